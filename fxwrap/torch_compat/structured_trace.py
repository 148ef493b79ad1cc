"""torch's structured trace of compiles (TORCH_TRACE), which tlparse reads.

Why: the writer of its artifacts has no public name.
"""

from __future__ import annotations

from torch._logging._internal import trace_log, trace_structured


def traces_compiles() -> bool:
    """Whether torch writes a structured trace."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, text: str, *, encoding: str) -> None:
    """Writes an artifact with the id of the compile that runs. `encoding` is "string" or "json"."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )

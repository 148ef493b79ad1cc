"""Structured trace artifacts of a compile, which torch writes under TORCH_TRACE and tlparse shows."""

from __future__ import annotations

from fxwrap.report.content import ReportContent
from fxwrap.report.texts import compile_texts, file_name
from fxwrap.torch_compat import trace_artifact, traces_compiles

__all__ = ["trace_compile"]


def trace_compile(content: ReportContent) -> None:
    """Writes the texts of a compile as artifacts "fxwrap_forward_program", if torch writes a structured trace.

    An artifact has the compile id of the compile that runs. Those of several graphs of one id are in the order of
    compiles.
    """
    for path, text in compile_texts(content) if traces_compiles() else ():
        stem, _, suffix = path.rpartition(".")
        name = f"fxwrap_{file_name(content.name)}_{stem.replace('/', '_')}"
        readable = text.encode("utf-8", "backslashreplace").decode()  # torch encodes it strictly
        trace_artifact(name, readable, encoding="json" if suffix == "json" else "string")

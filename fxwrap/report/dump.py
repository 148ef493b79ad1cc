"""A folder with the texts of one compiled graph, for `options={"dump": folder}` and FXWRAP_DUMP."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import torch

from fxwrap.caching import bounded_cache
from fxwrap.errors import DumpWarning
from fxwrap.events import DumpFailed
from fxwrap.memory_planning import plan_to_json
from fxwrap.passes.provenance import provenance
from fxwrap.report.content import ReportContent
from fxwrap.report.page import report_page
from fxwrap.wrapper_ir import print_program

__all__ = ["DUMP_ENV", "dump_folder", "write_dump"]

DUMP_ENV = "FXWRAP_DUMP"
"""The environment variable with the default of the option `dump`."""

_SUFFIXES: Mapping[str, str] = {"python": ".py", "cpp": ".cpp", "fx": ".py", "interpreter": ".txt", "triton": ".py"}

_numbers = count()


def dump_folder(option: str | None) -> Path | None:
    """Returns the folder of the option `dump`, else that of the environment; None for no dump."""
    folder = option or os.environ.get(DUMP_ENV)
    return Path(folder) if folder else None


def write_dump(content: ReportContent, folder: Path) -> Path | None:
    """Writes a graph into a new folder below `folder` and returns it; None, with one warning, where that fails."""
    try:
        return _write(content, folder)
    except OSError as error:
        reason = f"it cannot be written ({error.strerror or error})"
    except Exception as error:  # noqa: BLE001  a compile does not fail for its report
        reason = f"the report failed, which is a defect of fxwrap ({type(error).__name__}: {error})"
    content.events.record(DumpFailed(str(folder), reason))
    _warn(str(folder), reason)
    return None


@bounded_cache(64)
def _warn(folder: str, reason: str) -> None:
    """Warns once for each folder and reason."""
    warnings.warn(
        f"a compiled graph is not dumped to the folder {folder}: {reason}; make it writable, or set the option 'dump' "
        f"or {DUMP_ENV} to another folder",
        DumpWarning,
        stacklevel=6,
    )


def _write(content: ReportContent, folder: Path) -> Path:
    own = _new_folder(folder, content)
    texts = {"graph.txt": content.graph, "options.txt": content.options + "\n", "program.txt": str(content.program)}
    for number, (name, program) in enumerate(content.stages):
        texts[f"stages/{number:02}_{_file_name(name)}.txt"] = print_program(program, origins=True)
    for kernel in content.program.kernels:
        texts[f"kernels/{_file_name(kernel.name)}{_SUFFIXES.get(kernel.language, '.txt')}"] = kernel.source
    texts[f"source{_SUFFIXES[content.emitter]}"] = content.source
    if content.plan is not None:
        texts["plan.json"] = plan_to_json(content.plan)
    texts["provenance.json"] = provenance(content.program).to_json()
    rows = [dataclasses.asdict(item) for item in content.coverage]
    texts["coverage.json"] = json.dumps(rows, indent=1)
    texts["events.json"] = content.events.to_json()
    texts["index.html"] = report_page([content], content.title)
    for name, text in texts.items():
        path = own / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return own


def _new_folder(folder: Path, content: ReportContent) -> Path:
    """Makes the folder of a graph, which no other process, rank or graph has."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = (
        torch.distributed.get_rank()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else None
    )
    prefix = "" if rank is None else f"rank{rank}-"
    name = f"{prefix}{os.getpid()}-{next(_numbers):04}-{_file_name(content.title)}"
    for attempt in count():
        path = folder / (name if not attempt else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _file_name(text: str) -> str:
    """Returns a text with the characters that a file's name may have everywhere."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text)[:80].strip("-.") or "unnamed"

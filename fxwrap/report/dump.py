"""A folder with the texts of one compiled graph, for `options={"dump": folder}` and FXWRAP_DUMP."""

from __future__ import annotations

import os
import warnings
from itertools import count
from pathlib import Path

import torch

from fxwrap.caching import bounded_cache
from fxwrap.errors import DumpWarning
from fxwrap.events import DumpFailed
from fxwrap.report.content import ReportContent
from fxwrap.report.page import report_page
from fxwrap.report.texts import LANGUAGE_SUFFIXES, compile_texts, file_name

__all__ = ["DUMP_ENV", "dump_folder", "write_dump"]

DUMP_ENV = "FXWRAP_DUMP"
"""The environment variable with the default of the option `dump`."""

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
    texts = dict(compile_texts(content))
    for kernel in content.program.kernels:
        texts[f"kernels/{file_name(kernel.name)}{LANGUAGE_SUFFIXES.get(kernel.language, '.txt')}"] = kernel.source
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
    name = f"{prefix}{os.getpid()}-{next(_numbers):04}-{file_name(content.title)}"
    for attempt in count():
        path = folder / (name if not attempt else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")

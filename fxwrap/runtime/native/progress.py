"""The report of a long build: in the log, and on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

log = logging.getLogger("fxwrap.native")


@contextmanager
def report_build(subject: str, files: int, on_terminal: bool = True) -> Iterator[Callable[[], None]]:
    """Reports the build of `subject` from a number of files; yields the function to call after each file.

    The log has one line at the start and one at the end. A terminal shows one line that counts the files, unless the
    log is shown.
    """
    start, finished, lock = time.perf_counter(), 0, Lock()
    text = f"compiling {subject}, once for this machine and these versions"
    shows_line = on_terminal and sys.stderr is not None and sys.stderr.isatty() and not log.isEnabledFor(logging.INFO)

    def show(state: str, end: str = "") -> None:
        if shows_line:
            print(f"\r\033[Kfxwrap: {text}: {state}", end=end, file=sys.stderr, flush=True)

    def finish_file() -> None:
        nonlocal finished
        with lock:
            finished += 1
            log.debug("%s: file %d of %d", text, finished, files)
            show(f"{finished} of {files} files")

    log.info("%s: %d files", text, files)
    show(f"0 of {files} files")
    try:
        yield finish_file
    except BaseException:
        show("failed", "\n")
        raise
    seconds = time.perf_counter() - start
    log.info("compiled %s in %.1f s", subject, seconds)
    show(f"{seconds:.1f} s", "\n")

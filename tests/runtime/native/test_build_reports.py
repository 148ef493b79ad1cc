"""Long builds are reported: in the log, and by one line on a terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fxwrap.runtime.native.progress import report_build

SUBJECT = "the bridge"


class Terminal(io.StringIO):
    """Standard error as a terminal has it."""

    def isatty(self) -> bool:
        return True


@contextmanager
def standard_error(stream: io.StringIO | None) -> Iterator[None]:
    """Replaces the stream during a call alone: pytest has its own between the phases of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        yield


def build(files: int = 2) -> None:
    with report_build(SUBJECT, files) as finish_file:
        for _ in range(files):
            finish_file()


def test_the_log_has_a_line_at_the_start_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    with standard_error(terminal), caplog.at_level(logging.INFO, logger="fxwrap.native"):
        build()
    start, end = [record.getMessage() for record in caplog.records]
    assert start == "compiling the bridge, once for this machine and these versions: 2 files"
    assert end.startswith("compiled the bridge in ") and terminal.getvalue() == ""


def test_a_terminal_counts_files_in_one_line() -> None:
    terminal = Terminal()
    with standard_error(terminal):
        build()
    states = [text.rsplit(": ", 1)[1] for text in terminal.getvalue().split("\r\033[K")[1:]]
    assert states[:3] == ["0 of 2 files", "1 of 2 files", "2 of 2 files"]
    assert states[3].endswith(" s\n") and len(states) == 4


def test_a_build_that_fails_ends_the_line() -> None:
    terminal = Terminal()
    with standard_error(terminal), pytest.raises(ValueError, match="no compiler"), report_build(SUBJECT, 1):
        raise ValueError("no compiler")
    assert terminal.getvalue().endswith(": failed\n")


def test_nothing_is_printed_where_nobody_reads() -> None:
    stream = io.StringIO()
    for target in (stream, None):
        with standard_error(target):
            build()
    assert stream.getvalue() == ""

"""The progress of a compile that takes long: a line on a terminal, messages of its logger otherwise."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxwrap.events import Event, EventLog
from fxwrap.runtime.compiler_runs import finished_kernels

_DELAY_S = 2.0
"""Compiles that are shorter show nothing."""

_REFRESH_S = 0.2

_log = logging.getLogger(Event.logger)


@contextmanager
def show_progress(events: EventLog, delay_s: float = _DELAY_S) -> Iterator[None]:
    """Shows the step of a compile and its compiled kernels from `delay_s` on, until the block ends.

    A terminal has one line, by tqdm, if that is installed. Without one, and where the logger shows messages, it gets a
    message after `delay_s` and at each doubling of the time.
    """
    if not (_log.isEnabledFor(logging.INFO) or _has_terminal()):
        yield
        return
    view = _View(events, delay_s)
    thread = threading.Thread(target=view.run, name="fxwrap progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        view.stopped.set()
        if view.is_shown:
            thread.join()


class _View:
    def __init__(self, events: EventLog, delay_s: float) -> None:
        self.events = events
        self.stopped = threading.Event()
        self.is_shown = False
        self._delay_s = delay_s
        self._start = time.perf_counter()
        self._kernels_before = finished_kernels()

    def run(self) -> None:
        """Waits for the delay, then shows the progress until the compile ends."""
        if self.stopped.wait(self._delay_s):
            return
        self.is_shown = True
        line = None if _log.isEnabledFor(logging.INFO) else _terminal_line(self._line_text())
        if line is None:
            self._log_progress()
        else:
            self._show(line)

    def _log_progress(self) -> None:
        pause = self._delay_s
        while True:
            seconds = time.perf_counter() - self._start
            _log.info("'%s' is compiling since %.0f s: %s", self.events.name, seconds, self._text())
            if self.stopped.wait(pause):
                return
            pause *= 2

    def _show(self, line: Any) -> None:
        with line:
            line.start_t -= time.perf_counter() - self._start
            while not self.stopped.wait(_REFRESH_S):
                line.set_description_str(self._line_text())

    def _line_text(self) -> str:
        return f"fxwrap: compiling '{self.events.name}': {self._text()}"

    def _text(self) -> str:
        """Returns the current step, with the number of compiled kernels if it compiles any."""
        activity = self.events.activity
        if not activity.kernels:
            return activity.step
        finished = min(finished_kernels() - self._kernels_before, activity.kernels)
        return f"{activity.step}, {finished} of {activity.kernels} kernels"


def _terminal_line(text: str) -> Any:
    """Returns a line of tqdm on the terminal, which shows a text; None without a terminal or without tqdm."""
    if not _has_terminal():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=text, file=sys.stderr, leave=False, bar_format="{desc} [{elapsed}]")


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()

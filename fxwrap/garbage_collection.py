"""Garbage collection while large structures are built, such as programs, and while graphs are compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def collect_in_pause() -> None:
    """Collects the new objects of a pause, most of which are garbage in cycles; does nothing outside of one.

    A caller that waits for other processes has the time that the end of the pause would take.
    """
    if not gc.isenabled():
        gc.collect(0)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection; usable as a decorator.

    Construction of a program or graph allocates objects that nearly all stay alive. The collector visits them again
    and again, in time that grows faster than their number. Objects that are freed by reference counts are freed as
    usual; garbage in cycles waits until the end. Collection is resumed only if it was enabled, so pauses nest, and a
    pause that overlaps with one of another thread may end early.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

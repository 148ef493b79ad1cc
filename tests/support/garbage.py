"""Garbage collections of tests, in processes whose other tests have left millions of objects."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collects garbage, and leaves what remains out of all later collections and of `gc.get_objects`.

    A collection after it visits what was allocated since. Without it each takes seconds after half of the suite.
    """
    gc.collect()
    gc.freeze()

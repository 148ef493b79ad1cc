"""What a converter gives: text, and a callable that is built from it on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Boxed = Callable[[list[Any]], Any]
"""Takes the flat inputs in a list, which it empties, and returns the tuple of outputs."""


class Emitted:
    """A program in a form that runs.

    Call it with the flat inputs; it returns the tuple of flat outputs. `boxed` is the entry that takes a list and clears
    it, so that owned inputs are really freed at their last use. Gradients are not recorded. `source` is the text.
    """

    def __init__(self, source: str, build: Callable[[], Boxed]) -> None:
        self.source = source
        self._build = build
        self._built: Boxed | None = None
        self._lock = threading.Lock()

    @property
    def boxed(self) -> Boxed:
        """The boxed entry; built (imported, compiled) the first time it is asked for."""
        if self._built is None:
            with self._lock:
                if self._built is None:
                    self._built = self._build()
        return self._built

    def __call__(self, *inputs: Any) -> Any:
        boxed = self._built or self.boxed
        if torch.is_grad_enabled():
            with torch.no_grad():
                return boxed(list(inputs))
        return boxed(list(inputs))

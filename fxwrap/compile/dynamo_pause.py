"""Garbage collection pauses while Dynamo traces a frame for fxwrap, as it does while fxwrap compiles the graph.

Full collections visit all objects of the process, which are many more than a trace creates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from fxwrap.garbage_collection import gc_paused
from fxwrap.torch_compat import CompileObserver


class DynamoPause:
    """The pause of the compile that runs, for backends of `torch.compile` that were added."""

    def __init__(self) -> None:
        self._backends: WeakSet[Callable[..., Any]] = WeakSet()
        self._pauses = ExitStack()
        self._observer = CompileObserver(self._begin, self.end)

    def add(self, backend: Callable[..., Any]) -> None:
        """Lets later compiles for a backend pause. The first may not: it is Dynamo's import that takes long."""
        self._backends.add(backend)
        self._observer.register_if_imported()

    def renew(self) -> None:
        """Lets later compiles pause after `torch.compiler.reset()` too; a compile calls it."""
        self._observer.register()

    def end(self) -> None:
        """Ends the pause, if there is one."""
        self._pauses.close()

    def _begin(self, backend: Any) -> None:
        if any(item is backend for item in self._backends):
            self._pauses.enter_context(gc_paused())

"""Timing kernels at a program's first call, which runs line by line: its sizes are noted, and compiled for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxwrap.converters.base import Handler
from fxwrap.converters.emitted import Boxed, Emitted, Flat, guarded
from fxwrap.converters.interpreter import Interpreter
from fxwrap.errors import FxwrapError, TuningWarning
from fxwrap.lines import ExtensionLine
from fxwrap.torch_compat import DisableAutocast, operators_are_watched
from fxwrap.wrapper_ir import Block, Program


class NotingInterpreter(Interpreter):
    """Runs one call of a program. `noted` has the largest value that each whole number in it took, by symbol."""

    def __init__(self, program: Program, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> None:
        super().__init__(program, handlers)
        self.noted: dict[str, int] = {}

    def _inner(self, block: Block, arguments: list[Any]) -> Interpreter:
        inner = super()._inner(block, arguments)
        assert isinstance(inner, NotingInterpreter)
        inner.noted = self.noted
        return inner

    def _lines(self, block: Block) -> None:
        super()._lines(block)
        for name, number in self.symbols.items():
            if type(number) is int:
                self.noted[name] = max(number, self.noted.get(name, number))


class FirstCall:
    """The entries of a program, which is compiled again for the sizes of its first call, after that call.

    That call's results are the interpreter's. Calls on other threads meanwhile run what was compiled before, and so do
    calls while somebody watches operators or records a CUDA graph: then nothing can be timed, and a later call is the
    first. Where compiling again fails, a TuningWarning says why, and what was compiled before goes on running.
    """

    def __init__(
        self, program: Program, before: Emitted, compile_again: Callable[[Mapping[str, int]], Emitted]
    ) -> None:
        """`compile_again` takes the largest value of each whole number of the first call, by symbol."""
        self._program = program
        self._before = before
        self._again: Callable[[Mapping[str, int]], Emitted] | None = compile_again
        self._lock = threading.Lock()
        self._boxed: Boxed = self._first
        self._flat: Flat = guarded(self._first)

    def boxed(self, inputs: list[Any]) -> Any:
        """The boxed entry, for every call."""
        return self._boxed(inputs)

    def flat(self, *inputs: Any) -> Any:
        """The flat entry, for every call."""
        return self._flat(*inputs)

    def stay(self) -> None:
        """Makes what runs now run from now on, after the first call if that is under way."""
        with self._lock:
            self._finish(self._before)

    def _finish(self, entries: Emitted) -> None:
        if self._again is not None:
            boxed, flat = entries.boxed, entries.flat
            self._again = None
            self._boxed, self._flat = boxed, flat

    def _first(self, inputs: list[Any]) -> Any:
        if not _may_time() or not self._lock.acquire(blocking=False):
            return self._before.boxed(inputs)
        try:
            if self._again is None:  # another thread's call was the first
                return self._boxed(inputs)
            interpreter = NotingInterpreter(self._program)
            results = interpreter.run(inputs)
            self._compile(interpreter.noted)
            return results
        finally:
            self._lock.release()

    def _compile(self, noted: Mapping[str, int]) -> None:
        assert self._again is not None
        try:
            # as it was when the graph was compiled: nothing of the caller's may reach the rules for fake tensors
            with torch.inference_mode(False), torch.no_grad(), DisableAutocast():
                self._finish(self._again(noted))
        except FxwrapError as error:
            warnings.warn(f"the kernels stay as they were compiled, and are not timed: {error}", TuningWarning, 2)
            self._finish(self._before)


def _may_time() -> bool:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not capturing and not operators_are_watched()

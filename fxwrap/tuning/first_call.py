"""Autotuning at a program's first call: the interpreter runs it and records the sizes to tune for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import Self

from fxwrap.converters.base import Handler
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram, FlatCallable, disable_autograd_and_autocast
from fxwrap.converters.interpreter import Interpreter
from fxwrap.errors import FxwrapError, TuningWarning
from fxwrap.lines import ExtensionLine
from fxwrap.torch_compat import DisableAutocast, is_dispatch_intercepted
from fxwrap.wrapper_ir import Block, Program


class SizeRecordingInterpreter(Interpreter):
    """Runs one call of a program. `observed_sizes` has the largest value of each int symbol, by name."""

    def __init__(self, program: Program, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> None:
        super().__init__(program, handlers)
        self.observed_sizes: dict[str, int] = {}

    def _block_interpreter(self, block: Block, arguments: list[Any]) -> Self:
        inner = super()._block_interpreter(block, arguments)
        inner.observed_sizes = self.observed_sizes
        return inner

    def _run_lines(self, block: Block) -> None:
        super()._run_lines(block)
        for name, number in self.symbols.items():
            if type(number) is int:
                self.observed_sizes[name] = max(number, self.observed_sizes.get(name, number))


class FirstCallAutotuner:
    """The entries of a program that is compiled again for the sizes of its first call, after that call.

    The interpreter computes the first call. Concurrent calls run the untuned program, and so do calls under a dispatch
    mode or a CUDA graph capture, where nothing can be timed: a later call is then the first. If recompilation fails, a
    TuningWarning tells why, and the untuned program remains.
    """

    def __init__(
        self, program: Program, before: EmittedProgram, recompile: Callable[[Mapping[str, int]], EmittedProgram]
    ) -> None:
        """`recompile` takes the largest value of each int symbol in the first call, by name."""
        self._program = program
        self._before = before
        self._recompile: Callable[[Mapping[str, int]], EmittedProgram] | None = recompile
        self._lock = threading.Lock()
        self._boxed: BoxedCallable = self._first
        self._flat: FlatCallable = disable_autograd_and_autocast(self._first)

    def boxed(self, inputs: list[Any]) -> Any:
        """The boxed entry, for every call."""
        return self._boxed(inputs)

    def flat(self, *inputs: Any) -> Any:
        """The flat entry, for every call."""
        return self._flat(*inputs)

    def skip_tuning(self) -> None:
        """Keeps the untuned program for all calls; waits for a first call in progress."""
        with self._lock:
            self._finish(self._before)

    def _finish(self, entries: EmittedProgram) -> None:
        if self._recompile is not None:
            boxed, flat = entries.boxed, entries.flat
            self._recompile = None
            self._boxed, self._flat = boxed, flat

    def _first(self, inputs: list[Any]) -> Any:
        if not _can_time() or not self._lock.acquire(blocking=False):
            return self._before.boxed(inputs)
        try:
            if self._recompile is None:  # another thread's call was the first
                return self._boxed(inputs)
            interpreter = SizeRecordingInterpreter(self._program)
            results = interpreter.run(inputs)
            self._compile(interpreter.observed_sizes)
            return results
        finally:
            self._lock.release()

    def _compile(self, observed_sizes: Mapping[str, int]) -> None:
        assert self._recompile is not None
        try:
            # fake-tensor propagation must not see the caller's modes
            with torch.inference_mode(False), torch.no_grad(), DisableAutocast():
                self._finish(self._recompile(observed_sizes))
        except FxwrapError as error:
            warnings.warn(
                f"the kernels keep their default configurations: autotuning failed: {error}", TuningWarning, 2
            )
            self._finish(self._before)


def _can_time() -> bool:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not capturing and not is_dispatch_intercepted()

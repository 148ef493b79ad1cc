"""Triton kernels of a user's on CPU tensors: eager PyTorch interprets them, and Dynamo takes them as on a GPU.

Without a GPU neither does so: Triton has no device to compile for, and torch.compile asks for one before it looks at a
kernel. What is put in their place is what the two would find with a GPU; nothing of fxwrap's is replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction

from fxwrap.runtime.triton.kernels import interpreter_mode


class TargetWithoutGpu:
    """What Triton asks its driver for before anything is launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_benchmarker(self) -> Any:
        return _seconds

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def _seconds(call: Any, quantiles: Sequence[float]) -> list[float]:
    start = time.perf_counter()
    call()
    return [time.perf_counter() - start] * len(quantiles)


def interpret(kernel: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    """Runs a function of @triton.jit through the interpreter, and the functions that it calls."""
    assert not warmup
    grid = tuple(grid) if isinstance(grid, list) else grid  # which the interpreter does not take
    scopes = _scopes(kernel.fn.__globals__, {})
    with interpreter_mode():
        compiled = [{name: item for name, item in scope.items() if type(item) is JITFunction} for scope in scopes]
        for scope, functions in zip(scopes, compiled, strict=True):
            scope.update({name: InterpretedFunction(item.fn) for name, item in functions.items()})
        try:
            InterpretedFunction(kernel.fn).run(*arguments, grid=grid, warmup=False, **keywords)
        finally:
            for scope, functions in zip(scopes, compiled, strict=True):
                scope.update(functions)


def _scopes(scope: dict[str, Any], known: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The globals of a kernel's module, and of the modules of the suite that it calls functions of."""
    known[id(scope)] = scope
    for item in list(scope.values()):
        inner = vars(item) if isinstance(item, ModuleType) else getattr(item, "__globals__", {})
        if id(inner) not in known and str(inner.get("__name__", "")).startswith("tests.user_kernels"):
            _scopes(inner, known)
    return list(known.values())


@contextmanager
def triton_on_cpu() -> Iterator[None]:
    """Lets kernels of a user's run on CPU tensors, and be compiled by torch.compile."""
    run = JITFunction.run

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def launch(kernel: JITFunction[Any], *arguments: Any, **keywords: Any) -> Any:
        tensors = [item for item in (*arguments, *keywords.values()) if isinstance(item, torch.Tensor)]
        on_cpu = bool(tensors) and all(item.is_cpu for item in tensors)
        return interpret(kernel, *arguments, **keywords) if on_cpu else run(kernel, *arguments, **keywords)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", launch))
        # torch looks for written tensors with default options, which Triton 3.9 warns of; a warning ends the search
        stack.enter_context(mock.patch.dict(os.environ, TRITON_DEFAULT_FP_FUSION="1"))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch("torch.utils._triton.has_triton", lambda **_devices: True))
            stack.enter_context(mock.patch.object(driver, "_active", TargetWithoutGpu()))
        yield

"""Launchers of Triton kernels: on a GPU, or in Triton's interpreter on the CPU.

Triton reads `TRITON_INTERPRET` when a function is decorated, and decorates its library functions (`tl.sum`, ...) on
import, possibly before fxwrap is imported. CPU kernels are therefore decorated and run in a scope that enables the
interpreter and patches the library functions; one process can do both. With `TRITON_INTERPRET=1` set before the start,
Triton interprets kernels on GPU tensors too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, cached_property, partial
from itertools import zip_longest
from typing import Any

import torch

from fxwrap.devices import TRITON
from fxwrap.devices.kernel_names import DEPENDENT, described_parameters
from fxwrap.runtime.cpp_kernels import KernelOptions, KernelText
from fxwrap.runtime.triton.compile import (
    import_triton,
    load_jit_function,
    split_launch_options,
    triton_jit_function,
    triton_lock,
)
from fxwrap.runtime.triton.interpreter import interpreter_patches
from fxwrap.runtime.triton.launchers import aligned_arguments, make_launcher

_LIBRARY = ("triton.language", "triton.language.standard", "triton.language.random", "triton.language.math")
_CORE = "triton.language.core"


def load_triton_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> Callable[..., object]:
    """Returns `launcher(grid, *tensors, *scalars)` of a source that defines a `@triton.jit` function.

    Options in capitals are constant parameters; the others (num_warps, num_stages, num_ctas, maxnreg, enable_fp_fusion)
    are compile options. With the option `dependent`, fxwrap's own launcher may start the kernel before the one before
    it has ended. Raises FxwrapError where Triton is missing, for a source without the function, and for an unknown
    option.
    """
    is_dependent = (DEPENDENT, True) in options
    options = tuple([(name, option) for name, option in options if name != DEPENDENT])
    kernel = KernelText(TRITON.name, source, signature, options)
    triton = _TritonKernel(kernel)
    import_triton()
    return make_launcher(kernel, triton.constants, triton, is_dependent)


class _TritonKernel:
    """A kernel as Triton compiles and launches it, on GPUs and in its interpreter."""

    def __init__(self, kernel: KernelText) -> None:
        self._kernel = kernel
        self.constants, self._options = split_launch_options(kernel.options)
        self._has_bytes = "*u8" in kernel.signature
        self._described = described_parameters(kernel.source)

    @cached_property
    def _on_gpu(self) -> Any:
        return triton_jit_function(self._kernel.source, self._kernel.signature, self._kernel.options)

    @cached_property
    def _interpreted(self) -> Any:
        with interpreter_mode():
            return load_jit_function(self._kernel.source)

    def _arguments(self, arguments: Sequence[torch.Tensor | float]) -> Sequence[torch.Tensor | float]:
        if not self._has_bytes:
            return arguments
        return [_as_declared(*pair) for pair in zip_longest(arguments, self._kernel.signature)]

    def launch(self, grid: Sequence[int], *arguments: torch.Tensor | float) -> object:
        """Launches it on a GPU if there is a tensor on one, else in Triton's interpreter."""
        arguments = tuple(aligned_arguments(self._arguments(arguments), self._described))
        if any(isinstance(item, torch.Tensor) and not item.is_cpu for item in arguments):
            launch = partial(self._on_gpu[tuple(grid)], *arguments, **self.constants, **self._options)
            return _with_scratch_memory(launch) if self._described else launch()
        function = self._interpreted
        with interpreter_mode(), unwrap_interpreter_errors(function.__name__):
            function[tuple(grid)](*arguments, **self.constants)
        return None

    def compile(self, grid: Sequence[int], *arguments: torch.Tensor | float) -> Any:
        """Returns the kernel for these arguments, loaded on the current GPU; None if a hook of Triton refuses it."""
        declared = self._arguments(arguments)
        compiled = self._on_gpu.warmup(*declared, grid=tuple(grid), **self.constants, **self._options)
        if compiled is not None:
            _ = compiled.run  # loads it
        return compiled


def _with_scratch_memory(launch: Callable[[], object]) -> object:
    """Calls a launch of Triton for which torch allocates scratch memory, on the current GPU."""

    def allocate(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    context = copy_context()  # Triton keeps its allocator in a context variable
    context.run(import_triton().set_allocator, allocate)
    return context.run(launch)


def _as_declared(argument: torch.Tensor | float, entry: str | None) -> torch.Tensor | float:
    """Returns an argument of a launch; a float8 tensor is reinterpreted where the kernel accesses bytes."""
    if entry == "*u8" and isinstance(argument, torch.Tensor) and argument.dtype is not torch.uint8:
        return argument.view(torch.uint8)
    return argument


@contextmanager
def unwrap_interpreter_errors(kernel: str) -> Iterator[None]:
    """Raises the error of an assertion of the named kernel, which the interpreter wraps, with that name."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, IndexError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise IndexError(f"{cause}, in kernel {kernel}") from None


@contextmanager
def interpreter_mode() -> Iterator[None]:
    """Makes Triton interpret functions that are decorated or called in a `with` block."""
    runtime = import_triton().knobs.runtime
    with triton_lock, runtime.scope():
        runtime.interpret = True
        before = [(owner, dict(vars(owner))) for owner in _patched_owners()]
        for owner, name, function in _interpreted_library():
            setattr(owner, name, function)
        try:
            yield
        finally:
            for owner, contents in before:
                _restore_attributes(owner, contents)


@cache
def _patched_owners() -> tuple[object, ...]:
    """Returns the objects that the interpreter patches while a kernel runs; not all versions restore all of them."""
    modules = [importlib.import_module(name) for name in (*_LIBRARY, _CORE)]
    classes = [item for item in vars(modules[-1]).values() if isinstance(item, type) and item.__module__ == _CORE]
    return (*modules, *classes, *dict.fromkeys([owner for owner, _, _ in interpreter_patches()]))


def _restore_attributes(owner: object, contents: dict[str, object]) -> None:
    for name, item in contents.items():
        if vars(owner).get(name) is not item:
            setattr(owner, name, item)


@cache
def _interpreted_library() -> tuple[tuple[object, str, object], ...]:
    """Returns owner, name and interpreted form of Triton's library functions that are decorated for GPUs."""
    compiled = import_triton().JITFunction
    interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    modules = [importlib.import_module(name) for name in _LIBRARY]
    patches: list[tuple[object, str, object]] = []
    functions: dict[object, Callable[..., object]] = {}
    for module in modules:
        for name, item in vars(module).items():
            if isinstance(item, compiled):
                functions.setdefault(item, interpreted(item.fn))
                patches.append((module, name, functions[item]))
    tensor = modules[0].tensor
    members = [(name, item) for name, item in vars(tensor).items() if isinstance(item, compiled)]
    patches += [(tensor, name, _member(functions.get(item) or interpreted(item.fn))) for name, item in members]
    return (*patches, *interpreter_patches())


def _member(function: Callable[..., object]) -> Callable[..., object]:
    return lambda *arguments, **keywords: function(*arguments, **keywords)

"""Triton kernels: written to the cache folder as modules, launched on a GPU or interpreted on the CPU.

Triton reads `TRITON_INTERPRET` when a function is decorated, and torch may have imported Triton long before fxwrap
could set it; then Triton's own library functions (`tl.sum`, `tl.softmax`, ...) are decorated for GPUs already. So a
kernel for the CPU is decorated, and run, in a scope in which Triton's switch is on and its library functions are
replaced by interpreted ones. Everything is put back at the scope's end, so one process can do both. With
`TRITON_INTERPRET=1` in the environment before the start, Triton interprets kernels on GPU tensors too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from fxwrap.device_spec import TRITON
from fxwrap.runtime.cpp_kernels import KernelOptions, KernelText
from fxwrap.runtime.triton_compile import gpu_function, kernel_of, launch_keywords, one_at_a_time, triton
from fxwrap.runtime.triton_interpreter import interpreter_additions
from fxwrap.runtime.triton_launchers import native_launcher

_LIBRARY = ("triton.language", "triton.language.standard", "triton.language.random", "triton.language.math")
_CORE = "triton.language.core"


def load_triton_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> Callable[..., None]:
    """Returns `launcher(grid, *tensors, *numbers)` of a text that defines a `@triton.jit` function called `kernel`.

    Those of fxwrap's own texts have names (`fxwrap/kernel_names.py`). Options in capitals are its constant parameters;
    the others (num_warps, num_stages, num_ctas, maxnreg, enable_fp_fusion) say how it is compiled. Raises FxwrapError
    where Triton is missing, for a text without the function, and for an unknown option.
    """
    constants, choices = launch_keywords(options)
    triton()

    @cache
    def on_gpu() -> Any:
        return gpu_function(source, signature, options)

    @cache
    def interpreted() -> Any:
        with interpreting():
            return kernel_of(source)

    def by_triton(grid: Sequence[int], *arguments: torch.Tensor | float) -> Any:
        if any(isinstance(item, torch.Tensor) and not item.is_cpu for item in arguments):
            return on_gpu()[tuple(grid)](*arguments, **constants, **choices)
        with interpreting(), own_errors():
            interpreted()[tuple(grid)](*arguments, **constants)
        return None

    return native_launcher(KernelText(TRITON.name, source, signature, options), constants, by_triton)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises what an assertion of a kernel raised, which the interpreter wraps in errors of its own."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, IndexError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise IndexError(*cause.args) from None


@contextmanager
def interpreting() -> Iterator[None]:
    """Makes Triton interpret what is decorated and called, until the end."""
    runtime = triton().knobs.runtime
    with one_at_a_time, runtime.scope():
        runtime.interpret = True
        before = [(owner, dict(vars(owner))) for owner in _patched_owners()]
        for owner, name, function in _interpreted_library():
            setattr(owner, name, function)
        try:
            yield
        finally:
            for owner, contents in before:
                _put_back(owner, contents)


@cache
def _patched_owners() -> tuple[Any, ...]:
    """Returns what the interpreter changes while a kernel runs, not all of which every version of it puts back."""
    modules = [importlib.import_module(name) for name in (*_LIBRARY, _CORE)]
    classes = [item for item in vars(modules[-1]).values() if isinstance(item, type) and item.__module__ == _CORE]
    return (*modules, *classes, *dict.fromkeys([owner for owner, _, _ in interpreter_additions()]))


def _put_back(owner: Any, contents: dict[str, Any]) -> None:
    for name, item in contents.items():
        if vars(owner).get(name) is not item:
            setattr(owner, name, item)


@cache
def _interpreted_library() -> tuple[tuple[Any, str, Any], ...]:
    """Returns Triton's library functions that were decorated for GPUs: owner, name and interpreted form of each."""
    compiled = triton().JITFunction
    interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    modules = [importlib.import_module(name) for name in _LIBRARY]
    found: list[tuple[Any, str, Any]] = []
    made: dict[Any, Any] = {}
    for module in modules:
        for name, item in vars(module).items():
            if isinstance(item, compiled):
                made.setdefault(item, interpreted(item.fn))
                found.append((module, name, made[item]))
    tensor = modules[0].tensor
    members = [(name, item) for name, item in vars(tensor).items() if isinstance(item, compiled)]
    found += [(tensor, name, _member(made.get(item) or interpreted(item.fn))) for name, item in members]
    return (*found, *interpreter_additions())


def _member(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a plain function, which a class binds to its objects."""
    return lambda *arguments, **keywords: function(*arguments, **keywords)

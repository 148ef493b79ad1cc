"""Support for emitted graphs that run kernels directly, bypassing torch's dispatcher."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxwrap.devices import Launcher
from fxwrap.runtime import control
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import load_gridless_kernel, load_kernel, prepare_kernels
from fxwrap.runtime.plain_inputs import is_plain_call
from fxwrap.torch_compat import direct_state


def can_bypass_dispatcher(module: torch.nn.Module, *inputs: object) -> bool:
    """Whether a call of a module may run kernels directly: its inputs, parameters and buffers are plain."""
    return is_plain_call(inputs + direct_state(module))


class LazyKernels:
    """The launchers of a graph's kernels, as globals of its code.

    The first launch loads all kernels, C++ kernels compiled together, and replaces the launchers among the globals of
    the function that it is called from: nothing in Python remains between the code and the kernel.
    """

    def __init__(self) -> None:
        self._texts: dict[str, tuple[KernelText, bool]] = {}
        self._unloaded: dict[str, Launcher] = {}
        self._loaded: dict[str, Launcher] = {}
        self._lock = threading.Lock()

    def add(self, name: str, text: KernelText, gridless: bool) -> Launcher:
        """Returns the launcher of a kernel, to be the global of this name. That of a `gridless` one takes no grid."""

        def load_and_launch(*arguments: object) -> None:
            self._load(inspect.currentframe().f_back.f_globals)  # type: ignore[union-attr]
            self._loaded[name](*arguments)

        self._texts[name] = (text, gridless)
        self._unloaded[name] = load_and_launch
        return load_and_launch

    def _load(self, code_globals: dict[str, object]) -> None:
        with self._lock:
            if not self._loaded:
                prepare_kernels(tuple([text for text, _ in self._texts.values()]))
                self._loaded = {name: _launcher(*kernel) for name, kernel in self._texts.items()}
        for name, launcher in self._unloaded.items():
            if code_globals.get(name) is launcher:
                code_globals[name] = self._loaded[name]


def _launcher(text: KernelText, gridless: bool) -> Launcher:
    load = load_gridless_kernel if gridless else load_kernel
    return load(text.language, text.source, text.signature, text.options)


def while_loop(
    cond: Callable[..., object],
    body: Callable[..., tuple[object, ...]],
    carried: Sequence[object],
    extra: Sequence[object],
    stacked: bool = False,
) -> tuple[object, ...]:
    """Repeats `body(*carried, *extra)` while `cond` of the same returns true; see `control.while_loop`."""
    return control.while_loop(lambda boxed: (cond(*boxed),), lambda boxed: body(*boxed), carried, extra, stacked)


def scan(
    body: Callable[..., tuple[Any, ...]],
    carried: Sequence[object],
    over: Sequence[torch.Tensor],
    extra: Sequence[object],
) -> tuple[object, ...]:
    """Runs `body(*carried, *slices, *extra)` along the first dimension of `over`.

    Returns the last carried values, then the other results of each iteration, stacked along a new first dimension.
    Requires at least one slice, as torch's operators do.
    """
    current, count = tuple(carried), len(carried)
    stacked: list[torch.Tensor] = []
    for position, slices in enumerate(zip(*[tensor.unbind(0) for tensor in over], strict=True)):
        results = body(*current, *slices, *extra)
        current = results[:count]
        if not position:
            stacked = [item.new_empty((len(over[0]), *item.shape)) for item in results[count:]]
        for output, item in zip(stacked, results[count:], strict=True):
            output[position].copy_(item)
        del results  # only `current` may own the carried values during the next iteration
    return (*current, *stacked)

"""Support for emitted graphs that run kernels directly, bypassing torch's dispatcher."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Proxy

from fxwrap.devices import Launcher
from fxwrap.errors import GraphModuleError
from fxwrap.runtime import control
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import load_gridless_kernel, load_kernel, prepare_kernels
from fxwrap.runtime.native import find_plain_inputs_check
from fxwrap.torch_compat import direct_state, has_real_storage, is_dispatch_intercepted, is_opaque

SUPPORTED_ALTERNATIVES = (
    "Run it with torch.fx.Interpreter, copy it with copy.deepcopy, retrace it with make_fx, or keep the program's text "
    "(str(program)) and emit that again with fxwrap.to_fx; fxwrap.save writes it to a file"
)

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_CLASSES = _TENSORS | {int, float, bool, complex, type(None), str, torch.dtype, torch.device, torch.Generator}

_address = torch.Tensor.data_ptr  # 0 for tensors without memory and empty ones
_is_negated = torch.Tensor.is_neg
_is_compiling = torch.compiler.is_dynamo_compiling


def _make_bypass_check() -> Callable[..., bool]:
    """Returns `can_bypass_dispatcher`, which uses the native check as soon as a bridge is loaded."""
    are_plain_inputs: Callable[[tuple[object, ...]], bool] | None = None

    def can_bypass_dispatcher(module: torch.nn.Module, *inputs: object) -> bool:
        """Whether a call may run kernels directly, with the same observable behaviour as calls of operators.

        No mode, functorch level or tracer may be active, and no input, parameter or buffer may be a fake, meta,
        functionalised, negated, subclassed or symbolic tensor or require gradients. Raises GraphModuleError under
        symbolic tracing.
        """
        nonlocal are_plain_inputs
        if _is_compiling():
            return False
        inputs += direct_state(module)
        if are_plain_inputs is None:
            are_plain_inputs = find_plain_inputs_check()
        if are_plain_inputs is not None and are_plain_inputs(inputs):
            return True
        return not is_dispatch_intercepted() and _are_plain(inputs)

    return can_bypass_dispatcher


can_bypass_dispatcher = _make_bypass_check()


def _are_plain(inputs: tuple[object, ...]) -> bool:
    """Whether operators run the kernels of ordinary tensors on these inputs, without gradients."""
    kinds = set(map(type, inputs))
    if not kinds <= _PLAIN_CLASSES and not all(type(item) in _PLAIN_CLASSES or is_opaque(item) for item in inputs):
        check_not_traced(inputs)
        return False
    tensors: Sequence[Any] = (
        inputs if kinds <= _TENSORS else [item for item in inputs if isinstance(item, torch.Tensor)]
    )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    try:
        if not all(map(_address, tensors)) and not all(map(has_real_storage, tensors)):
            return False
        return not any(map(_is_negated, tensors))
    except RuntimeError:  # no address: sparse, or of a functorch level that has ended
        return False


def check_not_traced(inputs: Sequence[object]) -> None:
    """Raises GraphModuleError under symbolic tracing."""
    if Proxy in map(type, inputs):
        reason = "symbolic_trace would run its allocations once and record the memory as constants"
        raise GraphModuleError(f"an emitted graph cannot be traced symbolically: {reason}. {SUPPORTED_ALTERNATIVES}")


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

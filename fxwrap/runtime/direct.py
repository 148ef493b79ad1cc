"""What the Python of an emitted graph needs to run kernels directly, without torch's dispatcher between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.fx import Proxy

from fxwrap.errors import GraphModuleError
from fxwrap.runtime import control
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import load_function, load_kernel, prepare_kernels
from fxwrap.torch_compat import has_own_memory, operators_are_watched

INSTEAD = (
    "Run it with torch.fx.Interpreter, copy it with copy.deepcopy, retrace it with make_fx, or keep the program's text "
    "(str(program)) and emit that again with fxwrap.to_fx; fxwrap.save writes it to a file"
)

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_CLASSES = _TENSORS | {int, float, bool, complex, type(None), str, torch.dtype, torch.device, torch.Generator}

_address = torch.Tensor.data_ptr  # 0 for what has no memory, and for what is empty
_is_negated = torch.Tensor.is_neg
_is_compiling = torch.compiler.is_dynamo_compiling


def is_direct(module: torch.nn.Module, *inputs: Any) -> bool:
    """Says whether a call may run kernels directly: nothing but the results can tell it from calls of operators.

    That is so when no mode, functorch level or tracer is active, and no input, parameter or buffer is a fake, meta or
    functionalised tensor, negated by a bit, of a subclass, symbolic, or part of a graph of autograd's. Raises
    GraphModuleError when the graph is being traced symbolically.
    """
    if _is_compiling() or operators_are_watched():
        return False
    if module._parameters or module._buffers:
        inputs = (*inputs, *module._parameters.values(), *module._buffers.values())
    kinds = set(map(type, inputs))
    if not kinds <= _PLAIN_CLASSES:
        refuse_proxies(inputs)
        return False
    tensors = inputs if kinds <= _TENSORS else [item for item in inputs if isinstance(item, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    try:
        if not all(map(_address, tensors)) and not all(map(has_own_memory, tensors)):
            return False
        return not any(map(_is_negated, tensors))
    except RuntimeError:  # it has no address: it is sparse, or of a level of functorch that has ended
        return False


def refuse_proxies(inputs: Sequence[Any]) -> None:
    """Raises GraphModuleError when a graph is being traced symbolically."""
    if Proxy in map(type, inputs):
        reason = "symbolic_trace would run its allocations once and keep the memory as constants"
        raise GraphModuleError(f"an emitted graph cannot be traced symbolically: {reason}. {INSTEAD}")


class Kernels:
    """The kernels of a graph, as functions of a module, which launch them.

    They are loaded when the first of them is launched; the C++ kernels among them are compiled together then.
    """

    def __init__(self) -> None:
        self.module = ModuleType("kernels")  # nothing else finds an attribute as fast, once the code is warm
        self._texts: dict[str, KernelText] = {}
        self._once: set[str] = set()
        self._lock = threading.Lock()

    def add(self, name: str, text: KernelText, called_once: bool) -> None:
        """Adds a kernel. One of C++ that is `called_once` takes no grid."""
        self._texts[name] = text
        if called_once:
            self._once.add(name)

        def first(*arguments: Any) -> None:
            self._load()
            getattr(self.module, name)(*arguments)

        setattr(self.module, name, first)

    def _load(self) -> None:
        with self._lock:
            prepare_kernels(tuple(self._texts.values()))
            for name, launcher in {name: self._launcher(name) for name in self._texts}.items():
                setattr(self.module, name, launcher)

    def _launcher(self, name: str) -> Callable[..., object]:
        text = self._texts[name]
        if name in self._once:
            return load_function(text.language, text.source, text.signature, text.options)
        return load_kernel(text.language, text.source, text.signature, text.options)


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., tuple[Any, ...]],
    carried: Sequence[Any],
    extra: Sequence[Any],
    stacked: bool = False,
) -> tuple[Any, ...]:
    """Repeats `body(*carried, *extra)` while `cond` of the same gives true; see `control.while_loop`."""
    return control.while_loop(lambda given: (cond(*given),), lambda given: body(*given), carried, extra, stacked)


def scan(
    body: Callable[..., tuple[Any, ...]], carried: Sequence[Any], over: Sequence[torch.Tensor], extra: Sequence[Any]
) -> tuple[Any, ...]:
    """Runs `body(*carried, *slices, *extra)` along the first dimension of `over`.

    Returns the last carried values, then what else each round gives, stacked along a new first dimension. There must be
    a slice: torch's operators refuse to run without.
    """
    current, count = tuple(carried), len(carried)
    stacked: list[torch.Tensor] = []
    for position, slices in enumerate(zip(*[tensor.unbind(0) for tensor in over], strict=True)):
        given = body(*current, *slices, *extra)
        current = given[:count]
        if not position:
            stacked = [item.new_empty((len(over[0]), *item.shape)) for item in given[count:]]
        for place, item in zip(stacked, given[count:], strict=True):
            place[position].copy_(item)
        del given  # so that nothing but `current` holds what is carried while the next round runs
    return (*current, *stacked)

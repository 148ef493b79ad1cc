"""Operators in place of higher-order ones whose calls no schema describes, and the operator that observes values.

The former are `torch.ops.higher_order.print` and `call_torchbind`; the latter shows the value of a line to an observer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from fxwrap.torch_compat import declare_side_effect

_library = torch.library.Library("fxwrap_runtime", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "print(str format, str[] arguments, Tensor[] tensors, Scalar[] numbers, str[] texts) -> ()"
)


@torch.library.impl(_library, "print", "CompositeExplicitAutograd")
def _print(
    format: str, arguments: list[str], tensors: list[torch.Tensor], numbers: list[float], texts: list[str]
) -> None:
    """Prints `format.format(...)`.

    Each entry of `arguments` is "tensor", "number" or "text", the list of the next argument, followed by a blank and
    its keyword if it has one.
    """
    queues = {"tensor": iter(tensors), "number": iter(numbers), "text": iter(texts)}
    positional: list[object] = []
    named: dict[str, object] = {}
    for argument in arguments:
        kind, _, name = argument.partition(" ")
        value: object = next(queues[kind])
        if name:
            named[name] = value
        else:
            positional.append(value)
    print(format.format(*positional, **named))


@torch.library.register_fake("fxwrap_runtime::print")  # type: ignore[untyped-decorator]
def _(*arguments: object) -> None:
    """Fake tensors have nothing to print."""


declare_side_effect(torch.ops.fxwrap_runtime.print.default)


_library.define(  # type: ignore[no-untyped-call]
    "call_method(Any object, str method, Any[] arguments) -> Any"
)


@torch.library.impl(_library, "call_method", "CompositeExplicitAutograd")
def _call_method(object: torch.ScriptObject, method: str, arguments: list[object]) -> object:
    returned = getattr(object, method)(*arguments)
    return list(returned) if isinstance(returned, tuple) else returned


@torch.library.register_fake("fxwrap_runtime::call_method")  # type: ignore[untyped-decorator]
def _(object: object, method: str, arguments: list[object]) -> object:
    """Calls the method of the fake class that stands in for the object's."""
    returned = torch.ops.higher_order.call_torchbind(object, method, *arguments)
    return list(returned) if isinstance(returned, tuple) else returned


declare_side_effect(torch.ops.fxwrap_runtime.call_method.default)


# --- observers --------------------------------------------------------------------------------------------------------

Observer: TypeAlias = Callable[[int, torch.Tensor], None]
"""Receives the number of an observation point, and the tensor, whose memory the program may overwrite later."""

_library.define("observe(Tensor value, int point) -> ()")  # type: ignore[no-untyped-call]


class _Observers(threading.local):
    """The observers of the programs that this thread runs, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Observer] = []


_observers = _Observers()


@torch.library.impl(_library, "observe", "CompositeExplicitAutograd")
def _observe(value: torch.Tensor, point: int) -> None:
    """Calls the innermost observer of this thread; without one, does nothing."""
    if _observers.stack:
        _observers.stack[-1](point, value)


@torch.library.register_fake("fxwrap_runtime::observe")  # type: ignore[untyped-decorator]
def _(value: torch.Tensor, point: int) -> None:
    """Fake tensors have no values."""


declare_side_effect(torch.ops.fxwrap_runtime.observe.default)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Calls `observer` for each observation point that this thread runs in the block."""
    _observers.stack.append(observer)
    try:
        yield
    finally:
        _observers.stack.pop()

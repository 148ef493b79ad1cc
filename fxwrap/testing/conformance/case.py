"""A case of the conformance suite: a function, its inputs, and the capabilities of a device that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

Group: TypeAlias = Literal[
    "operators", "kernels", "views", "mutation", "symbols", "control flow", "training", "streams", "capture"
]
GROUPS: tuple[Group, ...] = get_args(Group)
"""The groups of cases, in the order in which they run."""

Inputs: TypeAlias = Callable[[], tuple[Any, ...]]
"""Returns new inputs on the CPU, equal in each call: tensors and numbers."""


@dataclass(frozen=True)
class ConformanceCase:
    """A function that runs on a device, and on the CPU in eager mode.

    Fields:
        name, group: its name in the table.
        function: the function of tensors on any device.
        inputs: returns its inputs on the CPU.
        training: whether gradients of the sum of its results are compared too.
        later_inputs: returns the inputs of further calls, of other sizes, which must not compile again.
        requires: the field of `DeviceSpec` that the case needs, or "".
        reference: the function on the CPU, if another one.
        options: options of the compile.
    """

    name: str
    group: Group
    function: Callable[..., Any]
    inputs: Inputs
    training: bool = False
    later_inputs: tuple[Inputs, ...] = ()
    requires: str = ""
    reference: Callable[..., Any] | None = None
    options: Mapping[str, object] = field(default_factory=dict)


def case(group: Group, inputs: Inputs, **fields: Any) -> Callable[[Callable[..., Any]], ConformanceCase]:
    """Returns a decorator that turns a function into a case of its name."""

    def decorate(function: Callable[..., Any]) -> ConformanceCase:
        return ConformanceCase(function.__name__.replace("_", " "), group, function, inputs, **fields)

    return decorate


def is_floating(item: object) -> bool:
    """Whether an input is a tensor that can require a gradient."""
    return isinstance(item, Tensor) and item.is_floating_point()

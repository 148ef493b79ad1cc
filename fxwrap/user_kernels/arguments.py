"""The arguments of a call of torch's operator for Triton kernels, sorted by what they are to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from fxwrap.wrapper_ir import TensorType, Value


class KernelCallError(Exception):
    """A call that no program can hold; callers say at which node it is."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}. {remedy}")


@dataclass
class SortedArguments:
    """A call's arguments by name: tensors, numbers that may differ from launch to launch, and what is part of a kernel.

    `descriptors` are the block shapes of tensors that the kernel gets as tensor descriptors.
    """

    tensors: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    descriptors: dict[str, Any] = field(default_factory=dict)


def sort_arguments(
    kernel: Any, given: Mapping[str, Any], read: Callable[[Any], Any], descriptors: Mapping[str, Any] | None
) -> SortedArguments:
    """Sorts the arguments that a call passes by name, in the order of the kernel's parameters.

    Args:
        kernel: a kernel of torch's table: a `@triton.jit` function, however it is wrapped.
        given: the arguments as the graph has them, constant ones too.
        read: gives what an argument is in the program: a value, a number or expression, or the argument itself.
        descriptors: the operator's metadata of tensor descriptors.

    Raises KernelCallError for a kernel without parameters, for a constant argument that is known only when the program
    runs, and for a descriptor without a plain block shape.
    """
    found = SortedArguments()
    parameters = {parameter.name: parameter.is_constexpr for parameter in jit_function(kernel).params}
    order = {name: position for position, name in enumerate(parameters)}
    for name in sorted(given, key=lambda name: order.get(name, len(order))):
        item = read(given[name])
        is_part = parameters.get(name, True)
        if isinstance(item, Value) and isinstance(item.type, TensorType):
            found.tensors[name] = item
        elif isinstance(item, sympy.Basic) and is_part:
            raise KernelCallError(
                f"the constant argument '{name}' of its kernel is {item}, which is known when it runs only",
                "Pass a number, or declare the parameter without tl.constexpr",
            )
        elif isinstance(item, sympy.Basic) or (not is_part and type(item) in (int, float, bool)):
            found.numbers[name] = item
        else:
            found.constants[name] = item
    for name, metadata in (descriptors or {}).items():
        found.descriptors[name] = _block_shape(name, metadata)
    return found


def jit_function(kernel: Any) -> Any:
    """Returns the function with parameters that is under a kernel, however it is wrapped."""
    found = kernel
    while not hasattr(found, "params"):
        if not hasattr(found, "fn"):
            raise KernelCallError(
                f"its kernel is a {type(kernel).__name__}, not a function of @triton.jit",
                "Decorate the kernel with @triton.jit, or with @triton.autotune above it",
            )
        found = found.fn
    return found


def _block_shape(name: str, metadata: Any) -> list[int]:
    kind, rest = metadata
    shape: list[Any] = list(rest[0]) if kind == "stable" else [None]
    if not all(type(size) is int for size in shape):
        raise KernelCallError(
            f"the tensor descriptor '{name}' of its kernel has no block shape of plain numbers",
            "Make it with TensorDescriptor.from_tensor and a constant block shape",
        )
    return shape

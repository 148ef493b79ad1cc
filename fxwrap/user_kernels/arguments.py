"""Classification of the arguments of torch's operator for Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy

from fxwrap.symbolic import NumberOrExpression
from fxwrap.wrapper_ir import TensorType, Value

TritonKernel: TypeAlias = Any
"""A kernel object of Triton, which is optional and has no type stubs."""


class KernelCallError(Exception):
    """An unsupported call; callers add the node."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}. {remedy}")


@dataclass
class ClassifiedArguments:
    """A call's arguments by name: tensors, numbers of each launch, and constants of the kernel.

    `descriptors` are the block shapes of tensors that the kernel receives as tensor descriptors.
    """

    tensors: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, NumberOrExpression] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    descriptors: dict[str, list[int]] = field(default_factory=dict)


def classify_arguments(
    kernel: TritonKernel,
    arguments: Mapping[str, object],
    read: Callable[[object], object],
    descriptors: Mapping[str, tuple[str, Sequence[Any]]] | None,
) -> ClassifiedArguments:
    """Classifies the arguments of a call, in the order of the kernel's parameters.

    Args:
        kernel: a kernel of torch's table: a `@triton.jit` function, possibly wrapped.
        arguments: the arguments in the graph by name, constants included.
        read: returns an argument in the program: a value, a number or expression, or the argument itself.
        descriptors: the operator's metadata of tensor descriptors.

    Raises KernelCallError for a kernel without parameters, a constant argument that is known only at run time, and a
    descriptor without a constant block shape.
    """
    result = ClassifiedArguments()
    parameters: dict[str, bool] = {item.name: item.is_constexpr for item in jit_function(kernel).params}
    order = {name: position for position, name in enumerate(parameters)}
    for name in sorted(arguments, key=lambda name: order.get(name, len(order))):
        item = read(arguments[name])
        is_constant = parameters.get(name, True)
        if isinstance(item, Value) and isinstance(item.type, TensorType):
            result.tensors[name] = item
        elif isinstance(item, sympy.Basic) and is_constant:
            raise KernelCallError(
                f"the constant argument '{name}' of its kernel is {item}, which is known only at run time",
                "Pass a number, or declare the parameter without tl.constexpr",
            )
        elif isinstance(item, sympy.Basic) or (not is_constant and type(item) in (int, float, bool)):
            result.numbers[name] = item
        else:
            result.constants[name] = item
    for name, metadata in (descriptors or {}).items():
        result.descriptors[name] = _block_shape(name, metadata)
    return result


def jit_function(kernel: TritonKernel) -> TritonKernel:
    """Returns the `@triton.jit` function of a possibly wrapped kernel."""
    function = kernel
    while not hasattr(function, "params"):
        if not hasattr(function, "fn"):
            raise KernelCallError(
                f"its kernel is a {type(kernel).__name__}, not a function of @triton.jit",
                "Decorate the kernel with @triton.jit, or with @triton.autotune above it",
            )
        function = function.fn
    return function


def _block_shape(name: str, metadata: tuple[str, Sequence[Any]]) -> list[int]:
    kind, rest = metadata
    sizes = list(rest[0]) if kind == "stable" else [None]
    shape = [size for size in sizes if type(size) is int]
    if len(shape) < len(sizes):
        raise KernelCallError(
            f"the tensor descriptor '{name}' of its kernel has no constant block shape",
            "Create it by TensorDescriptor.from_tensor with a constant block shape",
        )
    return shape

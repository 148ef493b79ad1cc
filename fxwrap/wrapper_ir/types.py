"""The types that values of a program have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from fxwrap.devices import SYMMETRIC_MEMORY
from fxwrap.errors import ValueKindError
from fxwrap.symbolic import Size, canonicalize, product
from fxwrap.torch_compat import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Every element type by its name."""


def varying_dims(sizes: Sequence[Size], rank: int) -> list[int]:
    """Returns the dimensions of size other than 1, of a tensor of these sizes that is broadcast to a rank."""
    return [dim for dim, size in enumerate(sizes, rank - len(sizes)) if size != 1]


def contiguous_strides(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """Returns the row-major strides, in elements, of a dense tensor of these sizes, as `torch.empty` does."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * (size or 1) if type(size) is int else size * step
    strides.reverse()
    return tuple(strides)


def symmetric_space(group: str) -> str:
    """Returns the memory space of symmetric memory of a process group: its ranks access each other's memory."""
    return f"{SYMMETRIC_MEMORY}:{group}"


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a strided tensor.

    `sizes`, `strides` and `storage_offset` count elements. The offset is relative to the first element of the value's
    root or pool slice, whose own offset is 0. `memory_space` and `layout` are defined by the device.
    """

    dtype: torch.dtype
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    device: torch.device
    storage_offset: Size = 0
    memory_space: str = ""
    layout: str = ""

    @classmethod
    def contiguous(cls, dtype: torch.dtype, sizes: tuple[Size, ...], device: torch.device) -> TensorType:
        """Returns the type of a dense row-major tensor."""
        return cls(dtype, sizes, contiguous_strides(sizes), device)

    @property
    def symmetric_group(self) -> str | None:
        """The process group whose ranks can access the memory; None for other memory. See `symmetric_space`."""
        space = self.memory_space
        return space.removeprefix(f"{SYMMETRIC_MEMORY}:") if space.startswith(f"{SYMMETRIC_MEMORY}:") else None

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are exactly those of a dense row-major tensor of these sizes."""
        return self.strides == contiguous_strides(self.sizes)

    @property
    def element_count(self) -> Size:
        """The number of elements."""
        return product(self.sizes)

    @property
    def is_static(self) -> bool:
        """Whether sizes, strides and offset are constant."""
        return {int}.issuperset(map(type, (*self.sizes, *self.strides, self.storage_offset)))

    @property
    def end_bytes(self) -> Size:
        """The number of bytes from the first element of the root or pool slice to the end of the last element."""
        size = self.storage_bytes
        return 0 if size == 0 else self.storage_offset * self.dtype.itemsize + size

    @property
    def storage_bytes(self) -> Size:
        """The number of bytes from the first element to the end of the last one."""
        if 0 in self.sizes:
            return 0
        last: Size = 1
        for size, stride in zip(self.sizes, self.strides):
            last = last + (size - 1) * stride
        bytes_ = last * self.dtype.itemsize
        # Structurally equal for equal sizes.
        return bytes_ if isinstance(bytes_, int) else canonicalize(sympy.expand(bytes_))

    @property
    def element_bytes(self) -> Size:
        """The number of bytes of the elements: of a slice with gaps, which other tensors may have, its own part."""
        count, whole = self.element_count * self.dtype.itemsize, self.storage_bytes
        if isinstance(count, int) and isinstance(whole, int):
            return min(count, whole)  # strides of 0 and windows repeat elements
        return whole if 0 in self.strides else count


@dataclass(frozen=True, slots=True)
class ScalarType:
    """The type of a scalar: `kind` is "int", "float" or "bool"."""

    kind: str


@dataclass(frozen=True, slots=True)
class ListType:
    """The type of a list whose elements have one type."""

    element: Type


@dataclass(frozen=True, slots=True)
class OptionalType:
    """The type of a value of the element type, or none."""

    element: Type


def element_type(type_: ListType) -> Type:
    """Returns the type of the elements of a list that are not none."""
    element = type_.element
    return element.element if isinstance(element, OptionalType) else element


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """The type of an object that the IR only passes: a process group, a device mesh, a script object, a generator.

    `name` is the qualified name of its class; torch's own classes "Generator" and "Event" have no module. The object
    has no storage: it is neither owned nor freed, and blocks may yield it as a scalar.
    """

    name: str


GENERATOR = OpaqueType("Generator")
"""The type of a random number generator other than a device's default generator."""


@dataclass(frozen=True, slots=True)
class TokenType:
    """The type of an ordering token, which carries no data."""


Type: TypeAlias = TensorType | ScalarType | ListType | OptionalType | OpaqueType | TokenType


@dataclass(frozen=True, slots=True)
class Value:
    """A value, which a line, a block or the program defines. Names are unique in a program and have no '%'."""

    name: str
    type: Type

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def tensor_type(self) -> TensorType:
        """The type of a tensor value. Raises ValueKindError for any other value."""
        if not isinstance(self.type, TensorType):
            raise ValueKindError(f"%{self.name} is not a tensor; its type is a {type(self.type).__name__}")
        return self.type


Leaf: TypeAlias = (
    "Value | bool | int | float | complex | str | sympy.Basic"
    " | torch.dtype | torch.device | torch.layout | torch.memory_format | None"
)
"""An argument that is not a list."""

Operand: TypeAlias = "Leaf | tuple[Operand, ...]"
"""An argument of a line. Tuples are the lists of operators and may nest."""

Result: TypeAlias = "Value | tuple[Result, ...] | None"
"""A result of a line; None for a result that the program does not use."""


def holds_memory(value: Value) -> bool:
    """Returns whether a value has storage, which must be released: every value except scalars and opaque ones."""
    return not isinstance(value.type, ScalarType | OpaqueType)


def types_agree(first: Type | None, second: Type | None, *, compare_strides: bool = True) -> bool:
    """Returns whether a value of one type may be used where the other type is declared.

    Types other than tensors must be equal. Sizes and strides of tensors must be equal if both are constant; strides of
    dimensions of size 0 and 1 are ignored. None is the type of a missing result.
    """
    if not isinstance(first, TensorType) or not isinstance(second, TensorType):
        return first == second
    if len(first.sizes) != len(second.sizes) or _without_shape(first) != _without_shape(second):
        return False
    dimensions = zip(first.sizes, second.sizes, first.strides, second.strides)
    return all(
        _agree(size, other)
        and (not compare_strides or (isinstance(size, int) and size < 2) or _agree(stride, other_stride))
        for size, other, stride, other_stride in dimensions
    )


def _agree(first: Size, second: Size) -> bool:
    return first == second or not (isinstance(first, int) and isinstance(second, int))


def _without_shape(type_: TensorType) -> tuple[object, ...]:
    return type_.dtype, type_.device, type_.memory_space, type_.layout

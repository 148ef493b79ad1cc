"""Reduced axes that select the bits of packed elements, unrolled.

Two int4 weights in a byte, or eight in a word, are elements along a short reduced axis, along which all load the same
byte. With an axis for each position in the byte, a schedule would load it several times; as terms of one iteration they
are loaded once.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fxwrap.loop_ir.builder import KernelBuilder, Scalar
from fxwrap.loop_ir.index import Atom, Axis, IndexLike
from fxwrap.loop_ir.kernel import (
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    Kernel,
    Load,
    Operation,
    Reduce,
    Store,
    indices,
    map_operation,
    operands,
    renumber_index,
)
from fxwrap.loop_ir.operations import INTEGERS

_MAX_TERMS = 8
_COMPARISONS = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


def unroll_packed_axes(kernel: Kernel, separate: bool = False) -> Kernel:
    """Returns the kernel with the reduced axes unrolled that select bits of elements; the same kernel without any.

    Such an axis is short, has a constant size and occurs in computed integers, and there is a load of integers along
    other reduced axes that does not depend on it. Terms are added before they are reduced, or, if `separate`, are
    reduced by themselves: sums of products then remain such. The other reduced axes are in the order of that load.
    """
    axes = _packed_axes(kernel)
    return _Unrolling(kernel, axes, separate).run() if axes else kernel


def _packed_axes(kernel: Kernel) -> tuple[Axis, ...]:
    selecting = frozenset[Axis]()
    for operation in kernel.operations:
        if isinstance(operation, IndexValue):
            selecting |= operation.index.axes()
    axes = tuple([axis for axis in kernel.reduced if axis in selecting and isinstance(axis.size, int)])
    count = math.prod([axis.size for axis in axes if isinstance(axis.size, int)])
    is_simple = not kernel.reduces_in_steps and not kernel.scans and not _writes_along(kernel, axes)
    return axes if axes and _packed_loads(kernel, axes) and 1 < count <= _MAX_TERMS and is_simple else ()


def _packed_loads(kernel: Kernel, axes: Sequence[Axis]) -> list[Load]:
    """Returns the loads of integers along other reduced axes only."""
    loads = [item for item in kernel.operations if isinstance(item, Load) and item.dtype in INTEGERS]
    rest = frozenset(kernel.reduced).difference(axes)
    return [item for item in loads if rest & item.index.axes() and item.index.axes().isdisjoint(axes)]


def _constant_stride(load: Load, axis: Axis) -> int:
    stride = load.index.stride(axis)
    return 0 if stride is None or stride.constant is None else abs(stride.constant)


def _writes_along(kernel: Kernel, axes: Sequence[Axis]) -> bool:
    """Whether anything but sums needs the elements along the axes, or a sum does not vary along them."""
    dependent = _dependent(kernel, axes)
    for position, operation in enumerate(kernel.operations):
        if isinstance(operation, Reduce):
            if (
                operation.kind != "sum"
                or not operation.dtype.is_floating_point
                or operation.operands[0] not in dependent
            ):
                return True
        elif isinstance(operation, Store | DeviceAssert) and position in dependent:
            return True
    return False


def _dependent(kernel: Kernel, axes: Sequence[Axis]) -> frozenset[int]:
    """Returns the operations that vary along the axes."""
    dependent: set[int] = set()
    for position, operation in enumerate(kernel.operations):
        own = any(not index.axes().isdisjoint(axes) for index in indices(operation))
        if own or (not isinstance(operation, Reduce) and not dependent.isdisjoint(operands(operation))):
            dependent.add(position)
    return frozenset(dependent)


class _Unrolling:
    def __init__(self, kernel: Kernel, axes: Sequence[Axis], separate: bool) -> None:
        self.kernel, self.axes, self.separate = kernel, axes, separate
        self.dependent = _dependent(kernel, axes)
        self.body = KernelBuilder()
        self.common: dict[int, Scalar] = {}

    def run(self) -> Kernel:
        """Returns the kernel without the axes."""
        kernel = self.kernel
        for position, operation in enumerate(kernel.operations):
            if position in self.dependent:
                continue
            if isinstance(operation, Reduce):
                self.common[position] = self._sum(operation)
            else:
                self._copy(position, self.common, {})
        packed = _packed_loads(kernel, self.axes)[0]  # the order in which its elements are contiguous
        reduced = [axis for axis in kernel.reduced if axis not in self.axes]
        reduced.sort(key=lambda axis: _constant_stride(packed, axis), reverse=True)
        return self.body.finish(kernel.axes, reduced, kernel.inputs, kernel.outputs)

    def _sum(self, operation: Reduce) -> Scalar:
        """Adds the sum of all terms."""
        sizes = [range(axis.size) for axis in self.axes if isinstance(axis.size, int)]
        points = [dict[Atom, IndexLike](zip(self.axes, at, strict=True)) for at in itertools.product(*sizes)]
        terms = [self._term(operation.operands[0], at) for at in points]
        self.body.origin = operation.origin
        if self.separate:
            terms = [self.body.add(replace(operation, operands=(term.position,))) for term in terms]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total if self.separate else self.body.add(replace(operation, operands=(total.position,)))

    def _term(self, operand: int, at: Mapping[Atom, IndexLike]) -> Scalar:
        """Adds the operations that compute an operand at one point of the axes."""
        values = dict(self.common)
        for position in range(operand + 1):
            if position in self.dependent:
                self._copy(position, values, at)
        return values[operand]

    def _copy(self, position: int, values: dict[int, Scalar], at: Mapping[Atom, IndexLike]) -> None:
        operation = map_operation(
            self.kernel.operations[position],
            lambda used: values[used].position,
            lambda index: renumber_index(lambda used: values[used].position, at, index),
        )
        self.body.origin = operation.origin
        if isinstance(operation, Store | DeviceAssert):
            self.body.operations.append(operation)
        else:
            values[position] = self._folded(operation)

    def _folded(self, operation: Operation) -> Scalar:
        """Adds an operation, as a constant or as one of its operands where its integers are constant."""
        body = self.body
        match operation:
            case IndexValue() if operation.index.constant is not None:
                return body.constant(operation.index.constant, operation.dtype)
            case Load(mask=int() as mask, dtype=dtype) if (known := self._constant(mask)) is not None:
                if known.value:
                    return body.add(replace(operation, mask=None, other=0))
                if dtype in INTEGERS:
                    return body.constant(operation.other, dtype)
            case Compute("where", (condition, inside, other)) if (known := self._constant(condition)) is not None:
                chosen = inside if known.value else other
                return Scalar(body, chosen, operation.dtype)
            case Compute("cast", (used,)) if (known := self._constant(used)) is not None:
                if known.dtype in INTEGERS and operation.dtype in INTEGERS:
                    return body.constant(known.value, operation.dtype)
            case Compute("lt" | "le" | "gt" | "ge" | "eq" | "ne" as name, (left, right)):
                one, other_constant = self._constant(left), self._constant(right)
                if one is not None and other_constant is not None:
                    return body.constant(_COMPARISONS[name](one.value, other_constant.value), torch.bool)
            case Compute("bitwise_right_shift", (shifted, count)) if (known := self._constant(count)) is not None:
                if known.value == 0:
                    return Scalar(body, shifted, operation.dtype)
            case _:
                pass
        assert not isinstance(operation, Store | DeviceAssert), "these have no value"
        return body.add(operation)

    def _constant(self, position: int) -> Constant | None:
        operation = self.body.operations[position]
        return operation if isinstance(operation, Constant) else None

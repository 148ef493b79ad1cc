"""Sums at indices that are known when a program is compiled, as gathers.

An interpolation, or a padding that repeats elements, reads at indices that it computes from positions alone. Its
gradient adds values at these indices. On GPUs, atomic additions take many times the memory's time, and on CPUs eager
mode adds one element after the other. But the values of an element come from few positions, next to each other, which
an element can read by itself, as in the backward of an average pooling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NoReturn

import torch

from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Compute,
    Constant,
    Index,
    IndexLike,
    Kernel,
    OperationCopier,
    Scalar,
    as_index,
    evaluate_kernel,
    linearize_index,
    replace_operations,
)
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Pointwise, Stored
from fxwrap.lowering.fusion.tracing import BodyBuilder, Tracer
from fxwrap.lowering.rules.indexing_common import Condition, all_of, index_in_range, masked_sum
from fxwrap.symbolic import Size, product

MAX_TERMS = 27
"""The most positions, in all dimensions, whose values an element may have."""

_MAX_POSITIONS = 1 << 16
_MIN_REPEATS, _CHEAP = 16, 2
_MAX_TERMS_PER_VALUE = 9
"""More reads than this for each value that is added take longer than atomic additions."""


@dataclass(frozen=True)
class KnownIndex:
    """An index tensor along one dimension: the values at its positions are from `low` to `high`.

    These are equal, or apart by the last bit of a float that some devices round otherwise. `width` positions from
    `start` on have all that may be equal to an index; `always` are those of them at which all values are.
    """

    definition: Definition
    positions: int
    slope: Fraction
    offset: int
    width: int
    always: frozenset[int]

    def start(self, index: IndexLike) -> Index:
        """Returns the first position whose value may be this index; it may be out of bounds."""
        up, down = self.slope.numerator, self.slope.denominator
        before = max(0, -(self.offset // down))  # a floor division of numbers that are not negative
        return (as_index(index) * up + (self.offset + before * down)) // down - before

    def equals(self, reader: ElementReader, number: int, position: Index, index: IndexLike) -> Condition:
        """Returns whether the value at a position, this number of positions after the start, is an index."""
        if number in self.always:
            return True
        sizes = self.definition.sizes
        at = [0 if size == 1 else position for size in sizes]
        return reader.load(self.definition, at).to(torch.int64).equals(reader.body.index(as_index(index)))


def known_index(definition: Definition, size: Size) -> KnownIndex | None:
    """Returns an index tensor of one dimension into one of this size, None if it is not known or values are far apart.

    An index is known if it is computed from positions and numbers alone.
    """
    sizes = [item for item in definition.sizes if item != 1]
    if len(sizes) != 1 or not isinstance(size, int) or not isinstance(sizes[0], int):
        return None
    if not 0 < sizes[0] <= _MAX_POSITIONS:
        return None
    limits = _limits(definition)
    if limits is None or min(limits[0].min(), limits[1].min()) < 0 or max(limits[0].max(), limits[1].max()) >= size:
        return None
    low, high = limits
    count = sizes[0]
    first, last = _runs(low, high, size)
    slopes = {
        Fraction(count, size),
        Fraction(max(count - 1, 1), max(size - 1, 1)),
        Fraction(1),
        Fraction(round(count / size) or 1),
    }
    windows = [_window(first, last, slope) for slope in sorted(slopes, key=lambda item: item.denominator)]
    # An integer slope is worth another position: strides are fixed, and corners with such windows share their loads.
    width, slope, offset = min(windows, key=lambda item: item[0] - (item[1].denominator == 1))
    starts = _starts(slope, offset, size)
    if width > MAX_TERMS:
        return None
    always, indices = set[int](), torch.arange(size)
    for number in range(width):
        positions = starts + number
        inside = (positions >= 0) & (positions < count)
        read = positions[inside]
        if torch.equal(low[read], indices[inside]) and torch.equal(high[read], indices[inside]):
            always.add(number)
    return KnownIndex(definition, count, slope, offset, width, frozenset(always))


def gathers_fewer(read: int, targets: Size, values: Size) -> bool:
    """Whether to read so many values for each target takes less time than to add each of the values to its target."""
    if not isinstance(targets, int) or not isinstance(values, int) or read > MAX_TERMS:
        return False
    return read * targets <= _MAX_TERMS_PER_VALUE * values


def repeated_operands(values: Definition) -> Iterator[Definition]:
    """Yields operands of values whose elements many of the values read, and that are not cheap to compute."""
    count, tracer = product(values.sizes), Tracer()
    for operand, _ in tracer.trace(values).reads if isinstance(values, Pointwise) else ():
        elements = product(operand.sizes)
        is_repeated = isinstance(count, int) and isinstance(elements, int) and elements * _MIN_REPEATS <= count
        if not is_repeated or not isinstance(operand, Pointwise):
            continue
        trace = tracer.trace(operand)
        if trace.cost > _CHEAP or not all(isinstance(other, Stored) for other, _ in trace.reads):
            yield operand


def _runs(low: torch.Tensor, high: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first and the last position that may have each index; the last is -1 where there is none."""
    values, positions = torch.cat([low, high]), torch.arange(len(low)).repeat(2)
    first = torch.full([size], len(low)).scatter_reduce_(0, values, positions, "amin")
    return first, torch.full([size], -1).scatter_reduce_(0, values, positions, "amax")


def _window(first: torch.Tensor, last: torch.Tensor, slope: Fraction) -> tuple[int, Fraction, int]:
    """Returns the least width of windows with a slope, the slope, and their offset: a multiple of its denominator.

    Such an offset lets the windows of several index tensors, as of the corners of an interpolation, share positions.
    """
    is_read, down = last >= 0, slope.denominator
    limit = int((down * first + down - 1 - slope.numerator * torch.arange(len(first)))[is_read].min())

    def width(offset: int) -> int:
        return int((last - _starts(slope, offset, len(first)))[is_read].max()) + 1

    shared = limit // down * down
    return (width(shared), slope, shared) if width(shared) <= width(limit) else (width(limit), slope, limit)


def _starts(slope: Fraction, offset: int, size: int) -> torch.Tensor:
    return (slope.numerator * torch.arange(size) + offset).div(slope.denominator, rounding_mode="floor")


# --- values ----------------------------------------------------------------------------------------------------------


class _UnknownError(Exception):
    """A value depends on memory."""


def _limits(definition: Definition) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the smallest and the largest value of each element of an index tensor, flat; None if it is not known."""
    try:
        kernel, count = _kernel_of(definition)
    except _UnknownError:
        return None
    computed = {position: item for position, item in enumerate(kernel.operations) if isinstance(item, Compute)}
    floats = {
        position
        for position, item in enumerate(kernel.operations)
        if isinstance(item, Compute | Constant) and item.dtype.is_floating_point
    }
    names = {item.name for item in computed.values() if floats.intersection(item.operands)}
    if not names <= _KNOWN_FLOAT_OPERATIONS:
        return None
    if not _may_round_otherwise(kernel, floats):
        values = _evaluate(kernel, definition.dtype, count)
        return values, values
    if not names <= _MONOTONE_FLOAT_OPERATIONS:
        return None
    conversions = [
        position
        for position, item in computed.items()
        if item.operands[0] in floats and (item.name in _ROUNDINGS or not item.dtype.is_floating_point)
    ]
    ends = [_evaluate(_shifted(kernel, conversions, sign), definition.dtype, count) for sign in (-1.0, 1.0)]
    values = _evaluate(kernel, definition.dtype, count)
    return torch.stack([values, *ends]).aminmax(dim=0)


_ROUNDINGS = frozenset({"floor", "ceil", "trunc", "round"})
_MONOTONE_FLOAT_OPERATIONS = _ROUNDINGS | {"add", "sub", "mul", "div", "maximum", "minimum", "neg", "cast"}
_KNOWN_FLOAT_OPERATIONS = _MONOTONE_FLOAT_OPERATIONS | {"abs", "where", "lt", "le", "gt", "ge", "eq", "ne"}
"""Operations whose results IEEE 754 defines, so that all devices compute the same."""


def _kernel_of(definition: Definition) -> tuple[Kernel, int]:
    """Returns a kernel that stores the elements of a tensor, and their number. Raises _UnknownError if it reads any."""

    def fetch(*_: object) -> NoReturn:
        raise _UnknownError

    builder = BodyBuilder(lambda other: "inlined" if isinstance(other, Pointwise) else "fetched", fetch)
    sizes = [size if isinstance(size, int) else 0 for size in definition.sizes]
    axes = [Axis(f"p{number}", size) for number, size in enumerate(sizes)]
    value = builder.load(definition, axes)
    builder.body.store("out0", linearize_index(axes, sizes), value)
    count = math.prod(sizes)
    return builder.body.finish(axes, (), (), (Buffer("out0", definition.dtype, count),)), count


def _may_round_otherwise(kernel: Kernel, floats: set[int]) -> bool:
    """Whether devices may round floats in different ways: in a fused multiply-add, or in a quotient."""
    operations = kernel.operations
    for position in floats:
        item = operations[position]
        if not isinstance(item, Compute):
            continue
        terms = [operations[other] for other in item.operands if item.name in ("add", "sub")]
        if item.name == "div" or any(isinstance(other, Compute) and other.name == "mul" for other in terms):
            return True
    return False


def _shifted(kernel: Kernel, conversions: Sequence[int], sign: float) -> Kernel:
    """Returns a kernel with floats that are some units of the last place larger or smaller before they are rounded."""

    def shifted(body: OperationCopier, position: int) -> int:
        operation = kernel.operations[position]
        assert isinstance(operation, Compute)
        old = kernel.operations[operation.operands[0]]
        assert isinstance(old, Compute | Constant)
        dtype = old.dtype
        x = body.new[operation.operands[0]]
        size = body.compute("add", body.compute("abs", x, dtype=dtype), body.constant(1.0, dtype), dtype=dtype)
        shift = body.compute("mul", size, body.constant(sign * 2.0**-20, dtype), dtype=dtype)
        return body.add(replace(operation, operands=(body.compute("add", x, shift, dtype=dtype),)))

    return replace_operations(kernel, conversions, shifted)


def _evaluate(kernel: Kernel, dtype: torch.dtype, count: int) -> torch.Tensor:
    out = torch.empty([count], dtype=dtype)
    evaluate_kernel(kernel, {"out0": out})
    return out.to(torch.int64)


# --- sums ------------------------------------------------------------------------------------------------------------


def sum_at_known_indices(
    reader: ElementReader,
    known: Mapping[int, KnownIndex],
    indices: Indices,
    load: Callable[[Mapping[int, Index]], Scalar],
    dtype: torch.dtype,
) -> Scalar:
    """Returns the sum of the values whose index tensors, by dimension, have the indices of an element.

    `load` returns the value at positions of the index tensors, by dimension.
    """
    terms: list[tuple[Condition, Callable[[], Scalar]]] = []
    for numbers in itertools.product(*[range(index.width) for index in known.values()]):
        positions = {
            dim: index.start(indices[dim]) + number for (dim, index), number in zip(known.items(), numbers, strict=True)
        }
        inside = [index_in_range(reader, positions[dim], index.positions) for dim, index in known.items()]

        def value(positions: Mapping[int, Index] = positions, numbers: tuple[int, ...] = numbers) -> Scalar:
            equal = all_of(*[
                index.equals(reader, number, positions[dim], indices[dim])
                for (dim, index), number in zip(known.items(), numbers, strict=True)
            ])  # fmt: skip
            return equal.where(load(positions), 0) if isinstance(equal, Scalar) else load(positions)

        exists = all_of(*inside)
        if exists is not False or not terms:
            terms.append((exists, value))
    return masked_sum(reader, terms, dtype)

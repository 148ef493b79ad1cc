"""Cuts of a loop where conditions on its variable change: between two cuts they are constants, and masks are gone.

This is what makes cat and pad plain copies: each part of the range loads from one tensor, without a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import (
    STORAGE_ONLY,
    Axis,
    Compute,
    Constant,
    Gathered,
    Index,
    IndexValue,
    Kernel,
    Load,
    Operation,
    Require,
    Store,
    as_index,
    map_operation,
)

MOST_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an axis's range, and the kernel as it is there: operations keep their positions, some are constants."""

    start: int
    end: int
    kernel: Kernel


def segments_of(kernel: Kernel, axis: Axis) -> list[Segment]:
    """Returns the parts into which conditions cut an axis; none when they do not, or its size is not known."""
    if not isinstance(axis.size, int):
        return []
    cuts: set[int] = set()
    for operation in kernel.operations:
        found = _comparison(kernel, operation, axis)
        if found is not None:
            cuts |= {cut for cut in found.cuts if 0 < cut < axis.size}
    if not cuts or len(cuts) >= MOST_SEGMENTS:
        return []
    places = [0, *sorted(cuts), axis.size]
    return [Segment(start, end, _specialised(kernel, axis, start)) for start, end in itertools.pairwise(places)]


def interior_of(kernel: Kernel, axes: Sequence[Axis], lane: Axis) -> tuple[Axis, Segment] | None:
    """Returns the part of one of the axes, most of its range, within which masks on strided loads are gone.

    Compilers vectorise masked loads of neighbours, and of nothing else. `lane` is the vectorised axis.
    """
    if not any(isinstance(item, Load) and item.mask is not None and _strided(item, lane) for item in kernel.operations):
        return None
    for axis in reversed(axes):
        if segments := segments_of(kernel, axis):
            longest = max(segments, key=lambda item: item.end - item.start)
            return (axis, longest) if 2 * (longest.end - longest.start) > segments[-1].end else None
    return None


def _strided(load: Load, lane: Axis) -> bool:
    stride = load.index.stride(lane)
    return stride is None or stride.constant not in (0, 1)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Whether `scale` times an axis is less than, equal to ... a number. `scale` is positive."""

    name: str
    scale: int
    number: int

    @property
    def cuts(self) -> tuple[int, ...]:
        """The places along the axis from which on it may be another truth than before."""
        first_not_less, first_larger = -(-self.number // self.scale), self.number // self.scale + 1
        return {"lt": (first_not_less,), "ge": (first_not_less,), "le": (first_larger,), "gt": (first_larger,)}.get(
            self.name, (first_not_less, first_larger)
        )

    def holds(self, place: int) -> bool:
        """Whether it is true at a place along the axis."""
        left, right = self.scale * place, self.number
        return {
            "lt": left < right, "le": left <= right, "gt": left > right, "ge": left >= right, "eq": left == right,
            "ne": left != right,
        }[self.name]  # fmt: skip


def _comparison(kernel: Kernel, operation: Operation, axis: Axis) -> _Comparison | None:
    """Returns a comparison of the axis with a number; None for other operations."""
    if not isinstance(operation, Compute) or operation.name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        return None
    left, right = [kernel.operations[place] for place in operation.operands]
    if not isinstance(left, IndexValue) or not isinstance(right, Constant):
        return None
    stride = left.index.stride(axis)
    scale = None if stride is None else stride.constant
    if scale is None or scale <= 0:
        return None
    offset = (left.index - as_index(axis) * scale).constant
    return None if offset is None else _Comparison(operation.name, scale, int(right.value) - offset)


def _specialised(kernel: Kernel, axis: Axis, start: int) -> Kernel:
    """Returns the kernel as it is from `start` up to the next cut."""
    new: list[Operation] = []
    same = list(range(len(kernel.operations)))
    truth: dict[int, bool] = {}

    def index(old: Index) -> Index:
        found = [atom for atom in old.atoms() if isinstance(atom, Gathered)]
        return old.substitute({atom: Gathered(same[atom.operation], atom.size) for atom in found})

    for place, old in enumerate(kernel.operations):
        operation = map_operation(old, same.__getitem__, index)
        found = _comparison(kernel, old, axis)
        if found is not None:
            truth[place] = found.holds(start)
        elif isinstance(operation, Compute):
            _fold(operation, place, same, truth)
            _fold_cast(operation, place, same, new)
        operation = _unmasked(operation, truth)
        if place in truth:
            operation = Constant(truth[place], torch.bool)
        new.append(operation)
    return replace(kernel, operations=tuple(new))


def _fold(operation: Compute, place: int, same: list[int], truth: dict[int, bool]) -> None:
    """Notes what an operation is whose conditions are known: a truth, or the same as another operation."""
    known = [truth.get(operand) for operand in operation.operands]
    if operation.name == "where" and known[0] is not None:
        chosen = operation.operands[1 if known[0] else 2]
        same[place] = same[chosen]
        if chosen in truth:
            truth[place] = truth[chosen]
    elif operation.name == "logical_not" and known[0] is not None:
        truth[place] = not known[0]
    elif operation.dtype is torch.bool and operation.name in _DECIDES:
        decisive = _DECIDES[operation.name]
        if decisive in known:
            truth[place] = decisive
        elif known == [not decisive, not decisive]:
            truth[place] = not decisive
        elif (not decisive) in known:
            other = operation.operands[0 if known[0] is None else 1]
            same[place] = same[other]


def _fold_cast(operation: Compute, place: int, same: list[int], new: list[Operation]) -> None:
    """Notes that a half-precision number, widened and narrowed again, is what it was: a part of a cat is a copy."""
    if operation.name != "cast" or operation.dtype not in STORAGE_ONLY:
        return
    wide = new[operation.operands[0]]
    if isinstance(wide, Compute) and wide.name == "cast":
        source = new[wide.operands[0]]
        if isinstance(source, Load) and source.dtype is operation.dtype:
            same[place] = wide.operands[0]


_DECIDES = {"logical_and": False, "bitwise_and": False, "logical_or": True, "bitwise_or": True}


def _unmasked(operation: Operation, truth: dict[int, bool]) -> Operation:
    """Returns an operation without a mask that is known; one that never happens becomes a constant."""
    if not isinstance(operation, Load | Store | Require) or operation.mask not in truth:
        return operation
    if truth[operation.mask]:
        return replace(operation, mask=None)
    return Constant(operation.other, operation.dtype) if isinstance(operation, Load) else Constant(0, torch.int64)

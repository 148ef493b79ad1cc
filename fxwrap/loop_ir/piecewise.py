"""Computed indices that are linear in parts of an axis, as those of reflected and replicated borders."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fxwrap.loop_ir.atoms import Axis, IndirectIndex
from fxwrap.loop_ir.body_operations import Compute, Constant, IndexValue, indices
from fxwrap.loop_ir.index import Index, as_index
from fxwrap.loop_ir.kernel import Kernel

MAX_PIECES = 5
"""The most parts of an axis: a border is reflected at both ends."""

Pieces = dict[int, Index]
"""An index expression from each position along an axis on."""


def piecewise_indices(kernel: Kernel, axis: Axis) -> dict[IndirectIndex, Pieces]:
    """Returns the indices that are computed from the axis, and linear in a few parts of it."""
    atoms = dict.fromkeys([
        atom
        for item in kernel.operations
        for index in indices(item)
        for atom in index.atoms()
        if isinstance(atom, IndirectIndex) and axis in kernel.value_axes[atom.operation]
    ])  # fmt: skip
    every = {atom: _pieces(kernel, atom.operation, axis) for atom in atoms} if isinstance(axis.size, int) else {}
    return {atom: pieces for atom, pieces in every.items() if pieces is not None and len(pieces) <= MAX_PIECES}


def piece_of(pieces: Pieces, start: int, end: int) -> Index | None:
    """Returns the index from `start` to `end`; None if it has several pieces there."""
    first = max(point for point in pieces if point <= start)
    return None if any(start < point < end for point in pieces) else pieces[first]


def _pieces(kernel: Kernel, position: int, axis: Axis) -> Pieces | None:
    """Returns the pieces of an integer; None if it is computed by other operations or of other values."""
    match kernel.operations[position]:
        case IndexValue(index=index):
            return {0: index}
        case Constant(value=value, dtype=torch.int64):
            return {0: as_index(int(value))}
        case Compute(name="abs", operands=(used,), dtype=torch.int64):
            inner = _pieces(kernel, used, axis)
            return None if inner is None else _selected(inner, {0: as_index(0)}, axis, lambda x, _: (x, -x))
        case Compute(name=("add" | "sub" | "maximum" | "minimum") as name, operands=(left, right), dtype=torch.int64):
            first, second = _pieces(kernel, left, axis), _pieces(kernel, right, axis)
            if first is None or second is None:
                return None
            if name in ("add", "sub"):
                sign = 1 if name == "add" else -1
                return {start: x + y * sign for start, _, x, y in _common(first, second, axis)}
            return _selected(first, second, axis, lambda x, y: (x, y) if name == "maximum" else (y, x))
        case _:
            return None


def _common(first: Pieces, second: Pieces, axis: Axis) -> Iterator[tuple[int, int, Index, Index]]:
    """Yields the start and the end of each part in which both are linear, with their indices."""
    assert isinstance(axis.size, int)
    starts = sorted({*first, *second})
    for start, end in zip(starts, [*starts[1:], axis.size], strict=True):
        x, y = piece_of(first, start, end), piece_of(second, start, end)
        assert x is not None and y is not None
        yield start, end, x, y


def _selected(
    first: Pieces, second: Pieces, axis: Axis, choose: Callable[[Index, Index], tuple[Index, Index]]
) -> Pieces | None:
    """Returns the first choice of two indices where the first is not less than the second, else the second one."""
    pieces: Pieces = {}
    for start, end, x, y in _common(first, second, axis):
        difference = x - y
        stride = difference.stride(axis)
        if stride is None or stride.constant is None:
            return None
        rest = difference - as_index(axis) * stride.constant
        if rest.constant is None:
            return None
        larger, smaller = choose(x, y)
        signs = [stride.constant * at + rest.constant >= 0 for at in (start, end - 1)]
        pieces[start] = larger if signs[0] else smaller
        if signs[0] != signs[1]:
            change = -(rest.constant // stride.constant) if signs[1] else rest.constant // -stride.constant + 1
            pieces[change] = larger if signs[1] else smaller
    return pieces

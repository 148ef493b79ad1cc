"""Sums of many values in few elements on GPUs: in private copies of these, which are then summed.

Atomic additions to one element run one after another. A histogram, the gradient of an embedding of a few types, or sums
by class add thousands of values to each element; values next to each other go to different copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.loop_ir import Index, Scalar, linearize_index
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, ScatterBody, Scattered, reduction
from fxwrap.lowering.rules.creation import full_tensor
from fxwrap.symbolic import Size, product

_MAX_ELEMENTS = 1 << 16
_MAX_COPIED_ELEMENTS = 1 << 18
"""The most elements that have copies, and the most elements of all copies, which are written and read once more."""

_MAX_COPIES = 8192
_MIN_VALUES, _VALUES_OF_A_COPY = 64, 16
"""The values of an element from which on it has copies, and those that are added to one at least."""


def private_copies(sizes: Sequence[Size], space: Sequence[Size]) -> int:
    """Returns the number of private copies of a tensor to which a value is added for each element of a space."""
    elements, values = product(sizes), product(space)
    if not isinstance(elements, int) or not isinstance(values, int) or not 0 < elements <= _MAX_ELEMENTS:
        return 1
    if values < _MIN_VALUES * elements:
        return 1
    limit = min(_MAX_COPIES, _MAX_COPIED_ELEMENTS // elements, values // (elements * _VALUES_OF_A_COPY))
    return 1 << (limit.bit_length() - 1)


def sum_of_private_copies(
    initial: Definition, space: Sequence[Size], along: Sequence[int], body: ScatterBody, copies: int, *, of_rows: bool
) -> Definition:
    """Returns the sums of the values that a scatter's body adds to zeros of the sizes of `initial`, through copies.

    Values at consecutive positions along some dimensions of the space go to different copies. These are the first
    dimension of the copied tensor if an element's last index is the last one of the space (`of_rows`), so that
    additions of a row stay contiguous; else the last, so that additions to copies of one element are.
    """
    sizes, dtype, device = initial.sizes, initial.dtype, initial.device
    number = [space[dim] for dim in along]

    def private(reader: ElementReader, indices: Indices) -> tuple[Sequence[Index], Scalar]:
        target, value = body(reader, indices)
        copy = linearize_index([indices[dim] for dim in along], number) % copies
        return [copy, *target] if of_rows else [*target, copy], value

    zeros = full_tensor([copies, *sizes] if of_rows else [*sizes, copies], dtype, device, 0)
    scattered = Scattered(zeros.sizes, dtype, device, zeros, tuple(space), "add", (private,))

    def copied(reader: ElementReader, parallel: Indices, reduced: Indices) -> Scalar:
        return reader.load(scattered, [*reduced, *parallel] if of_rows else [*parallel, *reduced])

    (total,) = reduction("sum", sizes, (copies,), device, dtype, copied, [dtype])
    return total

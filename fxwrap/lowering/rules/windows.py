"""Windows of convolutions and poolings, and sums over the windows that cover an element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import Index, IndexLike, Scalar, as_index
from fxwrap.lowering.fusion.definitions import ElementReader, Indices
from fxwrap.lowering.rules.indexing_common import (
    Condition,
    all_of,
    index_equal,
    index_greater_equal,
    index_less,
    masked_sum,
    statically_known_nonnegative,
)
from fxwrap.lowering.rules.registry import ElementBody
from fxwrap.symbolic import Size


@dataclass(frozen=True)
class Windows:
    """The windows along one dimension: window w covers the indices w * stride - padding + k * dilation."""

    size: Size
    count: Size
    width: int
    stride: int
    padding: int
    dilation: int

    def input_index(self, window: IndexLike, offset: IndexLike) -> Index:
        """Returns the input index of element `offset` of a window."""
        return as_index(window) * self.stride + (as_index(offset) * self.dilation - self.padding)

    def in_bounds(self, reader: ElementReader, window: IndexLike, offset: IndexLike) -> Condition:
        """Returns whether element `offset` of a window is in the input."""
        input_index = self.input_index(window, offset)
        return all_of(index_greater_equal(reader, input_index, 0), index_less(reader, input_index, self.size))

    @property
    def max_before_input(self) -> int:
        """The most elements of a window that are before the input."""
        return min(-(-self.padding // self.dilation), self.width - 1)

    def within_padding(self, reader: ElementReader, window: IndexLike, offset: int) -> Condition:
        """Returns whether element `offset` of a window is in the input or its padding; a window may end beyond both."""
        return index_less(reader, self.input_index(window, offset), as_index(self.size) + self.padding)

    def counts_all(self, *, padding: bool) -> bool:
        """Whether all elements of all windows are known to be in the input, or else in its `padding`."""
        end = (as_index(self.count) - 1) * self.stride + (self.width - 1) * self.dilation - self.padding
        last = as_index(self.size) - 1 + (self.padding if padding else 0)
        return statically_known_nonnegative(last - end) and (padding or self.padding == 0)

    @property
    def max_covering_windows(self) -> int:
        """The most windows from whose first to whose last element one element can be."""
        return -(-((self.width - 1) * self.dilation + 1) // self.stride)

    def covering_window(self, reader: ElementReader, input_index: IndexLike, number: int) -> CoveringWindow:
        """Returns the window that is so many windows before the last one that may contain an element."""
        padded = as_index(input_index) + self.padding
        last, offset = padded // self.stride, padded % self.stride + number * self.stride
        covers = index_less(reader, offset, (self.width - 1) * self.dilation + 1)
        if self.dilation > 1:
            covers = all_of(covers, index_equal(reader, offset % self.dilation, 0))
        exists = all_of(
            index_greater_equal(reader, last, number), index_less(reader, last, as_index(self.count) + number)
        )
        return CoveringWindow(last - number, offset, all_of(exists, covers))


@dataclass(frozen=True)
class CoveringWindow:
    """A window, the offset of an element from its start, and whether the window exists and contains the element."""

    window: Index
    offset: Index
    exists: Condition


Plane = tuple[Windows, ...]
"""The windows along each of the last dimensions."""


def window_offsets(widths: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yields the offsets of all elements of a window."""
    return itertools.product(*[range(width) for width in widths])


def is_window_in_bounds(reader: ElementReader, plane: Plane, at: Indices, offset: Sequence[IndexLike]) -> Condition:
    """Returns whether an element of a window is in the input."""
    return all_of(*[windows.in_bounds(reader, window, k) for windows, window, k in zip(plane, at, offset, strict=True)])


def input_indices(plane: Plane, at: Indices, offset: Sequence[IndexLike]) -> list[Index]:
    """Returns the input indices of an element of a window."""
    return [windows.input_index(window, k) for windows, window, k in zip(plane, at, offset, strict=True)]


def sum_over_windows(
    plane: Plane,
    term: Callable[[ElementReader, Indices, Sequence[CoveringWindow]], Callable[[], Scalar]],
    dtype: torch.dtype,
    divisor: float | None = None,
) -> ElementBody:
    """Returns the divided sum of terms over the windows that cover an element.

    `term(reader, outer indices, covering windows)` returns the function that computes the value of windows that exist.
    """
    rank = len(plane)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        outer, input_index = indices[:-rank], indices[-rank:]
        terms: list[tuple[Condition, Callable[[], Scalar]]] = []
        for numbers in window_offsets(windows.max_covering_windows for windows in plane):
            covering = [
                windows.covering_window(reader, index, number)
                for windows, index, number in zip(plane, input_index, numbers, strict=True)
            ]
            exists = all_of(*[item.exists for item in covering])
            if exists is not False or not terms:
                terms.append((exists, term(reader, outer, covering)))
        total = masked_sum(reader, terms, dtype)
        return total if divisor is None else total / divisor

    return body

"""The native counterparts of `explore`, `sweep` and `Blocks`: equal results, step for step, in less time."""

from __future__ import annotations

import ctypes
import math
import time
import weakref
from collections.abc import Sequence

from fxwrap.memory_planning.blocks import Blocks
from fxwrap.memory_planning.explore import Order, SearchLimits, SearchResult, SearchStatus, explore
from fxwrap.memory_planning.greedy import Buffer
from fxwrap.memory_planning.placement import Subproblem
from fxwrap.memory_planning.sweep import SweepOptions, sweep
from fxwrap.runtime.native.planning import load_planner

_OUTCOMES = (SearchStatus.SOLVED, SearchStatus.INFEASIBLE, SearchStatus.LIMIT_REACHED)

_MAX_CAPACITY = 1 << 61
"""Sums of two offsets below this have 64 bits."""

_MAX_AREA = 1 << 53
"""Products of capacity and sections up to this are exact as floating-point numbers."""

_FOREVER_S = 1e9


class NativeSearch:
    """The functions of the native library, as `PythonSearch` has them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def explore(
        self, part: Subproblem, order: Order, ranks: list[int], weights: list[int], limits: SearchLimits
    ) -> SearchResult:
        """Runs one depth-first search; see `explore`."""
        if part.capacity >= _MAX_CAPACITY:
            return explore(part, order, ranks, weights, limits)
        count, sections = len(part.size), part.sections
        numbers = ctypes.c_int64 * count
        counted = (ctypes.c_int64 * sections)(*weights)
        offsets, steps = numbers(), (ctypes.c_int64 * 1)()
        outcome = _OUTCOMES[
            self._library.fxwrap_explore(
                count, sections, part.capacity, numbers(*part.first), numbers(*part.last), numbers(*part.size),
                numbers(*part.twin_rank), numbers(*ranks), order.lowest_section, order.lowest_first, limits.steps,
                _seconds_until(limits.deadline), counted, offsets, steps,
            )
        ]  # fmt: skip
        weights[:] = counted
        return SearchResult(outcome, tuple(offsets) if outcome is SearchStatus.SOLVED else (), steps[0])

    def sweep(
        self, buffers: Sequence[Buffer], capacity: int, options: SweepOptions, limits: SearchLimits
    ) -> SearchResult:
        """Runs one sweep; see `sweep`."""
        if capacity >= _MAX_CAPACITY:
            return sweep(buffers, capacity, options, limits)
        numbers = ctypes.c_int64 * len(buffers)
        first, last, size = [numbers(*[buffer[field] for buffer in buffers]) for field in range(3)]
        offsets, steps = numbers(), (ctypes.c_int64 * 1)()
        outcome = _OUTCOMES[
            self._library.fxwrap_sweep(
                len(buffers), capacity, first, last, size, options.width, options.tolerance, limits.steps,
                _seconds_until(limits.deadline), offsets, steps,
            )
        ]  # fmt: skip
        return SearchResult(outcome, tuple(offsets) if outcome is SearchStatus.SOLVED else (), steps[0])

    def merge(self, buffers: Sequence[Buffer], capacity: int, tolerances: Sequence[float]) -> Blocks | NativeBlocks:
        """Merges buffers, whose times are numbers of sections, into blocks; see `Blocks`."""
        if capacity * max([last for _, last, _ in buffers]) >= _MAX_AREA:
            return Blocks(buffers, capacity, tolerances)
        return NativeBlocks(self._library, buffers, capacity, tolerances)


class NativeBlocks:
    """Blocks in the memory of the native library; see `Blocks`."""

    def __init__(
        self, library: ctypes.CDLL, buffers: Sequence[Buffer], capacity: int, tolerances: Sequence[float]
    ) -> None:
        self._library = library
        self._count = len(buffers)
        self._numbers = ctypes.c_int64 * self._count
        first, last, size = [self._numbers(*[buffer[field] for buffer in buffers]) for field in range(3)]
        numbers = (ctypes.c_double * len(tolerances))(*tolerances)
        self._handle = library.fxwrap_blocks_create(
            self._count, first, last, size, capacity, len(tolerances), numbers
        )  # fmt: skip
        weakref.finalize(self, library.fxwrap_blocks_destroy, self._handle)

    @property
    def buffers(self) -> list[Buffer]:
        """The roots as buffers."""
        first, last, size = self._numbers(), self._numbers(), self._numbers()
        count = self._library.fxwrap_blocks_roots(self._handle, first, last, size)
        return list(zip(first[:count], last[:count], size[:count]))

    @property
    def steps(self) -> int:
        """The work until now; see `Blocks`."""
        return int(self._library.fxwrap_blocks_steps(self._handle))

    @property
    def has_blocks(self) -> bool:
        """Whether a root is a block."""
        return len(self.buffers) < self._count

    def expand(self, offsets: Sequence[int]) -> list[int]:
        """Returns the offsets of the buffers from those of the roots."""
        expanded = self._numbers()
        self._library.fxwrap_blocks_expand(self._handle, (ctypes.c_int64 * len(offsets))(*offsets), expanded)
        return list(expanded)

    def improve(self, steps: int, deadline: float = math.inf) -> None:
        """Splits blocks and merges again; see `Blocks.improve`."""
        self._library.fxwrap_blocks_improve(self._handle, steps, _seconds_until(deadline))


def native_search(builds: bool = True) -> NativeSearch | None:
    """Returns the native search, which is compiled now if it is not yet.

    None where it cannot be compiled, and without `builds` where it would have to be.
    """
    library = load_planner(builds)
    return None if library is None else NativeSearch(library)


def _seconds_until(deadline: float) -> float:
    return min(deadline - time.monotonic(), _FOREVER_S)

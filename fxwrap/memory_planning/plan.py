"""The plan of a program's memory, as data: which allocations share a pool, and at which offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fxwrap.errors import PlanningError
from fxwrap.memory_planning.assignment import assign_offsets
from fxwrap.memory_planning.live_ranges import Keeper, LiveRange, live_ranges, program_ranges
from fxwrap.memory_planning.offsets import stacked_offsets
from fxwrap.symbolic import Scalar, Size, evaluate
from fxwrap.wrapper_ir import Block, Program, blocks, defined_symbol, symbol_infos

UNKNOWN_SIZE = 8192
"""What a symbol without a hint counts for."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece of memory at an offset of its pool, in bytes."""

    range: LiveRange
    offset: Size


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One allocation that holds several pieces of memory.

    `first` is the position of the first line that needs it, `end` the one after the last; `size` its bytes; `terms`
    are named parts of offsets and sizes, each over the ones before and the program's symbols.
    """

    name: str
    device: torch.device
    memory_space: str
    first: int
    end: int
    size: Size
    placed: tuple[Placed, ...]
    terms: tuple[tuple[str, Size], ...] = ()
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The pools of one block, and its memory in bytes, by hints of symbols.

    `peak` is the most that is live at once with the pools, `lower_bound` without them: the largest sum of live sizes,
    each rounded up to the device's alignment. All memory counts, also what no pool holds: inputs, constants, results of
    operators and what is given back.
    """

    label: str
    pools: tuple[PoolPlan, ...]
    peak: int
    lower_bound: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The plans of a program's blocks, its body first, then functions and nested blocks in the program's order."""

    blocks: tuple[BlockPlan, ...]

    @property
    def body(self) -> BlockPlan:
        """The plan of the program's body."""
        return self.blocks[0]

    @property
    def fragmentation(self) -> float:
        """How much of the body's peak is wasted: 0 where it is the lower bound."""
        return 1 - self.body.lower_bound / self.body.peak if self.body.peak else 0.0


Align = Callable[[torch.device], int]


def plan_memory(
    program: Program,
    *,
    alignment: Callable[[torch.device], int],
    algorithm: str = "auto",
    hints: Mapping[str, Scalar] | None = None,
    time_limit_s: float = 10.0,
) -> MemoryPlan:
    """Returns where each allocation of a program goes.

    Only memory that a line of a block allocates and another frees is placed. Sizes may be symbolic: then offsets are
    expressions that hold for all values, chosen to be best for the hints.

    Args:
        program: the program. It is not changed.
        alignment: bytes that offsets are multiples of, by device.
        algorithm: see `assign_offsets`.
        hints: values of symbols by name; those that the program declares stand in for the others.
        time_limit_s: how long to search for a better assignment, in seconds, for each pool.

    Raises PlanningError for a size that is negative or beyond 64 bits.
    """
    declared = {name: info.hint for name, info in symbol_infos(program).items() if info.hint is not None}
    values = dict.fromkeys(symbol_infos(program), UNKNOWN_SIZE) | declared | dict(hints or {})
    planner = _Planner(values, alignment, algorithm, time_limit_s)
    planner.reserve(symbol_infos(program))
    found = [planner.block("body", program.body, program_ranges(program))]
    for name, function in program.functions:
        found.append(planner.block(name, function, _block_ranges(function)))
    for label, nested in nested_blocks(program):
        found.append(planner.block(label, nested, _block_ranges(nested)))
    return MemoryPlan(tuple(found))


def nested_blocks(program: Program) -> list[tuple[str, Block]]:
    """Returns the blocks inside the lines of a program, outer before inner, with labels such as "body.3.then"."""
    found: list[tuple[str, Block]] = []
    pending = [("body", program.body), *program.functions]
    while pending:
        label, block = pending.pop(0)
        for position, line in enumerate(block.lines):
            inner = [(f"{label}.{position}.{name}", nested) for name, nested in blocks(line)]
            found += inner
            pending += inner
    return found


def _block_ranges(block: Block) -> tuple[LiveRange, ...]:
    return live_ranges(block, {value.name: value for value in block.arguments})


class _Planner:
    def __init__(self, values: Mapping[str, Scalar], alignment: Align, algorithm: str, time_limit_s: float) -> None:
        self.values = values
        self.alignment = alignment
        self.algorithm = algorithm
        self.time_limit_s = time_limit_s
        self._symbols: set[str] = set()
        self._pools = 0

    def reserve(self, names: Mapping[str, object]) -> None:
        """Notes names of symbols that are taken."""
        self._symbols.update(names)

    def fresh(self) -> str:
        """Returns the name of a symbol that nothing has."""
        number = 0
        while f"n{number}" in self._symbols:
            number += 1
        self._symbols.add(f"n{number}")
        return f"n{number}"

    def bytes_of(self, item: LiveRange) -> int:
        """Returns a size by the hints. Raises PlanningError for one that is no number of bytes."""
        size = item.size if isinstance(item.size, int) else int(evaluate(item.size, self.values))
        if not 0 <= size < 2**63:
            raise PlanningError(f"%{item.name} takes {item.size} = {size} bytes, which no memory has")
        return size

    def rounded(self, size: int, device: torch.device) -> int:
        """Returns a size in whole multiples of the device's alignment."""
        step = self.alignment(device)
        return -(-size // step) * step

    def block(self, label: str, block: Block, ranges: Sequence[LiveRange]) -> BlockPlan:
        """Plans one block."""
        count = len(block.lines)
        sizes = {item.name: self.rounded(self.bytes_of(item), item.device) for item in ranges}
        fixed = [item for item in ranges if item.keeper is not Keeper.PROGRAM]
        ideal = _profile(count, [(item.first, item.end, sizes[item.name]) for item in ranges])
        bound = max(ideal, default=0)
        pools: list[PoolPlan] = []
        for members in self._groups(block, [item for item in ranges if item.keeper is Keeper.PROGRAM]):
            others = [item for item in ranges if item.keeper is Keeper.PROGRAM and item not in members]
            around = _profile(count, [(item.first, item.end, sizes[item.name]) for item in (*fixed, *others)])
            pools += self._relieved(self._split(members, sizes, around, bound), sizes, around, bound)
        placed = {item.range.name for pool in pools for item in pool.placed}
        loose = [item for item in ranges if item.name not in placed]
        spans = [*map(self._span, pools), *[(item.first, item.end, sizes[item.name]) for item in loose]]
        peak = max(_profile(count, spans), default=0)
        return BlockPlan(label, tuple(sorted(pools, key=lambda pool: (pool.first, pool.name))), peak, bound)

    def _relieved(
        self, pools: list[PoolPlan], sizes: Mapping[str, int], around: Sequence[int], bound: int
    ) -> list[PoolPlan]:
        """Returns the pools without what makes the peak worse than it is without pools.

        What reaches into the part of a pool that is too much at the worst moment is left to allocations of its own; so
        is a pool that stays too large.
        """
        everything = [item.range for pool in pools for item in pool.placed]
        for attempt in range(_MOST_EVICTIONS):
            held = {item.range.name for pool in pools for item in pool.placed}
            outside = [(item.first, item.end, sizes[item.name]) for item in everything if item.name not in held]
            spans = [self._span(pool) for pool in pools]
            profile = _profile(len(around), [*spans, *outside])
            worst = max(range(len(around)), key=lambda position: around[position] + profile[position])
            excess = around[worst] + profile[worst] - bound
            there = [index for index, pool in enumerate(pools) if pool.first <= worst < pool.end]
            if excess <= 0 or not there:
                break
            index = max(there, key=lambda index: spans[index][2])
            level = spans[index][2] - excess
            rest = [item.range for item in pools[index].placed
                    if self._number(item.offset, pools[index]) + sizes[item.range.name] <= level]  # fmt: skip
            given_up = attempt >= _MOST_EVICTIONS - len(pools)
            pools = [*pools[:index], *([self._pool(rest, sizes)] if rest and not given_up else []), *pools[index + 1 :]]
        return [pool for pool in pools if len(pool.placed) > 1]

    def _number(self, size: Size, pool: PoolPlan) -> int:
        """Returns a size over a pool's terms by the hints."""
        if isinstance(size, int):
            return size
        values = dict(self.values)
        for name, term in pool.terms:
            values[name] = evaluate(term, values)
        return int(evaluate(size, values))

    def _span(self, pool: PoolPlan) -> tuple[int, int, int]:
        return pool.first, pool.end, self._number(pool.size, pool)

    def _groups(self, block: Block, ranges: Sequence[LiveRange]) -> list[list[LiveRange]]:
        """Returns what may share a pool: memory of one device, whose sizes are known before the pool is allocated."""
        known_at = {made.name: position for position, line in enumerate(block.lines)
                    if (made := defined_symbol(line)) is not None}  # fmt: skip
        groups: dict[object, list[LiveRange]] = {}
        first: dict[object, int] = {}
        for item in ranges:
            place = (item.device, item.memory_space)
            first[place] = min(item.first, first.get(place, item.first))
        for item in ranges:
            place = (item.device, item.memory_space)
            symbols = [] if isinstance(item.size, int) else [symbol.name for symbol in item.size.free_symbols]
            ready = max([known_at.get(name, -1) for name in symbols], default=-1)
            groups.setdefault((place, ready if ready > first[place] else -1), []).append(item)
        return list(groups.values())

    def _split(
        self, members: list[LiveRange], sizes: Mapping[str, int], around: Sequence[int], bound: int
    ) -> list[PoolPlan]:
        """Returns the pools for a group: one, or several one after another where that lowers the peak.

        A pool is there from its first member to its last. Where little is live between two parts of a block that
        each need much, or where what is kept grows meanwhile, several pools hold less together than one.
        """
        best = [self._pool(members, sizes)]
        worst = _peak_with(around, [self._span(pool) for pool in best])
        while worst > bound and len(best) < _MOST_POOLS:
            tried = self._divided(best, sizes, around)
            if tried is None:
                break
            peak = _peak_with(around, [self._span(pool) for pool in tried])
            if peak >= worst:
                break
            best, worst = tried, peak
        return best

    def _divided(self, pools: list[PoolPlan], sizes: Mapping[str, int], around: Sequence[int]) -> list[PoolPlan] | None:
        """Returns the pools with one of them cut in two, at the place where the sum at the worst moment is least."""
        best: tuple[int, list[PoolPlan]] | None = None
        for index, pool in enumerate(pools):
            members = [item.range for item in pool.placed]
            for cut in _cuts(members, sizes):
                early = [item for item in members if item.first < cut]
                late = [item for item in members if item.first >= cut]
                if not early or not late:
                    continue
                spans = [self._span(other) for position, other in enumerate(pools) if position != index]
                guess = _peak_with(around, [*spans, _envelope(early, sizes), _envelope(late, sizes)])
                if best is None or guess < best[0]:
                    made = [self._pool(early, sizes), self._pool(late, sizes)]
                    best = guess, [*pools[:index], *made, *pools[index + 1 :]]
        return None if best is None else best[1]

    def _pool(self, members: Sequence[LiveRange], sizes: Mapping[str, int]) -> PoolPlan:
        device = members[0].device
        step = self.alignment(device)
        buffers = [(item.first, item.end, sizes[item.name]) for item in members]
        assignment = assign_offsets(buffers, alignment=step, algorithm=self.algorithm, time_limit_s=self.time_limit_s)
        first, end = min(item.first for item in members), max(item.end for item in members)
        self._pools += 1
        if all(isinstance(item.size, int) for item in members):
            placed = tuple([Placed(item, offset) for item, offset in zip(members, assignment.offsets, strict=True)])
            size: Size = assignment.peak
            terms: tuple[tuple[str, Size], ...] = ()
        else:
            offsets, size, terms = stacked_offsets(
                [(item.first, item.end, item.size) for item in members], assignment.offsets, step, self.fresh
            )
            placed = tuple([Placed(item, offset) for item, offset in zip(members, offsets, strict=True)])
        return PoolPlan(
            f"pool_{self._pools}", device, members[0].memory_space, first, end, size, placed, terms,
            assignment.algorithm,
        )  # fmt: skip


_MOST_POOLS = 8
_MOST_EVICTIONS = 24


def _profile(count: int, spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Returns the bytes that are live at each of so many lines."""
    steps = [0] * (count + 1)
    for first, end, size in spans:
        steps[first] += size
        steps[end] -= size
    return list(accumulate(steps))[:count]


def _peak_with(around: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> int:
    profile = _profile(len(around), spans)
    return max([have + more for have, more in zip(around, profile, strict=True)], default=0)


def _envelope(members: Sequence[LiveRange], sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Returns the span of a pool for these, of the least size it could have."""
    first, end = min(item.first for item in members), max(item.end for item in members)
    profile = _profile(end, [(item.first, item.end, sizes[item.name]) for item in members])
    return first, end, max(profile, default=0)


def _cuts(members: Sequence[LiveRange], sizes: Mapping[str, int]) -> list[int]:
    """Returns the positions before which to cut a pool: those that the fewest bytes cross."""
    crossing: dict[int, int] = {}
    starts = sorted({item.first for item in members})[1:]
    if not starts:
        return []
    end = max(item.end for item in members)
    # what crosses a cut before p is live at p - 1 and still at p
    profile = _profile(end + 1, [(item.first + 1, item.end, sizes[item.name]) for item in members])
    for start in starts:
        crossing[start] = profile[start]
    return sorted(starts, key=lambda start: (crossing[start], start))[:16]

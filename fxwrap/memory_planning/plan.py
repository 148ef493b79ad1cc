"""The plan of a program's memory, as data: which allocations share a pool, and at which offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxwrap.errors import PlanningError
from fxwrap.memory_planning.assignment import assign_offsets
from fxwrap.memory_planning.live_ranges import Keeper, LiveRange, live_ranges, program_ranges
from fxwrap.memory_planning.offsets import symbolic_offsets
from fxwrap.memory_planning.pools import Pocket, Span, choose_pools, pool_span, profile
from fxwrap.symbolic import Scalar, Size, evaluate
from fxwrap.wrapper_ir import (
    Block,
    Program,
    blocks,
    called_functions,
    defined,
    defined_symbol,
    known_values,
    typical_values,
)

_MOST_GUESSED = 2**40
"""What a size counts for at most where its symbols have no hints."""

_MOST_SEARCHED = 64
"""How many pools of a program "auto" tries all algorithms for; a search may take a second."""


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
    each rounded up to the device's alignment. All memory counts, also what no pool holds: a program's inputs and
    constants, results of operators, what is given back, and what blocks inside hold while they run. The arguments of a
    nested block are the memory of those around it.
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
    slack: float = 0.0,
) -> MemoryPlan:
    """Returns where each allocation of a program goes.

    Only memory that a line of a block allocates and another frees is placed. Sizes may be symbolic: then offsets are
    expressions that hold for all values, chosen to be best for the hints. By the hints, the peak is never above the one
    without pools, unless `slack` allows it. The plan is the one with the fewest allocations that was found.

    Args:
        program: the program. It is not changed.
        alignment: bytes that offsets are multiples of, by device.
        algorithm: see `assign_offsets`.
        hints: values of symbols by name; those that the program declares stand in for the others.
        time_limit_s: how long to search for a better assignment, in seconds, for each pool.
        slack: by what part of the peak without pools the one with pools may exceed it, where allocations become fewer.

    Raises PlanningError for a size that is negative or beyond 64 bits, an alignment that is no power of two, or a
    negative slack.
    """
    if not slack >= 0:
        raise PlanningError(f"the slack is a part of the peak, 0 or more, not {slack}")
    given, values = known_values(program, hints), typical_values(program, hints)
    planner = _Planner(given, values, alignment, algorithm, time_limit_s, slack)
    for name, function in program.functions:
        planner.block(name, function, _block_ranges(function))
    body = planner.block("body", program.body, program_ranges(program))
    labels = [*[name for name, _ in program.functions], *[label for label, _ in nested_blocks(program)]]
    return MemoryPlan((body, *[planner.plans[label] for label in labels]))


def nested_blocks(program: Program) -> list[tuple[str, Block]]:
    """Returns the blocks inside the lines of a program, outer before inner, with labels such as "body.3.then"."""
    found: list[tuple[str, Block]] = []
    pending = [("body", program.body), *program.functions]
    for label, block in pending:
        inner = [(f"{label}.{position}.{name}", nested) for position, line in enumerate(block.lines)
                 for name, nested in blocks(line)]  # fmt: skip
        found += inner
        pending += inner
    return found


def _allocations(pockets: Sequence[Pocket]) -> int:
    """Returns how many more allocations there are with these pools than without: fewer, so it is negative."""
    return sum([1 - len(pocket.members) for pocket in pockets])


def _block_ranges(block: Block) -> tuple[LiveRange, ...]:
    """Returns the live ranges of what a nested block makes."""
    arguments = {value.name: value for value in block.arguments}
    return tuple([item for item in live_ranges(block, arguments) if item.name not in arguments])


class _Planner:
    def __init__(
        self,
        given: Mapping[str, Scalar],
        values: Mapping[str, Scalar],
        alignment: Align,
        algorithm: str,
        time_limit_s: float,
        slack: float,
    ) -> None:
        self.given = given
        self.values = values
        self.alignment = alignment
        self.algorithm = algorithm
        self.time_limit_s = time_limit_s
        self.slack = slack
        self.plans: dict[str, BlockPlan] = {}
        self._symbols = set(values)
        self._next_symbol = 0
        self._pools = 0
        self._assigned = 0

    def fresh(self) -> str:
        """Returns the name of a symbol that nothing has."""
        while f"n{self._next_symbol}" in self._symbols:
            self._next_symbol += 1
        self._next_symbol += 1
        return f"n{self._next_symbol - 1}"

    def bytes_of(self, item: LiveRange) -> int:
        """Returns a size by the hints, in whole multiples of the device's alignment.

        Raises PlanningError for one that is no number of bytes, and is known rather than guessed.
        """
        if isinstance(item.size, int):
            size, known = item.size, True
        else:
            size = int(evaluate(item.size, self.values))
            known = all(symbol.name in self.given for symbol in item.size.free_symbols)
        if known and not 0 <= size < 2**62:
            text = item.size if item.size == size else f"{item.size} = {size}"
            raise PlanningError(f"%{item.name} takes {text} bytes, which no memory has")
        if not known:
            size = max(0, min(size, _MOST_GUESSED))
        step = self.alignment(item.device)
        if step < 1 or step & (step - 1):
            raise PlanningError(f"an alignment is a power of two, not {step} as it is said to be on {item.device}")
        return -(-size // step) * step

    def block(self, label: str, block: Block, ranges: Sequence[LiveRange]) -> BlockPlan:
        """Plans one block, those inside it first."""
        spans = [(item.first, item.end, self.bytes_of(item)) for item in ranges]
        peaks, bounds = self._inside(label, block, {item.name: size for item, (_, _, size) in zip(ranges, spans)})
        if sum([size for _, _, size in spans]) >= 2**63:
            raise PlanningError(f"what ^{label} allocates has more bytes than 64 bits count")
        count = len(block.lines)
        ideal = profile(count, spans)
        bound = int((ideal + torch.tensor(bounds, dtype=torch.int64)).max())
        total = ideal + torch.tensor(peaks, dtype=torch.int64)
        limit = int(total.max())
        pools: list[PoolPlan] = []
        for members in self._groups(block, ranges):
            own = [spans[index] for index in members]
            around = total - profile(count, own)
            pockets = self._pockets(own, around, limit, ranges[members[0]].device)
            pools += [self._pool([ranges[members[index]] for index in pocket.members], pocket) for pocket in pockets]
            total -= profile(count, [own[index] for pocket in pockets for index in pocket.members])
            total += profile(count, [pool_span(pocket, own) for pocket in pockets])
        pools.sort(key=lambda pool: (pool.first, pool.name))
        self.plans[label] = BlockPlan(label, tuple(pools), int(total.max()), bound)
        return self.plans[label]

    def _pockets(self, spans: Sequence[Span], around: torch.Tensor, limit: int, device: torch.device) -> list[Pocket]:
        """Returns the fewest pools, with the least of the slack that gives so few."""
        best: list[Pocket] | None = None
        for part in (0.0, 0.5, 1.0) if self.slack else (0.0,):
            found = choose_pools(spans, around, limit + int(limit * self.slack * part), self._assign(device))
            if best is None or _allocations(found) < _allocations(best):
                best = found
        assert best is not None
        return best

    def _inside(self, label: str, block: Block, sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """Returns what the blocks and functions that each line runs hold at their peak, with pools and without.

        The line's results, whose sizes are among `sizes`, are theirs, and count there.
        """
        peaks, bounds = [0] * len(block.lines), [0] * len(block.lines)
        for position, line in enumerate(block.lines):
            run = [self.block(f"{label}.{position}.{name}", nested, _block_ranges(nested))
                   for name, nested in blocks(line)]  # fmt: skip
            run += [self.plans[name] for name in called_functions(line)]
            if run:
                made = sum([sizes.get(value.name, 0) for value in defined(line)])
                peaks[position] = max(max([plan.peak for plan in run]) - made, 0)
                bounds[position] = max(max([plan.lower_bound for plan in run]) - made, 0)
        return peaks, bounds

    def _groups(self, block: Block, ranges: Sequence[LiveRange]) -> list[list[int]]:
        """Returns what may share a pool, by index: memory of one device whose sizes are known before the pool is."""
        known_at = {made.name: position for position, line in enumerate(block.lines)
                    if (made := defined_symbol(line)) is not None}  # fmt: skip
        placed = [index for index, item in enumerate(ranges) if item.keeper is Keeper.PROGRAM]
        groups: dict[object, list[int]] = {}
        first: dict[object, int] = {}
        for index in placed:
            item = ranges[index]
            place = (item.device, item.memory_space)
            first[place] = min(item.first, first.get(place, item.first))
        for index in placed:
            item = ranges[index]
            place = (item.device, item.memory_space)
            symbols = [] if isinstance(item.size, int) else [symbol.name for symbol in item.size.free_symbols]
            ready = max([known_at.get(name, -1) for name in symbols], default=-1)
            groups.setdefault((place, ready if ready > first[place] else -1), []).append(index)
        return list(groups.values())

    def _assign(self, device: torch.device) -> Callable[[Sequence[Span]], tuple[Sequence[int], str]]:
        def assign(spans: Sequence[Span]) -> tuple[Sequence[int], str]:
            self._assigned += 1
            quick = self.algorithm == "auto" and self._assigned > _MOST_SEARCHED
            algorithm = "greedy_by_size" if quick else self.algorithm
            found = assign_offsets(
                spans, alignment=self.alignment(device), algorithm=algorithm, time_limit_s=self.time_limit_s
            )
            return found.offsets, found.algorithm

        return assign

    def _pool(self, members: Sequence[LiveRange], pocket: Pocket) -> PoolPlan:
        """Returns the plan of a pool, with expressions for offsets where sizes are symbolic."""
        self._pools += 1
        device = members[0].device
        offsets: Sequence[Size] = pocket.offsets
        terms: tuple[tuple[str, Size], ...] = ()
        size: Size = 0
        if all(isinstance(item.size, int) for item in members):
            step = self.alignment(device)
            tops = [offset - (-item.size // step) * step
                    for item, offset in zip(members, pocket.offsets, strict=True)]  # fmt: skip
            size = max(tops)
        else:
            buffers = [(item.first, item.end, item.size) for item in members]
            offsets, size, terms = symbolic_offsets(
                buffers, pocket.offsets, self.alignment(device), self.fresh, self.values
            )
        placed = tuple([Placed(item, offset) for item, offset in zip(members, offsets, strict=True)])
        first, end = min(item.first for item in members), max(item.end for item in members)
        name, space = f"pool_{self._pools}", members[0].memory_space
        return PoolPlan(name, device, space, first, end, size, placed, terms, pocket.algorithm)

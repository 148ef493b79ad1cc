"""Memory plans as data: the pools of a program, and the offsets of buffers in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.errors import PlanningError
from fxwrap.memory_planning.assignment import assign_offsets
from fxwrap.memory_planning.live_ranges import LiveRange, MemoryOwner, live_ranges, program_live_ranges
from fxwrap.memory_planning.offsets import assign_symbolic_offsets
from fxwrap.memory_planning.pools import OffsetAssignment, Span, choose_pools, pool_span, profile
from fxwrap.symbolic import Number, Size, evaluate_size

_MAX_UNHINTED_BYTES = 2**40
"""Upper bound of the estimate of a size whose symbols have no hints."""

_MAX_SEARCHED_POOLS = 64
"""Largest number of pools that "auto" uses all algorithms for; a search may take a second."""


@dataclass(frozen=True, slots=True)
class PoolAllocation:
    """A buffer at an offset in bytes of its pool."""

    range: LiveRange
    offset: Size


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One allocation for several buffers.

    `first` is the position of the first line that uses it, `end` the one after the last; `size` is in bytes; `terms`
    are named expressions in offsets and sizes, over earlier terms and the program's symbols.
    """

    name: str
    device: torch.device
    memory_space: str
    first: int
    end: int
    size: Size
    allocations: tuple[PoolAllocation, ...]
    terms: tuple[tuple[str, Size], ...] = ()
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The pools of one block, and its memory in bytes for the hints of symbols.

    `peak` is the largest sum of live bytes with the pools, `lower_bound` without them, with sizes rounded up to the
    device's alignment. Both include memory outside of pools: inputs and constants of the program, results of operators,
    returned values, and nested blocks while they run. The arguments of a nested block belong to the outer one.
    """

    label: str
    pools: tuple[PoolPlan, ...]
    peak: int
    lower_bound: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The plans of a program's body, its functions, and nested blocks, in this order."""

    blocks: tuple[BlockPlan, ...]

    @property
    def body(self) -> BlockPlan:
        """The plan of the program's body."""
        return self.blocks[0]


def plan_memory(
    program: ir.Program,
    *,
    alignment: Callable[[torch.device], int],
    algorithm: str = "auto",
    hints: Mapping[str, Number] | None = None,
    time_limit_s: float = 10.0,
    slack: float = 0.0,
) -> MemoryPlan:
    """Returns a memory plan of a program with few allocations.

    Assigned are buffers that lines of a block allocate and free. Offsets of symbolic sizes are expressions that are
    valid for all values. For the hints, the peak never exceeds the one without pools by more than `slack`.

    Args:
        program: the program. It is not changed.
        alignment: bytes that offsets are multiples of, by device.
        algorithm: see `assign_offsets`.
        hints: values of symbols by name; the default is the hints that the program declares.
        time_limit_s: limit of the search for an assignment, in seconds for each pool.
        slack: by which fraction the peak may grow for fewer allocations.

    Raises PlanningError for a size that is negative or beyond 64 bits, an alignment that is no power of two, or a
    negative slack.
    """
    if not slack >= 0:
        raise PlanningError(f"slack must be a fraction of the peak, 0 or more, not {slack}")
    known, values = ir.symbol_values(program, hints), ir.hints_with_fallback(program, hints)
    planner = _PlanBuilder(known, values, alignment, algorithm, time_limit_s, slack)
    for name, function in program.functions:
        planner.block(name, function, _block_ranges(function))
    body = planner.block("body", program.body, program_live_ranges(program))
    labels = [*[name for name, _ in program.functions], *[label for label, _ in nested_blocks(program)]]
    return MemoryPlan((body, *[planner.plans[label] for label in labels]))


def nested_blocks(program: ir.Program) -> list[tuple[str, ir.Block]]:
    """Returns the blocks inside the lines of a program, outer before inner, with labels such as "body.3.then"."""
    labelled: list[tuple[str, ir.Block]] = [("body", program.body), *program.functions]
    outermost = len(labelled)
    for label, block in labelled:
        labelled += [(f"{label}.{position}.{name}", nested) for position, line in enumerate(block.lines)
                     for name, nested in ir.blocks(line)]  # fmt: skip
    return labelled[outermost:]


def _block_ranges(block: ir.Block) -> tuple[LiveRange, ...]:
    """Returns the live ranges of the memory that a nested block defines."""
    arguments = {value.name: value for value in block.arguments}
    return tuple([item for item in live_ranges(block, arguments) if item.name not in arguments])


@dataclass
class _PlanBuilder:
    """The arguments of `plan_memory`, and the plans of blocks, inner before outer.

    `known` are the values of symbols with hints, `values` those of all symbols.
    """

    known: Mapping[str, Number]
    values: Mapping[str, Number]
    alignment: Callable[[torch.device], int]
    algorithm: str
    time_limit_s: float
    slack: float
    plans: dict[str, BlockPlan] = field(default_factory=dict)
    _next_symbol: int = 0
    _assignment_count: int = 0
    _pool_count: int = 0

    def fresh(self) -> str:
        """Returns an unused name of a symbol."""
        while f"n{self._next_symbol}" in self.values:
            self._next_symbol += 1
        self._next_symbol += 1
        return f"n{self._next_symbol - 1}"

    def bytes_of(self, item: LiveRange) -> int:
        """Returns a size for the hints, rounded up to the device's alignment.

        Raises PlanningError for an invalid size of known symbols.
        """
        size = evaluate_size(item.size, self.values)
        if not isinstance(item.size, int) and any(symbol.name not in self.known for symbol in item.size.free_symbols):
            size = max(0, min(size, _MAX_UNHINTED_BYTES))
        if not 0 <= size < 2**62:
            text = item.size if item.size == size else f"{item.size} = {size}"
            raise PlanningError(f"%{item.name} has {text} bytes, which is no valid size")
        step = self.alignment(item.device)
        if step < 1 or step & (step - 1):
            raise PlanningError(f"the alignment on {item.device} is {step}; it must be a power of two")
        return -(-size // step) * step

    def block(self, label: str, block: ir.Block, ranges: Sequence[LiveRange]) -> BlockPlan:
        """Plans one block after its nested blocks."""
        spans = [(item.first, item.end, self.bytes_of(item)) for item in ranges]
        peaks, bounds = self._nested_peaks(label, block, {item.name: size for item, (_, _, size) in zip(ranges, spans)})
        if sum([size for _, _, size in spans]) >= 2**63:
            raise PlanningError(f"the memory of ^{label} exceeds 64 bits: check the sizes of its buffers")
        count = len(block.lines)
        ideal = profile(count, spans)
        bound = int((ideal + torch.tensor(bounds, dtype=torch.int64)).max())
        total = ideal + torch.tensor(peaks, dtype=torch.int64)
        limit = int(total.max())
        pools: list[PoolPlan] = []
        for members in self._groups(block, ranges):
            own = [spans[index] for index in members]
            around = total - profile(count, own)
            assignments = self._assign_pools(own, around, limit, ranges[members[0]].device)
            for item in assignments:
                self._pool_count += 1
                pools.append(self._pool(f"pool_{self._pool_count}", [ranges[members[n]] for n in item.members], item))
            total -= profile(count, [own[index] for item in assignments for index in item.members])
            total += profile(count, [pool_span(item, own) for item in assignments])
        pools.sort(key=lambda pool: (pool.first, pool.name))
        self.plans[label] = BlockPlan(label, tuple(pools), int(total.max()), bound)
        return self.plans[label]

    def _assign_pools(
        self, spans: Sequence[Span], around: torch.Tensor, limit: int, device: torch.device
    ) -> list[OffsetAssignment]:
        """Returns the candidate with the fewest allocations, at the least slack."""
        parts = (0.0, 0.5, 1.0) if self.slack else (0.0,)
        limits = [limit + int(limit * self.slack * part) for part in parts]
        candidates = [choose_pools(spans, around, item, self._assign(device)) for item in limits]
        return min(candidates, key=lambda pools: sum([1 - len(item.members) for item in pools]))

    def _nested_peaks(self, label: str, block: ir.Block, sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """Returns the peak of the blocks and functions that each line runs, with pools and without.

        The line's results, whose sizes are among `sizes`, are not included.
        """
        peaks, bounds = [0] * len(block.lines), [0] * len(block.lines)
        for position, line in enumerate(block.lines):
            run = [self.block(f"{label}.{position}.{name}", nested, _block_ranges(nested))
                   for name, nested in ir.blocks(line)]  # fmt: skip
            run += [self.plans[name] for name in ir.called_functions(line)]
            if run:
                results = sum([sizes.get(value.name, 0) for value in ir.defined(line)])
                peaks[position] = max(max([plan.peak for plan in run]) - results, 0)
                bounds[position] = max(max([plan.lower_bound for plan in run]) - results, 0)
        return peaks, bounds

    def _groups(self, block: ir.Block, ranges: Sequence[LiveRange]) -> list[list[int]]:
        """Returns the buffers that may share a pool, by index: on one device, with sizes known at its allocation."""
        known_at = {symbol.name: position for position, line in enumerate(block.lines)
                    if (symbol := ir.defined_symbol(line)) is not None}  # fmt: skip
        planned = {index: item for index, item in enumerate(ranges) if item.owner is MemoryOwner.PROGRAM}
        groups: dict[object, list[int]] = {}
        first: dict[object, int] = {}
        for item in planned.values():
            memory = (item.device, item.memory_space)
            first[memory] = min(item.first, first.get(memory, item.first))
        for index, item in planned.items():
            memory = (item.device, item.memory_space)
            symbols = [] if isinstance(item.size, int) else [symbol.name for symbol in item.size.free_symbols]
            ready = max([known_at.get(name, -1) for name in symbols], default=-1)
            groups.setdefault((memory, ready if ready > first[memory] else -1), []).append(index)
        return list(groups.values())

    def _assign(self, device: torch.device) -> Callable[[Sequence[Span]], tuple[Sequence[int], str]]:
        def assign(spans: Sequence[Span]) -> tuple[Sequence[int], str]:
            self._assignment_count += 1
            is_limited = self.algorithm == "auto" and self._assignment_count > _MAX_SEARCHED_POOLS
            algorithm = "greedy_by_size" if is_limited else self.algorithm
            alignment = self.alignment(device)
            result = assign_offsets(spans, alignment=alignment, algorithm=algorithm, time_limit_s=self.time_limit_s)
            return result.offsets, result.algorithm

        return assign

    def _pool(self, name: str, members: Sequence[LiveRange], assignment: OffsetAssignment) -> PoolPlan:
        """Returns the plan of a pool, with symbolic offsets if a size is symbolic."""
        device, step = members[0].device, self.alignment(members[0].device)
        offsets: Sequence[Size] = assignment.offsets
        terms: tuple[tuple[str, Size], ...] = ()
        if all(isinstance(item.size, int) for item in members):
            pairs = zip(members, assignment.offsets, strict=True)
            size: Size = max([offset - (-item.size // step) * step for item, offset in pairs])
        else:
            buffers = [(item.first, item.end, item.size) for item in members]
            offsets, size, terms = assign_symbolic_offsets(buffers, assignment.offsets, step, self.fresh, self.values)
        allocations = tuple([PoolAllocation(item, offset) for item, offset in zip(members, offsets, strict=True)])
        first, end = min(item.first for item in members), max(item.end for item in members)
        space = members[0].memory_space
        return PoolPlan(name, device, space, first, end, size, allocations, terms, assignment.algorithm)

"""Checks of a memory plan, and its application to a program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

import torch

from fxwrap.errors import PlanningError
from fxwrap.lines import Alloc, Free, Let, Pool, PoolSlice, Reuse
from fxwrap.memory_planning.live_ranges import LiveRange
from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, PoolPlan
from fxwrap.symbolic import Number, Size, SymbolInfo, evaluate, evaluate_size
from fxwrap.wrapper_ir import Block, LineBase, Program, TensorType, Value, blocks, defined, hints_with_fallback


def apply_plan(program: Program, plan: MemoryPlan, *, check: bool = True) -> Program:
    """Returns the program with one allocation for each pool and pool slices instead of the planned allocations.

    Args:
        program: the program. It is not changed.
        plan: its plan, possibly read from a file.
        check: whether to check the plan first, with the hints of symbols.

    Raises PlanningError for the plan of another program, and for one whose buffers overlap or exceed their pool.
    """
    if check:
        check_plan(plan, alignment=lambda device: 1, values=hints_with_fallback(program))
    plans = {item.label: item for item in plan.blocks}
    names = {value.name for block in program.all_blocks() for line in block.lines for value in defined(line)}
    names |= {item.name for item in program.inputs} | {constant.value.name for constant in program.constants}
    names |= {value.name for block in program.all_blocks() for value in block.arguments}

    def applied(label: str, block: Block) -> Block:
        lines = []
        for position, line in enumerate(block.lines):
            inner = {name: applied(f"{label}.{position}.{name}", nested) for name, nested in blocks(line)}
            lines.append(line.replace(**inner) if inner else line)
        block_plan = plans.get(label)
        new = _Application(tuple(lines), block_plan, names).lines() if block_plan else tuple(lines)
        return Block(block.arguments, new)

    functions = tuple([(name, applied(name, block)) for name, block in program.functions])
    return program.replace(body=applied("body", program.body), functions=functions)


class _Application:
    """Applies the plan of one block. `names` are all names of values in the program."""

    def __init__(self, lines: tuple[LineBase, ...], plan: BlockPlan, names: set[str]) -> None:
        self.before = lines
        self.plan = plan
        self.names = names
        self.allocation_of: dict[str, tuple[PoolPlan, Size]] = {}
        self.values: dict[str, Value] = {}
        for pool in plan.pools:
            self.values[pool.name] = self._value(pool)
            for allocation in pool.allocations:
                self._check(pool, allocation.range)
                self.allocation_of |= dict.fromkeys(allocation.range.names, (pool, allocation.offset))

    def lines(self) -> tuple[LineBase, ...]:
        """Returns the lines with pools."""
        starts: dict[int, list[PoolPlan]] = {}
        ends: dict[int, list[PoolPlan]] = {}
        for pool in self.plan.pools:
            starts.setdefault(pool.first, []).append(pool)
            ends.setdefault(pool.end - 1, []).append(pool)
        lines: list[LineBase] = []
        for position, line in enumerate(self.before):
            for pool in starts.get(position, ()):
                lines += [Let(SymbolInfo(name), term) for name, term in pool.terms]
                lines.append(Pool(self.values[pool.name]))
            lines += self._use_pools(line)
            lines += [Free(self.values[pool.name]) for pool in ends.get(position, ())]
        return tuple(lines)

    def _use_pools(self, line: LineBase) -> list[LineBase]:
        """Returns a pool slice for a planned allocation, nothing for its free, and other lines unchanged."""
        if isinstance(line, Alloc | Reuse) and line.result.name in self.allocation_of:
            pool, offset = self.allocation_of[line.result.name]
            return [PoolSlice(line.result, self.values[pool.name], offset, origin=line.origin)]
        if isinstance(line, Free) and line.root.name in self.allocation_of:
            return []
        return [line]

    def _value(self, pool: PoolPlan) -> Value:
        name, number = pool.name, 0
        while name in self.names:
            name, number = f"{pool.name}_{number}", number + 1
        self.names.add(name)
        type_ = TensorType(torch.uint8, (pool.size,), (1,), pool.device, memory_space=pool.memory_space)
        return Value(name, type_)

    def _check(self, pool: PoolPlan, item: LiveRange) -> None:
        line = self.before[item.first] if item.first < len(self.before) else None
        if not isinstance(line, Alloc) or line.result.name != item.name or item.end > len(self.before):
            reason = f"{pool.name} has %{item.name}, which line {item.first} of ^{self.plan.label} does not allocate"
            raise PlanningError(f"the plan belongs to another program: {reason}")


def check_plan(
    plan: MemoryPlan, *, alignment: Callable[[torch.device], int], values: Mapping[str, Number] | None = None
) -> None:
    """Raises PlanningError for a plan whose buffers overlap, exceed their pool or are not aligned.

    Args:
        plan: the plan, possibly read from a file.
        alignment: bytes that offsets must be multiples of, by device.
        values: values of symbols by name, for symbolic sizes.
    """
    for block in plan.blocks:
        for pool in block.pools:
            _check_pool(pool, alignment(pool.device), dict(values or {}))


def _check_pool(pool: PoolPlan, step: int, values: dict[str, Number]) -> None:
    for name, term in pool.terms:
        values[name] = evaluate(term, values)
    pool_size = evaluate_size(pool.size, values)
    spans = []
    for allocation in pool.allocations:
        item, start = allocation.range, evaluate_size(allocation.offset, values)
        end = start + evaluate_size(item.size, values)
        buffer = f"%{item.name} at bytes {start} to {end} of {pool.name}"
        if start < 0 or end > pool_size:
            raise PlanningError(f"{buffer} exceeds the pool's {pool_size} bytes")
        if start % step:
            raise PlanningError(f"{buffer} is not aligned to {step} bytes, as memory on {pool.device} must be")
        if not pool.first <= item.first < item.end <= pool.end:
            raise PlanningError(
                f"{buffer} is live in lines {item.first} to {item.end}, beyond the live range of the pool"
            )
        if end > start:
            spans.append((item.first, item.end, start, end, buffer))
    _check_overlaps(spans)


def _check_overlaps(spans: list[tuple[int, int, int, int, str]]) -> None:
    """Checks each buffer against its neighbours by offset among the live ones."""
    live: list[tuple[int, int, str]] = []  # start and end in bytes, text
    ends: list[tuple[int, tuple[int, int, str]]] = []
    for first, last, start, end, buffer in sorted(spans):
        while ends and ends[0][0] <= first:
            del live[bisect_left(live, heappop(ends)[1])]
        item = (start, end, buffer)
        index = bisect_left(live, item)
        for other_start, other_end, other in live[max(index - 1, 0) : index + 1]:
            if start < other_end and other_start < end:
                raise PlanningError(f"{buffer} overlaps {other}, and both are live at line {first}")
        live.insert(index, item)
        heappush(ends, (last, item))

"""Application of a memory plan to a program."""

from __future__ import annotations

import torch

from fxwrap.errors import PlanningError
from fxwrap.lines import Alloc, Free, Let, Pool, PoolSlice, Reuse
from fxwrap.memory_planning.check import check_plan
from fxwrap.memory_planning.live_ranges import LiveRange
from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, PoolPlan
from fxwrap.symbolic import Size, SymbolInfo
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

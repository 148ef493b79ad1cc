"""A program with its allocations in the pools of a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fxwrap.errors import PlanningError
from fxwrap.lines import Alloc, Free, Let, Pool, PoolSlice, Reuse
from fxwrap.memory_planning.check import check_plan
from fxwrap.memory_planning.live_ranges import LiveRange
from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, PoolPlan
from fxwrap.symbolic import Size, SymbolInfo
from fxwrap.wrapper_ir import Block, LineBase, Program, TensorType, Value, blocks, defined, typical_values


def apply_plan(program: Program, plan: MemoryPlan, *, check: bool = True) -> Program:
    """Returns the program with pools: one allocation for each, and slices in place of what they hold.

    Args:
        program: the program. It is not changed.
        plan: its plan, which may have been read from a file.
        check: whether the plan is checked before: by the hints of the program's symbols, where sizes are symbolic.

    Raises PlanningError for the plan of another program, and for one whose memory overlaps or leaves its pool.
    """
    if check:
        check_plan(plan, alignment=lambda device: 1, values=typical_values(program))
    plans = {item.label: item for item in plan.blocks}
    taken = {value.name for block in program.all_blocks() for line in block.lines for value in defined(line)}
    taken |= {item.name for item in program.inputs} | {constant.value.name for constant in program.constants}
    taken |= {value.name for block in program.all_blocks() for value in block.arguments}

    def applied(label: str, block: Block) -> Block:
        lines = []
        for position, line in enumerate(block.lines):
            inner: dict[str, Any] = {
                name: applied(f"{label}.{position}.{name}", nested) for name, nested in blocks(line)
            }
            lines.append(dataclasses.replace(line, **inner) if inner else line)
        own = plans.get(label)
        return Block(block.arguments, _Application(tuple(lines), own, taken).lines() if own else tuple(lines))

    functions = tuple([(name, applied(name, block)) for name, block in program.functions])
    return program.replace(body=applied("body", program.body), functions=functions)


class _Application:
    """The lines of one block with the pools of its plan."""

    def __init__(self, lines: tuple[LineBase, ...], plan: BlockPlan, taken: set[str]) -> None:
        self.before = lines
        self.plan = plan
        self.taken = taken
        self.place_of: dict[str, tuple[PoolPlan, Size]] = {}
        self.values: dict[str, Value] = {}
        for pool in plan.pools:
            self.values[pool.name] = self._value(pool)
            for placed in pool.placed:
                self._check(pool, placed.range)
                self.place_of |= dict.fromkeys(placed.range.names, (pool, placed.offset))

    def lines(self) -> tuple[LineBase, ...]:
        """Returns the lines."""
        starts: dict[int, list[PoolPlan]] = {}
        ends: dict[int, list[PoolPlan]] = {}
        for pool in self.plan.pools:
            starts.setdefault(pool.first, []).append(pool)
            ends.setdefault(pool.end - 1, []).append(pool)
        found: list[LineBase] = []
        for position, line in enumerate(self.before):
            for pool in starts.get(position, ()):
                found += [Let(SymbolInfo(name), term) for name, term in pool.terms]
                found.append(Pool(self.values[pool.name]))
            found += self._placed(line)
            found += [Free(self.values[pool.name]) for pool in ends.get(position, ())]
        return tuple(found)

    def _placed(self, line: LineBase) -> list[LineBase]:
        """Returns a line that makes or releases memory as one that takes it from its pool; others as they are."""
        if isinstance(line, Alloc | Reuse) and line.result.name in self.place_of:
            pool, offset = self.place_of[line.result.name]
            return [PoolSlice(line.result, self.values[pool.name], offset, origin=line.origin)]
        if isinstance(line, Free) and line.root.name in self.place_of:
            return []
        return [line]

    def _value(self, pool: PoolPlan) -> Value:
        name, number = pool.name, 0
        while name in self.taken:
            name, number = f"{pool.name}_{number}", number + 1
        self.taken.add(name)
        type_ = TensorType(torch.uint8, (pool.size,), (1,), pool.device, memory_space=pool.memory_space)
        return Value(name, type_)

    def _check(self, pool: PoolPlan, item: LiveRange) -> None:
        line = self.before[item.first] if item.first < len(self.before) else None
        if not isinstance(line, Alloc) or line.result.name != item.name or item.end > len(self.before):
            reason = f"{pool.name} holds %{item.name}, which line {item.first} of ^{self.plan.label} does not allocate"
            raise PlanningError(f"the plan is not this program's: {reason}")

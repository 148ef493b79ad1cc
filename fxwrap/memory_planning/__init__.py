"""Where a program's memory goes: live ranges, offsets in pools, the plan as data, and the program that follows it."""

from fxwrap.memory_planning.apply import apply_plan
from fxwrap.memory_planning.assignment import Assignment, assign_offsets
from fxwrap.memory_planning.check import check_plan
from fxwrap.memory_planning.live_ranges import Keeper, LiveRange, live_ranges, program_ranges
from fxwrap.memory_planning.picture import memory_error_text, plan_svg, plan_table
from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, Placed, PoolPlan, plan_memory
from fxwrap.memory_planning.text import plan_from_json, plan_to_json

__all__ = [
    "Assignment",
    "BlockPlan",
    "Keeper",
    "LiveRange",
    "MemoryPlan",
    "Placed",
    "PoolPlan",
    "apply_plan",
    "assign_offsets",
    "check_plan",
    "live_ranges",
    "memory_error_text",
    "plan_from_json",
    "plan_memory",
    "plan_svg",
    "plan_table",
    "plan_to_json",
    "program_ranges",
]

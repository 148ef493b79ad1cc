"""Memory planning: live ranges, offset assignment in pools, plans as data, and their application to programs."""

from fxwrap.memory_planning.apply import apply_plan
from fxwrap.memory_planning.assignment import Assignment, assign_offsets
from fxwrap.memory_planning.check import check_plan
from fxwrap.memory_planning.live_ranges import LiveRange, MemoryOwner, live_ranges, program_live_ranges
from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, PoolAllocation, PoolPlan, plan_memory
from fxwrap.memory_planning.serialization import plan_from_json, plan_to_json
from fxwrap.memory_planning.visualization import out_of_memory_message, plan_svg, plan_table

__all__ = [
    "Assignment",
    "BlockPlan",
    "LiveRange",
    "MemoryOwner",
    "MemoryPlan",
    "PoolAllocation",
    "PoolPlan",
    "apply_plan",
    "assign_offsets",
    "check_plan",
    "live_ranges",
    "out_of_memory_message",
    "plan_from_json",
    "plan_memory",
    "plan_svg",
    "plan_table",
    "plan_to_json",
    "program_live_ranges",
]

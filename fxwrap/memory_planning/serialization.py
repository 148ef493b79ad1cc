"""Memory plans as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from fxwrap.errors import FxwrapError, PlanningError
from fxwrap.memory_planning.live_ranges import LiveRange, MemoryOwner
from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, PoolAllocation, PoolPlan
from fxwrap.symbolic import Size, parse_expr, print_expr

FORMAT = 1
"""The format version that `plan_to_json` writes."""


def plan_to_json(plan: MemoryPlan) -> str:
    """Returns a plan as JSON text. Sizes are numbers, or strings for symbolic expressions."""
    content = {"format": FORMAT, "blocks": [_block_json(block) for block in plan.blocks]}
    return json.dumps(content, indent=2) + "\n"


def plan_from_json(text: str) -> MemoryPlan:
    """Returns the plan in JSON text, unchecked. Raises PlanningError for text that is no plan."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise PlanningError(f"the plan has format {content['format']}; this version reads {FORMAT}")
        return MemoryPlan(tuple([_block(item) for item in content["blocks"]]))
    except PlanningError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, FxwrapError) as error:
        raise PlanningError(f"invalid memory plan: {type(error).__name__}: {error}") from None


def _block_json(block: BlockPlan) -> dict[str, object]:
    return {
        "block": block.label,
        "peak": block.peak,
        "lower_bound": block.lower_bound,
        "pools": [_pool_json(pool) for pool in block.pools],
    }


def _pool_json(pool: PoolPlan) -> dict[str, object]:
    return {
        "name": pool.name,
        "device": str(pool.device),
        "memory_space": pool.memory_space,
        "lines": [pool.first, pool.end],
        "size": _size_json(pool.size),
        "algorithm": pool.algorithm,
        "terms": {name: _size_json(term) for name, term in pool.terms},
        "memory": [
            {
                "names": list(allocation.range.names),
                "lines": [allocation.range.first, allocation.range.end],
                "size": _size_json(allocation.range.size),
                "offset": _size_json(allocation.offset),
            }
            for allocation in pool.allocations
        ],
    }


def _size_json(size: Size) -> int | str:
    return size if isinstance(size, int) else print_expr(size)


def _block(content: dict[str, Any]) -> BlockPlan:
    pools = tuple([_pool(item) for item in content["pools"]])
    return BlockPlan(str(content["block"]), pools, int(content["peak"]), int(content["lower_bound"]))


def _pool(content: dict[str, Any]) -> PoolPlan:
    device, space = torch.device(content["device"]), str(content["memory_space"])
    allocations = []
    for item in content["memory"]:
        first, end = item["lines"]
        names = tuple([str(name) for name in item["names"]])
        memory = LiveRange(names, int(first), int(end), _size(item["size"]), device, space, MemoryOwner.PROGRAM)
        allocations.append(PoolAllocation(memory, _size(item["offset"])))
    first, end = content["lines"]
    terms = tuple([(str(name), _size(term)) for name, term in content["terms"].items()])
    return PoolPlan(
        str(content["name"]), device, space, int(first), int(end), _size(content["size"]), tuple(allocations), terms,
        str(content["algorithm"]),
    )  # fmt: skip


def _size(value: int | str) -> Size:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanningError(f"a size must be a number or an expression, not {value!r}")
    return value if isinstance(value, int) else parse_expr(value)

"""A plan as JSON, and back."""

from __future__ import annotations

import json
from typing import Any

import torch

from fxwrap.errors import FxwrapError, PlanningError
from fxwrap.memory_planning.live_ranges import Keeper, LiveRange
from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, Placed, PoolPlan
from fxwrap.symbolic import Size, parse_expr, print_expr

FORMAT = 1
"""The number of the form that `plan_to_json` writes."""


def plan_to_json(plan: MemoryPlan) -> str:
    """Returns a plan as JSON text: bytes as numbers, or as expressions over symbols in quotes."""
    found = {"format": FORMAT, "blocks": [_block_json(block) for block in plan.blocks]}
    return json.dumps(found, indent=2) + "\n"


def plan_from_json(text: str) -> MemoryPlan:
    """Returns the plan that JSON text says. Raises PlanningError for text that is none; it is not checked further."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise PlanningError(f"the plan has format {found['format']}; this version reads {FORMAT}")
        return MemoryPlan(tuple([_block(item) for item in found["blocks"]]))
    except PlanningError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, FxwrapError) as error:
        raise PlanningError(f"this is no memory plan: {type(error).__name__}: {error}") from None


def _block_json(block: BlockPlan) -> dict[str, Any]:
    return {
        "block": block.label,
        "peak": block.peak,
        "lower_bound": block.lower_bound,
        "pools": [_pool_json(pool) for pool in block.pools],
    }


def _pool_json(pool: PoolPlan) -> dict[str, Any]:
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
                "names": list(placed.range.names),
                "lines": [placed.range.first, placed.range.end],
                "size": _size_json(placed.range.size),
                "offset": _size_json(placed.offset),
            }
            for placed in pool.placed
        ],
    }


def _size_json(size: Size) -> int | str:
    return size if isinstance(size, int) else print_expr(size)


def _block(found: dict[str, Any]) -> BlockPlan:
    pools = tuple([_pool(item) for item in found["pools"]])
    return BlockPlan(str(found["block"]), pools, int(found["peak"]), int(found["lower_bound"]))


def _pool(found: dict[str, Any]) -> PoolPlan:
    device, space = torch.device(found["device"]), str(found["memory_space"])
    placed = []
    for item in found["memory"]:
        first, end = item["lines"]
        names = tuple([str(name) for name in item["names"]])
        memory = LiveRange(names, int(first), int(end), _size(item["size"]), device, space, Keeper.PROGRAM)
        placed.append(Placed(memory, _size(item["offset"])))
    first, end = found["lines"]
    terms = tuple([(str(name), _size(term)) for name, term in found["terms"].items()])
    return PoolPlan(
        str(found["name"]), device, space, int(first), int(end), _size(found["size"]), tuple(placed), terms,
        str(found["algorithm"]),
    )  # fmt: skip


def _size(found: int | str) -> Size:
    if isinstance(found, bool) or not isinstance(found, int | str):
        raise PlanningError(f"a size is a number or an expression, not {found!r}")
    return found if isinstance(found, int) else parse_expr(found)

"""The memory of a program over its lines, as data for the report: buffers, the peak and its reasons, pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxwrap.memory_planning import MemoryPlan, PoolPlan, program_live_ranges
from fxwrap.report.rows import OriginTable
from fxwrap.symbolic import Number, evaluate, evaluate_size
from fxwrap.wrapper_ir import Program, TensorType, defined, hints_with_fallback, live_bytes, symbol_infos
from fxwrap.wrapper_ir.printer import print_type


def memory_data(program: Program, plan: MemoryPlan | None, table: OriginTable) -> dict[str, Any]:
    """Returns the live ranges of all buffers of the body in bytes, the live bytes at each line, and the pools.

    Symbols have the values of their hints.
    """
    values = hints_with_fallback(program)
    for pool in () if plan is None else [pool for block in plan.blocks for pool in block.pools]:
        for name, term in pool.terms:
            values[name] = evaluate(term, values)
    live = live_bytes(program, values)
    types, origins = _definitions(program, table)
    pools = () if plan is None else plan.body.pools
    pool_names = {pool.name for pool in pools}
    buffers = [
        {
            "name": item.name, "names": list(item.names), "first": item.first, "end": item.end,
            "bytes": evaluate_size(item.size, values), "device": str(item.device),
            "owner": "pool" if item.name in pool_names else item.owner.value,
            "type": types.get(item.name, ""), "origin": origins.get(item.name, -1),
        }
        for item in program_live_ranges(program)
    ]  # fmt: skip
    return {
        "lines": len(program.body.lines),
        "live": list(live.at_line),
        "peak": live.peak,
        "position": live.position,
        "buffers": buffers,
        "pools": [_pool_data(pool, values, types) for pool in pools],
        "planned": plan is not None,
        "hints": {name: str(values[name]) for name in symbol_infos(program)},
    }


def _definitions(program: Program, table: OriginTable) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the types of values, and the origins of the lines that first write them, by name."""
    types, origins = dict[str, str](), dict[str, int]()
    for item in (*[item.value for item in program.inputs], *[item.value for item in program.constants]):
        if isinstance(type_ := getattr(item, "type", None), TensorType):
            types[item.name] = print_type(type_)
    for line in program.body.lines:
        for value in defined(line):
            types[value.name] = print_type(value.type)
            origins[value.name] = table.index(line.origin)
    return types, origins


def _pool_data(pool: PoolPlan, values: Mapping[str, Number], types: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": pool.name, "device": str(pool.device), "first": pool.first, "end": pool.end,
        "bytes": evaluate_size(pool.size, values), "algorithm": pool.algorithm,
        "buffers": [
            {
                "name": item.range.name, "first": item.range.first, "end": item.range.end,
                "bytes": evaluate_size(item.range.size, values), "offset": evaluate_size(item.offset, values),
                "type": types.get(item.range.name, ""),
            }
            for item in pool.allocations
        ],
    }  # fmt: skip

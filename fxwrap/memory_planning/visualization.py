"""Memory plans as a table, as a drawing, and in the message of a failed allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape

from fxwrap.memory_planning.plan import MemoryPlan, PoolAllocation, PoolPlan
from fxwrap.symbolic import Number, Size, evaluate
from fxwrap.wrapper_ir import Program, hints_with_fallback, live_bytes, print_line, symbol_infos

_WIDTH, _HEIGHT, _MARGIN, _GAP = 1000, 320, 60, 40
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f")


def plan_table(plan: MemoryPlan, values: Mapping[str, Number] | None = None) -> str:
    """Returns a table of a plan: the peak and lower bound of blocks, their pools, and the buffers in these."""
    lines = []
    for block in plan.blocks:
        if not block.pools and block is not plan.body:
            continue
        over = f"{block.peak / block.lower_bound:.3f} of it" if block.lower_bound else "the same"
        lines.append(f"^{block.label}: peak {block.peak:,} bytes, lower bound {block.lower_bound:,}, {over}")
        for pool in block.pools:
            sizes = _PoolSizes(pool, values or {})
            where = f"lines {pool.first} to {pool.end - 1}"
            lines.append(f"  {pool.name} on {pool.device}: {sizes.text(pool.size)} bytes, {where}, {pool.algorithm}")
            width = max(len(allocation.range.name) for allocation in pool.allocations)
            for allocation in sorted(pool.allocations, key=lambda item: item.range.first):
                item = allocation.range
                lines.append(
                    f"    %{item.name:<{width}}  lines {item.first:>5} to {item.end - 1:<5}  "
                    f"{sizes.text(item.size):>14} bytes at {sizes.text(allocation.offset)}"
                )
    return "\n".join(lines) + "\n"


def plan_svg(plan: MemoryPlan, values: Mapping[str, Number] | None = None) -> str:
    """Returns an SVG drawing of the body's pools: lines are horizontal, offsets vertical."""
    pools = plan.body.pools
    height = _MARGIN + len(pools) * (_HEIGHT + _GAP) + _GAP
    body = plan.body
    title = f"peak {body.peak:,} bytes, lower bound {body.lower_bound:,}, {len(body.pools)} pools"
    size = f'width="{_WIDTH + 2 * _MARGIN}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<text x="{_MARGIN}" y="24" font-size="16">{escape(title)}</text>',
    ]
    for index, pool in enumerate(pools):
        parts += _pool_svg(pool, _PoolSizes(pool, values or {}), _MARGIN + index * (_HEIGHT + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _PoolSizes:
    def __init__(self, pool: PoolPlan, values: Mapping[str, Number]) -> None:
        self.values = dict(values)
        for name, term in pool.terms:
            size = self.evaluate(term)
            if size is not None:
                self.values[name] = size

    def evaluate(self, size: Size) -> int | None:
        """Returns a size in bytes, None if a symbol in it has no value."""
        if not isinstance(size, int) and any(symbol.name not in self.values for symbol in size.free_symbols):
            return None
        return int(evaluate(size, self.values))

    def text(self, size: Size) -> str:
        """Returns a size as text."""
        number = self.evaluate(size)
        return str(size) if number is None else f"{number:,}"


def _pool_svg(pool: PoolPlan, sizes: _PoolSizes, top: int) -> list[str]:
    pool_size, lines = sizes.evaluate(pool.size) or 1, pool.end - pool.first
    across: Callable[[int], float] = lambda line: _MARGIN + (line - pool.first) * _WIDTH / lines  # noqa: E731
    title = f"{pool.name} on {pool.device}: {pool_size:,} bytes, lines {pool.first} to {pool.end - 1}"
    parts = [
        f'<text x="{_MARGIN}" y="{top}">{escape(title)}</text>',
        f'<rect x="{_MARGIN}" y="{top + 8}" width="{_WIDTH}" height="{_HEIGHT - 16}" fill="#f4f4f4" stroke="#888"/>',
    ]
    for index, allocation in enumerate(pool.allocations):
        parts.append(_memory_svg(allocation, sizes, across, top + 8, pool_size, _COLOURS[index % len(_COLOURS)]))
    return parts


def _memory_svg(
    allocation: PoolAllocation, sizes: _PoolSizes, across: Callable[[int], float], top: int, pool_size: int, colour: str
) -> str:
    item = allocation.range
    offset, size = sizes.evaluate(allocation.offset) or 0, sizes.evaluate(item.size) or 0
    scale = (_HEIGHT - 16) / pool_size
    left, right = across(item.first), across(item.end)
    y = top + (_HEIGHT - 16) - (offset + size) * scale
    label = f"%{item.name}: {size:,} bytes at {offset:,}, lines {item.first} to {item.end - 1}"
    return (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(right - left, 1):.1f}" height="{max(size * scale, 0.5):.1f}" '
        f'fill="{colour}" fill-opacity="0.8" stroke="white" stroke-width="0.5"><title>{escape(label)}</title></rect>'
    )


def out_of_memory_message(plan: MemoryPlan, program: Program) -> str:
    """Returns the peak memory of a program and its line, for the message of a failed allocation.

    Args:
        plan: the plan of the program.
        program: the program with its pools. Symbols have the values of their hints.
    """
    hints = hints_with_fallback(program)
    for pool in (pool for block in plan.blocks for pool in block.pools):
        for name, term in pool.terms:
            hints[name] = evaluate(term, hints)
    position = live_bytes(program, hints).position
    line = print_line(program.body.lines[position]).partition("\n")[0]
    pools = ", ".join(f"{pool.name} of {_PoolSizes(pool, hints).text(pool.size)}" for pool in plan.body.pools)
    in_pools = f", including pools: {pools}" if pools else ""
    by = " for the sizes it was compiled with" if symbol_infos(program) else ""
    return f"@{program.name} needs {plan.body.peak:,} bytes at its peak{by}, line {position}: `{line}`{in_pools}"

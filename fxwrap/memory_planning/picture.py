"""A plan for people: a table, and a drawing of memory over the lines of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape

from fxwrap.memory_planning.plan import BlockPlan, MemoryPlan, Placed, PoolPlan
from fxwrap.symbolic import Scalar, Size, evaluate
from fxwrap.wrapper_ir import Program, live_bytes, print_line, symbol_infos, typical_values

_WIDTH, _HEIGHT, _MARGIN, _GAP = 1000, 320, 60, 40
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f")


def plan_table(plan: MemoryPlan, values: Mapping[str, Scalar] | None = None) -> str:
    """Returns a table of a plan: each block's peak beside its lower bound, its pools, and what they hold."""
    lines = []
    for block in plan.blocks:
        if not block.pools and block is not plan.body:
            continue
        over = f"{block.peak / block.lower_bound:.3f} of it" if block.lower_bound else "the same"
        lines.append(f"^{block.label}: peak {block.peak:,} bytes, lower bound {block.lower_bound:,}, {over}")
        for pool in block.pools:
            numbers = _Numbers(pool, values or {})
            where = f"lines {pool.first} to {pool.end - 1}"
            lines.append(f"  {pool.name} on {pool.device}: {numbers.shown(pool.size)} bytes, {where}, {pool.algorithm}")
            width = max(len(placed.range.name) for placed in pool.placed)
            for placed in sorted(pool.placed, key=lambda item: item.range.first):
                item = placed.range
                lines.append(
                    f"    %{item.name:<{width}}  lines {item.first:>5} to {item.end - 1:<5}  "
                    f"{numbers.shown(item.size):>14} bytes at {numbers.shown(placed.offset)}"
                )
    return "\n".join(lines) + "\n"


def plan_svg(plan: MemoryPlan, values: Mapping[str, Scalar] | None = None) -> str:
    """Returns an SVG drawing of the body's pools: lines from left to right, bytes from bottom to top."""
    pools = plan.body.pools
    height = _MARGIN + len(pools) * (_HEIGHT + _GAP) + _GAP
    total_width = _WIDTH + 2 * _MARGIN
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{height}" font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<text x="{_MARGIN}" y="24" font-size="16">{escape(_title(plan.body))}</text>',
    ]
    for index, pool in enumerate(pools):
        parts += _pool_svg(pool, _Numbers(pool, values or {}), _MARGIN + index * (_HEIGHT + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(block: BlockPlan) -> str:
    return f"peak {block.peak:,} bytes, lower bound {block.lower_bound:,}, {len(block.pools)} pools"


class _Numbers:
    """Sizes of a pool as numbers, where the symbols are known."""

    def __init__(self, pool: PoolPlan, values: Mapping[str, Scalar]) -> None:
        self.values = dict(values)
        for name, term in pool.terms:
            number = self.number(term)
            if number is not None:
                self.values[name] = number

    def number(self, size: Size) -> int | None:
        """Returns a size as a number, None where a symbol of it has no value."""
        if isinstance(size, int):
            return size
        if any(symbol.name not in self.values for symbol in size.free_symbols):
            return None
        return int(evaluate(size, self.values))

    def shown(self, size: Size) -> str:
        """Returns a size as text."""
        number = self.number(size)
        return str(size) if number is None else f"{number:,}"


def _pool_svg(pool: PoolPlan, numbers: _Numbers, top: int) -> list[str]:
    whole, lines = numbers.number(pool.size) or 1, pool.end - pool.first
    across: Callable[[int], float] = lambda line: _MARGIN + (line - pool.first) * _WIDTH / lines  # noqa: E731
    title = f"{pool.name} on {pool.device}: {whole:,} bytes, lines {pool.first} to {pool.end - 1}"
    parts = [
        f'<text x="{_MARGIN}" y="{top}">{escape(title)}</text>',
        f'<rect x="{_MARGIN}" y="{top + 8}" width="{_WIDTH}" height="{_HEIGHT - 16}" fill="#f4f4f4" stroke="#888"/>',
    ]
    for index, placed in enumerate(pool.placed):
        parts.append(_memory_svg(placed, numbers, across, top + 8, whole, _COLOURS[index % len(_COLOURS)]))
    return parts


def _memory_svg(
    placed: Placed, numbers: _Numbers, across: Callable[[int], float], top: int, whole: int, colour: str
) -> str:
    item = placed.range
    offset, size = numbers.number(placed.offset) or 0, numbers.number(item.size) or 0
    scale = (_HEIGHT - 16) / whole
    left, right = across(item.first), across(item.end)
    y = top + (_HEIGHT - 16) - (offset + size) * scale
    label = f"%{item.name}: {size:,} bytes at {offset:,}, lines {item.first} to {item.end - 1}"
    return (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(right - left, 1):.1f}" height="{max(size * scale, 0.5):.1f}" '
        f'fill="{colour}" fill-opacity="0.8" stroke="white" stroke-width="0.5"><title>{escape(label)}</title></rect>'
    )


def memory_error_text(plan: MemoryPlan, program: Program) -> str:
    """Returns how much a program needs at its worst and which line that is, for the message of a failed allocation.

    Args:
        plan: the plan that the program follows.
        program: the program, with its pools. Where its sizes are symbolic, the numbers are those of the hints.
    """
    hints = typical_values(program)
    for pool in (pool for block in plan.blocks for pool in block.pools):
        for name, term in pool.terms:
            hints[name] = term if isinstance(term, int) else evaluate(term, hints)
    position = live_bytes(program, hints).position
    line = print_line(program.body.lines[position]).partition("\n")[0]
    pools = ", ".join(f"{pool.name} of {_Numbers(pool, hints).shown(pool.size)}" for pool in plan.body.pools)
    held = f", of them in pools: {pools}" if pools else ""
    by = " by the sizes it was compiled for" if symbol_infos(program) else ""
    return f"@{program.name} needs {plan.body.peak:,} bytes at its peak{by}, line {position}: `{line}`{held}"

"""Memory plans as a table, as a drawing, and in the message of a failed allocation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fxwrap.memory_planning.plan import MemoryPlan, PoolAllocation, PoolPlan
from fxwrap.symbolic import Number, Size, evaluate, evaluate_size
from fxwrap.wrapper_ir import Program, hints_with_fallback, live_bytes, print_line, symbol_infos

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 1000, 320, 90, 30, 60, 80
"""Pixels: the width of all lines, the height of the largest pool, margins, and the distance of pools."""

_TEXT_HEIGHT, _CHARACTER_WIDTH = 13, 7
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f")


def plan_table(plan: MemoryPlan, values: Mapping[str, Number] | None = None) -> str:
    """Returns a table of a plan: the peak and lower bound of blocks, their pools, and the buffers in these."""
    lines = []
    for block in plan.blocks:
        if not block.pools and block is not plan.body:
            continue
        share = f"{block.peak / block.lower_bound:.3f} times " if block.lower_bound else ""
        lines.append(f"^{block.label}: peak {block.peak:,} bytes, {share}the lower bound {block.lower_bound:,}")
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
    """Returns an SVG drawing of the body's pools: lines are horizontal, bytes vertical, all pools have one scale."""
    body = plan.body
    sizes = [_PoolSizes(pool, values or {}) for pool in body.pools]
    bytes_ = [item.evaluate(pool.size) or 0 for pool, item in zip(body.pools, sizes, strict=True)]
    scale = _Scale(max([pool.end for pool in body.pools], default=1), max([*bytes_, 1]))
    parts = [f'<text x="{_LEFT}" y="24" font-size="16">{escape(_title(plan))}</text>']
    top = _TOP
    for pool, pool_sizes, total in zip(body.pools, sizes, bytes_, strict=True):
        parts += _pool_svg(pool, pool_sizes, total, scale, top)
        top += round(scale.height(total)) + _GAP
    size = f'width="{_LEFT + _WIDTH + _RIGHT}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _title(plan: MemoryPlan) -> str:
    body = plan.body
    pools = "1 pool" if len(body.pools) == 1 else f"{len(body.pools)} pools"
    return f"peak {body.peak:,} bytes, lower bound {body.lower_bound:,}, {pools}"


@dataclass(frozen=True)
class _Scale:
    """The scales of a drawing: pixels for lines and bytes, and the distances of the marks on its axes."""

    lines: int
    bytes: int

    def across(self, line: int) -> float:
        return _LEFT + line * _WIDTH / self.lines

    def height(self, bytes_: int) -> float:
        return bytes_ * _HEIGHT / self.bytes

    @property
    def line_step(self) -> int:
        """1, 2, 5, 10, 20... lines, for at most 14 marks."""
        steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
        return next((step for step in steps if self.lines / step <= 14), self.lines)

    @property
    def byte_step(self) -> int:
        """A power of two of bytes, for at most 8 marks."""
        return int(2 ** (self.bytes // 8).bit_length())


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
        return evaluate_size(size, self.values)

    def text(self, size: Size) -> str:
        """Returns a size as text."""
        number = self.evaluate(size)
        return str(size) if number is None else f"{number:,}"


def _pool_svg(pool: PoolPlan, sizes: _PoolSizes, total: int, scale: _Scale, top: int) -> list[str]:
    """Returns a pool with its axes; `top` is the top of its caption."""
    caption = f"{pool.name} on {pool.device}: {total:,} bytes, lines {pool.first} to {pool.end - 1}, {pool.algorithm}"
    low = top + 10 + scale.height(total)  # the line of offset 0
    left, width = scale.across(pool.first), scale.across(pool.end) - scale.across(pool.first)
    parts = [
        f'<text x="{_LEFT}" y="{top}">{escape(caption)}</text>',
        f'<rect x="{left:.1f}" y="{top + 10}" width="{width:.1f}" height="{low - top - 10:.1f}" fill="#f4f4f4"/>',
    ]
    for offset in range(0, total + 1, scale.byte_step):
        y = low - scale.height(offset)
        parts.append(f'<path d="M{_LEFT - 5} {y:.1f}h{_WIDTH + 5}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 9}" y="{y + 4:.1f}" text-anchor="end">{_bytes_text(offset)}</text>')
    for line in range(0, scale.lines + 1, scale.line_step):
        x = scale.across(line)
        parts.append(f'<path d="M{x:.1f} {low:.1f}v5" stroke="#888"/>')
        parts.append(f'<text x="{x:.1f}" y="{low + 18:.1f}" text-anchor="middle">{line}</text>')
    for index, allocation in enumerate(pool.allocations):
        parts += _memory_svg(allocation, sizes, scale, low, _COLOURS[index % len(_COLOURS)])
    parts.append(f'<path d="M{_LEFT} {top + 10}V{low:.1f}H{_LEFT + _WIDTH}" fill="none" stroke="#888"/>')
    place = f'x="{_LEFT + _WIDTH}" y="{low + 33:.1f}" text-anchor="end" fill="#666"'
    parts.append(f"<text {place}>line of the program</text>")
    return parts


def _memory_svg(allocation: PoolAllocation, sizes: _PoolSizes, scale: _Scale, low: float, colour: str) -> list[str]:
    item = allocation.range
    offset, size = sizes.evaluate(allocation.offset) or 0, sizes.evaluate(item.size) or 0
    left, width = scale.across(item.first), scale.across(item.end) - scale.across(item.first)
    y, height = low - scale.height(offset + size), scale.height(size)
    label = f"%{item.name}: {size:,} bytes at {offset:,}, lines {item.first} to {item.end - 1}"
    place = f'x="{left:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{max(height, 0.5):.1f}"'
    look = f'fill="{colour}" fill-opacity="0.8" stroke="white" stroke-width="0.5"'
    parts = [f"<rect {place} {look}><title>{escape(label)}</title></rect>"]
    if height >= _TEXT_HEIGHT and width >= _CHARACTER_WIDTH * (len(item.name) + 2):
        text = f'y="{y + height / 2 + 4:.1f}" pointer-events="none">%{escape(item.name)}</text>'
        parts.append(f'<text x="{left + 4:.1f}" {text}')
    return parts


def _bytes_text(bytes_: int) -> str:
    """Returns a multiple of a power of two in its largest unit."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if bytes_ and bytes_ % unit == 0:
            return f"{bytes_ // unit:,} {name}"
    return f"{bytes_:,} B" if bytes_ else "0"


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

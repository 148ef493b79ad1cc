"""Reductions and scans in Triton: over a whole row at once, or block by block with accumulators.

Block by block, sums, products and extrema keep one accumulator an element of the tile and combine at the end; Welford's
algorithm does so too (B. P. Welford 1962; merged as Chan, Golub and LeVeque 1979); the sum of exponentials follows the
running maximum (Milakov and Gimelshein 2018), one exponential an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import Reduce, Scan
from fxwrap.printers.triton.operations import TRITON_DTYPES, number_text

_EXTREMA = {"max": "maximum_or_nan", "min": "minimum_or_nan"}
_POSITIONS = {
    "argmax": "first_largest", "argmin": "first_smallest", "cummax": "last_largest", "cummin": "last_smallest",
}  # fmt: skip

RESULT_NAMES = {
    "sum": ("total",), "prod": ("product",), "max": ("largest",), "min": ("smallest",), "argmax": ("position",),
    "argmin": ("position",), "any": ("any_of",), "all": ("all_of",), "welford": ("mean", "squares"),
    "softmax": ("largest", "exponentials"), "cumsum": ("running_sum",), "cumprod": ("running_product",),
    "cummax": ("running_largest", "running_position"), "cummin": ("running_smallest", "running_position"),
    "logcumsumexp": ("running_log",),
}  # fmt: skip
"""What the results of each kind are called in the text."""


@dataclass(frozen=True)
class Row:
    """What combinations along a tile's reduced dimension need to know.

    `axis` is its position of `rank`, `shape` the tile's shape, `mask` the name of the mask of its last block,
    `position` the name of the position along it, `count` its whole length, `block` the constant with the length of a
    block, `lanes` the positions in a block; `exp` is the exponential function; `new` makes names, `use` notes a helper.
    """

    axis: int
    rank: int
    shape: str
    mask: str | None
    position: str
    count: str
    block: str
    lanes: str
    exp: str
    new: Callable[[str], str]
    use: Callable[[str], str]

    @property
    def keep(self) -> str:
        """The argument that keeps the reduced dimension where the tile has others."""
        return ", keep_dims=True" if self.rank > 1 else ""

    def whole(self, value: str) -> str:
        """Returns a value over the whole tile."""
        return f"tl.broadcast_to({value}, {self.shape})"

    def inside(self, value: str, identity: str) -> str:
        """Returns a value that is the identity beyond the end of the row."""
        return value if self.mask is None else f"tl.where({self.mask}, {value}, {identity})"


def identity(kind: str, dtype: torch.dtype) -> str:
    """Returns the number that changes nothing when it is combined."""
    if kind in ("any", "all"):
        return "False" if kind == "any" else "True"
    if kind in ("sum", "cumsum", "welford"):
        return number_text(0, dtype)
    if kind in ("prod", "cumprod"):
        return number_text(1, dtype)
    low = kind in ("max", "argmax", "softmax", "cummax", "logcumsumexp")
    if dtype.is_floating_point:
        return number_text(float("-inf") if low else float("inf"), dtype)
    limits = torch.iinfo(dtype)
    return str(limits.min if low else limits.max)


def combined(kind: str, value: str, dtype: torch.dtype, row: Row) -> str:
    """Returns the expression that combines elements along the row, for kinds of one result that is no position."""
    small = not dtype.is_floating_point and dtype is not torch.bool and dtype.itemsize < 4
    cast = f".to({TRITON_DTYPES[dtype]})" if small else ""
    if kind == "sum":
        return f"tl.sum({value}, {row.axis}{row.keep}){cast}"
    if kind == "prod":
        return f"tl.reduce({value}, {row.axis}, {row.use('multiply')}{row.keep})"
    if kind in ("any", "all"):
        return f"(tl.{'max' if kind == 'any' else 'min'}({value}.to(tl.int32), {row.axis}{row.keep}) != 0)"
    if dtype.is_floating_point:
        return f"tl.reduce({value}, {row.axis}, {row.use(_EXTREMA[kind])}{row.keep})"
    return f"tl.{kind}({value}, {row.axis}{row.keep}){cast}"


def reduce_whole(operation: Reduce, value: str, dtype: torch.dtype, names: list[str], row: Row) -> list[str]:
    """Returns the statements of a reduction over a row that the tile holds. `value` varies along the row."""
    kind, first = operation.kind, names[0]
    inside = row.inside(value, identity(kind, dtype))
    if kind in _POSITIONS:
        found = row.new("found")
        pair = f"({row.whole(inside)}, {row.whole(row.position)})"
        return [
            f"{found}, {first} = tl.reduce({pair}, {row.axis}, {row.use(_POSITIONS[kind])}{row.keep})",
            f"{first} = {first}.to(tl.int64)",
        ]
    if kind == "welford":
        difference = row.new("difference")
        return [
            f"{first} = tl.sum({inside}, {row.axis}{row.keep}) / {row.count}",
            f"{difference} = {row.inside(f'{value} - {first}', '0.0')}",
            f"{names[1]} = tl.sum({difference} * {difference}, {row.axis}{row.keep})",
        ]
    if kind == "softmax":
        power = row.inside(f"{row.exp}({value} - {first})", "0.0")  # the same text as in what comes after
        return [
            f"{first} = {combined('max', inside, dtype, row)}",
            f"{names[1]} = tl.sum({power}, {row.axis}{row.keep})",
            f'{names[1]} = tl.where({first} == float("-inf"), 0.0, {names[1]})',
        ]
    return [f"{first} = {combined(kind, inside, dtype, row)}"]


def reduce_one_hot(
    operation: Reduce, value: str, row_value: str, element: str, dtype: torch.dtype, names: list[str], row: Row
) -> list[str]:
    """Returns the statements of a sum of products with a one-hot: `element`, where the sum of the row is finite."""
    first = names[0]
    return [
        *reduce_whole(operation, row_value, dtype, names, row),
        f"if {first} - {first} == 0.0:  # finite, and so is the row: all products but one are 0",
        f"    {first} = {element} + 0.0",
        "else:",
        *[f"    {line}" for line in reduce_whole(operation, value, dtype, names, row)],
    ]


def _shift(largest: str) -> str:
    return f'tl.where({largest} == float("-inf"), 0.0, {largest})'


@dataclass(frozen=True)
class Accumulator:
    """A reduction block by block: statements before the loop, in it, and after it."""

    before: list[str]
    inside: list[str]
    after: list[str]


def accumulate(operation: Reduce, value: str, dtype: torch.dtype, names: list[str], row: Row) -> Accumulator:
    """Returns a reduction block by block."""
    kind, first = operation.kind, names[0]
    start, name = identity(kind, dtype), TRITON_DTYPES[dtype]
    if kind in _POSITIONS:
        return _accumulate_position(kind, value, dtype, first, row)
    if kind == "welford":
        return _accumulate_welford(value, dtype, names, row)
    if kind == "softmax":
        return _accumulate_softmax(value, dtype, names, row)
    sums = row.new(f"{first}s")
    step = {
        "sum": f"{sums} + {row.inside(value, start)}",
        "prod": f"{sums} * {row.inside(value, start)}",
        "any": f"{sums} | {row.inside(value, start)}",
        "all": f"{sums} & {row.inside(value, start)}",
    }.get(kind) or _extreme(kind, sums, row.inside(value, start), dtype)
    return Accumulator(
        [f"{sums} = tl.full({row.shape}, {start}, {name})"],
        [f"{sums} = {step}"],
        [f"{first} = {combined(kind, sums, dtype, row)}"],
    )


def _extreme(kind: str, left: str, right: str, dtype: torch.dtype) -> str:
    nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_floating_point else ""
    return f"tl.{kind}imum({left}, {right}{nan})"


def _accumulate_position(kind: str, value: str, dtype: torch.dtype, first: str, row: Row) -> Accumulator:
    best, at, function = row.new("best"), row.new("best_position"), row.use(_POSITIONS[kind])
    start = identity(kind, dtype)
    short = row.count.isdigit() and int(row.count) < 2**31 - 1
    position, beyond = ("tl.int32", 2**31 - 1) if short else ("tl.int64", 2**63 - 1)
    found = row.new("found")
    return Accumulator(
        [
            f"{best} = tl.full({row.shape}, {start}, {TRITON_DTYPES[dtype]})",
            f"{at} = tl.full({row.shape}, {beyond}, {position})",
        ],
        [f"{best}, {at} = {function}({best}, {at}, {row.inside(value, start)}, {row.position}.to({position}))"],
        [
            f"{found}, {first} = tl.reduce(({best}, {at}), {row.axis}, {function}{row.keep})",
            f"{first} = {first}.to(tl.int64)",
        ],
    )


def _accumulate_welford(value: str, dtype: torch.dtype, names: list[str], row: Row) -> Accumulator:
    name = TRITON_DTYPES[dtype]
    means, squares, seen = row.new("means"), row.new("square_sums"), row.new("seen")
    difference, lanes, apart = row.new("difference"), row.new("seen_by_lane"), row.new("apart")
    count = f"({row.count} - {row.lanes} + {row.block} - 1) // {row.block}"
    mean, total = names
    return Accumulator(
        [
            f"{means} = tl.full({row.shape}, 0.0, {name})",
            f"{squares} = tl.full({row.shape}, 0.0, {name})",
            f"{seen} = tl.full((), 0.0, {name})",
        ],
        [
            f"{seen} += 1.0",
            f"{difference} = {row.inside(f'{value} - {means}', '0.0')}",
            f"{means} = tl.fma({difference}, 1.0 / {seen}, {means})",
            f"{squares} = tl.fma({difference}, {row.inside(f'{value} - {means}', '0.0')}, {squares})",
        ],
        [
            f"{lanes} = ({count}).to({name})",
            f"{mean} = tl.sum({means} * {lanes}, {row.axis}{row.keep}) / {row.count}",
            f"{apart} = {means} - {mean}",
            f"{total} = tl.sum({squares} + {lanes} * {apart} * {apart}, {row.axis}{row.keep})",
        ],
    )


def _accumulate_softmax(value: str, dtype: torch.dtype, names: list[str], row: Row) -> Accumulator:
    name = TRITON_DTYPES[dtype]
    largest, total = names
    sums, higher, shift, inside = row.new("powers"), row.new("higher"), row.new("shift"), row.new("inside")
    one = "()" if row.rank == 1 else _one_along(row)
    block = combined("max", inside, dtype, row)
    return Accumulator(
        [
            f'{largest} = tl.full({one}, float("-inf"), {name})',
            f"{sums} = tl.full({row.shape}, 0.0, {name})",
        ],
        [
            f"{inside} = {row.inside(value, identity('softmax', dtype))}",
            f"{higher} = {_extreme('max', largest, block, dtype)}",
            f"{shift} = {_shift(higher)}",
            f"{sums} = {sums} * {row.exp}({largest} - {shift}) + {row.exp}({inside} - {shift})",
            f"{largest} = {higher}",
        ],
        [f"{total} = tl.sum({sums}, {row.axis}{row.keep})"],
    )


def _one_along(row: Row) -> str:
    sizes = row.shape.strip("()").split(", ")
    return f"({', '.join(['1' if position == row.axis else size for position, size in enumerate(sizes)])})"


def scan_block(
    operation: Scan, value: str, dtype: torch.dtype, names: list[str], row: Row, carried: bool
) -> tuple[list[str], list[str]]:
    """Returns the statements before the loop and in it of a scan; `carried` says that there is a loop.

    Without a loop, all statements are in the second list.
    """
    kind = operation.kind
    start = identity(kind, dtype)
    if kind in _POSITIONS:
        return _scan_position(kind, value, dtype, names, row, carried)
    first, name = names[0], TRITON_DTYPES[dtype]
    cast = f".to({name})" if not dtype.is_floating_point and dtype.itemsize < 4 else ""
    if kind == "logcumsumexp":
        scanned = f"tl.associative_scan({value}, {row.axis}, {row.use('log_add_exp')})"
        together = f"tl.reduce({row.inside(value, start)}, {row.axis}, {row.use('log_add_exp')}{row.keep})"
    else:
        scanned = f"tl.{kind}({value}, {row.axis}){cast}"
        together = combined({"cumsum": "sum", "cumprod": "prod"}[kind], row.inside(value, start), dtype, row)
    if not carried:
        return [], [f"{first} = {scanned}"]
    carry = row.new("carried")
    shape = "()" if row.rank == 1 else _one_along(row)

    def joined(right: str) -> str:
        if kind == "logcumsumexp":
            return f"{row.use('log_add_exp')}({carry}, {right})"
        return f"{carry} {'+' if kind == 'cumsum' else '*'} {right}"

    before = [f"{carry} = tl.full({shape}, {start}, {name})"]
    return before, [f"{first} = {joined(scanned)}", f"{carry} = {joined(together)}"]


def _scan_position(
    kind: str, value: str, dtype: torch.dtype, names: list[str], row: Row, carried: bool
) -> tuple[list[str], list[str]]:
    function, start = row.use(_POSITIONS[kind]), identity(kind, dtype)
    first, at = names
    position = f"{row.whole(row.position)}.to(tl.int64)"
    scan = f"{first}, {at} = tl.associative_scan(({value}, {position}), {row.axis}, {function})"
    if not carried:
        return [], [scan]
    carry, carry_at, block, block_at = row.new("carried"), row.new("carried_position"), row.new("b"), row.new("b_at")
    shape = "()" if row.rank == 1 else _one_along(row)
    together = f"tl.reduce(({row.inside(value, start)}, {position}), {row.axis}, {function}{row.keep})"
    return [
        f"{carry} = tl.full({shape}, {start}, {TRITON_DTYPES[dtype]})",
        f"{carry_at} = tl.full({shape}, -1, tl.int64)",
    ], [
        scan,
        f"{first}, {at} = {function}({carry}, {carry_at}, {first}, {at})",
        f"{block}, {block_at} = {together}",
        f"{carry}, {carry_at} = {function}({carry}, {carry_at}, {block}, {block_at})",
    ]

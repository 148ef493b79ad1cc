"""Reductions and scans in Triton: of a whole row at once, or in a loop over blocks with accumulators.

In a loop, reductions have one accumulator for each element of the tile and combine these at the end: for Welford's
algorithm (1962) as Chan, Golub and LeVeque (1979). The sum of exponentials follows the running maximum (Milakov and
Gimelshein 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import Reduce, Scan
from fxwrap.printers.triton.operations import TRITON_DTYPES, literal_text
from fxwrap.symbolic import Size

_MIN_MAX_COMBINERS = {"max": "maximum_or_nan", "min": "minimum_or_nan"}
_ARG_COMBINERS = {
    "argmax": "first_largest", "argmin": "first_smallest", "cummax": "last_largest", "cummin": "last_smallest",
}  # fmt: skip

_MAX_BLOCKS = 32
"""Number of blocks that one accumulator of a sum or product combines, as on a CPU."""

RESULT_NAMES = {
    "sum": ("total",), "prod": ("product",), "max": ("largest",), "min": ("smallest",),
    "argmax": ("largest", "position"), "argmin": ("smallest", "position"), "any": ("any_of",), "all": ("all_of",),
    "welford": ("mean", "m2"), "softmax": ("largest", "exponentials"), "cumsum": ("running_sum",),
    "cumprod": ("running_product",), "cummax": ("running_largest", "running_position"),
    "cummin": ("running_smallest", "running_position"), "logcumsumexp": ("running_log",),
}  # fmt: skip
"""The names of the results of each kind in the text."""


@dataclass(frozen=True)
class RowContext:
    """The tile's reduced dimension, along which reductions and scans combine elements.

    Fields: `axis` is its position among the `rank` dimensions of the tile; `shape` the tile's shape; `mask` the name of
    its mask; `position` the name of the element's position along it; `size` its size and `count` the text of that;
    `block` the constant with the size of a block, `width`; `lanes` the positions in a block; `exp` returns the
    exponential function of softmaxes; `create_name` returns an unused name; `use` records a helper.
    """

    axis: int
    rank: int
    shape: str
    mask: str | None
    position: str
    size: Size
    count: str
    block: str
    width: int
    lanes: str
    exp: Callable[[], str]
    create_name: Callable[[str], str]
    use: Callable[[str], str]

    @property
    def keep_dims_argument(self) -> str:
        """The argument that keeps the reduced dimension where the tile has others."""
        return ", keep_dims=True" if self.rank > 1 else ""

    def broadcast(self, value: str) -> str:
        """Returns a value broadcast to the tile."""
        return f"tl.broadcast_to({value}, {self.shape})"

    def masked(self, value: str, identity: str) -> str:
        """Returns a value with the identity beyond the end of the row."""
        return value if self.mask is None else f"tl.where({self.mask}, {value}, {identity})"


def identity(kind: str, dtype: torch.dtype) -> str:
    """Returns the identity element of a reduction or scan."""
    if kind in ("any", "all"):
        return "False" if kind == "any" else "True"
    if kind in ("sum", "cumsum", "welford"):
        return literal_text(0, dtype)
    if kind in ("prod", "cumprod"):
        return literal_text(1, dtype)
    low = kind in ("max", "argmax", "softmax", "cummax", "logcumsumexp")
    if dtype.is_floating_point:
        return literal_text(float("-inf") if low else float("inf"), dtype)
    limits = torch.iinfo(dtype)
    return str(limits.min if low else limits.max)


def reduce_expression(kind: str, value: str, dtype: torch.dtype, row: RowContext) -> str:
    """Returns the expression that reduces elements along the row, for kinds whose one result is a value."""
    small = not dtype.is_floating_point and dtype is not torch.bool and dtype.itemsize < 4
    cast = f".to({TRITON_DTYPES[dtype]})" if small else ""
    if kind == "sum":
        return f"tl.sum({value}, {row.axis}{row.keep_dims_argument}){cast}"
    if kind == "prod":
        return f"tl.reduce({value}, {row.axis}, {row.use('multiply')}{row.keep_dims_argument})"
    if kind in ("any", "all"):
        function = "max" if kind == "any" else "min"
        return f"(tl.{function}({value}.to(tl.int32), {row.axis}{row.keep_dims_argument}) != 0)"
    if dtype.is_floating_point:
        return f"tl.reduce({value}, {row.axis}, {row.use(_MIN_MAX_COMBINERS[kind])}{row.keep_dims_argument})"
    return f"tl.{kind}({value}, {row.axis}{row.keep_dims_argument}){cast}"


def reduce_persistent(
    operation: Reduce, value: str, dtype: torch.dtype, names: list[str], row: RowContext
) -> list[str]:
    """Returns the statements of a reduction of a row in one tile. `value` varies along the row."""
    kind, first = operation.kind, names[0]
    masked = row.masked(value, identity(kind, dtype))
    if kind in _ARG_COMBINERS:
        at = names[1]
        pair = f"({row.broadcast(masked)}, {row.broadcast(row.position)})"
        combine = row.use(_ARG_COMBINERS[kind])
        return [
            f"{first}, {at} = tl.reduce({pair}, {row.axis}, {combine}{row.keep_dims_argument})",
            f"{at} = {at}.to(tl.int64)",
        ]
    if kind == "welford":
        difference = row.create_name("difference")
        return [
            f"{first} = tl.sum({masked}, {row.axis}{row.keep_dims_argument}) / {row.count}",
            f"{difference} = {row.masked(f'{value} - {first}', '0.0')}",
            *_correct_mean(first, difference, row),
            f"{difference} = {row.masked(f'{value} - {first}', '0.0')}",
            f"{names[1]} = tl.sum({difference} * {difference}, {row.axis}{row.keep_dims_argument})",
        ]
    if kind == "softmax":
        power = row.masked(f"{row.exp()}({value} - {first})", "0.0")  # equal to the exponentials of the softmax
        return [
            f"{first} = {reduce_expression('max', masked, dtype, row)}",
            f"{names[1]} = tl.sum({power}, {row.axis}{row.keep_dims_argument})",
            f'{names[1]} = tl.where({first} == float("-inf"), 0.0, {names[1]})',
        ]
    return [f"{first} = {reduce_expression(kind, masked, dtype, row)}"]


def _correct_mean(mean: str, differences: str, row: RowContext) -> list[str]:
    """Returns the statements that add the mean of the differences to a finite mean, which removes its rounding error.

    Otherwise rows of equal elements would differ from their mean, which a small standard deviation amplifies.
    """
    rest = row.create_name("rest")
    return [
        f"{rest} = tl.sum({differences}, {row.axis}{row.keep_dims_argument}) / {row.count}",
        f"{mean} += tl.where({mean} - {mean} == 0.0, {rest}, 0.0)",
    ]


def reduce_one_hot(
    operation: Reduce, value: str, row_value: str, element: str, dtype: torch.dtype, names: list[str], row: RowContext
) -> list[str]:
    """Returns the statements of a sum of products with a one-hot vector: `element` if the sum of the row is finite."""
    first = names[0]
    return [
        *reduce_persistent(operation, row_value, dtype, names, row),
        f"if {first} - {first} == 0.0:  # finite, and so is the row: all products but one are 0",
        f"    {first} = {element} + 0.0",
        "else:",
        *[f"    {line}" for line in reduce_persistent(operation, value, dtype, names, row)],
    ]


@dataclass(frozen=True)
class Accumulator:
    """The statements of a reduction before, inside and after the loop over blocks."""

    before: list[str]
    inside: list[str]
    after: list[str]


def accumulate(operation: Reduce, value: str, dtype: torch.dtype, names: list[str], row: RowContext) -> Accumulator:
    """Returns the statements of a reduction in a loop over blocks."""
    kind, first = operation.kind, names[0]
    start, name = identity(kind, dtype), TRITON_DTYPES[dtype]
    if kind in _ARG_COMBINERS:
        return _accumulate_position(kind, value, dtype, names, row)
    if kind == "welford":
        return _accumulate_welford(value, dtype, names, row)
    if kind == "softmax":
        return _accumulate_softmax(value, dtype, names, row)
    sums = row.create_name(f"{first}s")
    is_long = isinstance(row.size, int) and row.size > 2 * _MAX_BLOCKS * row.width
    if kind in ("sum", "prod") and dtype.is_floating_point and is_long:
        return _accumulate_parts(kind, sums, row.masked(value, start), dtype, first, row)
    step = {
        "sum": f"{sums} + {row.masked(value, start)}",
        "prod": f"{sums} * {row.masked(value, start)}",
        "any": f"{sums} | {row.masked(value, start)}",
        "all": f"{sums} & {row.masked(value, start)}",
    }.get(kind) or _extreme(kind, sums, row.masked(value, start), dtype)
    return Accumulator(
        [f"{sums} = tl.full({row.shape}, {start}, {name})"],
        [f"{sums} = {step}"],
        [f"{first} = {reduce_expression(kind, sums, dtype, row)}"],
    )


def _accumulate_parts(
    kind: str, parts: str, value: str, dtype: torch.dtype, first: str, row: RowContext
) -> Accumulator:
    """Returns the statements of a sum or product of many blocks, in parts of a few that are combined in float64.

    Equal elements make equal rounding errors, which add up in a long part; so do those of factors close to 1.
    """
    whole, block, by = row.create_name("combined"), row.create_name("block_number"), "+" if kind == "sum" else "*"
    start = identity(kind, dtype)
    empty = f"tl.full({row.shape}, {start}, {TRITON_DTYPES[dtype]})"
    combined = reduce_expression(kind, f"({whole} {by} {parts})", torch.float64, row)
    return Accumulator(
        [f"{whole} = tl.full({row.shape}, {start}, tl.float64)", f"{parts} = {empty}", f"{block} = 0"],
        [
            f"{parts} {by}= {value}",
            f"{block} += 1",
            f"if {block} % {_MAX_BLOCKS} == 0:",
            f"    {whole} {by}= {parts}",
            f"    {parts} = {empty}",
        ],
        [f"{first} = {combined}.to({TRITON_DTYPES[dtype]})"],
    )


def _extreme(kind: str, left: str, right: str, dtype: torch.dtype) -> str:
    nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_floating_point else ""
    return f"tl.{kind}imum({left}, {right}{nan})"


def _accumulate_position(kind: str, value: str, dtype: torch.dtype, names: list[str], row: RowContext) -> Accumulator:
    """Each lane begins at its first position and moves to later ones only for better elements; NaN is the best."""
    best, at, better = row.create_name("best"), row.create_name("best_position"), row.create_name("better")
    first, first_at = names
    short = isinstance(row.size, int) and row.size < 2**31 - 1
    position, element = "tl.int32" if short else "tl.int64", row.masked(value, start := identity(kind, dtype))
    worse = f"({element} {'<=' if kind == 'argmax' else '>='} {best})"
    is_number = f" & ({best} == {best})" if dtype.is_floating_point else ""
    function = row.use(_ARG_COMBINERS[kind])
    return Accumulator(
        [
            f"{best} = tl.full({row.shape}, {start}, {TRITON_DTYPES[dtype]})",
            f"{at} = {row.broadcast(f'({row.lanes})')}.to({position})",
        ],
        [
            f"{better} = ~{worse}{is_number}",
            f"{best} = tl.where({better}, {element}, {best})",
            f"{at} = tl.where({better}, {row.position}.to({position}), {at})",
        ],
        [
            f"{first}, {first_at} = tl.reduce(({best}, {at}), {row.axis}, {function}{row.keep_dims_argument})",
            f"{first_at} = {first_at}.to(tl.int64)",
        ],
    )


def _accumulate_welford(value: str, dtype: torch.dtype, names: list[str], row: RowContext) -> Accumulator:
    name = TRITON_DTYPES[dtype]
    means, m2, sample_count = row.create_name("means"), row.create_name("m2_lanes"), row.create_name("sample_count")
    difference, lanes, delta = row.create_name("difference"), row.create_name("lane_counts"), row.create_name("delta")
    count = f"({row.count} - {row.lanes} + {row.block} - 1) // {row.block}"
    mean, total = names
    return Accumulator(
        [
            f"{means} = tl.full({row.shape}, 0.0, {name})",
            f"{m2} = tl.full({row.shape}, 0.0, {name})",
            f"{sample_count} = tl.full((), 0.0, {name})",
        ],
        [
            f"{sample_count} += 1.0",
            f"{difference} = {row.masked(f'{value} - {means}', '0.0')}",
            f"{means} = tl.fma({difference}, 1.0 / {sample_count}, {means})",
            f"{m2} = tl.fma({difference}, {row.masked(f'{value} - {means}', '0.0')}, {m2})",
        ],
        [
            f"{lanes} = ({count}).to({name})",
            f"{mean} = tl.sum({means} * {lanes}, {row.axis}{row.keep_dims_argument}) / {row.count}",
            *_correct_mean(mean, f"({means} - {mean}) * {lanes}", row),
            f"{delta} = {means} - {mean}",
            f"{total} = tl.sum({m2} + {lanes} * {delta} * {delta}, {row.axis}{row.keep_dims_argument})",
        ],
    )


def _accumulate_softmax(value: str, dtype: torch.dtype, names: list[str], row: RowContext) -> Accumulator:
    name, exp = TRITON_DTYPES[dtype], row.exp()
    largest, total = names
    sums, higher, shift, inside = [row.create_name(item) for item in ("powers", "higher", "shift", "inside")]
    one = "()" if row.rank == 1 else _keep_dims_shape(row)
    block = reduce_expression("max", inside, dtype, row)
    return Accumulator(
        [f'{largest} = tl.full({one}, float("-inf"), {name})', f"{sums} = tl.full({row.shape}, 0.0, {name})"],
        [
            f"{inside} = {row.masked(value, identity('softmax', dtype))}",
            f"{higher} = {_extreme('max', largest, block, dtype)}",
            f'{shift} = tl.where({higher} == float("-inf"), 0.0, {higher})',
            f"{sums} = {sums} * {exp}({largest} - {shift}) + {exp}({inside} - {shift})",
            f"{largest} = {higher}",
        ],
        [f"{total} = tl.sum({sums}, {row.axis}{row.keep_dims_argument})"],
    )


def _keep_dims_shape(row: RowContext) -> str:
    sizes = row.shape.strip("()").split(", ")
    return f"({', '.join(['1' if position == row.axis else size for position, size in enumerate(sizes)])})"


def scan_block(
    operation: Scan, value: str, dtype: torch.dtype, names: list[str], row: RowContext, carried: bool
) -> tuple[list[str], list[str]]:
    """Returns the statements of a scan before and inside the loop over blocks.

    Without `carried` there is no loop, and the first list is empty. Sums and products of float32 are carried from block
    to block in float64, so that rounding errors do not grow with the number of blocks.
    """
    kind = operation.kind
    start = identity(kind, dtype)
    if kind in _ARG_COMBINERS:
        return _scan_position(kind, value, dtype, names, row, carried)
    first, name = names[0], TRITON_DTYPES[dtype]
    cast = f".to({name})" if not dtype.is_floating_point and dtype.itemsize < 4 else ""
    if kind == "logcumsumexp":
        scanned = f"tl.associative_scan({value}, {row.axis}, {row.use('log_add_exp')})"
        combine = row.use("log_add_exp")
        total = f"tl.reduce({row.masked(value, start)}, {row.axis}, {combine}{row.keep_dims_argument})"
    else:
        scanned = f"tl.{kind}({value}, {row.axis}){cast}"
        total = reduce_expression({"cumsum": "sum", "cumprod": "prod"}[kind], row.masked(value, start), dtype, row)
    if not carried:
        return [], [f"{first} = {scanned}"]
    carry = row.create_name("carried")
    shape = "()" if row.rank == 1 else _keep_dims_shape(row)

    is_wide = dtype is torch.float32 and kind != "logcumsumexp"

    def add_carry(left: str, right: str) -> str:
        if kind == "logcumsumexp":
            return f"{row.use('log_add_exp')}({left}, {right})"
        return f"{left} {'+' if kind == 'cumsum' else '*'} {right}"

    before = [f"{carry} = tl.full({shape}, {start}, {'tl.float64' if is_wide else name})"]
    added = add_carry(f"{carry}.to({name})" if is_wide else carry, scanned)
    return before, [f"{first} = {added}", f"{carry} = {add_carry(carry, total)}"]


def _scan_position(
    kind: str, value: str, dtype: torch.dtype, names: list[str], row: RowContext, carried: bool
) -> tuple[list[str], list[str]]:
    function, start = row.use(_ARG_COMBINERS[kind]), identity(kind, dtype)
    first, at = names
    position = f"{row.broadcast(row.position)}.to(tl.int64)"
    scan = f"{first}, {at} = tl.associative_scan(({value}, {position}), {row.axis}, {function})"
    if not carried:
        return [], [scan]
    names = [row.create_name(item) for item in ("carried", "carried_position", "b", "b_at")]
    carry, carry_at, block, block_at = names
    shape = "()" if row.rank == 1 else _keep_dims_shape(row)
    total = f"tl.reduce(({row.masked(value, start)}, {position}), {row.axis}, {function}{row.keep_dims_argument})"
    return [
        f"{carry} = tl.full({shape}, {start}, {TRITON_DTYPES[dtype]})",
        f"{carry_at} = tl.full({shape}, -1, tl.int64)",
    ], [
        scan,
        f"{first}, {at} = {function}({carry}, {carry_at}, {first}, {at})",
        f"{block}, {block_at} = {total}",
        f"{carry}, {carry_at} = {function}({carry}, {carry_at}, {block}, {block_at})",
    ]

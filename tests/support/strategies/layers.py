"""Random graphs of layers: what models compute on images and sequences, larger and in half precision too.

Each step draws one layer in one of the forms that models write: interleaved elements, groups, tables of positions,
windows, convolutions, norms, quantised weights, experts. Steps compose with each other and with those of other graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import GraphModule

from tests.support.strategies import graphs
from tests.support.strategies.graphs import Entry, GraphDraw, NoCandidate, RandomGraph, Step, aten

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
WIDTHS = (8, 16, 32, 12, 64, 24, 20, 48, 17, 6)
ROWS = (3, 4, 1, 2, 8, 5, 16, 7, 0)
MOST_ELEMENTS = 3000


def _is_float(entry: Entry) -> bool:
    return entry.value.dtype.is_floating_point


def _sized(b: GraphDraw, least: int = 1) -> Entry:
    """Draws floats with a last dimension, none of whose sizes is 0."""
    return b.pick(
        lambda entry: _is_float(entry) and bool(entry.shape) and 0 not in entry.shape and entry.shape[-1] >= least
    )


def _divisor(b: GraphDraw, size: int, most: int = 8) -> int:
    """Draws a divisor of a size between 2 and a limit."""
    divisors = [one for one in range(2, most + 1) if size % one == 0]
    if not divisors:
        raise NoCandidate
    return int(b.choice(divisors))


def _one(entries: Sequence[Entry]) -> Entry:
    return entries[0]


def _parts(b: GraphDraw, entry: Entry, count: int) -> list[Entry]:
    """Returns the elements of a last dimension in so many parts: each in turn, or one after the other."""
    *sizes, width = entry.shape
    form = b.choice(["slices", "split", "pairs"])
    if form == "slices":
        return [_one(b.call(aten.slice.Tensor, entry, -1, at, width, count)) for at in range(count)]
    if form == "split":
        return b.call(aten.split.Tensor, entry, width // count, -1)
    pairs = _one(b.call(aten.reshape.default, entry, [*sizes, width // count, count]))
    return b.call(aten.unbind.int, pairs, -1)


def _interleave(b: GraphDraw) -> None:
    """Rotates parts of the last dimension by each other, as rotary embeddings and gates do."""
    entry = _sized(b, 2)
    count = _divisor(b, entry.shape[-1], 4)
    parts = _parts(b, entry, count)
    *sizes, width = parts[0].shape
    table = _positions(b, [b.choice([size, 1]) for size in sizes[-1:]] + [width], entry.value.dtype)
    results = []
    for number, part in enumerate(parts):
        (scaled,) = b.call(b.choice([aten.mul.Tensor, aten.add.Tensor]), part, table)
        results += b.call(b.choice([aten.sub.Tensor, aten.mul.Tensor]), scaled, parts[number - 1])
    form = b.choice(["stack", "cat", "select", "write"])
    if form == "stack":
        (joined,) = b.call(aten.stack.default, results, -1)
        b.call(aten.reshape.default, joined, [*sizes, width * count])
    elif form == "cat":
        b.call(aten.cat.default, results, b.choice([-1, 0]))
    elif form == "write":
        (joined,) = b.call(aten.slice_scatter.default, entry, results[0], -1, 0, width * count, count)
        b.call(aten.slice_scatter.default, joined, results[-1], -1, count - 1, width * count, count)


def _positions(b: GraphDraw, shape: Sequence[int], dtype: torch.dtype) -> Entry:
    """Draws a table: an input, or computed of the positions along its last dimension, or all of them."""
    if b.flag():
        return b.parameter(shape, dtype)
    (places,) = b.call(aten.arange.default, shape[-1], dtype=torch.float32, device=torch.device("cpu"))
    (places,) = b.call(aten.mul.Tensor, places, b.choice([0.5, 0.01]))
    (places,) = b.call(b.choice([aten.sin, aten.cos, aten.exp, aten.neg]).default, places)
    if len(shape) > 1 and b.flag():
        (rows,) = b.call(aten.arange.default, shape[-2], dtype=torch.float32, device=torch.device("cpu"))
        (rows,) = b.call(aten.unsqueeze.default, rows, 1)
        (places,) = b.call(aten.mul.Tensor, rows, places)
        (places,) = b.call(b.choice([aten.sin, aten.cos, aten.tanh]).default, places)
    return _one(b.call(aten._to_copy.default, places, dtype=dtype))


def _table(b: GraphDraw) -> None:
    """Adds or multiplies by values of the positions along one dimension, or masks by them."""
    entry = _sized(b)
    dim = b.integer(0, len(entry.shape) - 1)
    size, rest = entry.shape[dim], len(entry.shape) - 1 - dim
    if b.flag():
        table = _positions(b, [size], entry.value.dtype)
        (table,) = b.call(aten.reshape.default, table, [size, *[1] * rest])
        b.call(b.choice([aten.add.Tensor, aten.mul.Tensor]), entry, table)
        return
    (places,) = b.call(aten.arange.default, size, dtype=torch.int64, device=torch.device("cpu"))
    if b.flag() and len(entry.shape) > 1:
        other = entry.shape[dim - 1]
        (rows,) = b.call(aten.arange.default, other, dtype=torch.int64, device=torch.device("cpu"))
        (rows,) = b.call(aten.unsqueeze.default, rows, 1)
        (mask,) = b.call(b.choice([aten.le, aten.gt]).Tensor, places, rows)
        if dim:
            (mask,) = b.call(aten.reshape.default, mask, [other, size, *[1] * rest])
            filling = _one(b.call(aten.full.default, [], 0.5, dtype=entry.value.dtype, device=torch.device("cpu")))
            b.call(aten.where.self, mask, entry, filling)
        return
    (places,) = b.call(aten.floor_divide.default, places, b.choice([2, 3]))
    b.call(aten.index_select.default, entry, dim, places)


def _group(b: GraphDraw) -> None:
    """Reduces groups along a dimension; each element meets the result of its group."""
    entry = _sized(b)
    dim = b.integer(0, len(entry.shape) - 1)
    before, size, after = entry.shape[:dim], entry.shape[dim], entry.shape[dim + 1 :]
    count = _divisor(b, size)
    (groups,) = b.call(aten.reshape.default, entry, [*before, size // count, count, *after])
    (wide,) = b.call(aten._to_copy.default, groups, dtype=torch.float32)
    dims = [dim + 1, *[at for at in range(dim + 2, len(entry.shape) + 1) if b.flag()]]
    kind = b.choice(["sum", "mean", "squares", "var", *(["amax"] if entry.exact else [])])
    if kind == "squares":
        (wide,) = b.call(aten.mul.Tensor, wide, wide)
    if kind == "var":
        reduced = b.call(aten.var_mean.correction, wide, dims, correction=0, keepdim=True, exact=False)[-1]
    elif kind == "amax":
        (reduced,) = b.call(aten.amax.default, wide, dims, True)
    else:
        (reduced,) = b.call(aten.sum.dim_IntList if kind == "sum" else aten.mean.dim, wide, dims, True, exact=False)
    (result,) = b.call(b.choice([aten.sub.Tensor, aten.mul.Tensor]), groups, reduced)
    if b.flag():
        (result,) = b.call(aten._to_copy.default, result, dtype=entry.value.dtype)
    if b.flag():
        b.call(aten.reshape.default, result, list(entry.shape))


def _transpose(b: GraphDraw) -> None:
    """Stores a tensor in another order of its dimensions, perhaps with two of them merged."""
    entry = b.pick(lambda entry: len(entry.shape) > 1 and 0 not in entry.shape)
    order = b.draw(st.permutations(range(len(entry.shape))))
    (turned,) = b.call(aten.permute.default, entry, order)
    if b.flag():
        b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    else:
        b.call(aten.reshape.default, turned, [-1, turned.shape[-1]])


def _image(b: GraphDraw, exact: bool = False) -> Entry:
    """Returns an image of several channels: an entry, or one of an entry's elements, or an input."""
    wanted = [entry for entry in b.entries if len(entry.shape) == 4 and _is_float(entry) and (entry.exact or not exact)]
    if wanted and b.integer(0, 3):
        return b.choice([entry for entry in wanted[-4:] if 0 not in entry.shape] or [None]) or _new_image(b)
    return _new_image(b)


def _new_image(b: GraphDraw) -> Entry:
    shape = [b.choice([2, 1]), b.choice([8, 16, 3, 4, 20, 32]), b.choice([5, 4, 8, 7]), b.choice([6, 4, 9, 5])]
    entry = b.parameter(shape, b.choice([one.value.dtype for one in b.entries if _is_float(one)] or DTYPES))
    if b.flag():  # channels last
        (last,) = b.call(aten.permute.default, entry, [0, 2, 3, 1])
        (last,) = b.call(aten.clone.default, last, memory_format=torch.contiguous_format)
        (entry,) = b.call(aten.permute.default, last, [0, 3, 1, 2])
    return entry


def _window(b: GraphDraw) -> None:
    """Pools an image."""
    kernel = [b.integer(1, 3), b.integer(1, 3)]
    padding = [b.integer(0, size // 2) for size in kernel]
    stride, dilation = [b.integer(1, 3), b.integer(1, 3)], [b.integer(1, 2), b.integer(1, 2)]
    kind = b.choice(["max", "max", "average", "nearest"])
    image = _image(b, exact=kind == "max")
    if kind == "nearest":
        b.call(aten.upsample_nearest2d.default, image, [size * 2 for size in image.shape[2:]])
        return
    with_dilation = zip(image.shape[2:], kernel, padding, dilation if kind == "max" else [1, 1])
    if any(size + 2 * pad < hop * (width - 1) + 1 for size, width, pad, hop in with_dilation):
        raise NoCandidate
    if kind == "max":
        b.call(aten.max_pool2d_with_indices.default, image, kernel, stride, padding, dilation, b.flag())
    else:
        divisor = b.choice([None, 5])
        b.call(aten.avg_pool2d.default, image, kernel, stride, padding, b.flag(), b.flag(), divisor)


def _convolution(b: GraphDraw) -> None:
    image = _image(b)
    channels = image.shape[1]
    groups = b.choice([one for one in (1, 2, channels) if channels % one == 0])
    transposed = not b.integer(0, 5)
    width, dilation = b.choice([1, 3, 2]), b.choice([1, 1, 2])
    if min(image.shape[2:]) < dilation * (width - 1) + 1:
        raise NoCandidate
    results = groups * b.choice([1, 2, 4])
    shape = [channels, results // groups] if transposed else [results, channels // groups]
    weight = b.parameter([*shape, width, width], image.value.dtype)
    bias = b.parameter([results], image.value.dtype) if b.flag() else None
    stride, padding = [b.choice([1, 2])] * 2, [b.integer(0, width // 2)] * 2
    settings = (stride, padding, [dilation] * 2, transposed, [0, 0], groups)
    b.call(aten.convolution.default, image, weight, bias, *settings, exact=False)


def _image_norm(b: GraphDraw) -> None:
    image = _image(b)
    if not (image.value.is_contiguous() or image.value.is_contiguous(memory_format=torch.channels_last)):
        raise NoCandidate
    n, channels, *sizes = image.shape
    scale = b.parameter([channels], image.value.dtype)
    bias = b.parameter([channels], image.value.dtype)
    groups = b.choice([one for one in range(1, channels + 1) if channels % one == 0])
    pixels = sizes[0] * sizes[1]
    if pixels * (channels // groups) < 2:
        raise NoCandidate
    try:
        b.call(aten.native_group_norm.default, image, scale, bias, n, channels, pixels, groups, 1e-2, exact=False)
    except RuntimeError as error:  # sizes of 1 make the layout of an image ambiguous, which torch refuses
        raise NoCandidate from error
    del b.entries[-2:]  # the mean and the reciprocal deviation, whose dtype the device decides


def _norm(b: GraphDraw) -> None:
    """Normalises rows, of a residual sum too, as layer norm or by their squares in float32."""
    entry = _sized(b, 2)
    dtype, width = entry.value.dtype, entry.shape[-1]
    if b.flag():
        (entry,) = b.call(aten.add.Tensor, entry, b.pick(lambda other: other.shape == entry.shape))
    scale = b.parameter([width], dtype)
    if b.flag():
        b.call(
            aten.native_layer_norm.default,
            entry,
            [width],
            scale if entry.value.dtype is dtype else None,
            None,
            1e-2,
            exact=False,
        )
        del b.entries[-2:]
        return
    (wide,) = b.call(aten._to_copy.default, entry, dtype=torch.float32)
    (squares,) = b.call(aten.pow.Tensor_Scalar, wide, 2)
    (mean,) = b.call(aten.mean.dim, squares, [-1], True, exact=False)
    (mean,) = b.call(aten.add.Tensor, mean, 1e-2)
    (factor,) = b.call(aten.rsqrt.default, mean)
    (normal,) = b.call(aten.mul.Tensor, wide, factor)
    (normal,) = b.call(aten._to_copy.default, normal, dtype=dtype)
    b.call(aten.mul.Tensor, normal, scale)


def _matrix(b: GraphDraw) -> Entry:
    """Returns rows of floats, at most 16 of them."""
    entry = _sized(b, 4)
    (rows,) = b.call(aten.reshape.default, entry, [-1, entry.shape[-1]])
    count = b.integer(1, 16)
    return rows if rows.shape[0] <= count else _one(b.call(aten.slice.Tensor, rows, 0, 0, count))


def _linear(b: GraphDraw) -> None:
    rows = _matrix(b)
    weight = b.parameter([b.choice(WIDTHS), rows.shape[1]], rows.value.dtype)
    (columns,) = b.call(aten.t.default, weight)
    if b.flag():
        b.call(aten.addmm.default, b.parameter([weight.shape[0]], rows.value.dtype), rows, columns, exact=False)
    else:
        b.call(aten.mm.default, rows, columns, exact=False)


def _quantised(b: GraphDraw) -> None:
    """Multiplies rows by weights of 8 or 4 bits, whose groups have scales and perhaps zero points; by one or two."""
    rows = _matrix(b)
    columns, width = b.choice(WIDTHS), rows.shape[1]
    bits, form, group = b.choice([4, 4, 8]), b.choice(["zeros", "middle"]), b.choice([4, 8, 16, 32, width + width % 2])
    order, wide = b.choice(["pairs", "halves"]), b.flag()
    known = list(b.entries)
    results = [
        _one(
            b.call(
                aten.mm.default,
                rows,
                _dequantised(b, rows.value.dtype, columns, width, bits, group, form, order, wide),
                exact=False,
            )
        )
        for _ in range(b.choice([1, 1, 2]))
    ]
    b.entries = [*known, *results]
    if len(results) == 2:
        (gate,) = b.call(b.choice([aten.silu, aten.relu, aten.sigmoid]).default, results[0])
        b.call(aten.mul.Tensor, gate, results[1])
    elif b.flag():
        b.call(aten.add.Tensor, results[0], b.parameter([columns], rows.value.dtype))


def _dequantised(
    b: GraphDraw, dtype: torch.dtype, columns: int, width: int, bits: int, group: int, form: str, order: str, wide: bool
) -> Entry:
    """Returns the transposed matrix of a quantised weight, computed in its dtype or in float32."""
    inner = torch.float32 if wide else dtype
    groups = -(-width // group)
    (scale,) = b.call(aten.mul.Tensor, b.parameter([columns, groups], dtype), 1 / 16)
    padded = groups * group
    if bits == 8:
        numbers = b.parameter([columns, padded], torch.uint8)
    else:
        packed = b.parameter([columns, padded // 2], torch.uint8)
        (low,) = b.call(aten.bitwise_and.Scalar, packed, 15)
        (high,) = b.call(aten.__rshift__.Scalar, packed, 4)
        if order == "pairs":
            (numbers,) = b.call(aten.stack.default, [low, high], -1)
        else:
            (numbers,) = b.call(aten.cat.default, [low, high], -1)
    (numbers,) = b.call(aten.reshape.default, numbers, [columns, groups, group])
    (numbers,) = b.call(aten._to_copy.default, numbers, dtype=inner)
    if form == "zeros":
        zero = b.parameter([columns, groups, 1], inner)
        (numbers,) = b.call(aten.sub.Tensor, numbers, zero)
    else:
        (numbers,) = b.call(aten.sub.Tensor, numbers, 8 if bits == 4 else 128)
    (scale,) = b.call(aten.unsqueeze.default, scale, -1)
    (numbers,) = b.call(aten.mul.Tensor, numbers, scale)
    if numbers.value.dtype is not dtype:
        (numbers,) = b.call(aten._to_copy.default, numbers, dtype=dtype)
    (weight,) = b.call(aten.reshape.default, numbers, [columns, padded])
    if padded != width:
        (weight,) = b.call(aten.slice.Tensor, weight, 1, 0, width)
    return _one(b.call(aten.t.default, weight))


def _experts(b: GraphDraw) -> None:
    """A loop over experts, each of which computes the rows that chose it, perhaps none or all."""
    rows = _matrix(b)
    count, width, dtype = b.choice([2, 3, 4]), rows.shape[1], rows.value.dtype
    chosen_count = b.choice([1, 2])
    (chosen,) = b.call(aten.remainder.Scalar, b.parameter([rows.shape[0], chosen_count], torch.int64), count)
    factors = b.parameter([rows.shape[0], chosen_count], dtype)
    (result,) = b.call(aten.zeros_like.default, rows)
    up = b.parameter([count, b.choice([8, 16]), width], dtype)
    down = b.parameter([count, width, up.shape[1]], dtype)
    known = list(b.entries)
    for number in range(count):
        (mask,) = b.call(aten.eq.Scalar, chosen, number)
        (places,) = b.call(aten.nonzero.default, mask)
        token, position = b.call(aten.unbind.int, places, 1)
        (own,) = b.call(aten.index.Tensor, rows, [token])
        into, out = [_one(b.call(aten.t.default, _one(b.call(aten.select.int, one, 0, number)))) for one in (up, down)]
        (hidden,) = b.call(aten.mm.default, own, into, exact=False)
        (hidden,) = b.call(aten.silu.default, hidden)
        (values,) = b.call(aten.mm.default, hidden, out, exact=False)
        (factor,) = b.call(aten.index.Tensor, factors, [token, position])
        (factor,) = b.call(aten.unsqueeze.default, factor, 1)
        (values,) = b.call(aten.mul.Tensor, values, factor)
        (result,) = b.call(aten.index_add.default, result, 0, token, values, exact=False)
    b.entries = [*known, result]  # others have sizes that the routing decides


SEQUENCES: tuple[Step, ...] = (_interleave, _interleave, _table, _group, _transpose, _norm)
IMAGES: tuple[Step, ...] = (_window, _window, _convolution, _image_norm, _group, _transpose)
MATMULS: tuple[Step, ...] = (_linear, _quantised, _quantised, _experts)
FAMILIES: tuple[tuple[Step, ...], ...] = (
    SEQUENCES, SEQUENCES, IMAGES, MATMULS, graphs.POINTWISE, (graphs._cat, graphs._slice, graphs._sum, graphs._softmax),
)  # fmt: skip


@st.composite
def layers(draw: Any, steps: int = 9, families: Sequence[Sequence[Step]] = FAMILIES) -> RandomGraph:
    """Draws a graph of at most so many layers over an input of one dtype."""
    b = GraphDraw(draw, writes=False, most_elements=MOST_ELEMENTS, rounds=True)
    dtype = b.choice(DTYPES)
    shape = [*[b.choice(ROWS[:-1]) for _ in range(b.integer(0, 2))], b.choice(WIDTHS)]
    b.placeholder(b.random(shape, dtype))
    for _ in range(b.integer(steps // 3, steps)):
        with suppress(NoCandidate):
            b.choice(b.choice(families))(b)
    computed = [entry for entry in b.entries if entry.node.op == "call_function"] or b.entries
    outputs = [b.choice(computed).node for _ in range(b.integer(0, 3))]
    b.graph.output((*outputs, computed[-1].node))
    b.graph.eliminate_dead_code()
    return RandomGraph(GraphModule(torch.nn.Module(), b.graph), tuple(b.inputs))

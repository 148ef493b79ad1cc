"""Writing at computed positions: scatter, index_put, index_add and their like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxwrap.device_spec import DeviceSpec
from fxwrap.loop_ir import INTEGERS, STORAGE_ONLY, Index, IndexLike, Scalar, as_index, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Reader, Scattered, broadcast_indices, pointwise
from fxwrap.lowering.rules.creation import filled
from fxwrap.lowering.rules.indexing import indexing, position_along
from fxwrap.lowering.rules.positions import dimension, refused_positions, replaced
from fxwrap.lowering.rules.registry import Call, rule
from fxwrap.lowering.rules.rows import kernel_rule
from fxwrap.lowering.rules.views import reshaped
from fxwrap.symbolic import Size, product

Write = Callable[[Reader, Indices], tuple[Sequence[IndexLike], Scalar]]
"""Returns the indices that an iteration writes to, and the value."""

MODES = {"sum": "add", "add": "add", "prod": "prod", "multiply": "prod", "amax": "max", "amin": "min"}
"""A store's mode by the name that scatter operators have for it."""

_NAN = {
    ("max", torch.float32): (torch.int32, 0x7FC00000), ("max", torch.float64): (torch.int64, 0x7FF8000000000000),
    ("min", torch.float32): (torch.int32, -0x400000), ("min", torch.float64): (torch.int64, -0x8000000000000),
}  # fmt: skip
"""The bits of the NaN that is beyond all numbers where a GPU compares the bits of floats in memory as integers."""


def refused_mode(dtype: torch.dtype, spec: DeviceSpec, mode: str) -> str | None:
    """Returns why several iterations may not combine into one element of this dtype, or None.

    Where several positions are equal, eager promises no order either, and on GPUs it adds with atomic operations too.
    """
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and kernels write in any order"
    if mode == "set":
        return None
    if dtype is torch.bool or dtype in STORAGE_ONLY:
        return f"{dtype} has no atomic operations"
    if mode == "prod" and not spec.all_atomics:
        return f"there is no atomic multiplication on {spec.device_type}"
    if dtype in INTEGERS and dtype.itemsize < 4 and not spec.all_atomics:
        return f"{dtype} has no atomic operations on {spec.device_type}"
    if dtype not in INTEGERS and mode in ("add", "prod") and spec.rounds_as_cpu:
        return "on the CPU eager adds floats in a fixed order, which parallel atomic additions would lose"
    return None


def scattered(call: Call, initial: Definition, space: Sequence[Size], mode: str, write: Write) -> Scattered | str:
    """Returns `initial` with what `write` gives combined into it for each element of a space, or the refusal."""
    reason = refused_mode(call.dtype, call.spec, mode)
    if reason is not None:
        return reason
    computes = compute_dtype(call.dtype)

    def body(reader: Reader, indices: Indices) -> tuple[Sequence[Index], Scalar]:
        places, value = write(reader, indices)
        return [as_index(place) for place in places], value.to(computes)

    first = _with_one_nan(initial, mode) if (mode, call.dtype) in _NAN else initial
    return Scattered(call.sizes, call.dtype, call.device, first, tuple(space), mode, body)


def _with_one_nan(initial: Definition, mode: str) -> Definition:
    """Returns a tensor whose NaNs have the bits that no number combined with them displaces."""
    bits_dtype, bits = _NAN[mode, initial.dtype]

    def body(reader: Reader, indices: Indices) -> Scalar:
        x = reader.load(initial, indices)
        nan = x.body.compute("bitcast", reader.number(bits, bits_dtype), dtype=initial.dtype)
        return x.apply("isnan").where(nan, x)

    return pointwise(initial.sizes, initial.dtype, initial.device, body)


def _value(call: Call, source: Any) -> Callable[[Reader, Indices], Scalar]:
    """Returns what reads a source: an element of a tensor, or a number."""
    if isinstance(source, Definition):
        return lambda reader, indices: reader.load(source, indices[: len(source.sizes)])
    return lambda reader, indices: reader.number(source, call.dtype)


# --- an index tensor with the source's sizes -------------------------------------------------------------------------


def _scatter(call: Call, x: Definition, dim: int, index: Definition, source: Any, mode: str) -> Any:
    reason = refused_positions(index)
    if reason is not None:
        return reason
    dim, value = dimension(dim, len(x.sizes)), _value(call, source)

    def write(reader: Reader, indices: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        place = position_along(reader, index, indices, x.sizes[dim] if x.sizes else 1, error="runtime")
        return replaced(indices, dim, place) if x.sizes else (), value(reader, indices)

    return scattered(call, x, index.sizes, mode, write)


@kernel_rule("aten.scatter.src", "aten.scatter.value")
def _scatter_set(call: Call, x: Definition, dim: int, index: Definition, source: Any) -> Any:
    return _scatter(call, x, dim, index, source, "set")


@kernel_rule("aten.scatter_add.default")
def _scatter_add(call: Call, x: Definition, dim: int, index: Definition, source: Definition) -> Any:
    return _scatter(call, x, dim, index, source, "add")


@kernel_rule("aten.scatter.reduce", "aten.scatter.value_reduce")
def _scatter_combine(call: Call, x: Definition, dim: int, index: Definition, source: Any, *, reduce: str) -> Any:
    return _scatter(call, x, dim, index, source, MODES[reduce])


@kernel_rule("aten.scatter_reduce.two")
def _scatter_reduce(
    call: Call, x: Definition, dim: int, index: Definition, source: Definition, reduce: str, *,
    include_self: bool = True,
) -> Any:  # fmt: skip
    if reduce not in MODES:
        return f"{reduce} needs to know how many values meet in an element"
    if not include_self:
        return "which elements are kept depends on all positions"
    return _scatter(call, x, dim, index, source, MODES[reduce])


# --- an index of one dimension ---------------------------------------------------------------------------------------


def _along(call: Call, x: Definition, dim: int, index: Definition, space: Sequence[Size], mode: str, value: Any) -> Any:
    """Writes to the slices that a list of positions names; `value(reader, indices)` gives an element of the space."""
    reason = refused_positions(index)
    if reason is not None:
        return reason

    def write(reader: Reader, indices: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        where = [indices[dim] if indices else 0] if index.sizes else []
        place = position_along(reader, index, where, x.sizes[dim] if x.sizes else 1)
        return replaced(indices, dim, place) if x.sizes else (), value(reader, indices)

    return scattered(call, x, space, mode, write)


def _source_space(x: Definition, dim: int, index: Definition) -> tuple[Size, ...]:
    """Returns the sizes of a source: the tensor's, but as many along the dimension as there are positions."""
    count = index.sizes[0] if index.sizes else 1
    return tuple(replaced(x.sizes, dim, count)) if x.sizes else (count,)


@kernel_rule("aten.index_add.default")
def _index_add(
    call: Call, x: Definition, dim: int, index: Definition, source: Definition, *, alpha: Any = 1
) -> Any:  # fmt: skip
    dim = dimension(dim, len(x.sizes))
    space = _source_space(x, dim, index)
    to_source = reshaped(source.sizes, space)

    def value(reader: Reader, indices: Indices) -> Scalar:
        found = reader.load(source, to_source(indices))
        return found if isinstance(alpha, int) and alpha == 1 else found * reader.number(alpha, source.dtype)

    return _along(call, x, dim, index, space, "add", value)


@kernel_rule("aten.index_copy.default")
def _index_copy(call: Call, x: Definition, dim: int, index: Definition, source: Definition) -> Any:
    dim = dimension(dim, len(x.sizes))
    space = _source_space(x, dim, index)
    to_source = reshaped(source.sizes, space)
    return _along(
        call, x, dim, index, space, "set", lambda reader, indices: reader.load(source, to_source(indices))
    )  # fmt: skip


@kernel_rule("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def _index_fill(call: Call, x: Definition, dim: int, index: Definition, value: Any) -> Any:
    dim = dimension(dim, len(x.sizes))
    return _along(call, x, dim, index, _source_space(x, dim, index), "set", _value(call, value))


# --- tensors of positions --------------------------------------------------------------------------------------------


@kernel_rule(
    "aten.index_put.default", "aten.index_put.hacked_twin", "aten._unsafe_index_put.default",
    "aten._unsafe_index_put.hacked_twin",
)  # fmt: skip
def _index_put(
    call: Call, x: Definition, indices: Sequence[Definition | None], values: Definition, accumulate: bool = False
) -> Any:
    how = indexing(x.sizes, indices)
    if isinstance(how, str):
        return how

    def write(reader: Reader, where: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        return how.places(reader, where), reader.load(values, broadcast_indices(values.sizes, where))

    return scattered(call, x, how.result_sizes, "add" if accumulate else "set", write)


@kernel_rule("aten.put.default")
def _put(call: Call, x: Definition, index: Definition, source: Definition, accumulate: bool = False) -> Any:
    reason = refused_positions(index)
    if reason is not None:
        return reason
    count = product(x.sizes)
    from_flat, to_source = reshaped(x.sizes, (count,)), reshaped(source.sizes, index.sizes)

    def write(reader: Reader, indices: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        place = position_along(reader, index, indices, count, wraps=True)
        return from_flat([place]), reader.load(source, to_source(indices))

    return scattered(call, x, index.sizes, "add" if accumulate else "set", write)


@kernel_rule("aten.embedding_dense_backward.default")
def _embedding_backward(
    call: Call, grad: Definition, index: Definition, rows: Any, padding: Any, scale_by_frequency: bool
) -> Any:
    reason = refused_positions(index)
    if scale_by_frequency:
        reason = "how often each row is read must be counted first"
    if reason is not None:
        return reason

    def write(reader: Reader, indices: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        row = position_along(reader, index, indices[:-1], rows)
        value = reader.load(grad, indices)
        if padding != -1:
            value = reader.body.index(row).equals(reader.number(padding, torch.int64)).where(0, value)
        return [row, indices[-1]], value

    return scattered(call, filled(call.sizes, call.dtype, call.device, 0), grad.sizes, "add", write)


for _name in ("aten.masked_scatter.default", "aten.index_reduce.default"):
    rule(_name)(lambda call, *_, **__: "where a value goes depends on all elements before it")

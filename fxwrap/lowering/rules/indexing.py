"""Reads and writes at indices from tensors: gather, index, embedding, scatter, index_put and similar operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import (
    FLOAT8,
    HALF_PRECISION,
    INTEGERS,
    STORAGE_ONLY,
    ZERO,
    Index,
    IndexLike,
    Scalar,
    as_index,
    compute_dtype,
)
from fxwrap.lowering.fusion.definitions import (
    Definition,
    ElementReader,
    Indices,
    Pointwise,
    Scattered,
    broadcast_indices,
    copy_definition,
    pointwise,
    rounded_scatter,
)
from fxwrap.lowering.rules.indexing_common import (
    broadcast_sizes,
    canonicalize_dim,
    checked_indirect_index,
    replace_index,
)
from fxwrap.lowering.rules.known_indices import (
    KnownIndex,
    gathers_fewer,
    known_index,
    repeated_operands,
    sum_at_known_indices,
)
from fxwrap.lowering.rules.private_sums import private_copies, sum_of_private_copies
from fxwrap.lowering.rules.registry import (
    Declined,
    ElementBody,
    LoweringResult,
    NumberOrSymbol,
    OperatorCall,
    TensorOrNumber,
    check_index_dtype,
    lowering_rule,
)
from fxwrap.lowering.rules.views import reshape_index_map
from fxwrap.printers.cpp import MIN_SCATTERED_COLUMNS
from fxwrap.symbolic import Size, product
from fxwrap.wrapper_ir import varying_dims

# --- along one dimension ---------------------------------------------------------------------------------------------


def load_indirect_index(
    reader: ElementReader,
    index: Definition,
    indices: Indices,
    size: Size,
    *,
    wrap_negative: bool = False,
    error: str = "index",
    writes: bool = False,
) -> IndexLike:
    """Returns an element of an index tensor as an index into a dimension of this size, which the kernel may write."""
    position = reader.load(index, indices)
    return checked_indirect_index(reader, position, size, wrap_negative=wrap_negative, error=error, writes=writes)


def load_list_index(
    reader: ElementReader,
    x: Definition,
    dim: int,
    index: Definition,
    indices: Indices,
    *,
    error: str = "index",
    writes: bool = False,
) -> Indices:
    """Returns indices with the one at `dim` replaced by the element of an index tensor of rank 0 or 1."""
    position = [indices[dim] if indices else 0] if index.sizes else []
    row = load_indirect_index(reader, index, position, x.sizes[dim] if x.sizes else 1, error=error, writes=writes)
    return replace_index(indices, dim, row) if x.sizes else ()


@lowering_rule("aten.gather.default", index_argument=2)
def _gather(call: OperatorCall, x: Definition, dim: int, index: Definition) -> LoweringResult:
    dim = canonicalize_dim(dim, len(x.sizes))

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = load_indirect_index(reader, index, indices, x.sizes[dim] if x.sizes else 1, error="runtime")
        return reader.load(x, replace_index(indices, dim, row) if x.sizes else ())

    return call.define(body)


@lowering_rule("aten.index_select.default", index_argument=2)
def _index_select(call: OperatorCall, x: Definition, dim: int, index: Definition) -> LoweringResult:
    dim = canonicalize_dim(dim, len(x.sizes))
    return call.define(lambda reader, indices: reader.load(x, load_list_index(reader, x, dim, index, indices)))


@lowering_rule("aten.embedding.default", index_argument=1)
def _embedding(call: OperatorCall, weight: Definition, index: Definition) -> LoweringResult:
    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = load_indirect_index(reader, index, indices[:-1], weight.sizes[0])
        return reader.load(weight, [row, indices[-1]])

    return call.define(body)


@lowering_rule("aten.take.default", index_argument=1)
def _take(call: OperatorCall, x: Definition, index: Definition) -> Pointwise:
    """Reads `x`, flattened, at the elements of an index tensor."""
    count = product(x.sizes)
    from_flat, to_index = reshape_index_map(x.sizes, (count,)), reshape_index_map(index.sizes, call.sizes)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        flat = load_indirect_index(reader, index, to_index(indices), count, wrap_negative=True)
        return reader.load(x, from_flat([flat]))

    return call.define(body)


# --- advanced indexing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdvancedIndexing:
    """`x[indices]`: the index tensors by dimension of `x`.

    Their broadcast sizes `index_shape` are dimensions of the result, from `index_dim_start` on.
    """

    sizes: tuple[Size, ...]
    tensors: dict[int, Definition]
    index_shape: tuple[Size, ...]
    index_dim_start: int

    @property
    def result_sizes(self) -> tuple[Size, ...]:
        """The sizes of `x[indices]`."""
        others = [size for dim, size in enumerate(self.sizes) if dim not in self.tensors]
        return (*others[: self.index_dim_start], *self.index_shape, *others[self.index_dim_start :])

    def operand_indices(self, reader: ElementReader, indices: Indices, *, writes: bool = False) -> list[IndexLike]:
        """Returns the indices in `x` of an element of `x[indices]`, which the kernel may write."""
        start, end = self.index_dim_start, self.index_dim_start + len(self.index_shape)
        others = iter([*indices[:start], *indices[end:]])
        result: list[IndexLike] = []
        for dim, size in enumerate(self.sizes):
            tensor = self.tensors.get(dim)
            if tensor is None:
                result.append(next(others))
            else:
                position = broadcast_indices(tensor.sizes, indices[start:end])
                result.append(load_indirect_index(reader, tensor, position, size, wrap_negative=True, writes=writes))
        return result


def analyze_indexing(sizes: Sequence[Size], indices: Sequence[Definition | None]) -> AdvancedIndexing:
    """Returns how index tensors index a tensor of these sizes, by torch's rules.

    The broadcast sizes of adjacent index tensors replace the dimensions that they index; otherwise they come first.
    """
    tensors = {dim: item for dim, item in enumerate(indices) if item is not None}
    if any(item.dtype in (torch.bool, torch.uint8) for item in tensors.values()):
        raise Declined("the number of elements that a mask selects is unbacked")
    check_index_dtype(*tensors.values())
    dims = list(tensors)
    adjacent = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    index_shape = broadcast_sizes([item.sizes for item in tensors.values()])
    return AdvancedIndexing(tuple(sizes), tensors, index_shape, dims[0] if adjacent else 0)


@lowering_rule(
    "aten.index.Tensor", "aten.index.Tensor_hacked_twin", "aten._unsafe_index.Tensor",
    "aten._unsafe_index.Tensor_hacked_twin",
)  # fmt: skip
def _index(call: OperatorCall, x: Definition, indices: Sequence[Definition | None]) -> LoweringResult:
    indexing = analyze_indexing(x.sizes, indices)
    return call.define(lambda reader, at: reader.load(x, indexing.operand_indices(reader, at)))


ElementWrite = Callable[[ElementReader, Indices], tuple[Sequence[IndexLike], Scalar]]
"""Returns the indices that an iteration writes to, and the value."""

SCATTER_MODES = {"sum": "add", "add": "add", "prod": "prod", "multiply": "prod", "amax": "max", "amin": "min"}
"""Store modes by the `reduce` argument of scatter operators."""

_DOMINANT_NAN_BITS = {
    ("max", torch.float32): (torch.int32, 0x7FC00000), ("max", torch.float64): (torch.int64, 0x7FF8000000000000),
    ("min", torch.float32): (torch.int32, -0x400000), ("min", torch.float64): (torch.int64, -0x8000000000000),
}  # fmt: skip
"""The bits of the NaN that wins where a GPU compares the bits of floats in memory as integers."""


def check_any_order() -> None:
    """Declines stores of several iterations to one element where their order must be fixed."""
    if torch.are_deterministic_algorithms_enabled():
        raise Declined("deterministic algorithms are enabled, and kernels write in any order")


def check_store_mode(dtype: torch.dtype, spec: DeviceSpec, mode: str) -> None:
    """Declines stores that several iterations cannot combine into one element of this dtype.

    Eager promises no order for equal indices either, and on GPUs it adds with atomic operations too. On a CPU,
    values are added to an element in the order of the loops, which threads share where they do not meet.
    """
    check_any_order()
    if mode == "set" or (spec.cpu_rounding and mode == "add" and dtype in HALF_PRECISION):
        return
    if dtype is torch.bool or dtype in FLOAT8 or (dtype in STORAGE_ONLY and spec.cpu_rounding):
        raise Declined(f"{dtype} has no atomic operations")
    if mode == "prod" and not spec.supports_all_atomics:
        raise Declined(f"there is no atomic multiplication on {spec.device_type}")
    if dtype in INTEGERS and dtype.itemsize < 4 and not spec.supports_all_atomics:
        raise Declined(f"{dtype} has no atomic operations on {spec.device_type}")


def lower_scatter(
    call: OperatorCall,
    initial: Definition,
    space: Sequence[Size],
    mode: str,
    write: ElementWrite,
    *,
    rounds_once: bool = False,
    of_rows: bool = False,
    along: Sequence[int] = (),
) -> Definition:
    """Returns `initial` with the values of `write` combined into it, for each element of an index space.

    Half precision is combined in a float32 tensor, which is cast: where eager `rounds_once`, and where that tensor is
    no larger than the space. Larger tensors are added to in their own dtype, as in eager mode, because the two passes
    over float32 would take longer than the additions; on a CPU, only whole rows are.
    The body of an empty space has no reads: nothing would order it behind what it reads. With `of_rows`, an element's
    last index is the last one of the space. `along` are the dimensions of the space that an element's computed index
    depends on.
    """
    check_store_mode(call.dtype, call.spec, mode)
    is_wide = rounds_once or mode != "add" or not is_larger(call.sizes, space)
    if call.spec.cpu_rounding and call.dtype in HALF_PRECISION and not is_wide:
        if not (of_rows and isinstance(space[-1], int) and space[-1] >= MIN_SCATTERED_COLUMNS):
            raise Declined("it may add many numbers of half precision to one element, which the library rounds once")
    computes = compute_dtype(call.dtype)
    dtype = computes if call.dtype in HALF_PRECISION and mode != "set" and is_wide else call.dtype

    def body(reader: ElementReader, indices: Indices) -> tuple[Sequence[Index], Scalar]:
        if 0 in space:
            return [ZERO] * len(call.sizes), reader.number(0, computes)
        target, value = write(reader, indices)
        return [as_index(index) for index in target], value.to(computes)

    first = initial if dtype is call.dtype else copy_definition(initial, dtype)
    copies = private_copies(call.sizes, space) if along and mode == "add" and call.spec.massively_parallel else 1
    if copies > 1:
        total = sum_of_private_copies(first, space, along, body, copies, of_rows=of_rows)

        def added(reader: ElementReader, indices: Indices) -> Scalar:
            start, added = reader.load(first, indices), reader.load(total, indices)
            return added if start.constant == 0 else start + added

        return call.define(added)
    if (mode, dtype) in _DOMINANT_NAN_BITS:
        first = _canonicalize_nans(first, mode)
    scattered = Scattered(call.sizes, dtype, call.device, first, tuple(space), mode, (body,))
    return rounded_scatter(scattered, call.dtype)


def is_larger(sizes: Sequence[Size], space: Sequence[Size]) -> bool:
    """Whether a tensor has more elements than an index space, as far as both are known."""
    own, other = product(sizes), product(space)
    return not isinstance(own, int) or not isinstance(other, int) or own > other


def _canonicalize_nans(initial: Definition, mode: str) -> Definition:
    """Returns a tensor whose NaNs have the bits of the NaN that wins."""
    bits_dtype, bits = _DOMINANT_NAN_BITS[mode, initial.dtype]

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        x = reader.load(initial, indices)
        nan = x.body.compute("bitcast", reader.number(bits, bits_dtype), dtype=initial.dtype)
        return x.apply("isnan").where(nan, x)

    return pointwise(initial.sizes, initial.dtype, initial.device, body)


def _source_loader(call: OperatorCall, source: TensorOrNumber) -> ElementBody:
    """Returns the body that reads a source: a tensor's element, or a number."""
    if isinstance(source, Definition):
        return lambda reader, indices: reader.load(source, indices[: len(source.sizes)])
    return lambda reader, indices: reader.number(source, call.dtype)


# --- an index tensor with the source's sizes -------------------------------------------------------------------------


def _scatter(
    call: OperatorCall, x: Definition, dim: int, index: Definition, source: TensorOrNumber, mode: str
) -> LoweringResult:
    dim, value = canonicalize_dim(dim, len(x.sizes)), _source_loader(call, source)

    def write(reader: ElementReader, indices: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        size = x.sizes[dim] if x.sizes else 1
        row = load_indirect_index(reader, index, indices, size, error="runtime", writes=True)
        return replace_index(indices, dim, row) if x.sizes else (), value(reader, indices)

    return lower_scatter(call, x, index.sizes, mode, write, of_rows=dim + 1 < len(x.sizes), along=[dim])


@lowering_rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", index_argument=2)
def _scatter_source(
    call: OperatorCall, x: Definition, dim: int, index: Definition, source: TensorOrNumber
) -> LoweringResult:
    return _scatter(call, x, dim, index, source, "add" if call.operator == "scatter_add" else "set")


@lowering_rule("aten.scatter.reduce", "aten.scatter.value_reduce", index_argument=2)
def _scatter_combine(
    call: OperatorCall, x: Definition, dim: int, index: Definition, source: TensorOrNumber, reduce: str
) -> LoweringResult:
    return _scatter(call, x, dim, index, source, SCATTER_MODES[reduce])


@lowering_rule("aten.scatter_reduce.two", index_argument=2)
def _scatter_reduce(
    call: OperatorCall, x: Definition, dim: int, index: Definition, source: Definition, reduce: str, include_self: bool
) -> LoweringResult:
    if reduce not in SCATTER_MODES:
        raise Declined(f"{reduce} depends on the number of values that are written to an element")
    if not include_self:
        raise Declined("the elements that keep their value depend on all indices")
    return _scatter(call, x, dim, index, source, SCATTER_MODES[reduce])


# --- an index tensor of one dimension --------------------------------------------------------------------------------


def _scatter_slices(
    call: OperatorCall, x: Definition, dim: int, index: Definition, space: Sequence[Size], mode: str, value: ElementBody
) -> LoweringResult:
    """Writes `value(reader, indices)`, for each element of the space, to the slices that an index tensor selects."""
    error = "runtime" if mode == "add" else "index"  # eager's of index_add, and of the others

    def write(reader: ElementReader, indices: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        target = load_list_index(reader, x, dim, index, indices, error=error, writes=True)
        return target, value(reader, indices)

    return lower_scatter(call, x, space, mode, write, of_rows=dim + 1 < len(x.sizes), along=[dim])


def _source_space(x: Definition, dim: int, index: Definition) -> tuple[Size, ...]:
    """Returns the sizes of a source: the tensor's, with the number of indices along the dimension."""
    count = index.sizes[0] if index.sizes else 1
    return tuple(replace_index(x.sizes, dim, count)) if x.sizes else (count,)


@lowering_rule("aten.index_copy.default", equal=("self", "source"), index_argument=2, index_dtypes=(torch.int64,))
@lowering_rule("aten.index_add.default", equal=("self", "source"), index_argument=2)
def _index_add_or_copy(
    call: OperatorCall, x: Definition, dim: int, index: Definition, source: Definition, alpha: NumberOrSymbol = 1
) -> LoweringResult:
    dim = canonicalize_dim(dim, len(x.sizes))
    space = _source_space(x, dim, index)
    to_source = reshape_index_map(source.sizes, space)

    def value(reader: ElementReader, indices: Indices) -> Scalar:
        element = reader.load(source, to_source(indices))
        return element if isinstance(alpha, int) and alpha == 1 else element * reader.number(alpha, source.dtype)

    mode = "add" if call.operator == "index_add" else "set"
    return _scatter_slices(call, x, dim, index, space, mode, value)


@lowering_rule(
    "aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor", equal=("self", "value"), index_argument=2,
    index_dtypes=(torch.int64,),
)  # fmt: skip
def _index_fill(
    call: OperatorCall, x: Definition, dim: int, index: Definition, value: TensorOrNumber
) -> LoweringResult:
    dim = canonicalize_dim(dim, len(x.sizes))
    return _scatter_slices(call, x, dim, index, _source_space(x, dim, index), "set", _source_loader(call, value))


# --- several index tensors -------------------------------------------------------------------------------------------


@lowering_rule(
    "aten.index_put.default", "aten.index_put.hacked_twin", "aten._unsafe_index_put.default",
    "aten._unsafe_index_put.hacked_twin", equal=("self", "values"),
)  # fmt: skip
def _index_put(
    call: OperatorCall, x: Definition, indices: Sequence[Definition | None], values: Definition, accumulate: bool
) -> LoweringResult:
    indexing = analyze_indexing(x.sizes, indices)
    if accumulate and (known := _known_indices(call, indexing)):
        return _gathered_sums(call, x, indexing, known, values)

    def write(reader: ElementReader, at: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        target = indexing.operand_indices(reader, at, writes=True)
        return target, reader.load(values, broadcast_indices(values.sizes, at))

    of_rows = len(indices) < len(x.sizes) and all(item is not None for item in indices)
    along = [*range(indexing.index_dim_start, indexing.index_dim_start + len(indexing.index_shape))]
    mode = "add" if accumulate else "set"
    return lower_scatter(call, x, indexing.result_sizes, mode, write, of_rows=of_rows, along=along)


def _known_indices(call: OperatorCall, indexing: AdvancedIndexing) -> dict[int, KnownIndex]:
    """Returns the index tensors by dimension, if each is known and along a dimension of its own; else none."""
    dims = [varying_dims(item.sizes, len(indexing.index_shape)) for item in indexing.tensors.values()]
    own = [dim for dim, size in enumerate(indexing.index_shape) if size != 1]
    if sorted(itertools.chain(*dims)) != own or any(len(item) != 1 for item in dims):
        return {}
    known: dict[int, KnownIndex] = {}
    for dim, tensor in indexing.tensors.items():
        index = known_index(tensor, indexing.sizes[dim])
        if index is None:
            return {}
        known[dim] = index
    read = math.prod([index.width for index in known.values()])
    targets = product([indexing.sizes[dim] for dim in known])
    return known if gathers_fewer(read, targets, product(indexing.index_shape)) else {}


def _gathered_sums(
    call: OperatorCall, x: Definition, indexing: AdvancedIndexing, known: Mapping[int, KnownIndex], values: Definition
) -> LoweringResult:
    """Adds to each element of `x` the values whose indices it has: at most a few, next to each other.

    Weights of these values, which are the same for many, are loaded: each element reads several.
    """
    rank = len(indexing.index_shape)
    for operand in repeated_operands(values):
        call.in_memory.add(operand)
    place = {dim: varying_dims(item.sizes, rank)[0] for dim, item in indexing.tensors.items()}

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        others = [index for dim, index in enumerate(indices) if dim not in known]

        def load(positions: Mapping[int, Index]) -> Scalar:
            inner: list[IndexLike] = [0] * rank
            for dim, position in positions.items():
                inner[place[dim]] = position
            start = indexing.index_dim_start
            return reader.load(values, broadcast_indices(values.sizes, [*others[:start], *inner, *others[start:]]))

        total = sum_at_known_indices(reader, known, indices, load, values.dtype)
        first = reader.load(x, indices)
        return total if first.constant == 0 else first + total

    return call.define(body)


@lowering_rule("aten.put.default", equal=("self", "source"), index_argument=1, index_dtypes=(torch.int64,))
def _put(call: OperatorCall, x: Definition, index: Definition, source: Definition, accumulate: bool) -> LoweringResult:
    count = product(x.sizes)
    from_flat, to_source = reshape_index_map(x.sizes, (count,)), reshape_index_map(source.sizes, index.sizes)

    def write(reader: ElementReader, indices: Indices) -> tuple[Sequence[IndexLike], Scalar]:
        flat = load_indirect_index(reader, index, indices, count, wrap_negative=True, writes=True)
        return from_flat([flat]), reader.load(source, to_source(indices))

    along = [*range(len(index.sizes))]
    return lower_scatter(call, x, index.sizes, "add" if accumulate else "set", write, along=along)


@lowering_rule("aten.masked_scatter.default", "aten.index_reduce.default")
def _order_dependent(call: OperatorCall) -> NoReturn:
    raise Declined("where a value is written depends on all elements before it")

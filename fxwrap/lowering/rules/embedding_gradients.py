"""Gradients of embeddings: rows of gradients are added to the rows of a table that they were read from.

The rows of a half-precision table are summed in float32. Where the table is larger than all gradients, these sums are
in a compact tensor, which has a row for each gradient: the rows of the table that none was read from need neither zeros
in float32 nor a cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxwrap.loop_ir import HALF_PRECISION, Index, IndexLike, Scalar, as_index, delinearize_index, linearize_index
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Pointwise, Scattered, pointwise
from fxwrap.lowering.rules.creation import full_tensor
from fxwrap.lowering.rules.indexing import check_store_mode, is_larger, load_indirect_index, lower_scatter
from fxwrap.lowering.rules.registry import Declined, LoweringResult, OperatorCall, lowering_rule
from fxwrap.symbolic import Size, product

_MAX_SUM_RATIO = 8
"""The most elements of a half-precision table for each gradient with which its sums in float32 are faster."""

_COMPACT_LAUNCHES = 2
"""The launches that compact sums need beyond those of a table in float32: they write and fill the slots."""


@lowering_rule("aten.embedding_dense_backward.default", index_argument=1)
def _embedding_backward(
    call: OperatorCall, grad: Definition, index: Definition, rows: Size, padding: int, scale_by_frequency: bool
) -> LoweringResult:
    if scale_by_frequency:
        raise Declined("the number of reads of each row must be counted first")
    if _is_compact(call, grad):
        check_store_mode(torch.float32, call.spec, "add")
        return _CompactSums(call, grad, index, rows, padding).table()
    if call.dtype in HALF_PRECISION and is_larger(call.sizes, (_MAX_SUM_RATIO, *grad.sizes)):
        raise Declined("two passes over a table in float32 would take longer than the library, which sorts the rows")

    def write(reader: ElementReader, indices: Indices) -> tuple[list[IndexLike], Scalar]:
        row = load_indirect_index(reader, index, indices[:-1], rows, writes=True)
        value = reader.load(grad, indices)
        if padding != -1:
            value = reader.body.index(row).equals(reader.number(padding, torch.int64)).where(0, value)
        return [row, indices[-1]], value

    zeros = full_tensor(call.sizes, call.dtype, call.device, 0)
    along = [*range(len(index.sizes))]
    return lower_scatter(call, zeros, grad.sizes, "add", write, rounds_once=True, of_rows=True, along=along)


def _is_compact(call: OperatorCall, grad: Definition) -> bool:
    """Whether compact sums save more bytes than launches: a float32 table is written once and read once."""
    table, gradients = product(call.sizes), product(grad.sizes)
    if call.dtype not in HALF_PRECISION or not isinstance(table, int) or not isinstance(gradients, int):
        return False
    if gradients > torch.iinfo(torch.int32).max:  # slots are int32
        return False
    saved = 2 * torch.float32.itemsize * (table - gradients)
    is_worth_it = saved >= _COMPACT_LAUNCHES * call.spec.combo_kernel_bytes
    return call.spec.massively_parallel and gradients > 0 and is_worth_it


@dataclass(frozen=True)
class _CompactSums:
    """Sums of the gradients of a table's rows, in slots: one of the gradients of a row has the row's sum.

    Which one is arbitrary: each stores its number in an element of the table's size, and one of these stays. The sum
    begins as that gradient; the others are added to it.
    """

    call: OperatorCall
    grad: Definition
    index: Definition
    rows: Size
    padding: int

    @property
    def count(self) -> Size:
        """The number of gradients."""
        return product(self.index.sizes)

    def table(self) -> Pointwise:
        """Returns the gradient of the table: the sum of each row that was read, zeros of the others."""
        slots = self._slots()
        sums = self._sums(slots)

        def body(reader: ElementReader, indices: Indices) -> Scalar:
            slot = reader.load(slots, indices[:-1]).to(torch.int64)
            is_read = slot >= 0
            at = reader.body.indirect_index(slot, self.count, is_read)
            return reader.body.where(is_read, lambda: reader.load(sums, [at, indices[-1]]), 0)

        return self.call.define(body)

    def _slots(self) -> Scattered:
        """Returns for each row of the table the number of one of its gradients, -1 for a row that has none."""

        def body(reader: ElementReader, indices: Indices) -> tuple[list[Index], Scalar]:
            row = as_index(load_indirect_index(reader, self.index, indices, self.rows, writes=True))
            number = reader.body.index(self._number(indices))
            if self.padding != -1:
                number = reader.body.index(row).equals(reader.number(self.padding, torch.int64)).where(-1, number)
            return [row], number.to(torch.int32)

        empty = full_tensor((self.rows,), torch.int32, self.call.device, -1)
        return Scattered(empty.sizes, torch.int32, self.call.device, empty, self.index.sizes, "set", (body,))

    def _sums(self, slots: Definition) -> Scattered:
        """Returns the sums at their slots. Other elements are zeros, which nothing reads."""
        sizes = (self.count, self.grad.sizes[-1])

        def first(reader: ElementReader, indices: Indices) -> Scalar:
            at = delinearize_index(as_index(indices[0]), self.index.sizes)
            is_first = self._slot(reader, slots, at).equals(reader.body.index(self._number(at)))
            return reader.body.where(is_first, lambda: reader.load(self.grad, [*at, indices[-1]]), 0)

        def body(reader: ElementReader, indices: Indices) -> tuple[list[Index], Scalar]:
            slot = self._slot(reader, slots, indices[:-1])
            is_other = (slot >= 0) & ~slot.equals(reader.body.index(self._number(indices[:-1])))
            value = reader.body.where(is_other, lambda: reader.load(self.grad, indices), 0)
            at = reader.body.indirect_index(slot, self.count, is_other)
            return [at, as_index(indices[-1])], value

        begun = pointwise(sizes, torch.float32, self.call.device, first)
        return Scattered(sizes, torch.float32, self.call.device, begun, self.grad.sizes, "add", (body,))

    def _slot(self, reader: ElementReader, slots: Definition, at: Indices) -> Scalar:
        """Returns the slot of the row that a gradient belongs to, an int64."""
        row = load_indirect_index(reader, self.index, at, self.rows)
        return reader.load(slots, [row]).to(torch.int64)

    def _number(self, at: Indices) -> Index:
        """Returns the number of a gradient."""
        return linearize_index(at, self.index.sizes)

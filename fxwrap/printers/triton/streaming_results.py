"""What streaming reductions in Triton write: results of rows after the last block, and updates of memory in each."""

from __future__ import annotations

import torch

from fxwrap.loop_ir import Axis, Constant, KernelError, Store, Update, operands
from fxwrap.printers.triton.blocks import Scope
from fxwrap.printers.triton.schedule import ATOMIC_DTYPES, atomic_text
from fxwrap.printers.triton.streaming_scores import LOWEST
from fxwrap.printers.triton.streaming_values import StreamingValuePrinter


class StreamingResultPrinter(StreamingValuePrinter):
    """Prints the additions and stores of one streaming reduction."""

    def column(self, position: int) -> Axis | None:
        """Returns the column axis that a value depends on."""
        axes = [axis for axis in self.parts.columns if axis in self.kernel.value_axes[position]]
        if len(axes) > 1:
            raise KernelError("a result of its streaming reduction depends on several columns")
        return axes[0] if axes else None

    def write_results(self, rows: Scope) -> None:
        """Prints what is added to memory for each row, and the stores of results."""
        parts, scopes = self.parts, dict[Axis | None, Scope]()
        base = rows.inner()
        if parts.softmax is not None:
            maximum = "(largest / log2_e)" if self.is_half else "largest"
            if self.is_half and self.may_overflow:
                maximum = f"tl.where(largest < {LOWEST}, largest, {maximum})"
            base.text[parts.softmax.maximum] = maximum
        base.text |= {item: f"sum_{item}" for item in parts.results if item not in base.text}
        for update in parts.row_updates:
            self.write([update.value], base)
            self.add(update, self.value(update.value, base), base)
        for position, operation in enumerate(self.kernel.operations):
            if isinstance(operation, Store) and operation.mode == "set" and not self.kernel.varying[position]:
                column = self.column(position)
                if column not in scopes:
                    scopes[column] = base.inner()
                    if column is not None:
                        self.block(scopes[column], column, self.block_names[column], 1, "")
                self.write(operands(operation), scopes[column])
                self._store(position, operation, scopes[column])

    def add(self, update: Update, value: str, scope: Scope) -> None:
        """Adds a matrix of values to memory, those of one address as their sum."""
        store = self.kernel.operations[update.position]
        assert isinstance(store, Store)
        dtype = self.dtype_of(update.value)
        if dtype not in ATOMIC_DTYPES["add"]:
            raise KernelError(f"Triton has no atomic addition of {dtype}")
        needed = {*operands(store), *update.conditions} - {update.value}
        self.write(sorted(needed if store.mask is None else needed - {store.mask}), scope)
        varies, address_axes = self.kernel.value_axes, self.kernel.address_axes[update.position]
        used = [axis for axis in (self.parts.row, self.inner) if axis in varies[update.value]]
        summed = [axis for axis in used if axis not in address_axes]
        masks = {axis: [scope.masks[axis]] if axis in scope.masks else [] for axis in used}
        conditions = self._conditions(update, scope)
        if summed:
            where = [*[text for axis in used for text in masks[axis]], *conditions.values()]
            value = f"tl.where({' & '.join(where)}, {value}, 0.0)" if where else value
        for axis in summed:
            value = f"tl.sum({value}, {scope.dimension[axis]}, keep_dims=True)"
        address, _ = self.access(store.buffer, store.index, address_axes, None, scope, is_matrix=True)
        mask = [text for axis in used if axis not in summed for text in masks[axis]]
        mask += [text for item, text in conditions.items() if varies[item].isdisjoint(summed)]
        self.line(atomic_text("add", dtype, address, value, " & ".join(mask), self.use), store.origin)

    def set(self, update: Update, store: Store, value: str, scope: Scope) -> None:
        """Writes a matrix of values to memory."""
        inside = scope.inner()
        inside.text[update.value] = value
        needed = {*operands(store), *update.conditions} - {update.value}
        self.write(sorted(needed if store.mask is None else needed - {store.mask}), inside)
        axes = self.kernel.address_axes[update.position]
        address, _ = self.access(store.buffer, store.index, axes, None, inside, is_matrix=True)
        masks = [inside.masks[axis] for axis in (self.parts.row, self.inner) if axis in inside.masks]
        masks += self._conditions(update, inside).values()
        mask = f", mask={' & '.join(masks)}" if masks else ""
        self.line(f"tl.store({address}, {self.value(store.value, inside)}{mask})", store.origin)

    def _conditions(self, update: Update, scope: Scope) -> dict[int, str]:
        """Returns the texts of an update's conditions, without one that is always true."""
        return {
            item: f"({self.value(item, scope)})" for item in update.conditions
            if self.kernel.operations[item] != Constant(True, torch.bool)
        }  # fmt: skip

    def _store(self, position: int, store: Store, scope: Scope) -> None:
        axes = self.kernel.value_axes[position]
        address, mask = self.access(store.buffer, store.index, axes, store.mask, scope)
        self.line(f"tl.store({address}, {self.value(store.value, scope)}{mask})", store.origin)

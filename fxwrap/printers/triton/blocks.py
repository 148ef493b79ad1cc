"""Programs of Triton that compute blocks: matrices of values of the loop IR, of which each dimension is an axis.

A scope is a part of the text. It says which axes are dimensions of its matrices, and which values are known there.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir import (
    HALF_PRECISION,
    Axis,
    Compute,
    Constant,
    DeviceAssert,
    Index,
    IndexValue,
    Kernel,
    KernelError,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    SymbolicScalar,
    operands,
)
from fxwrap.printers.triton.kernel_text import TritonIndexPrinter
from fxwrap.printers.triton.kernel_writer import KernelWriter
from fxwrap.printers.triton.operations import TRITON_DTYPES, Arithmetic, literal_text


@dataclass
class Scope:
    """A part of the text: the dimension (0 or 1) of each axis of its matrices, their names and masks, and values."""

    dimension: dict[Axis, int] = field(default_factory=dict)
    names: dict[Axis, str] = field(default_factory=dict)
    masks: dict[Axis, str] = field(default_factory=dict)
    blocks: dict[Axis, str] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)

    def inner(self) -> Scope:
        """Returns a copy for a part inside this one."""
        return Scope(dict(self.dimension), dict(self.names), dict(self.masks), dict(self.blocks), dict(self.text))


class BlockPrinter(KernelWriter):
    """Prints the values, assertions and memory accesses of a kernel in blocks.

    `constants` are the sizes of blocks by name, which are compile-time arguments of the kernel.
    """

    def __init__(self, kernel: Kernel, limits: Mapping[str, int], constants: Mapping[str, int]) -> None:
        super().__init__(kernel, limits)
        self.constants = dict(constants)

    def _exact_indices(self) -> Iterator[Index]:
        values = [item.index for item in self.kernel.operations if isinstance(item, IndexValue)]
        return itertools.chain(super()._exact_indices(), values)

    # --- axes ---------------------------------------------------------------------------------------------------------

    def block(self, scope: Scope, axis: Axis, block: str, dimension: int, start: str) -> None:
        """Prints the positions of a block of an axis, as a row or a column of a matrix, and their mask."""
        name, subscript = f"{axis.name}_{'xy'[dimension]}", ("[:, None]", "[None, :]")[dimension]
        cast = ".to(tl.int64)" if self.use_int64 else ""
        self.line(f"{name} = {start + ' + ' if start else ''}tl.arange(0, {block}){cast}{subscript}")
        scope.names[axis], scope.dimension[axis], scope.blocks[axis] = name, dimension, block
        if not isinstance(axis.size, int) or axis.size % self.constants[block]:
            self.line(f"{name}_mask = {name} < {self.index_printer(scope).size_operand(axis.size)}")
            scope.masks[axis] = f"{name}_mask"

    def index_printer(self, scope: Scope) -> TritonIndexPrinter:
        """Returns the printer of indices in a scope."""

        def value(position: int) -> str:
            text = self.value(position, scope)
            return text if self.use_int64 else f"tl.cast({text}, tl.int32)"

        return TritonIndexPrinter(scope.names, value, self.helpers)

    # --- values -----------------------------------------------------------------------------------------------------

    def fixed(self, targets: Sequence[int], axes: Collection[Axis], scope: Scope) -> list[int]:
        """Returns the values that the targets need and that depend on these axes only."""
        allowed = frozenset(axes)
        positions = sorted(self.kernel.backward_slice(targets, scope.text.keys()))
        fixed = {item for item in positions if self.kernel.value_axes[item] <= allowed}
        used = {
            operand for item in positions if item not in fixed for operand in operands(self.kernel.operations[item])
        }
        return sorted((used | {*targets}) & fixed)

    def write(self, targets: Iterable[int], scope: Scope) -> None:
        """Prints the values that the targets are computed from and that the scope does not know."""
        for position in sorted(self.kernel.backward_slice(targets, scope.text.keys())):
            self._operation(position, scope)

    def asserts(self, axes: Collection[Axis], checked: Collection[Axis], scope: Scope) -> None:
        """Prints the assertions that depend on these axes, and not only on those in `checked`."""
        for position, operation in enumerate(self.kernel.operations):
            depends = self.kernel.value_axes[position]
            if isinstance(operation, DeviceAssert) and depends <= frozenset(axes):
                if checked and depends <= frozenset(checked):
                    continue
                self.write(operands(operation), scope)
                masks = [scope.masks[axis] for axis in depends if axis in scope.masks]
                masks += [self.value(operation.mask, scope)] if operation.mask is not None else []
                mask = f", mask={' & '.join(sorted(masks))}" if masks else ""
                condition = self.value(operation.condition, scope)
                self.line(f"tl.device_assert({condition}, {operation.printed_message!r}{mask})", operation.origin)

    def value(self, position: int, scope: Scope) -> str:
        """Returns the text of a value that a scope knows."""
        operation = self.kernel.operations[position]
        if isinstance(operation, Constant):
            dtype = TRITON_DTYPES[operation.dtype]
            return f"tl.full((), {literal_text(operation.value, operation.dtype)}, {dtype})"
        return scope.text[position]

    def _operation(self, position: int, scope: Scope) -> None:
        operation = self.kernel.operations[position]
        match operation:
            case Constant():
                scope.text[position] = literal_text(operation.value, operation.dtype)
            case Load():
                axes = self.kernel.value_axes[position]
                address, mask = self.access(operation.buffer, operation.index, axes, operation.mask, scope)
                other = ""
                if mask:
                    dtype = torch.float32 if operation.dtype in HALF_PRECISION else operation.dtype
                    other = f", other={literal_text(operation.other, dtype)}"
                self._assign(position, operation, operation.buffer, f"tl.load({address}{mask}{other})", scope)
            case SymbolicScalar():
                number = self.index_printer(scope).size(operation.expression)
                text = f"tl.full((), {number}, {TRITON_DTYPES[operation.dtype]})"
                self._assign(position, operation, "number", text, scope)
            case IndexValue():
                text = f"tl.cast({self.index_printer(scope)(operation.index)}, {TRITON_DTYPES[operation.dtype]})"
                self._assign(position, operation, "index", text, scope)
            case Compute():
                name, text = self.compute_text(position, operation, scope)
                self._assign(position, operation, name, text, scope)
            case Reduce() | Scan() | ReductionResult() | Store() | DeviceAssert():
                raise KernelError("an operation of its streaming reduction has no value")
            case _:
                assert_never(operation)

    def compute_text(self, position: int, operation: Compute, scope: Scope) -> tuple[str, str]:
        """Returns a name for the result of an operation, and its expression."""
        result = Arithmetic(self.kernel)(
            position, operation, lambda item: self.value(item, scope), lambda item: scope.text[item]
        )
        self.helpers.update(result.helpers)
        return result.name, result.text

    def _assign(self, position: int, operation: Operation, wanted: str, text: str, scope: Scope) -> None:
        name = self.names.create_name(wanted)
        self.line(f"{name} = {text}", operation.origin)
        scope.text[position] = name

    def access(
        self, buffer: str, index: Index, axes: Collection[Axis], condition: int | None, scope: Scope,
        is_matrix: bool = False,
    ) -> tuple[str, str]:  # fmt: skip
        """Returns the address of an access to memory and its mask, both broadcast to the axes that it depends on.

        With `is_matrix`, it is a matrix also where it depends on no axis of matrices.
        """
        text = self.index_printer(scope)(index)
        span = [axis for axis in axes if axis in scope.dimension]
        masks = sorted([scope.masks[axis] for axis in axes if axis in scope.masks])
        if condition is not None:
            masks.append(self.value(condition, scope))
        if span or is_matrix:
            shape = [next((scope.blocks[axis] for axis in span if scope.dimension[axis] == n), "1") for n in (0, 1)]
            if index.constant is not None:
                text = f"tl.full((), {index.constant}, {'tl.int64' if self.use_int64 else 'tl.int32'})"
            text = f"tl.broadcast_to({text}, ({', '.join(shape)}))"
        mask = f", mask={' & '.join(masks)}" if masks else ""
        return f"{self.pointers[buffer]} + {text}", mask

"""Kernels of elements, reductions and scans as Triton kernels.

A program computes a tile: blocks of the parallel axes and all of the reduced axes. Rows that fit registers are
persistent, and the body is straight-line code. Longer rows are read in one loop for each stage, and later stages load
and compute again the operands they share with earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir import (
    HALF_PRECISION,
    ONE,
    Axis,
    Compute,
    Constant,
    DeviceAssert,
    Index,
    IndexValue,
    IndirectIndex,
    Kernel,
    KernelError,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    SymbolicScalar,
    as_index,
)
from fxwrap.printers.triton.accesses import row_step
from fxwrap.printers.triton.fast_math import allows_fast_softmax
from fxwrap.printers.triton.kernel_text import BodyParameters, TritonKernelText, parenthesize
from fxwrap.printers.triton.one_hot import SelectedElement
from fxwrap.printers.triton.operations import TRITON_DTYPES, Arithmetic, literal_text
from fxwrap.printers.triton.reductions import (
    RESULT_NAMES,
    RowContext,
    accumulate,
    reduce_one_hot,
    reduce_persistent,
    scan_block,
)
from fxwrap.printers.triton.schedule import ATOMIC_DTYPES, Schedule, atomic_text, eviction_policy, make_schedule
from fxwrap.printers.triton.tile_offsets import TileOffsetPrinter
from fxwrap.printers.triton.tiling import Dimension, TiledConfiguration

_INT32 = 2**31 - 1


class TilePrinter(TileOffsetPrinter):
    """Prints one kernel. `selected` are the reductions that select an element of their row, by position."""

    def __init__(
        self,
        kernel: Kernel,
        configuration: TiledConfiguration,
        limits: Mapping[str, int],
        parameters: BodyParameters,
        selected: Mapping[int, SelectedElement] | None = None,
    ) -> None:
        super().__init__(kernel, configuration, limits, parameters)
        self.selected = selected or {}
        self.is_looped = configuration.looped and bool(kernel.reduced)
        self.schedule: Schedule = make_schedule(kernel, configuration.looped)
        self.arithmetic = Arithmetic(kernel)
        self.allows_fast_softmax = allows_fast_softmax(kernel)
        self.text: dict[int, str] = {}
        self.results: dict[int, list[str]] = {}
        self.zero_filled: frozenset[int] = frozenset()

    # --- the whole --------------------------------------------------------------------------------------------------

    def print(self) -> TritonKernelText:
        """Returns the kernel's text. Raises KernelError for atomic stores that GPUs have no instruction for."""
        self._check_stores()
        self._analyze_dimensions()
        self._emit_program_offsets()
        if self.is_looped:
            self._emit_looped()
        else:
            self._emit_persistent()
        constants = {item.block_constant: item.block for item in self.tile.dimensions}
        if self._has_loop():
            constants["LOOP_STAGES"] = self.configuration.num_stages
        return self.kernel_text(constants, self.configuration.launch_options, self.tile.num_programs)

    def _has_loop(self) -> bool:
        """Whether the text has a loop, whose pipeline stages are a constant."""
        return self.is_looped

    def _check_stores(self) -> None:
        types = {buffer.name: buffer.dtype for buffer in self.kernel.outputs}
        for store in self.kernel.stores:
            if store.mode != "set" and types[store.buffer] not in ATOMIC_DTYPES.get(store.mode, ()):
                raise KernelError(f"Triton has no atomic {store.mode} on {types[store.buffer]} (output {store.buffer})")

    def _row(self) -> RowContext:
        r = self._row_dimension
        assert r is not None, "a kernel with reductions has reduced axes"
        return self._context(r)

    def _context(self, r: int) -> RowContext:
        """Returns the context of reductions along a dimension of the tile."""
        dimension = self.tile.dimensions[r]
        return RowContext(
            axis=r,
            rank=len(self.tile.dimensions),
            shape=self.tile.shape,
            mask=self.masks.get(r),
            position=self.positions[dimension.name],
            size=dimension.size,
            count=self.index_printer.size_operand(dimension.size),
            block=dimension.block_constant,
            width=dimension.block,
            lanes=self.row_lanes,
            exp=self._exp_in_softmax,
            create_name=self.names.create_name,
            use=self.use,
        )

    def _exp_in_softmax(self) -> str:
        """Returns the exponential function of softmax reductions, equal to that of later exponentials, if any.

        Without these, exponentials may flush to zero, since the sums are at least 1.
        """
        if not self.allows_fast_softmax:
            return "libdevice.exp"
        is_reused = any(isinstance(item, Compute) and item.name == "exp" for item in self.kernel.operations)
        return "tl.exp" if is_reused else self.use("exp_ftz")

    # --- the body ---------------------------------------------------------------------------------------------------

    def _emit_persistent(self) -> None:
        barrier = self.schedule.barrier
        for position in self.schedule.straight_line:
            if barrier and isinstance(self.kernel.operations[position], Store):
                self.line("tl.debug_barrier()  # every thread has read what is now written")
                barrier = False
            self._operation(position, looped=False)

    def _emit_looped(self) -> None:
        for stage in self.schedule.stages:
            for position in stage.before:
                self._operation(position, looped=True)
            if stage.loop:
                self._loop(stage.loop, stage.last_use)
        if self.schedule.barrier:
            self.line("tl.debug_barrier()  # every thread has read what is now written")
        for position in self.schedule.after_loops:
            self._operation(position, looped=True)

    def _loop(self, positions: tuple[int, ...], last_use: frozenset[int]) -> None:
        """Prints one loop over the row."""
        r = self.tile.reduced
        assert r is not None, "a loop runs over reduced axes"
        dimension = self.tile.dimensions[r]
        lanes = f"tl.arange(0, {dimension.block_constant}){self.tile.broadcast_subscript(r)}"
        with self._loop_over(dimension) as (before, after):
            for position in positions:
                operation = self.kernel.operations[position]
                if not isinstance(operation, Reduce | Scan):
                    self._operation(position, looped=True, last_use=position in last_use)
                    continue
                value, dtype = self._row_value(operation)
                names = self._result_names(position)
                if isinstance(operation, Reduce):
                    reduction = accumulate(operation, value, dtype, names, self._row())
                    first, inside = reduction.before, reduction.inside
                    after += [line.replace(self.row_lanes, lanes) for line in reduction.after]
                else:
                    first, inside = scan_block(operation, value, dtype, names, self._row(), carried=True)
                before += first
                for line in inside:
                    self.line(line, operation.origin)

    @contextmanager
    def _loop_over(self, dimension: Dimension) -> Iterator[tuple[list[str], list[str]]]:
        """Prints a loop over the blocks of a dimension, of which the lines printed inside are the body.

        The body is printed first, and adds the lines before and after the loop to two lists.
        """
        before, after = list[str](), list[str]()
        outside, self.lines, origin = self.lines, [], self.origin
        self.depth += 1
        start = self._stable_name("start")
        self._emit_block_offsets(dimension, start)
        yield before, after
        inside, self.lines, self.origin = self.lines, outside, origin
        self.depth -= 1
        for line in before:
            self.line(line)
        size = self.index_printer.size(dimension.size)
        self.line(f"for {start} in tl.range(0, {size}, {dimension.block_constant}, num_stages=LOOP_STAGES):")
        self.lines += inside
        self.origin = ""
        for line in after:
            self.line(line)

    def _operation(self, position: int, looped: bool, last_use: bool = False) -> None:
        operation = self.kernel.operations[position]
        match operation:
            case Load():
                self._load(position, operation, looped, last_use)
            case Constant():
                self.text[position] = literal_text(operation.value, operation.dtype)
            case SymbolicScalar():
                dtype = TRITON_DTYPES[operation.dtype]
                number = self.index_printer.size(operation.expression)
                self._assign(position, operation, "number", f"tl.full((), {number}, {dtype})")
            case IndexValue():
                self._assign(position, operation, "index", self._index_value(operation))
            case Compute():
                self._compute(position, operation)
            case Reduce() | Scan():
                self._combine(position, operation)
            case ReductionResult():
                self.text[position] = self.results[operation.operation][operation.position]
            case Store():
                self._store(position, operation, looped)
            case DeviceAssert():
                mask = self._mask(self.varying_dimensions[position], operation.mask)
                masked = f", mask={mask}" if mask else ""
                text = f"tl.device_assert({self._value(operation.condition)}, {operation.printed_message!r}{masked})"
                self.line(text, operation.origin)
            case _:
                assert_never(operation)

    def _assign(self, position: int, operation: Operation, wanted: str, text: str) -> None:
        if position in self.schedule.inlined:
            self.text[position] = text
            return
        name = self._name(position, wanted)
        self.line(f"{name} = {text}", operation.origin)
        self.text[position] = name

    def _name(self, position: int, wanted: str) -> str:
        """Returns the name of an operation's value, the same in every loop."""
        if position not in self.results:
            self.results[position] = [self.names.create_name(wanted)]
        return self.results[position][0]

    def _result_names(self, position: int) -> list[str]:
        operation = self.kernel.operations[position]
        assert isinstance(operation, Reduce | Scan), "other operations have one result"
        if position not in self.results:
            self.results[position] = [self.names.create_name(name) for name in RESULT_NAMES[operation.kind]]
            self.text[position] = self.results[position][0]
        return self.results[position]

    # --- operations -------------------------------------------------------------------------------------------------

    def _value(self, position: int) -> str:
        """Returns the text of an operation's value, constants as scalars of their dtype."""
        operation = self.kernel.operations[position]
        if isinstance(operation, Constant):
            return f"tl.full((), {self.text[position]}, {TRITON_DTYPES[operation.dtype]})"
        return self.text[position]

    def _compute(self, position: int, operation: Compute) -> None:
        result = self.arithmetic(position, operation, self._value, self.text.__getitem__)
        self.helpers.update(result.helpers)
        self._assign(position, operation, result.name, result.text)

    def _combine(self, position: int, operation: Reduce | Scan) -> None:
        value, dtype = self._row_value(operation)
        names = self._result_names(position)
        selected = self.selected.get(position)
        if isinstance(operation, Reduce) and selected is not None:
            row, element = self.text[selected.row], self.text[selected.element]
            lines = reduce_one_hot(operation, value, row, element, dtype, names, self._row())
        elif isinstance(operation, Reduce):
            lines = reduce_persistent(operation, value, dtype, names, self._row())
        else:
            lines = scan_block(operation, value, dtype, names, self._row(), carried=False)[1]
        for line in lines:
            self.line(line, operation.origin)

    def _row_value(self, operation: Reduce | Scan) -> tuple[str, torch.dtype]:
        """Returns the operand of a reduction or scan, broadcast along the row, and its dtype."""
        used = operation.operands[0]
        value = self._value(used)
        tile = frozenset(range(len(self.tile.dimensions)))
        r = self._row_dimension
        if r not in self.varying_dimensions[used] or (
            isinstance(operation, Scan) and self.varying_dimensions[used] != tile
        ):
            value = f"tl.broadcast_to({value}, {self.tile.shape})"
        return value, self.dtype_of(used)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _indirect_index(self, position: int) -> str:
        value = self._value(position)
        return value if self.use_int64 else f"{parenthesize(value)}.to(tl.int32)"

    def _index_value(self, operation: IndexValue) -> str:
        limits = operation.index.bounds()
        low, high = (None, None) if limits is None else (limits[0].constant, limits[1].constant)
        if self.use_int64 or (low is not None and high is not None and low > -_INT32 and high < _INT32):
            text = self.index_printer(operation.index)
        else:
            names = {axis: f"{name}.to(tl.int64)" for axis, name in self.axis_names.items()}
            text = replace(self._indices_at(names), value_of=self._value)(operation.index)
        return f"tl.cast({text}, {TRITON_DTYPES[operation.dtype]})"

    def _address(self, buffer: str, index: Index, span: frozenset[int], own: frozenset[int]) -> str:
        text = self._index_text(index)
        if not own >= span:
            shape = [item.block_constant if n in span else "1" for n, item in enumerate(self.tile.dimensions)]
            if index.constant is not None:  # Triton broadcasts no plain number
                text = f"tl.full((), {index.constant}, {'tl.int64' if self.use_int64 else 'tl.int32'})"
            text = f"tl.broadcast_to({text}, ({', '.join(shape)}{',' if len(shape) == 1 else ''}))"
        elif len(own) > 1 and any(isinstance(atom, IndirectIndex) for atom in index.atoms()):
            text = self._grouped_index_text(index)
        return self.pointers[buffer] if text == "0" else f"{self.pointers[buffer]} + {text}"

    def _grouped_index_text(self, index: Index) -> str:
        """Returns an index as a sum of its parts: those along fewer dimensions of the tile first.

        A block then has an address for each row, and each element adds the offset of its column, or the other way
        round. Parts of indices with negative terms might not fit 32 bits.
        """
        if any(coefficient < 0 for _, coefficient in index.terms):
            return self._index_text(index)
        parts: dict[frozenset[int], Index] = {}
        for term in index.terms:
            dimensions = self._index_dimensions(part := Index((term,)))
            parts[dimensions] = parts.get(dimensions, as_index(0)) + part
        ordered = sorted(parts, key=lambda dimensions: (len(dimensions), sorted(dimensions)))
        return " + ".join([parenthesize(self._index_text(parts[dimensions])) for dimensions in ordered])

    def _index_text(self, index: Index) -> str:
        return self._flat_index_text(index, self.tile.dimensions[-1] if self.tile.dimensions else None)

    def _flat_index_text(self, index: Index, dimension: Dimension | None) -> str:
        """Returns an index by the position along a dimension if it is linear in that, not by those along its axes.

        The compiler then sees that elements are contiguous, and loads vectors: along other dimensions, only those of
        transposed accesses, if nothing is reduced.
        """
        names: dict[Axis, str] = {}
        is_block = dimension is not None and not self.kernel.reduced and not index.axes().isdisjoint(dimension.axes)
        for item in self.tile.dimensions:
            step = row_step(index, item.axes) if len(item.axes) > 1 else None
            if step is not None and step != as_index(0) and (item is dimension or (is_block and step == ONE)):
                flat = Axis(self.positions[item.name], 1)
                index = index.substitute(dict.fromkeys(item.axes, 0)) + step * flat
                names[flat] = flat.name
        return self._indices_at(names)(index)

    def _index_dimensions(self, index: Index) -> frozenset[int]:
        dimensions = {self.dimension_of[axis] for axis in index.axes() if axis in self.dimension_of}
        for atom in index.atoms():
            if isinstance(atom, IndirectIndex):
                dimensions |= self.varying_dimensions[atom.operation]
        return frozenset(dimensions)

    def _mask(self, span: Iterable[int], mask: int | None) -> str:
        parts = [self.masks[number] for number in sorted(span) if number in self.masks]
        if mask is not None:
            parts.append(self._value(mask) if not parts else parenthesize(self._value(mask)))
        return " & ".join(parts)

    def _load(self, position: int, operation: Load, looped: bool, last_use: bool) -> None:
        span = self.varying_dimensions[position]
        address = self._address(operation.buffer, operation.index, span, self._index_dimensions(operation.index))
        mask = self._mask(span, operation.mask)
        arguments = [address, *([f"mask={mask}"] if mask else [])]
        if operation.mask is not None:
            arguments.append(f"other={load_literal(operation.other, operation.dtype)}")
        elif mask and position in self.zero_filled:
            arguments.append(f"other={load_literal(0, operation.dtype)}")
        policy = self._load_policy(position, operation, looped, last_use) if span else ""
        if policy:
            arguments.append(f'eviction_policy="{policy}"')
        self._assign(position, operation, operation.buffer, f"tl.load({', '.join(arguments)})")

    def _load_policy(self, position: int, operation: Load, looped: bool, last_use: bool) -> str:
        again = looped and position in self.schedule.reloaded and self.tile.reduced in self.varying_dimensions[position]
        return self._eviction_policy(operation, again, last_use)

    def _eviction_policy(self, operation: Load, again: bool, last_use: bool) -> str:
        return eviction_policy(self.kernel, operation, again, last_use)

    def _store(self, position: int, operation: Store, looped: bool) -> None:
        own = self._index_dimensions(operation.index)
        span = self.varying_dimensions[position]
        if operation.mode != "set":  # each element of the parallel axes updates memory
            span |= {n for n in range(len(self.tile.dimensions)) if n != self.tile.reduced}
        address = self._address(operation.buffer, operation.index, span, own)
        mask = self._mask(span, operation.mask)
        value = self._value(operation.value)
        arguments = [address, value, *([f"mask={mask}"] if mask else [])]
        if operation.mode != "set":
            dtype = self.dtype_of(operation.value)
            self.line(atomic_text(operation.mode, dtype, address, value, mask, self.use), operation.origin)
            return
        arguments += self._store_policy(position, looped)
        self.line(f"tl.store({', '.join(arguments)})", operation.origin)

    def _store_policy(self, position: int, looped: bool) -> list[str]:
        """Returns the argument with the eviction policy of a store, if it has one: loops read other elements again."""
        rereads = looped and self.schedule.reloaded and self.tile.reduced in self.varying_dimensions[position]
        return ['eviction_policy="evict_first"'] if rereads else []


def load_literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """Returns a number as the literal of a loaded element that a mask excludes."""
    return literal_text(value, torch.float32 if dtype in HALF_PRECISION else dtype)

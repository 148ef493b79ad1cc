"""Streaming reductions as Triton: a program computes a block of rows in one pass over blocks of the streamed axes.

All values of a block are matrices: products of rows and streamed positions are `tl.dot`, the others broadcast. One loop
runs over the blocks of all streamed axes; a condition that holds from one block on splits it into two loops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir import (
    STORAGE_ONLY,
    Axis,
    Compute,
    Constant,
    Contraction,
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
    StreamingReduction,
    SymbolicScalar,
    assume,
    find_streaming_reduction,
    operands,
)
from fxwrap.printers.printed_kernel import SIGNATURE_TYPES, PrintedKernel
from fxwrap.printers.triton.configuration import Hint, next_power_of_2
from fxwrap.printers.triton.helpers import helper_sources
from fxwrap.printers.triton.kernel_text import NameAllocator, TritonIndexPrinter, TritonKernelText, comment_lines
from fxwrap.printers.triton.operations import TRITON_DTYPES, Arithmetic, collapse_bool_casts, literal_text
from fxwrap.printers.triton.schedule import fits_int32
from fxwrap.symbolic import ceiling_divide, product, symbol_kind

_SYMBOL_TYPES = {"int": "i64", "float": "f64", "bool": "i1"}
_LOG2_E = 1.4426950408889634
_MIN_DOT = 16
"""Smallest extent of an operand of `tl.dot`."""


@dataclass(frozen=True)
class StreamingConfiguration:
    """The blocks and launch metadata of a streaming reduction: rows of a program, and positions of an iteration.

    With `half_products`, factors of half precision are multiplied as such; Triton's interpreter cannot do that.
    """

    row_block: int
    key_block: int
    num_warps: int = 4
    num_stages: int = 2
    half_products: bool = True


def streaming_configurations(
    kernel: Kernel, hint: Hint, interpreted: bool = False
) -> tuple[StreamingConfiguration, ...]:
    """Returns candidate configurations of a streaming reduction, the default one first.

    Raises KernelError for another kernel that reduces some of its reduced axes.
    """
    parts = _parts(kernel)
    rows = max(next_power_of_2(hint(parts.row.size)), _MIN_DOT)
    keys = max(next_power_of_2(hint(parts.axes[-1].size)), _MIN_DOT)
    width = next_power_of_2(hint(product(axis.size for axis in parts.product.axes)))
    is_half = all(buffer.dtype in STORAGE_ONLY for buffer in kernel.outputs[:1])
    half = {64: [(128, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3)],
            128: [(128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 32, 4, 3)],
            256: [(64, 32, 4, 3), (128, 32, 8, 2), (64, 64, 4, 2)]}  # fmt: skip
    single = {64: [(64, 32, 4, 3), (128, 32, 8, 3), (32, 64, 4, 3)], 128: [(32, 64, 4, 3), (64, 32, 4, 2)],
              256: [(32, 32, 4, 2), (32, 16, 4, 2)]}  # fmt: skip
    shapes = (half if is_half else single)[min(max(width, 64), 256)]
    candidates = [
        StreamingConfiguration(min(r, rows), min(k, keys), warps, stages, half_products=not interpreted)
        for r, k, warps, stages in shapes
    ]
    return tuple(dict.fromkeys(candidates))


def _parts(kernel: Kernel) -> StreamingReduction:
    parts = find_streaming_reduction(kernel)
    if parts is None:
        raise KernelError("it reduces some of its reduced axes, and is no streaming reduction")
    return parts


@dataclass
class _Scope:
    """A part of the text: the dimension (0 or 1) of each axis of its matrices, their names and masks, and values."""

    dimension: dict[Axis, int] = field(default_factory=dict)
    names: dict[Axis, str] = field(default_factory=dict)
    masks: dict[Axis, str] = field(default_factory=dict)
    blocks: dict[Axis, str] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)

    def inner(self) -> _Scope:
        return _Scope(dict(self.dimension), dict(self.names), dict(self.masks), dict(self.blocks), dict(self.text))


class StreamingTritonPrinter:
    """Prints one streaming reduction."""

    def __init__(self, kernel: Kernel, configuration: StreamingConfiguration, limits: Mapping[str, int]) -> None:
        self.parts = parts = _parts(kernel)
        self.kernel = kernel
        self.configuration = configuration
        self.lines: list[str] = []
        self.depth = 1
        self.origin = ""
        self.helpers: set[str] = set()
        self.allocator = NameAllocator()
        self.symbols = {symbol: self.allocator.create_name(str(symbol)) for symbol in kernel.symbols}
        buffers = (*kernel.inputs, *kernel.outputs)
        self.pointers = {item.name: self.allocator.create_name(f"{item.name}_ptr") for item in buffers}
        self.outer = [axis for axis in kernel.axes if axis not in (parts.row, parts.column)]
        self.columns = () if parts.column is None else (parts.column,)
        self.inner = parts.axes[-1]
        if len(parts.product.axes) != 1 or len(parts.axes) > 2:
            raise KernelError("its streaming reduction has too many axes")
        self.width = parts.product.axes[0]
        self.use_int64 = not all(fits_int32(item.extent, limits) for item in buffers)
        widths = [axis.size for axis in (self.width, *self.columns)]
        if not all(isinstance(size, int) for size in widths):
            raise KernelError("the width of its streaming reduction is symbolic")
        self.constants: dict[str, int] = {
            "ROW_BLOCK": configuration.row_block, "KEY_BLOCK": configuration.key_block,
            "WIDTH_BLOCK": _dot_extent(self.width),
        }  # fmt: skip
        if parts.column is not None:
            self.constants["COLUMN_BLOCK"] = _dot_extent(parts.column)
        self.dtype = TRITON_DTYPES[self._operation_dtype(parts.maximum)]

    # --- the whole --------------------------------------------------------------------------------------------------

    def print(self) -> TritonKernelText:
        """Returns the kernel's text."""
        parts, scope = self.parts, _Scope()
        self._program(scope)
        self._write(self._fixed([store.value for store in self.kernel.stores], self.outer, scope), scope)
        self._asserts(self.outer, [], scope)
        rows = scope.inner()
        self._rows(rows)
        left = rows.inner()
        self._block(left, self.width, "WIDTH_BLOCK", 1, "")
        queries = self._factor(parts.product.left, left)
        self._line(f"log2_e = tl.full((), {_LOG2_E}, {self.dtype})")
        self._line(f'largest = tl.full((ROW_BLOCK, 1), float("-inf"), {self.dtype})')
        for position in parts.sums:
            self._line(f"sum_{position} = tl.full((ROW_BLOCK, 1), 0.0, {self.dtype})")
        for item in parts.weighted_sums:
            columns = "COLUMN_BLOCK" if self.columns else str(_MIN_DOT)
            self._line(f"sum_{item.position} = tl.full((ROW_BLOCK, {columns}), 0.0, {self.dtype})")
        for start, end, conditions in self._ranges(scope):
            self._loop(start, end, conditions, queries, rows)
        self._results(rows)
        return self._text()

    def _text(self) -> TritonKernelText:
        configuration = self.configuration
        constants = {**self.constants, "LOOP_STAGES": configuration.num_stages}
        launch: dict[str, int | bool] = {"num_warps": configuration.num_warps}
        if any(isinstance(item, DeviceAssert) for item in self.kernel.operations):
            launch |= {"debug": True, "sanitize_overflow": False}  # Triton leaves assertions out otherwise
        kinds = {symbol: symbol_kind(symbol.name) for symbol in self.symbols}
        pointers = [f"*{SIGNATURE_TYPES[item.dtype]}" for item in (*self.kernel.inputs, *self.kernel.outputs)]
        scalars = [name + (': "fp64"' if kinds[symbol] == "float" else "") for symbol, name in self.symbols.items()]
        helpers = "".join([f"{text}\n\n\n" for text in helper_sources(self.helpers)])
        body = "\n".join(self.lines)
        library = "from triton.language.extra import libdevice\n" if "libdevice." in helpers + body else ""
        blocks = ceiling_divide(self.parts.row.size, configuration.row_block)
        return TritonKernelText(
            f"import triton\nimport triton.language as tl\n{library}\n\n{helpers}@triton.jit\n",
            (*self.pointers.values(), *scalars),
            tuple([f"{name}: tl.constexpr" for name in constants]),
            f"{body}\n",
            (*pointers, *[_SYMBOL_TYPES[kind] for kind in kinds.values()]),
            tuple(sorted({**constants, **launch}.items())),
            product([blocks, *[axis.size for axis in self.outer]]),
            frozenset(self.allocator.used),
        )

    def _line(self, text: str, origin: str = "") -> None:
        indent = "    " * self.depth
        if origin and origin != self.origin:
            self.lines += [f"{indent}# {line}" for line in comment_lines(origin)]
            self.origin = origin
        self.lines.append(indent + text)

    @contextmanager
    def _nested(self, head: str) -> Iterator[None]:
        self._line(head)
        self.depth += 1
        yield
        self.depth -= 1

    # --- axes -------------------------------------------------------------------------------------------------------

    def _program(self, scope: _Scope) -> None:
        """Prints the indices of the outer axes and the first row: programs of one row block follow each other.

        The last rows come first: under a causal mask they take longest, and the launch ends with short programs.
        """
        if self.use_int64:
            for symbol, name in self.symbols.items():
                if symbol_kind(symbol.name) == "int":
                    self._line(f"{name} = tl.cast({name}, tl.int64)")
        size = self._index_printer(scope).size_operand
        self._line(f"program = tl.program_id(0){'.to(tl.int64)' if self.use_int64 else ''}")
        self._line(f"blocks = tl.cdiv({size(self.parts.row.size)}, ROW_BLOCK)")
        self._line("first_row = (blocks - 1 - program % blocks) * ROW_BLOCK")
        self._line("program = program // blocks")
        for axis in reversed(self.outer):
            scope.names[axis] = self.allocator.create_name(axis.name)
            self._line(f"{scope.names[axis]} = program % {size(axis.size)}")
            self._line(f"program = program // {size(axis.size)}")

    def _block(self, scope: _Scope, axis: Axis, block: str, dimension: int, start: str) -> None:
        """Prints the positions of a block of an axis, as a row or a column of a matrix, and their mask."""
        name, subscript = f"{axis.name}_{'xy'[dimension]}", ("[:, None]", "[None, :]")[dimension]
        cast = ".to(tl.int64)" if self.use_int64 else ""
        self._line(f"{name} = {start + ' + ' if start else ''}tl.arange(0, {block}){cast}{subscript}")
        scope.names[axis], scope.dimension[axis], scope.blocks[axis] = name, dimension, block
        if not isinstance(axis.size, int) or axis.size % self.constants[block]:
            self._line(f"{name}_mask = {name} < {self._index_printer(scope).size_operand(axis.size)}")
            scope.masks[axis] = f"{name}_mask"

    def _rows(self, scope: _Scope) -> None:
        self._block(scope, self.parts.row, "ROW_BLOCK", 0, "first_row")
        self._asserts([*self.outer, self.parts.row], self.outer, scope)

    def _index_printer(self, scope: _Scope) -> TritonIndexPrinter:
        def value(position: int) -> str:
            text = self._value(position, scope)
            return text if self.use_int64 else f"tl.cast({text}, tl.int32)"

        return TritonIndexPrinter(scope.names, value, self.helpers)

    # --- loops ------------------------------------------------------------------------------------------------------

    def _ranges(self, scope: _Scope) -> list[tuple[str, str, dict[int, bool]]]:
        """Returns the ranges of the outer streamed axis, and the conditions that hold in each."""
        bound, first = self.parts.bound, self.parts.axes[0]
        if len(self.parts.axes) == 1:
            return [("0", "1", {})]
        end, held = self._index_printer(scope).size_operand(first.size), dict[int, bool]()
        if bound is not None:
            end = f"tl.minimum({self._value(bound.count, scope)}, {end}).to(tl.int32)"
            held[bound.condition] = True
        self._line(f"visits = {end}")
        split = self._split(first)
        if split is None:
            return [("0", "visits", held)]
        condition, at = split
        self._line(f"first_visits = tl.maximum(tl.minimum({self._value(at, scope)}, visits), 0).to(tl.int32)")
        return [
            ("0", "first_visits", {**held, condition: False}),
            ("first_visits", "visits", {**held, condition: True}),
        ]

    def _split(self, axis: Axis) -> tuple[int, int] | None:
        """Returns a condition that holds from a position of an axis on, and that position; None if there is none."""
        for position in self._slice([self.parts.scores], {self.parts.product.position: ""}):
            operation = self.kernel.operations[position]
            if isinstance(operation, Compute) and operation.name == "ge":
                index, start = operation.operands
                value = self.kernel.operations[index]
                if isinstance(value, IndexValue) and value.index.single_axis == axis:
                    if self.kernel.value_axes[start] <= frozenset(self.outer):
                        return position, start
        return None

    def _loop(self, start: str, end: str, conditions: dict[int, bool], queries: str, rows: _Scope) -> None:
        """Prints the loop over blocks of the streamed axes of a range."""
        kernel, self.kernel = self.kernel, assume(self.kernel, conditions)
        scope = rows.inner()
        size = self._index_printer(scope).size_operand(self.inner.size)
        self._line(f"tiles = tl.cdiv({size}, KEY_BLOCK)")
        with self._nested(f"for step in tl.range({start} * tiles, {end} * tiles, num_stages=LOOP_STAGES):"):
            first = "step"
            if len(self.parts.axes) == 2:
                visit = self.parts.axes[0]
                scope.names[visit] = self.allocator.create_name(visit.name)
                self._line(f"{scope.names[visit]} = step // tiles")
                first = "step % tiles"
            self._line(f"first_key = {first} * KEY_BLOCK")
            rights = [item.right for item in (self.parts.product, *self.parts.weighted_sums)]
            targets = [self.parts.scores, *rights]
            shared = [*self.outer, *self.parts.axes[:-1]]
            scope.text[self.parts.product.position] = "products"
            self._write(self._fixed(targets, shared, scope), scope)
            self._asserts(shared, self.outer, scope)
            self._step(queries, scope)
        self.kernel = kernel
        self.origin = ""

    def _step(self, queries: str, scope: _Scope) -> None:
        parts, right = self.parts, scope.inner()
        self._block(right, self.width, "WIDTH_BLOCK", 0, "")
        self._block(right, self.inner, "KEY_BLOCK", 1, "first_key")
        keys = self._factor(parts.product.right, right)
        self._line(f"products = {self._dot(queries, keys, parts.product.left)}")
        self._block(scope, self.inner, "KEY_BLOCK", 1, "first_key")
        self._asserts([*self.outer, *parts.axes, parts.row], [*self.outer, *parts.axes[:-1]], scope)
        self._write([parts.scores], scope)
        scores = self._value(parts.scores, scope)
        shape = "(ROW_BLOCK, KEY_BLOCK)"
        if self.inner in scope.masks:
            scores = f'tl.where({scope.masks[self.inner]}, {scores}, float("-inf"))'
        self._line(f"scores = tl.broadcast_to({scores}, {shape})")
        self._line("next_largest = tl.maximum(largest, tl.max(scores, 1, keep_dims=True))")
        if any(self._factor_dtype(item.right) in STORAGE_ONLY for item in parts.weighted_sums):
            self._line('shift = tl.where(next_largest == float("-inf"), 0.0, next_largest * log2_e)')
            self._line(
                "factor = tl.exp2(largest * log2_e - shift)  # equal rounding: exactly 1 where the maximum stays"
            )
            self._line("weights = tl.exp2(tl.fma(scores, tl.broadcast_to(log2_e, scores.shape), -shift))")
        else:  # one operation more, and more accurate for large scores
            self._line('shift = tl.where(next_largest == float("-inf"), 0.0, next_largest)')
            self._line("factor = tl.exp2((largest - shift) * log2_e)")
            self._line("weights = tl.exp2((scores - shift) * log2_e)")
        self._line("largest = next_largest")
        for position in parts.sums:
            self._line(f"sum_{position} = sum_{position} * factor + tl.sum(weights, 1, keep_dims=True)")
        for item in parts.weighted_sums:
            self._weighted_sum(item, scope)

    def _weighted_sum(self, item: Contraction, scope: _Scope) -> None:
        right = scope.inner()
        self._block(right, self.inner, "KEY_BLOCK", 0, "first_key")
        for axis in self.columns:
            self._block(right, axis, "COLUMN_BLOCK", 1, "")
        for position in [*right.text]:  # values that vary along keys are rows in scores, and columns here
            if self.inner in self.kernel.value_axes[position]:
                del right.text[position]
        values = self._factor(item.right, right)
        dtype = self._factor_dtype(item.right)
        weights = "weights" if dtype not in STORAGE_ONLY else f"weights.to({TRITON_DTYPES[dtype]})"
        name = f"sum_{item.position}"
        self._line(f"{name} = {self._dot(weights, values, item.right, f'{name} * factor')}")

    def _dot(self, left: str, right: str, factor: int, start: str = "") -> str:
        """Returns the product of two matrices; those of half precision have float32 sums."""
        dtype = self._factor_dtype(factor)
        precision = "" if dtype in STORAGE_ONLY else ', input_precision="ieee"'
        out = ", out_dtype=tl.float64" if dtype is torch.float64 else ""
        return f"tl.dot({left}, {right}{', ' + start if start else ''}{precision}{out})"

    def _factor(self, position: int, scope: _Scope) -> str:
        """Prints a factor of a product, in half precision if it has been loaded so; returns its name."""
        source = self._factor_source(position)
        self._write([source], scope)
        axes = self.kernel.value_axes[source]
        shape = [next((scope.blocks[axis] for axis in axes if scope.dimension.get(axis) == n), "") for n in (0, 1)]
        if not all(shape):
            raise KernelError("a factor of its streaming reduction does not vary along both axes")
        text = self._value(source, scope)
        masks = [scope.masks[axis] for axis in axes if axis in scope.masks]
        if masks and not isinstance(self.kernel.operations[source], Load):
            text = f"tl.where({' & '.join(sorted(masks))}, {text}, 0.0)"
        return text

    def _factor_source(self, position: int) -> int:
        operation = self.kernel.operations[position]
        if not self.configuration.half_products:
            return position
        if isinstance(operation, Compute) and operation.name == "cast" and operation.dtype is torch.float32:
            if self._operation_dtype(operation.operands[0]) in STORAGE_ONLY:
                return operation.operands[0]
        return position

    def _factor_dtype(self, position: int) -> torch.dtype:
        return self._operation_dtype(self._factor_source(position))

    # --- results ----------------------------------------------------------------------------------------------------

    def _results(self, rows: _Scope) -> None:
        parts, scope = self.parts, rows.inner()
        for axis in self.columns:
            self._block(scope, axis, "COLUMN_BLOCK", 1, "")
        scope.text[parts.maximum] = "largest"
        results = [*parts.sums, *[item.position for item in parts.weighted_sums]]
        scope.text |= {item: f"sum_{item}" for item in results}
        for position, operation in enumerate(self.kernel.operations):
            if isinstance(operation, Store):
                self._write(operands(operation), scope)
                self._store(position, operation, scope)

    def _store(self, position: int, store: Store, scope: _Scope) -> None:
        if store.mode != "set":
            raise KernelError("its streaming reduction updates memory")
        axes = self.kernel.value_axes[position]
        address, mask = self._access(store.buffer, store.index, axes, store.mask, scope)
        self._line(f"tl.store({address}, {self._value(store.value, scope)}{mask})", store.origin)

    # --- values -----------------------------------------------------------------------------------------------------

    def _operation_dtype(self, position: int) -> torch.dtype:
        operation = self.kernel.operations[position]
        assert not isinstance(operation, Store | DeviceAssert), "stores and assertions have no value"
        return operation.dtype

    def _slice(self, targets: Iterable[int], known: Collection[int]) -> list[int]:
        """Returns the operations that the targets are computed from, in order, without known ones."""
        needed: set[int] = set()
        stack = list(targets)
        while stack:
            position = stack.pop()
            if position not in needed and position not in known:
                needed.add(position)
                stack.extend(operands(self.kernel.operations[position]))
        return sorted(needed)

    def _fixed(self, targets: Sequence[int], axes: Collection[Axis], scope: _Scope) -> list[int]:
        """Returns the values that the targets need and that depend on these axes only."""
        allowed = frozenset(axes)
        positions = self._slice(targets, scope.text.keys())
        fixed = {item for item in positions if self.kernel.value_axes[item] <= allowed}
        used = {
            operand for item in positions if item not in fixed for operand in operands(self.kernel.operations[item])
        }
        return sorted((used | {*targets}) & fixed)

    def _write(self, targets: Iterable[int], scope: _Scope) -> None:
        for position in self._slice(targets, scope.text.keys()):
            self._operation(position, scope)

    def _asserts(self, axes: Collection[Axis], checked: Collection[Axis], scope: _Scope) -> None:
        """Prints the assertions that depend on these axes, and not only on those in `checked`."""
        for position, operation in enumerate(self.kernel.operations):
            depends = self.kernel.value_axes[position]
            if isinstance(operation, DeviceAssert) and depends <= frozenset(axes):
                if checked and depends <= frozenset(checked):
                    continue
                self._write(operands(operation), scope)
                masks = [scope.masks[axis] for axis in depends if axis in scope.masks]
                masks += [self._value(operation.mask, scope)] if operation.mask is not None else []
                mask = f", mask={' & '.join(sorted(masks))}" if masks else ""
                condition = self._value(operation.condition, scope)
                self._line(f"tl.device_assert({condition}, {operation.message!r}{mask})", operation.origin)

    def _value(self, position: int, scope: _Scope) -> str:
        operation = self.kernel.operations[position]
        if isinstance(operation, Constant):
            dtype = TRITON_DTYPES[operation.dtype]
            return f"tl.full((), {literal_text(operation.value, operation.dtype)}, {dtype})"
        return scope.text[position]

    def _operation(self, position: int, scope: _Scope) -> None:
        operation = self.kernel.operations[position]
        match operation:
            case Constant():
                scope.text[position] = literal_text(operation.value, operation.dtype)
            case Load():
                axes = self.kernel.value_axes[position]
                address, mask = self._access(operation.buffer, operation.index, axes, operation.mask, scope)
                other = ""
                if mask:
                    dtype = torch.float32 if operation.dtype in STORAGE_ONLY else operation.dtype
                    other = f", other={literal_text(operation.other, dtype)}"
                self._assign(position, operation, operation.buffer, f"tl.load({address}{mask}{other})", scope)
            case SymbolicScalar():
                number = self._index_printer(scope).size(operation.expression)
                text = f"tl.full((), {number}, {TRITON_DTYPES[operation.dtype]})"
                self._assign(position, operation, "number", text, scope)
            case IndexValue():
                text = f"tl.cast({self._index_printer(scope)(operation.index)}, {TRITON_DTYPES[operation.dtype]})"
                self._assign(position, operation, "index", text, scope)
            case Compute():
                arithmetic = Arithmetic(self.kernel)
                result = arithmetic(
                    position, operation, lambda item: self._value(item, scope), lambda item: scope.text[item]
                )
                self.helpers.update(result.helpers)
                self._assign(position, operation, result.name, result.text, scope)
            case Reduce() | Scan() | ReductionResult() | Store() | DeviceAssert():
                raise KernelError("an operation of its streaming reduction has no value")
            case _:
                assert_never(operation)

    def _assign(self, position: int, operation: Operation, wanted: str, text: str, scope: _Scope) -> None:
        name = self.allocator.create_name(wanted)
        self._line(f"{name} = {text}", operation.origin)
        scope.text[position] = name

    def _access(
        self, buffer: str, index: Index, axes: Collection[Axis], condition: int | None, scope: _Scope
    ) -> tuple[str, str]:
        """Returns the address of an access to memory and its mask, both broadcast to the axes that it depends on."""
        text = self._index_printer(scope)(index)
        span = [axis for axis in axes if axis in scope.dimension]
        masks = sorted([scope.masks[axis] for axis in span if axis in scope.masks])
        if condition is not None:
            masks.append(self._value(condition, scope))
        if span:
            shape = [next((scope.blocks[axis] for axis in span if scope.dimension[axis] == n), "1") for n in (0, 1)]
            if index.constant is not None:
                text = f"tl.full((), {index.constant}, {'tl.int64' if self.use_int64 else 'tl.int32'})"
            text = f"tl.broadcast_to({text}, ({', '.join(shape)}))"
        mask = f", mask={' & '.join(masks)}" if masks else ""
        return f"{self.pointers[buffer]} + {text}", mask


def _dot_extent(axis: Axis) -> int:
    assert isinstance(axis.size, int)
    return max(next_power_of_2(axis.size), _MIN_DOT)


def print_streaming_triton(
    kernel: Kernel, configuration: StreamingConfiguration, limits: Mapping[str, int] | None = None, name: str = ""
) -> PrintedKernel:
    """Returns a streaming reduction as Triton source; arguments are those of `print_triton`.

    Raises KernelError for a kernel that is none, and for one whose factors are no matrices.
    """
    kernel = collapse_bool_casts(kernel)
    return StreamingTritonPrinter(kernel, configuration, limits or {}).print().printed(name)

"""Kernels of the loop IR as Triton kernels.

A program owns a tile: a few blocks of the parallel axes and, where the kernel has reduced axes, all of them. Rows that
fit are held in registers and the body is printed straight; longer rows are walked over in one loop for each stage, and
what later stages need of a row is loaded and computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from typing_extensions import assert_never

from fxwrap.kernel_names import function_name
from fxwrap.loop_ir import (
    Axis,
    Compute,
    Constant,
    Gathered,
    Index,
    IndexValue,
    Kernel,
    KernelError,
    Load,
    Operation,
    Part,
    Reduce,
    Require,
    Scan,
    SizeValue,
    Store,
    as_index,
    indices,
    operands,
)
from fxwrap.printers.printed import PrintedKernel
from fxwrap.printers.triton.arithmetic import Arithmetic, flags_cast_once
from fxwrap.printers.triton.combine import RESULT_NAMES, Row, accumulate, reduce_one_hot, reduce_whole, scan_block
from fxwrap.printers.triton.configuration import Configuration, configurations
from fxwrap.printers.triton.helpers import helper_texts
from fxwrap.printers.triton.memory import ATOMIC, atomic_text, eviction
from fxwrap.printers.triton.one_hot import PickedElement, with_picked_elements
from fxwrap.printers.triton.operations import SIGNATURES, TRITON_DTYPES, number_text
from fxwrap.printers.triton.precision import coarse_softmax
from fxwrap.printers.triton.schedule import Schedule, make_schedule
from fxwrap.printers.triton.text import IndexText, Names, grouped, size_text
from fxwrap.printers.triton.tile import Dimension, Tile, make_tile
from fxwrap.symbolic import Size, evaluate, symbol_kind

_INT32 = 2**31 - 1


def print_triton(
    kernel: Kernel,
    configuration: Configuration | None = None,
    limits: Mapping[str, int] | None = None,
    name: str = "",
) -> PrintedKernel:
    """Returns a kernel as Triton source with its launch.

    `configuration` says how it is cut, the best guess of `configurations` without one; `limits` gives the largest
    values of symbols, so that sizes made of them may be found to fit 32-bit indices; `name` says what it does, and the
    function's name adds a few digits that tell it from others that do the same. The grid has one dimension. Raises
    KernelError for what Triton has no form of: atomic stores of dtypes and modes that GPUs have no instruction for.
    """
    chosen = configuration or configurations(kernel)[0]
    kernel = flags_cast_once(kernel)
    picked: Mapping[int, PickedElement] = {}
    if not chosen.looped and len(make_tile(kernel, chosen).dimensions) == 1:  # a program has one row
        kernel, picked = with_picked_elements(kernel)
    return _Printer(kernel, chosen, limits or {}, picked, name).run()


class _Printer:
    def __init__(
        self,
        kernel: Kernel,
        cut: Configuration,
        limits: Mapping[str, int],
        picked: Mapping[int, PickedElement],
        name: str,
    ) -> None:
        self.kernel = kernel
        self.name = name
        self.picked = picked
        self.configuration = cut
        self.tile: Tile = make_tile(kernel, cut)
        self.schedule: Schedule = make_schedule(kernel, cut.looped)
        self.arithmetic = Arithmetic(kernel)
        self.coarse_softmax = coarse_softmax(kernel)
        self.wide = not all(_fits(size, limits) for size in _extents(kernel, self.tile))
        self.lines: list[str] = []
        self.depth = 1
        self.origin = ""
        self.helpers: set[str] = set()
        self.names = Names()
        self.numbers = {symbol: self.names.new(str(symbol)) for symbol in kernel.numbers}
        self.pointers = {item.name: self.names.new(f"{item.name}_ptr") for item in (*kernel.inputs, *kernel.outputs)}
        self.axis_names: dict[Axis, str] = {axis: self.names.new(axis.name) for axis in (*kernel.axes, *kernel.reduced)}
        self.index_text = IndexText(self.axis_names, self._gathered, self.helpers)
        self.text: dict[int, str] = {}
        self.results: dict[int, list[str]] = {}
        self.masks: dict[int, str] = {}
        self.repeated: dict[str, str] = {}
        self.spans: dict[int, frozenset[int]] = {}
        self.dimension_of = {axis: n for n, item in enumerate(self.tile.dimensions) for axis in item.axes}
        self.row_position = ""
        self.row_lanes = ""

    # --- the whole --------------------------------------------------------------------------------------------------

    def run(self) -> PrintedKernel:
        self._check_stores()
        self._spans()
        self._place()
        if self.configuration.looped and self.kernel.reduced:
            self._looped()
        else:
            self._straight()
        options = {item.option: item.block for item in self.tile.dimensions}
        launch = {"num_warps": self.configuration.num_warps}
        if any(isinstance(item, Require) for item in self.kernel.operations):
            launch |= {"debug": True, "sanitize_overflow": False}  # Triton leaves assertions out otherwise
        if self.configuration.looped and self.kernel.reduced:
            options["LOOP_STAGES"] = self.configuration.num_stages
        pointers = [f"*{SIGNATURES[item.dtype]}" for item in (*self.kernel.inputs, *self.kernel.outputs)]
        numbers = [{"int": "i64", "float": "f64", "bool": "i1"}[symbol_kind(s.name)] for s in self.kernel.numbers]
        chosen = tuple(sorted({**options, **launch}.items()))
        source = self._source(list(options), str(chosen))
        return PrintedKernel("triton", source, (*pointers, *numbers), chosen, (self.tile.programs, 1, 1))

    def _source(self, constants: list[str], chosen: str) -> str:
        floats = {symbol: ': "fp64"' if symbol_kind(symbol.name) == "float" else "" for symbol in self.kernel.numbers}
        parameters = [
            *self.pointers.values(),
            *[name + floats[symbol] for symbol, name in self.numbers.items()],
            *[f"{name}: tl.constexpr" for name in constants],
        ]
        body = "\n".join(self.lines) or "    pass"
        helpers = "".join([f"{text}\n\n\n" for text in helper_texts(self.helpers)])
        library = "from triton.language.extra import libdevice\n" if "libdevice." in helpers + body else ""
        head = f"import triton\nimport triton.language as tl\n{library}\n\n{helpers}"
        function = f"({', '.join(parameters)}):\n{body}\n"
        return f"{head}@triton.jit\ndef {function_name(self.name, function + chosen)}{function}"

    def _line(self, text: str, origin: str = "") -> None:
        indent = "    " * self.depth
        if origin and origin != self.origin:
            self.lines += [f"{indent}# {' '.join(line.split())}" for line in origin.splitlines()]
            self.origin = origin
        self.lines.append(indent + text)

    def _check_stores(self) -> None:
        types = {buffer.name: buffer.dtype for buffer in self.kernel.outputs}
        for store in self.kernel.stores:
            if store.mode != "set" and types[store.buffer] not in ATOMIC.get(store.mode, ()):
                raise KernelError(f"Triton has no atomic {store.mode} on {types[store.buffer]} (output {store.buffer})")

    # --- the tile ---------------------------------------------------------------------------------------------------

    def _spans(self) -> None:
        """Finds for each operation the dimensions of the tile that its value varies along."""
        r = self.tile.reduced
        for position, operation in enumerate(self.kernel.operations):
            found = frozenset[int]().union(*[self.spans[used] for used in operands(operation)])
            for index in indices(operation):
                found |= {self.dimension_of[axis] for axis in index.axes() if axis in self.dimension_of}
            if isinstance(operation, Reduce):
                found -= {r} if r is not None else set()
            elif isinstance(operation, Scan) and r is not None:
                found |= {r}
            self.spans[position] = frozenset(found)

    def _place(self) -> None:
        """Prints where in the space the program is."""
        if self.wide:
            for symbol, name in self.numbers.items():
                if symbol_kind(symbol.name) == "int":
                    self._line(f"{name} = tl.cast({name}, tl.int64)")
        parts: list[Dimension | Axis] = [*self.tile.parallel, *reversed(self.tile.outer)]
        rest = f"tl.program_id(0){'.to(tl.int64)' if self.wide else ''}"
        if len(parts) > 1:
            program = self.names.new("program")
            self._line(f"{program} = {rest}")
            rest = program
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            blocks = part.blocks if isinstance(part, Dimension) else part.size
            place = rest if last else f"{rest} % {grouped(size_text(blocks))}"
            if isinstance(part, Axis):
                self._line(f"{self.axis_names[part]} = {place}")
            else:
                self._block(part, f"{place if last else grouped(place)} * {part.option}")
            if not last:
                self._line(f"{rest} = {rest} // {grouped(size_text(blocks))}")
        r = self.tile.reduced
        if r is not None and not self.configuration.looped:
            self._block(self.tile.dimensions[r], "")

    def _block(self, dimension: Dimension, start: str) -> None:
        """Prints the positions of a block along a dimension, the axes flattened in it, and its mask."""
        number = self.tile.dimensions.index(dimension)
        single = len(dimension.axes) == 1
        flat = self.axis_names[dimension.axes[0]] if single else self._once(dimension.name)
        lanes = f"tl.arange(0, {dimension.option}){'.to(tl.int64)' if self.wide else ''}{self.tile.spread(number)}"
        self._line(f"{flat} = {start + ' + ' if start else ''}{lanes}")
        if not single:
            self._unflatten(dimension.axes, flat)
        if dimension.masked:
            self.masks[number] = self._once(f"{flat}_mask")
            self._line(f"{self.masks[number]} = {flat} < {grouped(size_text(dimension.size))}")
        if dimension.name == "r":
            self.row_position, self.row_lanes = flat, lanes

    def _once(self, wanted: str) -> str:
        """Returns a name for what is printed again in every loop: the same each time."""
        if wanted not in self.repeated:
            self.repeated[wanted] = self.names.new(wanted)
        return self.repeated[wanted]

    def _unflatten(self, axes: tuple[Axis, ...], flat: str) -> None:
        step = as_index(1)
        for axis in reversed(axes):
            divided = flat if step.constant == 1 else f"{flat} // {grouped(self.index_text(step))}"
            first = axis == axes[0]
            text = divided if first else f"{divided} % {grouped(size_text(axis.size))}"
            self._line(f"{self.axis_names[axis]} = {text}")
            step = step * as_index(axis.size)

    def _row(self) -> Row:
        r = self.tile.reduced
        assert r is not None, "a kernel with reductions has reduced axes"
        dimension = self.tile.dimensions[r]
        return Row(
            r, len(self.tile.dimensions), self.tile.shape, self.masks.get(r), self.row_position,
            grouped(size_text(dimension.size)), dimension.option, self.row_lanes,
            self._exp_in_softmax(), self.names.new, self._use,
        )  # fmt: skip

    def _exp_in_softmax(self) -> str:
        """Returns the exponential function of softmax reductions, the same as of what comes after, where there is any.

        Their sums are at least 1, so that where nothing else uses the exponentials, the smallest may count as 0.
        """
        if not self.coarse_softmax:
            return "libdevice.exp"
        again = any(isinstance(item, Compute) and item.name == "exp" for item in self.kernel.operations)
        return "tl.exp" if again else self._use("exp_or_zero")

    def _use(self, helper: str) -> str:
        self.helpers.add(helper)
        return helper

    # --- the body ---------------------------------------------------------------------------------------------------

    def _straight(self) -> None:
        barrier = self.schedule.barrier
        for position in self.schedule.straight:
            if barrier and isinstance(self.kernel.operations[position], Store):
                self._line("tl.debug_barrier()  # every thread has read what is now written")
                barrier = False
            self._operation(position, looped=False)

    def _looped(self) -> None:
        for stage in self.schedule.stages:
            for position in stage.before:
                self._operation(position, looped=True)
            if stage.loop:
                self._loop(stage.loop, stage.last_use)
        if self.schedule.barrier:
            self._line("tl.debug_barrier()  # every thread has read what is now written")
        for position in self.schedule.at_end:
            self._operation(position, looped=True)

    def _loop(self, positions: tuple[int, ...], last_use: frozenset[int]) -> None:
        """Prints one walk over the row. The body is printed first, to find what it needs before and after it."""
        r = self.tile.reduced
        assert r is not None, "a loop runs over reduced axes"
        dimension = self.tile.dimensions[r]
        outside, self.lines, origin = self.lines, [], self.origin
        self.depth += 1
        before: list[str] = []
        after: list[str] = []
        start = self._once("start")
        self._block(dimension, start)
        for position in positions:
            operation = self.kernel.operations[position]
            if isinstance(operation, Reduce):
                value, dtype = self._row_value(operation)
                part = accumulate(operation, value, dtype, self._result_names(position), self._row())
                before, after = [*before, *part.before], [*after, *part.after]
                for line in part.inside:
                    self._line(line, operation.origin)
            elif isinstance(operation, Scan):
                value, dtype = self._row_value(operation)
                names = self._result_names(position)
                first, inside = scan_block(operation, value, dtype, names, self._row(), carried=True)
                before = [*before, *first]
                for line in inside:
                    self._line(line, operation.origin)
            else:
                self._operation(position, looped=True, last_use=position in last_use)
        inside_lines, self.lines, self.origin = self.lines, outside, origin
        self.depth -= 1
        for line in before:
            self._line(line)
        size = size_text(dimension.size)
        self._line(f"for {start} in tl.range(0, {size}, {dimension.option}, num_stages=LOOP_STAGES):")
        self.lines += inside_lines
        self.origin = ""
        lanes = f"tl.arange(0, {dimension.option}){self.tile.spread(r)}"
        for line in after:
            self._line(line.replace(self.row_lanes, lanes))

    def _operation(self, position: int, looped: bool, last_use: bool = False) -> None:
        operation = self.kernel.operations[position]
        match operation:
            case Load():
                self._load(position, operation, looped, last_use)
            case Constant():
                self.text[position] = number_text(operation.value, operation.dtype)
            case SizeValue():
                dtype = TRITON_DTYPES[operation.dtype]
                number = size_text(operation.expression)
                self._assign(position, operation, "number", f"tl.full((), {number}, {dtype})")
            case IndexValue():
                self._assign(position, operation, "index", self._index_value(operation))
            case Compute():
                self._compute(position, operation)
            case Reduce() | Scan():
                self._combine(position, operation)
            case Part():
                self.text[position] = self.results[operation.operation][operation.position]
            case Store():
                self._store(position, operation, looped)
            case Require():
                mask = self._mask(self.spans[position], operation.mask)
                masked = f", mask={mask}" if mask else ""
                text = f"tl.device_assert({self._value(operation.condition)}, {operation.message!r}{masked})"
                self._line(text, operation.origin)
            case _:
                assert_never(operation)

    def _assign(self, position: int, operation: Operation, wanted: str, text: str) -> None:
        if position in self.schedule.inlined:
            self.text[position] = text
            return
        name = self._name(position, wanted)
        self._line(f"{name} = {text}", operation.origin)
        self.text[position] = name

    def _name(self, position: int, wanted: str) -> str:
        """Returns an operation's name, the same in every loop that computes it."""
        known = self.results.get(position)
        if known is None:
            known = self.results[position] = [self.names.new(wanted)]
        return known[0]

    def _result_names(self, position: int) -> list[str]:
        operation = self.kernel.operations[position]
        assert isinstance(operation, Reduce | Scan), "only combinations have several results"
        known = self.results.get(position)
        if known is None:
            known = self.results[position] = [self.names.new(name) for name in RESULT_NAMES[operation.kind]]
            self.text[position] = known[0]
        return known

    # --- operations -------------------------------------------------------------------------------------------------

    def _value(self, position: int) -> str:
        """Returns the text of an operation's value, numbers as scalars of their dtype."""
        operation = self.kernel.operations[position]
        if isinstance(operation, Constant):
            return f"tl.full((), {self.text[position]}, {TRITON_DTYPES[operation.dtype]})"
        return self.text[position]

    def _dtype(self, position: int) -> torch.dtype:
        operation = self.kernel.operations[position]
        assert not isinstance(operation, Store | Require), "neither has a value"
        return operation.dtype

    def _compute(self, position: int, operation: Compute) -> None:
        found = self.arithmetic(position, operation, self._value, self.text.__getitem__)
        self.helpers.update(found.helpers)
        self._assign(position, operation, found.name, found.text)

    def _combine(self, position: int, operation: Reduce | Scan) -> None:
        value, dtype = self._row_value(operation)
        names = self._result_names(position)
        picked = self.picked.get(position)
        if isinstance(operation, Reduce) and picked is not None:
            row, element = self.text[picked.row], self.text[picked.element]
            lines = reduce_one_hot(operation, value, row, element, dtype, names, self._row())
        elif isinstance(operation, Reduce):
            lines = reduce_whole(operation, value, dtype, names, self._row())
        else:
            lines = scan_block(operation, value, dtype, names, self._row(), carried=False)[1]
        for line in lines:
            self._line(line, operation.origin)

    def _row_value(self, operation: Reduce | Scan) -> tuple[str, torch.dtype]:
        """Returns the operand of a combination, spread over the row."""
        used = operation.operands[0]
        value = self._value(used)
        tile = frozenset(range(len(self.tile.dimensions)))
        r = self.tile.reduced
        if r not in self.spans[used] or (isinstance(operation, Scan) and self.spans[used] != tile):
            value = f"tl.broadcast_to({value}, {self.tile.shape})"
        return value, self._dtype(used)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _gathered(self, position: int) -> str:
        value = self._value(position)
        return value if self.wide else f"{grouped(value)}.to(tl.int32)"

    def _index_value(self, operation: IndexValue) -> str:
        limits = operation.index.bounds()
        low, high = (None, None) if limits is None else (limits[0].constant, limits[1].constant)
        if self.wide or (low is not None and high is not None and low > -_INT32 and high < _INT32):
            text = self.index_text(operation.index)
        else:
            names = {axis: f"{name}.to(tl.int64)" for axis, name in self.axis_names.items()}
            text = IndexText(names, self._value, self.helpers)(operation.index)
        return f"tl.cast({text}, {TRITON_DTYPES[operation.dtype]})"

    def _address(self, buffer: str, index: Index, span: frozenset[int], own: frozenset[int]) -> str:
        text = self.index_text(index)
        if not own >= span:
            shape = [item.option if n in span else "1" for n, item in enumerate(self.tile.dimensions)]
            if index.constant is not None:  # Triton broadcasts no plain number
                text = f"tl.full((), {text}, {'tl.int64' if self.wide else 'tl.int32'})"
            text = f"tl.broadcast_to({text}, ({', '.join(shape)}{',' if len(shape) == 1 else ''}))"
        return self.pointers[buffer] if text == "0" else f"{self.pointers[buffer]} + {text}"

    def _own_span(self, index: Index) -> frozenset[int]:
        found = {self.dimension_of[axis] for axis in index.axes() if axis in self.dimension_of}
        for atom in index.atoms():
            if isinstance(atom, Gathered):
                found |= self.spans[atom.operation]
        return frozenset(found)

    def _mask(self, span: Iterable[int], mask: int | None) -> str:
        parts = [self.masks[number] for number in sorted(span) if number in self.masks]
        if mask is not None:
            parts.append(self._value(mask) if not parts else grouped(self._value(mask)))
        return " & ".join(parts)

    def _load(self, position: int, operation: Load, looped: bool, last_use: bool) -> None:
        span = self.spans[position]
        address = self._address(operation.buffer, operation.index, span, self._own_span(operation.index))
        mask = self._mask(span, operation.mask)
        arguments = [address, *([f"mask={mask}"] if mask else [])]
        if operation.mask is not None:
            arguments.append(f"other={_literal(operation.other, operation.dtype)}")
        again = looped and position in self.schedule.reloaded and self.tile.reduced in span
        hint = eviction(self.kernel, operation, again, last_use) if span else ""
        if hint:
            arguments.append(f'eviction_policy="{hint}"')
        self._assign(position, operation, operation.buffer, f"tl.load({', '.join(arguments)})")

    def _store(self, position: int, operation: Store, looped: bool) -> None:
        own = self._own_span(operation.index)
        span = self.spans[position]
        if operation.mode != "set":  # every element of the parallel axes counts
            r = self.tile.reduced
            span |= {number for number in range(len(self.tile.dimensions)) if number != r}
        address = self._address(operation.buffer, operation.index, span, own)
        mask = self._mask(span, operation.mask)
        value = self._value(operation.value)
        arguments = [address, value, *([f"mask={mask}"] if mask else [])]
        if operation.mode != "set":
            dtype = self._dtype(operation.value)
            self._line(atomic_text(operation.mode, dtype, address, value, mask, self._use), operation.origin)
            return
        r = self.tile.reduced
        if looped and self.schedule.reloaded and r in span:
            arguments.append('eviction_policy="evict_first"')
        self._line(f"tl.store({', '.join(arguments)})", operation.origin)


def _literal(value: float | int | bool, dtype: torch.dtype) -> str:
    return number_text(value, torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype)


def _extents(kernel: Kernel, tile: Tile) -> list[Size]:
    """Returns what 32-bit indices must be able to count: elements of buffers and of the space."""
    blocks = [item.size for item in tile.dimensions]
    return [*[item.extent for item in (*kernel.inputs, *kernel.outputs)], *blocks, tile.programs]


def _fits(size: Size, limits: Mapping[str, int]) -> bool:
    if not isinstance(size, int):
        if any(str(symbol) not in limits for symbol in size.free_symbols):
            return False
        size = int(evaluate(size, limits))
    return size < _INT32 - (1 << 16)

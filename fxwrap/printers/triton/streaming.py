"""Streaming reductions as Triton: a program computes a block of rows in one pass over blocks of the streamed axes.

All values of a block are matrices: products of rows and streamed positions are `tl.dot`, the others broadcast. One loop
runs over the blocks of the last two streamed axes, inside loops over the others; a condition that holds from one block
on splits it into two loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import (
    HALF_PRECISION,
    Axis,
    Compute,
    Contraction,
    IndexValue,
    Kernel,
    Load,
    RunningMaximum,
    Store,
    assume,
    count_points,
)
from fxwrap.printers.triton.blocks import Scope
from fxwrap.printers.triton.kernel_text import TritonKernelText
from fxwrap.printers.triton.operations import TRITON_DTYPES, literal_text
from fxwrap.printers.triton.streaming_configuration import MIN_DOT, row_blocks
from fxwrap.printers.triton.streaming_results import StreamingResultPrinter
from fxwrap.printers.triton.streaming_scores import LOWEST, LinearBias, find_linear_bias
from fxwrap.printers.triton.streaming_values import LOG2_E, BlockRange
from fxwrap.printers.triton.tiling import StreamingConfiguration
from fxwrap.symbolic import ceiling_divide, product


@dataclass(frozen=True)
class _Branch:
    """Blocks of a loop, of which partial ones have masked elements.

    Fields:
        is_partial: the text of the condition of partial blocks.
        full, partial: conditions of elements, and the values that they have in full and in partial blocks; no partial
            ones where limits decide them.
    """

    is_partial: str
    full: Mapping[int, bool]
    partial: Mapping[int, bool]


class StreamingTritonPrinter(StreamingResultPrinter):
    """Prints one streaming reduction."""

    def __init__(self, kernel: Kernel, configuration: StreamingConfiguration, limits: Mapping[str, int]) -> None:
        super().__init__(kernel, configuration, limits)
        self.row_blocks = row_blocks(kernel, self.parts)
        self.lefts: dict[int, str] = {}
        self.branch: _Branch | None = None
        self.ends: list[str] = []

    # --- the whole --------------------------------------------------------------------------------------------------

    def print(self) -> TritonKernelText:
        """Returns the kernel's text."""
        parts, scope = self.parts, Scope()
        self._program(scope)
        self.write(self.fixed([store.value for store in self.kernel.stores], self.outer, scope), scope)
        self.asserts(self.outer, [], scope)
        rows = scope.inner()
        self._block(rows, parts.row, 0, "first_row")
        self.asserts([*self.outer, parts.row], self.outer, rows)
        for item in parts.products:
            left = rows.inner()
            self._block(left, item.axes[0], 1)
            self.lefts[item.position] = self.factor(item.left, left)
        self.write(self.fixed(parts.elements, [*self.outer, parts.row], rows), rows)
        self.line(f"log2_e = tl.full((), {LOG2_E}, {self.dtype})")
        if parts.softmax is not None:
            self.line(f'largest = tl.full((ROW_BLOCK, 1), float("-inf"), {self.dtype})')
        for total in parts.sums:
            self.line(f"sum_{total.position} = tl.full((ROW_BLOCK, 1), 0.0, {self.dtype})")
        for item in parts.weighted_sums:
            column = self.column(item.right)
            size = str(MIN_DOT) if column is None else self.block_names[column]
            self.line(f"sum_{item.position} = tl.full((ROW_BLOCK, {size}), 0.0, {self.dtype})")
        with self._leading_loops(rows):
            for start, end, conditions in self._ranges(rows):
                self._loop(start, end, conditions, rows)
        self.write_results(rows)
        return self._text()

    def _text(self) -> TritonKernelText:
        configuration = self.configuration
        constants = {**self.constants, "LOOP_STAGES": configuration.num_stages}
        blocks = ceiling_divide(self.parts.row.size, configuration.row_block)
        return self.kernel_text(constants, configuration.launch_options, product([blocks, count_points(self.outer)]))

    # --- axes -------------------------------------------------------------------------------------------------------

    def _program(self, scope: Scope) -> None:
        """Prints the indices of the outer axes and the first row: programs of a band of heads, row block by row block.

        Where later rows visit more, they come first, so that the launch ends with short programs.
        """
        self.cast_symbols()
        size = self.index_printer(scope).size_operand
        number = "tl.num_programs(0) - 1 - tl.program_id(0)" if self._grows_with_rows() else "tl.program_id(0)"
        self.line(f"program = {f'({number}).to(tl.int64)' if self.use_int64 else number}")
        self.line(f"blocks = tl.cdiv({size(self.parts.row.size)}, ROW_BLOCK)")
        heads = [axis for axis in self.outer if axis not in self.row_blocks]
        band = self.configuration.band
        if band > 1:
            self.line(f"rows = blocks * {size(count_points(self.row_blocks))}")
            self.line(f"first_head = program // ({band} * rows) * {band}")
            self.line(f"height = tl.minimum({size(count_points(heads))} - first_head, {band})")
            self.line(f"program = program % ({band} * rows)")
            self.line("program = (first_head + program % height) * rows + program // height")
        self.line("first_row = program % blocks * ROW_BLOCK")
        self.line("program = program // blocks")
        self._axes_of_program(self.row_blocks, scope)
        self._axes_of_program(heads, scope)

    def _axes_of_program(self, axes: Sequence[Axis], scope: Scope) -> None:
        """Prints the indices of axes, the last of which vary fastest between programs."""
        size = self.index_printer(scope).size_operand
        for axis in reversed(axes):
            scope.names[axis] = self.names.create_name(axis.name)
            self.line(f"{scope.names[axis]} = program % {size(axis.size)}")
            self.line(f"program = program // {size(axis.size)}")

    def _grows_with_rows(self) -> bool:
        """Whether later rows may visit more: positions up to a limit that varies over rows, as under a causal mask.

        The lists of a block mask have no limits: there, comparisons of elements say so.
        """
        if self.parts.visit_bound is None:
            return any(not item.is_lower for item in self.parts.row_bounds)
        streamed = frozenset(self.parts.axes)
        for position in sorted(self.kernel.backward_slice(self.parts.elements)):
            operation = self.kernel.operations[position]
            if isinstance(operation, Compute) and operation.name in ("ge", "gt", "le", "lt"):
                later, earlier = operation.operands if operation.name in ("ge", "gt") else operation.operands[::-1]
                later_axes, earlier_axes = self.kernel.value_axes[later], self.kernel.value_axes[earlier]
                if self.parts.row in later_axes and not later_axes & streamed and earlier_axes & streamed:
                    return True
        return False

    def _block(self, scope: Scope, axis: Axis, dimension: int, start: str = "") -> None:
        self.block(scope, axis, self.block_names[axis], dimension, start)
        if axis == self.inner and self.ends:
            name = scope.names[axis]
            self.line(f"{name}_inside = {' & '.join([f'({name} < {end})' for end in self.ends])}")
            scope.masks[axis] = f"{name}_inside"

    # --- loops ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _leading_loops(self, scope: Scope) -> Iterator[None]:
        """Opens the loops over all streamed axes but the last two, and prints the values that they depend on.

        Such values are not those of results.
        """
        known = dict(scope.text)
        with ExitStack() as stack:
            for axis in self.leading:
                scope.names[axis] = name = self.names.create_name(axis.name)
                stack.enter_context(self.nested(f"for {name} in range({self.index_printer(scope).size(axis.size)}):"))
            if self.leading:
                outside = [*self.outer, *self.leading]
                self.write(self.fixed(self.parts.elements, outside, scope), scope)
                self.asserts(outside, self.outer, scope)
            yield
        scope.text = known

    def _ranges(self, scope: Scope) -> list[tuple[str, str, dict[int, bool]]]:
        """Returns the ranges of the axis before the innermost one, and the conditions that hold in each."""
        bound, first = self.parts.visit_bound, self.streamed[0]
        if len(self.streamed) == 1:
            return [("0", "1", {})]
        end, held = self.index_printer(scope).size_operand(first.size), dict[int, bool]()
        if bound is not None and bound.axis == first and not bound.is_lower:
            self.write([bound.limit], scope)
            end = f"tl.minimum({self.value(bound.limit, scope)}, {end}).to(tl.int32)"
            held[bound.condition] = bound.holds
        self.line(f"visits = {end}")
        split = self._split(first)
        if split is None:
            return [("0", "visits", held)]
        condition, at = split
        self.line(f"first_visits = tl.maximum(tl.minimum({self.value(at, scope)}, visits), 0).to(tl.int32)")
        if self.configuration.branches:
            self.branch = _Branch("step < first_visits * tiles", {condition: True}, {condition: False})
            return [("0", "visits", held)]
        return [
            ("0", "first_visits", {**held, condition: False}),
            ("first_visits", "visits", {**held, condition: True}),
        ]

    def _split(self, axis: Axis) -> tuple[int, int] | None:
        """Returns a condition that holds from a position of an axis on, and that position; None if there is none."""
        products = {item.position for item in self.parts.products}
        for position in sorted(self.kernel.backward_slice(self.parts.elements, products)):
            operation = self.kernel.operations[position]
            if isinstance(operation, Compute) and operation.name == "ge":
                index, start = operation.operands
                value = self.kernel.operations[index]
                if isinstance(value, IndexValue) and value.index.single_axis == axis:
                    if self.kernel.value_axes[start] <= frozenset([*self.outer, *self.leading]):
                        return position, start
        return None

    def _loop(self, start: str, end: str, conditions: dict[int, bool], rows: Scope) -> None:
        """Prints the loops over blocks of the streamed axes of a range."""
        kernel, self.kernel = self.kernel, assume(self.kernel, conditions)
        some, scope = self.kernel, rows.inner()
        every, blocks = self.blocks(scope)
        self.ends = [] if self.configuration.splits else self._exact_ends()
        full, limits = {bound.condition: bound.holds for bound in self.limits}, self.limits
        if full and self.configuration.branches and self.parts.softmax is not None and len(self.streamed) == 1:
            self.branch = _Branch(self.partial_blocks(scope), full, {})
        self.write(self.fixed(self._targets(), [*self.outer, *self.leading, self.parts.row], scope), scope)
        if not full or self.branch is not None or not self.configuration.splits:
            self._block_loop(start, end, blocks, scope.inner(), rows)
        else:
            partial_blocks, full_blocks = self.split_blocks(blocks, scope)
            self._block_loop(start, end, partial_blocks, scope.inner(), rows)
            self.kernel, self.limits = assume(self.kernel, full), {}
            self._block_loop(start, end, full_blocks, scope.inner(), rows)
        if blocks is not every:
            self.kernel, self.limits, self.branch = some, limits, None
            self._block_loop(start, end, self.far_blocks(every, blocks, scope), scope.inner(), rows)
        self.kernel = kernel
        self.origin = ""

    def _exact_ends(self) -> list[str]:
        """Returns the upper limits that all rows share, which then hold: loads beyond them are masked, not elements.

        Steps of few rows wait for their loads.
        """
        exact = [item for item in self.limits if item in self.parts.bounds and self.parts.is_exact(item)]
        ends = {item.condition: item for item in exact if not item.is_lower}
        if ends:
            self.kernel = assume(self.kernel, {condition: item.holds for condition, item in ends.items()})
        return list(dict.fromkeys([self.limits.pop(item) for item in ends.values()]))

    def _targets(self) -> list[int]:
        """Returns the values that a step computes."""
        parts = self.parts
        factors = [item.right for item in (*parts.products, *parts.weighted_sums)]
        return [*parts.elements, *factors, *[item.factor for item in parts.scaled_weights]]

    def _block_loop(self, start: str, end: str, blocks: BlockRange, scope: Scope, rows: Scope) -> None:
        """Prints the loop over a range of blocks of the innermost axis, in visits of the axis before."""
        count, targets, shared = blocks.count, self._targets(), [*self.outer, *self.parts.axes[:-1]]
        visited = self._visited_loads(targets, scope)
        texts = self._visit(visited, start, end, rows)
        scope.text |= {item: self.names.create_name("visited") for item in visited}
        for item, text in zip(visited, texts, strict=True):
            self.line(f"{scope.text[item]} = {text}")
        with self.nested(f"for step in tl.range({start} * {count}, {end} * {count}, num_stages=LOOP_STAGES):"):
            step = "step"
            if len(self.streamed) == 2:
                visit = self.streamed[0]
                scope.names[visit] = self.names.create_name(visit.name)
                self.line(f"{scope.names[visit]} = step // {count}")
                step = f"step % {count}"
            self.line(f"first_key = {blocks.text(step)} * KEY_BLOCK")
            self.write([item for item in self.fixed(targets, shared, scope) if item not in scope.text], scope)
            self.asserts(shared, [*self.outer, *self.leading], scope)
            self._step(scope)
            for item, text in zip(visited, self._visit(visited, f"(step + 1) // {count}", end, rows), strict=True):
                self.line(f"{scope.text[item]} = {text}")

    def _visited_loads(self, targets: Sequence[int], scope: Scope) -> list[int]:
        """Returns the loads that depend on the visit and on no element of its block, such as that of a block's number.

        They are loaded one step ahead: as part of the step, Triton's pipeline would wait for them before other loads.
        """
        allowed = frozenset([*self.outer, *self.parts.axes[:-1]])
        return [
            position
            for position in sorted(self.kernel.backward_slice(targets, scope.text.keys()))
            if isinstance(self.kernel.operations[position], Load)
            and len(self.streamed) == 2
            and self.streamed[0] in self.kernel.value_axes[position] <= allowed
        ]

    def _visit(self, loads: Sequence[int], visit: str, end: str, rows: Scope) -> list[str]:
        """Prints the loads of a visit unless it is the end or beyond; returns their names."""
        if not loads:
            return []
        scope, axis = rows.inner(), self.streamed[0]
        scope.names[axis] = name = self.names.create_name("next_visit")
        scope.masks[axis] = f"({name} < {end})"
        self.line(f"{name} = {visit}")
        self.write(loads, scope)
        return [scope.text[item] for item in loads]

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step(self, scope: Scope) -> None:
        parts, loaded = self.parts, dict[int, str]()
        self._block(scope, self.inner, 1, "first_key")
        if self.branch is None or self.branch.partial:
            self.write_conditions(scope)
        checked = [*self.outer, *parts.axes[:-1]]
        self.asserts([*self.outer, *parts.axes, parts.row], checked, scope)
        if parts.softmax is not None:
            for item in parts.products:
                self._product(item, scope, loaded)
            self._softmax(parts.softmax, scope)
            if parts.scaled_weights and self.branch is not None:
                self.write_conditions(scope)
            names = {parts.softmax.weights: "weights"}
            for scaled in parts.scaled_weights:
                self.write([scaled.factor], scope)
                names[scaled.position] = name = f"weights_{scaled.position}"
                self.line(f"{name} = weights * ({self.value(scaled.factor, scope)})")
            for item in parts.weighted_sums:
                self._weighted_sum(item, names[item.left], scope, loaded)
            return
        for item in sorted(parts.weighted_sums, key=lambda item: len(self._missing_products([item.left], scope))):
            self._write_weights(item.left, scope, loaded)
            self._weighted_sum(item, f"weights_{item.left}", scope, loaded)
        for total in parts.sums:
            self._write_weights(total.weights, scope, loaded)
            weights = f"weights_{total.weights}"
            self.line(f"sum_{total.position} = sum_{total.position} + tl.sum({weights}, 1, keep_dims=True)")
        for update in parts.updates:
            self._write_weights(update.value, scope, loaded)
            store, name = self.kernel.operations[update.position], f"weights_{update.value}"
            if isinstance(store, Store) and store.mode == "set":
                self.set(update, store, name, scope)
            else:
                self.add(update, name, scope)

    def _missing_products(self, targets: list[int], scope: Scope) -> list[Contraction]:
        """Returns the products that targets are computed from and that a scope does not know."""
        needed = sorted(self.kernel.backward_slice(targets, scope.text.keys()))
        return [item for item in self.parts.products if item.position in needed]

    def _product(self, item: Contraction, scope: Scope, loaded: dict[int, str]) -> None:
        """Prints the product of a block of rows and one of streamed positions."""
        factor, name = self._right_factor(item, scope, loaded), f"products_{item.position}"
        self.line(f"{name} = {self.dot(self.lefts[item.position], factor, item.left)}")
        scope.text[item.position] = name

    def _right_factor(self, item: Contraction, scope: Scope, loaded: dict[int, str]) -> str:
        """Prints the right factor of a product unless that has been done; returns its name."""
        if item.position not in loaded:
            right = scope.inner()
            self._block(right, item.axes[0], 0)
            loaded[item.position] = self.factor(item.right, right)
        return loaded[item.position]

    def _softmax(self, softmax: RunningMaximum, scope: Scope) -> None:
        """Prints the weights of a block, and rescales the sums of weights.

        In half precision, the running maximum is in units in which weights are powers of 2, but for maxima that are so
        low that these might overflow: weights of such rows are 1 or 0 in any unit.
        """
        units: list[float] = []
        self.linear_bias = self._common_linear_bias()
        bias = self.write_linear_bias(softmax.scores, scope)

        def scores(scope: Scope) -> None:
            self._matrix("scores", self.score_text(softmax.scores, scope), float("-inf"), scope)
            unit = self.score_unit(softmax.scores)
            if self.is_half and unit not in units:
                self.line(f"unit = tl.full((), {unit}, tl.float32)")
                if self.may_overflow:
                    self.line(f"scale = tl.full((), {unit / LOG2_E}, tl.float32)")
                units.append(unit)

        self._elements("scores", softmax.scores, scope, scores)
        if self.is_half:
            unit = "unit"
            if self.may_overflow:
                unit = "row_unit"
                self.line("maxima = tl.max(scores, 1, keep_dims=True)")
                self.line(f"row_unit = tl.where(maxima * scale < {LOWEST}, scale, unit)")
                self.line("next_largest = tl.maximum(largest, maxima * row_unit)")
            else:
                maxima = "tl.max(scores, 1, keep_dims=True) * unit"
                self.line(f"next_largest = tl.maximum(largest, {f'{maxima} + {bias}' if bias else maxima})")
            self.line('shift = tl.where(next_largest == float("-inf"), 0.0, next_largest)')
            self.line("factor = tl.exp2(largest - shift)")
            self.line(f"weights = tl.exp2({self.fma('scores', unit, f'{bias} - shift' if bias else '-shift')})")
        else:  # one operation more, and more accurate for large scores
            self.line("next_largest = tl.maximum(largest, tl.max(scores, 1, keep_dims=True))")
            self.line('shift = tl.where(next_largest == float("-inf"), 0.0, next_largest)')
            self.line("factor = tl.exp2((largest - shift) * log2_e)")
            self.line("weights = tl.exp2((scores - shift) * log2_e)")
        self.line("largest = next_largest")
        for item in self.parts.sums:
            name = f"sum_{item.position}"
            self.line(f"{name} = {name} * factor + tl.sum(weights, 1, keep_dims=True)")

    def _common_linear_bias(self) -> LinearBias | None:
        """Returns the linear bias that the scores of partial and of full blocks of a loop have.

        Steps of few rows, which are not split, compute few scores and wait for their loads.
        """
        if not self.is_half or self.may_overflow or not self.configuration.splits:
            return None
        conditions = [{}] if self.branch is None else [self.branch.full, self.branch.partial]
        first, *others = {find_linear_bias(assume(self.kernel, item), self.parts) for item in conditions}
        return None if others else first

    def _write_weights(self, position: int, scope: Scope, loaded: dict[int, str]) -> None:
        """Prints weights that no maximum shifts, and the products that they are computed from."""
        for item in self._missing_products([position], scope):
            self._product(item, scope, loaded)
        name = f"weights_{position}"

        def weights(scope: Scope) -> None:
            self._matrix(name, self.element_text(position, scope), 0.0, scope)

        self._elements(name, position, scope, weights)

    def _elements(self, name: str, position: int, scope: Scope, write: Callable[[Scope], None]) -> None:
        """Prints the matrix of an operation's elements, which `write` prints.

        In a loop over partial and full blocks, the elements are those of full ones, which partial ones then replace.
        """
        if self.branch is None:
            write(scope)
            return
        branch, kernel = self.branch, self.kernel
        dependents = kernel.forward_slice(branch.full, scope.text.keys())
        self.kernel = assume(kernel, branch.full)
        write(scope)
        for item in dependents:
            scope.text.pop(item, None)
        self.kernel = assume(kernel, branch.partial)
        with self.nested(f"if {branch.is_partial}:"):
            inner = scope.inner()
            self.write_conditions(inner)
            write(inner)
        self.kernel = kernel
        scope.text[position] = name

    def _matrix(self, name: str, text: str, neutral: float, scope: Scope) -> None:
        """Prints a matrix of elements that are neutral beyond the last streamed position."""
        if self.inner in scope.masks:
            text = f"tl.where({scope.masks[self.inner]}, {text}, {literal_text(neutral, torch.float32)})"
        self.line(f"{name} = tl.broadcast_to({text}, (ROW_BLOCK, KEY_BLOCK))")

    def _weighted_sum(self, item: Contraction, weights: str, scope: Scope, loaded: dict[int, str]) -> None:
        """Prints the product of the weights of a block with values, added to the sum so far.

        Values that are the right factor of a product, too, are loaded once.
        """
        column = self.column(item.right)
        pattern = None if column is None else self.pattern(item.right, column)
        equal = [one for one in self.parts.products if self.pattern(one.right, one.axes[0]) == pattern]
        if equal:
            values = f"tl.trans({self._right_factor(equal[0], scope, loaded)})"
        else:
            right = scope.inner()
            self._block(right, self.inner, 0, "first_key")
            if column is not None:
                self._block(right, column, 1)
            for position in [*right.text]:  # values that vary along keys are rows in scores, and columns here
                if self.inner in self.kernel.value_axes[position]:
                    del right.text[position]
            values = self.factor(item.right, right)
        dtype = self.factor_dtype(item.right)
        weights = weights if dtype not in HALF_PRECISION else f"{weights}.to({TRITON_DTYPES[dtype]})"
        name = f"sum_{item.position}"
        start = name if self.parts.softmax is None else f"{name} * factor"
        self.line(f"{name} = {self.dot(weights, values, item.right, start)}")
        if self.configuration.waits:  # Triton waits for a product that another operation of the loop reads
            self.line(f"{name} = tl.where(step >= 0, {name}, 0.0)")

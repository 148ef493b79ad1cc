"""Streaming reductions as C++: tiles of rows, each in one pass over tiles of the streamed axes.

A tile of rows is transposed, so that each row is a lane: scores, maxima, sums and weighted sums are vectors over rows,
and no step combines lanes. Factors that do not depend on rows are packed, in the type of the computation, into tiles
that stay in the nearest caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fxwrap.loop_ir import Axis, Compute, Contraction, KernelError, Store, StreamingReduction, assume
from fxwrap.printers.cpp.loop_plan import LoopPlan
from fxwrap.printers.cpp.loops import LoopPrinter, loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES, print_size
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues
from fxwrap.symbolic import Size

_MAX_LANES = 64
"""Rows of a tile."""

_MAX_KEYS = 64
"""Positions of the innermost streamed axis in a tile."""

_MAX_TILE_ELEMENTS = 98304
"""Elements of all tiles, which are on the stack of a thread."""

_GROUP = 4
"""Sums that `contract` computes together, as in `kernel.h`."""


class StreamingPrinter(LoopPrinter):
    """A kernel that is one streaming reduction. Raises KernelError where its tiles do not fit."""

    def __init__(
        self, plan: LoopPlan, parts: StreamingReduction, writer: CppSourceWriter, origin_comments: bool
    ) -> None:
        super().__init__(plan, writer, origin_comments)
        self.parts = parts
        self.inner = parts.axes[-1]
        self.outer = [axis for axis in self.kernel.axes if axis not in (parts.row, parts.column)]
        self.columns = () if parts.column is None else (parts.column,)
        self.depth = _element_count(parts.product.axes)
        self.width = _round_up(_element_count(self.columns))
        self.lanes = _round_up(_at_most(_MAX_LANES, parts.row.size), 16)
        self.keys = _at_most(_MAX_KEYS, self.inner.size)
        self.type = CPP_TYPES[self.statements.dtype(parts.maximum)]
        elements = self.lanes * (self.depth + self.keys) + self.keys * self.depth
        elements += (self.lanes + self.keys) * self.width * len(parts.weighted_sums)
        if elements > _MAX_TILE_ELEMENTS:
            raise KernelError(f"the tiles of its streaming reduction have {elements} elements, too many for a stack")
        self.asserts = self._assert_scopes()

    def print(self) -> None:
        """Writes the loops over tiles of rows."""
        row, size = self.parts.row.name, print_size(self.parts.row.size)
        heads = [loop_head(axis) for axis in self.outer]
        heads.append(f"for (int64_t {row}_0 = 0; {row}_0 < {size}; {row}_0 += {self.lanes})")
        with self.writer.nest(heads, f"#pragma omp parallel for COLLAPSE schedule(dynamic){self.clause}"):
            known: EmittedValues = {}
            self._hoist([store.value for store in self.kernel.stores], self.outer, known)
            self.write_device_asserts(self.asserts["tile"], known)
            self._print_row_tile(known)
            with self.writer.nest(self._streamed_heads(known)):
                bound = self.parts.bound
                with self._assume({} if bound is None else {bound.condition: True}):
                    self._print_step(dict(known))
            self._print_results(known)

    # --- scopes -----------------------------------------------------------------------------------------------------

    def _assert_scopes(self) -> dict[str, list[int]]:
        """Returns the assertions that are checked once for each tile of rows, row, step, key, and score."""
        outer, streamed, row = set(self.outer), set(self.parts.axes), {self.parts.row}
        scopes = {
            "tile": outer, "row": outer | row, "step": outer | {*self.parts.axes[:-1]}, "key": outer | streamed,
            "score": outer | streamed | row,
        }  # fmt: skip
        result: dict[str, list[int]] = {scope: [] for scope in scopes}
        for position in self.device_asserts:
            axes = self.kernel.value_axes[position]
            scope = next((scope for scope, allowed in scopes.items() if axes <= allowed), None)
            if scope is None:
                raise KernelError("an assertion depends on the width of a head")
            result[scope].append(position)
        return result

    def _hoist(self, targets: Iterable[int], axes: Collection[Axis], known: EmittedValues) -> None:
        """Writes the values among those that the targets are computed from that depend on these axes only."""
        targets, allowed = list(targets), frozenset(axes)
        positions = self.statements.backward_slice(targets, known)
        fixed = {item for item in positions if self.kernel.value_axes[item] <= allowed}
        needed = sorted(self.frontier(positions, fixed) | fixed.intersection(targets))
        self.statements.write(needed, known, named=needed)

    @contextmanager
    def _lane_loop(self, asserts: Collection[int] = ()) -> Iterator[None]:
        """Opens the vectorised loop over the rows of a tile; those beyond the end repeat the last one.

        `asserts` are the assertions that it checks.
        """
        row, size = self.parts.row.name, self.parts.row.size
        is_whole = isinstance(size, int) and size % self.lanes == 0
        index = f"{row}_0 + lane"
        with self._lanes(self.clause if asserts else ""):
            text = index if is_whole else f"fxwrap::min<int64_t>({index}, {print_size(size)} - 1)"
            self.writer.line(f"const int64_t {row} = {text};")
            yield

    @contextmanager
    def _lanes(self, clause: str = "") -> Iterator[None]:
        with self.writer.nest([f"for (int lane = 0; lane < {self.lanes}; ++lane)"], f"#pragma omp simd{clause}"):
            yield

    @contextmanager
    def _assume(self, conditions: Mapping[int, bool]) -> Iterator[None]:
        """Prints with known values of conditions."""
        kernel = self.statements.kernel
        self.statements.kernel = assume(kernel, conditions)
        yield
        self.statements.kernel = kernel

    @contextmanager
    def _key_loop(self) -> Iterator[None]:
        """Opens the loop over the positions of a tile of the innermost streamed axis."""
        with self.writer.block("for (int64_t key = 0; key < count; ++key)"):
            self.writer.line(f"const int64_t {self.inner.name} = {self.inner.name}_0 + key;")
            yield

    def _streamed_heads(self, known: EmittedValues) -> list[str]:
        """Returns the heads of the loops over tiles of the streamed axes; within its bound, the condition holds."""
        heads, bound = [], self.parts.bound
        for axis in self.parts.axes:
            end, name, step = print_size(axis.size), axis.name, f"++{axis.name}"
            if bound is not None and bound.axis == axis:
                end = f"fxwrap::min<int64_t>({end}, {known[bound.count]})"
            if axis == self.inner:
                name, step = f"{axis.name}_0", f"{axis.name}_0 += {self.keys}"
            heads.append(f"for (int64_t {name} = 0, {axis.name}_end = {end}; {name} < {axis.name}_end; {step})")
        return heads

    # --- a tile of rows ---------------------------------------------------------------------------------------------

    def _print_row_tile(self, known: EmittedValues) -> None:
        """Writes the tiles, the left factors of a tile of rows, and the initial values of its reductions."""
        parts, lanes, line = self.parts, self.lanes, self.writer.line
        self._declare("rows", self.depth * lanes)
        self._declare("keys", _round_up(self.keys) * self.depth, " = {}")
        self._declare("scores", _round_up(self.keys) * lanes)
        self._declare("maxima", lanes)
        self._declare("factors", lanes)
        for position in parts.sums:
            self._declare(f"sums_{position}", lanes, " = {}")
        for item in parts.weighted_sums:
            self._declare(f"values_{item.position}", self.keys * self.width, " = {}")
            self._declare(f"sums_{item.position}", self.width * lanes, " = {}")
        with self._lane_loop(self.asserts["row"]):
            line(f"maxima[lane] = {self._lowest};")
            self.write_device_asserts(self.asserts["row"], dict(known))
        with self.writer.nest([loop_head(axis) for axis in parts.product.axes]), self._lane_loop():
            values = dict(known)
            self.statements.write([parts.product.left], values)
            line(f"rows[{_position(parts.product.axes, lanes)} + lane] = {values[parts.product.left]};")

    @property
    def _lowest(self) -> str:
        return f"Limits<{self.type}>::lowest"

    def _declare(self, name: str, elements: int, value: str = "") -> None:
        self.writer.line(f"alignas(64) {self.type} {name}[{elements}]{value};")

    # --- a tile of the streamed axes --------------------------------------------------------------------------------

    def _print_step(self, known: EmittedValues) -> None:
        parts, lanes, line = self.parts, self.lanes, self.writer.line
        known[parts.product.position] = f"scores[key * {lanes} + lane]"
        factors = [item.right for item in (parts.product, *parts.weighted_sums)]
        self._hoist([parts.scores, *factors], [*self.outer, *parts.axes[:-1]], known)
        self.write_device_asserts(self.asserts["step"], known)
        line(f"const int64_t count = fxwrap::min<int64_t>({self.keys}, {self.inner.name}_end - {self.inner.name}_0);")
        self._pack("keys", parts.product.right, parts.product.axes, self.depth, known)
        line(f"contract<{lanes}, {self.type}>(rows, keys, {self.depth}, 1, {self.depth}, count, nullptr, scores);")
        self._declare("next", self.lanes)
        with self._lanes():
            line("next[lane] = maxima[lane];")
        choice = self._uniform_condition()
        if choice is None:
            self._print_scores(known)
        else:
            for head, value in ((f"if ({known[choice]})", True), ("else", False)):
                with self.writer.block(head), self._assume({choice: value}):
                    self._print_scores(known)
        self._print_rescaling()
        self._print_weights()
        for item in parts.weighted_sums:
            self._print_weighted_sum(item, known)

    def _print_weights(self) -> None:
        """Writes the weights of a tile, in place of its scores, and adds their sum to those so far.

        Sums of a tile alone are more accurate than adding each weight: most are small beside the sums so far.
        """
        line, lanes, sums = self.writer.line, self.lanes, self.parts.sums
        if sums:
            self._declare("weights", lanes, " = {}")
        with self.writer.block("for (int64_t key = 0; key < count; ++key)"), self._lanes():
            line(f"const {self.type} weight = op::weight(scores[key * {lanes} + lane] - next[lane]);")
            line(f"scores[key * {lanes} + lane] = weight;")
            if sums:
                line("weights[lane] += weight;")
        if sums:
            with self._lanes():
                for position in sums:
                    line(f"sums_{position}[lane] = sums_{position}[lane] * factors[lane] + weights[lane];")

    def _uniform_condition(self) -> int | None:
        """Returns a condition of a whole tile that makes a condition of its elements irrelevant, or None."""
        kernel, allowed = self.statements.kernel, frozenset([*self.outer, *self.parts.axes[:-1]])
        for position in self.statements.backward_slice([self.parts.scores], {self.parts.product.position: ""}):
            operation = kernel.operations[position]
            if isinstance(operation, Compute) and operation.name == "logical_or":
                uniform = [item for item in operation.operands if kernel.value_axes[item] <= allowed]
                if len(uniform) == 1:
                    return uniform[0]
        return None

    def _print_scores(self, known: EmittedValues) -> None:
        """Writes the scores of a tile, and the maxima so far."""
        parts = self.parts
        with self._key_loop():
            values = dict(known)
            self._hoist([parts.scores], [*self.outer, *parts.axes], values)
            self.write_device_asserts(self.asserts["key"], values)
            with self._lane_loop(self.asserts["score"]):
                self.write_device_asserts(self.asserts["score"], values)
                self.statements.write([parts.scores], values, named=[parts.scores])
                self.writer.line(f"scores[key * {self.lanes} + lane] = {values[parts.scores]};")
                self.writer.line(f"next[lane] = combine::max(next[lane], {values[parts.scores]});")

    def _print_rescaling(self) -> None:
        """Writes the factors of the sums so far, and as `next` the shift of the scores: 0 for fully masked rows."""
        zero, line = f"{self.type}(0)", self.writer.line
        with self._lanes():
            line(f"const {self.type} largest = next[lane], factor = op::weight(maxima[lane] - largest);")
            line(f"factors[lane] = maxima[lane] == {self._lowest} ? {zero} : factor;")
            line("maxima[lane] = largest;")
            line(f"next[lane] = largest == {self._lowest} ? {zero} : largest;")

    def _print_weighted_sum(self, item: Contraction, known: EmittedValues) -> None:
        values, sums, columns = f"values_{item.position}", f"sums_{item.position}", _element_count(self.columns)
        self._pack(values, item.right, self.columns, self.width, known)
        arguments = f"scores, {values}, 1, {self.width}, count, {columns}, factors, {sums}"
        self.writer.line(f"contract<{self.lanes}, {self.type}>({arguments});")

    def _pack(self, tile: str, value: int, axes: Sequence[Axis], stride: int, known: EmittedValues) -> None:
        """Writes a tile of factors that do not depend on rows, `stride` elements for each key."""
        with self._key_loop():
            values = dict(known)
            self._hoist([value], [*self.outer, *self.parts.axes], values)
            heads = [loop_head(axis) for axis in axes]
            with self.writer.nest(heads[:-1]), self.writer.nest(heads[-1:], "#pragma omp simd"):
                self.statements.write([value], values)
                self.writer.line(f"{tile}[key * {stride} + {_position(axes)}] = {values[value]};")

    # --- results ----------------------------------------------------------------------------------------------------

    def _print_results(self, known: EmittedValues) -> None:
        """Writes the stores of a tile of rows."""
        parts, row = self.parts, self.parts.row
        by_column = [store for store in self.kernel.stores if self._varies_on_column(store)]
        by_row = [store for store in self.kernel.stores if store not in by_column]
        weighted = {item.position: f"sums_{item.position}" for item in parts.weighted_sums}
        values = {**known, parts.maximum: "maxima[lane]", **{item: f"sums_{item}[lane]" for item in parts.sums}}
        size = print_size(row.size)
        with self.writer.block(f"for (int lane = 0; lane < {self.lanes} && {row.name}_0 + lane < {size}; ++lane)"):
            self.writer.line(f"const int64_t {row.name} = {row.name}_0 + lane;")
            indexed = {item: f"{name}[{_position(self.columns, self.lanes)} + lane]" for item, name in weighted.items()}
            values |= indexed
            self._hoist([store.value for store in self.kernel.stores], [*self.outer, row], values)
            self.write_stores(by_row, values)
            if by_column:
                with self.writer.nest([loop_head(axis) for axis in self.columns], "#pragma omp simd"):
                    self.write_stores(by_column, values)

    def _varies_on_column(self, store: Store) -> bool:
        axes = self.kernel.value_axes[self.kernel.operations.index(store)]
        return not axes.isdisjoint(self.columns)


def _element_count(axes: Sequence[Axis]) -> int:
    """Returns the number of elements of axes. Raises KernelError if it is symbolic: it is the size of a tile."""
    count = 1
    for axis in axes:
        if not isinstance(axis.size, int):
            raise KernelError(f"the size {axis.size} of a tile of its streaming reduction is symbolic")
        count *= axis.size
    return count


def _at_most(limit: int, size: Size) -> int:
    return max(1, min(limit, size)) if isinstance(size, int) else limit


def _round_up(number: int, multiple: int = _GROUP) -> int:
    return -(-number // multiple) * multiple


def _position(axes: Sequence[Axis], stride: int = 1) -> str:
    """Returns the row-major position of an element of axes, times a stride."""
    text = "0"
    for axis in axes:
        text = axis.name if text == "0" else f"({text} * {axis.size} + {axis.name})"
    return text if stride == 1 or text == "0" else f"{text} * {stride}"

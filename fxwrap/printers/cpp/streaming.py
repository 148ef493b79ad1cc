"""Streaming reductions as C++: tiles of rows, each in one pass over tiles of the streamed axes.

A tile of rows is transposed, so that each row is a lane: scores, maxima, sums and weighted sums are vectors over rows,
and no step combines lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxwrap.loop_ir import Axis, Compute, Constant, Contraction, Store, Update, operands
from fxwrap.printers.cpp.loops import loop_head
from fxwrap.printers.cpp.operations import parenthesize, print_size
from fxwrap.printers.cpp.statements import EmittedValues
from fxwrap.printers.cpp.streaming_loops import StreamingLoopPrinter
from fxwrap.printers.cpp.streaming_tiles import element_count, position_of, round_up


class StreamingPrinter(StreamingLoopPrinter):
    """A kernel that is one streaming reduction. Raises KernelError where its tiles do not fit."""

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
            with self._streamed_loops(dict(known)) as inside:
                exact = [item for item in self.parts.bounds if self.parts.is_exact(item)]
                with self._assume({item.condition: item.holds for item in exact}):
                    self._print_step(inside)
            self._print_results(known)

    # --- a tile of rows ---------------------------------------------------------------------------------------------

    def _print_row_tile(self, known: EmittedValues) -> None:
        """Writes the tiles, the left factors of a tile of rows, and the initial values of its reductions.

        The tiles of products are those of scores and weights, too, where a maximum shifts these.
        """
        parts, lanes, line = self.parts, self.lanes, self.writer.line
        for item in parts.products:
            depth = self._depth(item)
            self._declare(f"rows_{item.position}", depth * lanes, " = {}")
            self._declare(f"keys_{item.position}", round_up(self.keys) * depth, " = {}")
            self._declare(f"products_{item.position}", round_up(self.keys) * lanes)
        self._declare("factors", lanes)
        if parts.softmax is not None:
            self._declare("maxima", lanes)
            for scaled in parts.scaled_weights:
                self._declare(f"weights_{scaled.position}", round_up(self.keys) * lanes)
        else:
            for weights in parts.weights:
                self._declare(f"weights_{weights}", round_up(self.keys) * lanes)
        for total in parts.sums:
            self._declare(f"sums_{total.position}", lanes, " = {}")
        for item in parts.weighted_sums:
            self._declare(f"values_{item.position}", self.keys * self._width(item), " = {}")
            self._declare(f"sums_{item.position}", self._width(item) * lanes, " = {}")
        with self._lane_loop(self.asserts["row"]):
            line(f"maxima[lane] = {self._lowest};" if parts.softmax is not None else f"factors[lane] = {self.type}(1);")
            self.write_device_asserts(self.asserts["row"], dict(known))
        for item in parts.products:
            with self.writer.nest([loop_head(axis) for axis in item.axes]), self._lane_loop():
                values = dict(known)
                self.statements.write([item.left], values)
                line(f"{self._row_element(item)} = {values[item.left]};")

    def _row_element(self, item: Contraction) -> str:
        """Returns the element of the tile of a product's first factors in the loops over its axes and rows."""
        return f"rows_{item.position}[{position_of(item.axes, self.lanes)} + lane]"

    def _sum_element(self, item: Contraction) -> str:
        """Returns the element of a weighted sum in the loops over rows and columns."""
        return f"sums_{item.position}[{position_of(self._columns(item), self.lanes)} + lane]"

    @property
    def _lowest(self) -> str:
        return f"Limits<{self.type}>::lowest"

    # --- a tile of the streamed axes --------------------------------------------------------------------------------

    def _print_step(self, known: EmittedValues) -> None:
        parts, line = self.parts, self.writer.line
        factors = [item.right for item in (*parts.products, *parts.weighted_sums)]
        known |= {item.position: self._element(f"products_{item.position}") for item in parts.products}
        factors += [item.factor for item in parts.scaled_weights]
        self._hoist([*parts.elements, *factors], [*self.outer, *parts.axes[:-1]], known)
        self.write_device_asserts(self.asserts["step"], known)
        line(f"const int64_t count = fxwrap::min<int64_t>({self.keys}, {self.inner.name}_end - {self.inner.name}_0);")
        self._print_tile_condition(known)
        for item in parts.products:
            self._pack(f"keys_{item.position}", item.right, item.axes, self._depth(item), known)
            self._print_product(item)
        if parts.softmax is not None:
            self._declare("next", self.lanes)
            with self._lanes():
                line("next[lane] = maxima[lane];")
        for position in self.matrices:
            self._pack_matrix(position, known)
        choice = self._uniform_condition()
        if choice is None:
            self._print_elements(known)
        else:
            for head, value in ((f"if ({known[choice]})", True), ("else", False)):
                with self.writer.block(head), self._assume({choice: value}):
                    self._print_elements(known)
        if parts.softmax is not None:
            self._print_rescaling()
            self._print_weights()
            self._print_scaled_weights(known)
        else:
            self._print_sums()
        for item in parts.weighted_sums:
            self._print_weighted_sum(item, known)
        for update in parts.updates:
            self._print_update(update, known)

    def _print_tile_condition(self, known: EmittedValues) -> None:
        """Writes the end of a step that contributes nothing, where that is cheap to know."""

    def _print_product(self, item: Contraction) -> None:
        """Writes the multiplication of a tile of rows and a tile of positions."""
        depth = self._depth(item)
        arguments = f"rows_{item.position}, keys_{item.position}, {depth}, 1, {depth}, count, nullptr"
        self.writer.line(f"contract<{self.lanes}, {self.type}>({arguments}, products_{item.position});")

    @property
    def _scores(self) -> str:
        """The tile of scores, in the memory of one of products, each element of which is read once, before."""
        return f"products_{self.parts.products[0].position}"

    def _print_weights(self) -> None:
        """Writes the weights of a tile, in place of its scores, and adds their sum to those so far.

        Sums of a tile alone are more accurate than adding each weight: most are small beside the sums so far.
        """
        line, lanes, sums = self.writer.line, self.lanes, self.parts.sums
        if sums:
            self._declare("weights", lanes, " = {}")
        with self.writer.block("for (int64_t key = 0; key < count; ++key)"), self._lanes():
            line(f"const {self.type} weight = op::weight({self._element(self._scores)} - next[lane]);")
            line(f"{self._element(self._scores)} = weight;")
            if sums:
                line("weights[lane] += weight;")
        if sums:
            with self._lanes():
                for item in sums:
                    name = f"sums_{item.position}"
                    line(f"{name}[lane] = {name}[lane] * factors[lane] + weights[lane];")

    def _print_scaled_weights(self, known: EmittedValues) -> None:
        """Writes the weights of a tile times factors."""
        for item in self.parts.scaled_weights:
            with self._key_loop():
                values = dict(known)
                self._hoist([item.factor], [*self.outer, *self.parts.axes], values)
                with self._lane_loop():
                    self.statements.write([item.factor], values)
                    product = f"{self._element(self._scores)} * {parenthesize(values[item.factor])}"
                    self.writer.line(f"{self._element(f'weights_{item.position}')} = {product};")

    def _print_sums(self) -> None:
        """Adds the sums of the weights of a tile to those so far."""
        line, lanes = self.writer.line, self.lanes
        for item in self.parts.sums:
            self._declare(f"total_{item.position}", lanes, " = {}")
            with self.writer.block("for (int64_t key = 0; key < count; ++key)"), self._lanes():
                line(f"total_{item.position}[lane] += {self._element(f'weights_{item.weights}')};")
            with self._lanes():
                line(f"sums_{item.position}[lane] += total_{item.position}[lane];")

    def _uniform_condition(self) -> int | None:
        """Returns a condition of a whole tile that makes a condition of its elements irrelevant, or None."""
        kernel, allowed = self.statements.kernel, frozenset([*self.outer, *self.parts.axes[:-1]])
        products = {item.position: "" for item in self.parts.products}
        for position in sorted(self.kernel.backward_slice(self.parts.elements, products)):
            operation = kernel.operations[position]
            if isinstance(operation, Compute) and operation.name == "logical_or":
                uniform = [item for item in operation.operands if kernel.value_axes[item] <= allowed]
                if len(uniform) == 1:
                    return uniform[0]
        return None

    def _print_elements(self, known: EmittedValues) -> None:
        """Writes the scores of a tile, and the maxima so far; or its weights, where no maximum shifts them."""
        parts = self.parts
        with self._key_loop():
            values = dict(known)
            self._hoist(parts.elements, [*self.outer, *parts.axes], values)
            self.write_device_asserts(self.asserts["key"], values)
            with self._lane_loop(self.asserts["score"]):
                self.write_device_asserts(self.asserts["score"], values)
                self.statements.write(parts.elements, values, named=parts.elements)
                if parts.softmax is None:
                    for weights in parts.weights:
                        self.writer.line(f"{self._element(f'weights_{weights}')} = {values[weights]};")
                else:
                    scores = values[parts.softmax.scores]
                    self.writer.line(f"{self._element(self._scores)} = {scores};")
                    self.writer.line(f"next[lane] = combine::max(next[lane], {scores});")

    def _print_rescaling(self) -> None:
        """Writes the factors of the sums so far, and as `next` the shift of the scores: 0 for fully masked rows."""
        zero, line = f"{self.type}(0)", self.writer.line
        with self._lanes():
            line(f"const {self.type} largest = next[lane], factor = op::weight(maxima[lane] - largest);")
            line(f"factors[lane] = maxima[lane] == {self._lowest} ? {zero} : factor;")
            line("maxima[lane] = largest;")
            line(f"next[lane] = largest == {self._lowest} ? {zero} : largest;")

    def _print_weighted_sum(self, item: Contraction, known: EmittedValues) -> None:
        softmax = self.parts.softmax
        weights = self._scores if softmax is not None and item.left == softmax.weights else f"weights_{item.left}"
        self._pack(f"values_{item.position}", item.right, self._columns(item), self._width(item), known)
        self._print_accumulation(item, weights)

    def _print_accumulation(self, item: Contraction, weights: str) -> None:
        """Writes the multiplication of a tile of weights and a tile of values."""
        count = element_count(self._columns(item))
        arguments = f"{weights}, values_{item.position}, 1, {self._width(item)}, count, {count}, factors"
        self.writer.line(f"contract<{self.lanes}, {self.type}>({arguments}, sums_{item.position});")

    # --- updates of memory ------------------------------------------------------------------------------------------

    def _update_targets(self, update: Update) -> list[int]:
        """Returns the values that an update's address and its conditions are computed from."""
        store = self.kernel.operations[update.position]
        assert isinstance(store, Store)
        used = {*operands(store)} - {store.value, store.mask}
        return sorted({*used, *update.conditions})

    def _print_update(self, update: Update, known: EmittedValues) -> None:
        """Writes the values of a tile to memory, or adds them, those of one address for all rows as their sum."""
        store = self.kernel.operations[update.position]
        assert isinstance(store, Store)
        with self._key_loop():
            values = dict(known)
            self._hoist(self._update_targets(update), [*self.outer, *self.parts.axes], values)
            values[update.value] = self._element(f"weights_{update.value}")
            if store.mode == "add":
                self._print_additions([update], values)
            else:
                self._print_stores(update, store, values)

    def _print_stores(self, update: Update, store: Store, known: EmittedValues) -> None:
        """Writes the values of the rows of a tile to memory."""
        row, size = self.parts.row.name, print_size(self.parts.row.size)
        self.writer.line(f"const int64_t lanes = fxwrap::min<int64_t>({self.lanes}, {size} - {row}_0);")
        with self.writer.nest(["for (int64_t lane = 0; lane < lanes; ++lane)"], "#pragma omp simd"):
            self.writer.line(f"const int64_t {row} = {row}_0 + lane;")
            self.statements.write([store.value, *self._update_targets(update)], known)
            text = f"{store.buffer}[{self.statements.index(known)(store.index)}] = {known[store.value]};"
            self.writer.line(self._conditions(update.conditions, known) + text)

    def _print_additions(self, updates: Sequence[Update], known: EmittedValues) -> None:
        """Adds the values of the rows of a tile to memory."""
        row, size, line = self.parts.row, print_size(self.parts.row.size), self.writer.line
        for update in updates:
            store = self.kernel.operations[update.position]
            assert isinstance(store, Store)
            is_summed = row not in self.kernel.address_axes[update.position]
            total = f"added_{update.position}"
            if is_summed:
                line(f"{self.type} {total} = {self.type}(0);")
            with self.writer.block(f"for (int lane = 0; lane < {self.lanes} && {row.name}_0 + lane < {size}; ++lane)"):
                line(f"const int64_t {row.name} = {row.name}_0 + lane;")
                values = dict(known)
                self.statements.write([update.value, *self._update_targets(update)], values)
                condition = self._conditions(update.conditions, values)
                value = values[update.value]
                text = f"{total} += {value};" if is_summed else self._addition(store, value, values)
                line(condition + text)
            if is_summed:
                values = dict(known)
                shared = [item for item in update.conditions if row not in self.kernel.value_axes[item]]
                self.statements.write([*(set(operands(store)) & set(self._update_targets(update))), *shared], values)
                line(f"{self._conditions(shared, values)}{self._addition(store, total, values)}")

    def _conditions(self, conditions: Sequence[int], known: EmittedValues) -> str:
        """Returns the head of a statement that runs where conditions hold."""
        texts = dict.fromkeys([parenthesize(known[item]) for item in conditions if not self._is_true(item)])
        return f"if ({' && '.join(texts)}) " if texts else ""

    def _is_true(self, condition: int) -> bool:
        return self.statements.kernel.operations[condition] == Constant(True, torch.bool)

    def _addition(self, store: Store, value: str, known: EmittedValues) -> str:
        return f"add_atomically({store.buffer}[{self.statements.index(known)(store.index)}], {value});"

    # --- results ----------------------------------------------------------------------------------------------------

    def _print_results(self, known: EmittedValues) -> None:
        """Writes the stores of a tile of rows."""
        parts, row = self.parts, self.parts.row
        groups: dict[frozenset[Axis], list[Store]] = {}
        for position, operation in enumerate(self.kernel.operations):
            if isinstance(operation, Store) and operation.mode == "set" and not self.kernel.varying[position]:
                columns = self.kernel.value_axes[position].intersection(parts.columns)
                groups.setdefault(columns, []).append(operation)
        values = {**known, **{item.position: f"sums_{item.position}[lane]" for item in parts.sums}}
        if parts.softmax is not None:
            values[parts.softmax.maximum] = "maxima[lane]"
        for item in parts.weighted_sums:
            values[item.position] = self._sum_element(item)
        self._print_additions(parts.row_updates, values)
        if not groups:
            return
        size = print_size(row.size)
        with self.writer.block(f"for (int lane = 0; lane < {self.lanes} && {row.name}_0 + lane < {size}; ++lane)"):
            self.writer.line(f"const int64_t {row.name} = {row.name}_0 + lane;")
            stored = [store.value for stores in groups.values() for store in stores]
            self._hoist(stored, [*self.outer, row], values)
            for columns in sorted(groups, key=lambda axes: [self.kernel.axes.index(axis) for axis in axes]):
                if not columns:
                    self.write_stores(groups[columns], values)
                    continue
                heads = [loop_head(axis) for axis in parts.columns if axis in columns]
                with self.writer.nest(heads, "#pragma omp simd"):
                    self.write_stores(groups[columns], dict(values))

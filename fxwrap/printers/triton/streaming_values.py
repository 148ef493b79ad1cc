"""Values of streaming reductions in Triton: bounds, factors of products, scores, the arithmetic of half precision.

Limits of the blocks that a program visits are known before the loop. Those that vary over rows are limits of each row
in the conditions of its elements, and the loop ends at the last one.

Weights that are rounded to half precision allow what eager's separate kernels do not do: multiplications and additions
of scores are contracted, a division by a value of each row is a multiplication by its reciprocal, and quotients and
hyperbolic tangents of scores are computed without branches, to a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fxwrap.loop_ir import (
    FAR_ABOVE_LOWEST,
    HALF_PRECISION,
    Axis,
    AxisBound,
    Compute,
    Kernel,
    KernelError,
    Load,
    Operation,
    map_operation,
    renumber_index,
    value_range,
)
from fxwrap.printers.triton.blocks import BlockPrinter, Scope
from fxwrap.printers.triton.operations import TRITON_DTYPES, safe_reciprocal
from fxwrap.printers.triton.streaming_configuration import MIN_DOT, streaming_parts
from fxwrap.printers.triton.streaming_scores import (
    LinearBias,
    constant_of,
    linear_addition,
    masked_score,
    may_be_lowest,
    scaled_score,
)
from fxwrap.printers.triton.tiling import StreamingConfiguration, next_power_of_2

LOG2_E = 1.4426950408889634
"""The factor of numbers whose power of 2 is the exponential."""

_FLOAT_BITS, _SHORT_INDEX = 0x4B000000, 1 << 22
"""The bits of 2**23 as float32, and a limit of indices that leaves as much for rows and keys of incomplete blocks."""


@dataclass(frozen=True)
class BlockRange:
    """Blocks of the innermost axis, as texts: `count` ones from `first` on, "" for 0, without the blocks `skipped`."""

    count: str
    first: str = ""
    skipped: BlockRange | None = None

    def text(self, step: str) -> str:
        """Returns the number of the block of a step."""
        number = f"({self.first} + {step})" if self.first else step
        if self.skipped is None:
            return number
        if self.skipped.first == self.first:
            return f"({number} + {self.skipped.count})"
        return f"({number} + tl.where({number} >= {self.skipped.first}, {self.skipped.count}, 0))"


class StreamingValuePrinter(BlockPrinter):
    """Prints the values of one streaming reduction, whose blocks have names.

    Its axes: those of `parts.row` and `parts.columns`, the other parallel ones `outer`, and the streamed ones: the last
    two, `streamed`, in one loop over blocks of the innermost, `inner`, and loops over the `leading` ones around it.
    """

    def __init__(self, kernel: Kernel, configuration: StreamingConfiguration, limits: Mapping[str, int]) -> None:
        self.parts = parts = streaming_parts(kernel)
        kernel = parts.kernel
        self.configuration = configuration
        self.inner = parts.axes[-1]
        self.widths = tuple(dict.fromkeys([axis for item in parts.products for axis in item.axes]))
        if any(len(item.axes) != 1 for item in parts.products):
            raise KernelError("its streaming reduction has products over several axes")
        if not all(isinstance(axis.size, int) for axis in (*self.widths, *parts.columns)):
            raise KernelError("the width of its streaming reduction is symbolic")
        self.block_names = {parts.row: "ROW_BLOCK", self.inner: "KEY_BLOCK"}
        constants = {"ROW_BLOCK": configuration.row_block, "KEY_BLOCK": configuration.key_block}
        for name, axes in (("WIDTH_BLOCK", self.widths), ("COLUMN_BLOCK", parts.columns)):
            for number, axis in enumerate(axes):
                self.block_names[axis] = name if number == 0 else f"{name}_{number}"
                constants[self.block_names[axis]] = _dot_extent(axis)
        super().__init__(kernel, limits, constants)
        self.dtype = TRITON_DTYPES[self.dtype_of(parts.products[0].position)]
        self.is_half = any(self.factor_dtype(item.right) in HALF_PRECISION for item in parts.weighted_sums)
        self.outer = [axis for axis in kernel.axes if axis != parts.row and axis not in parts.columns]
        self.leading, self.streamed = parts.axes[:-2], parts.axes[-2:]
        self.limits: dict[AxisBound, str] = {}
        self.linear_bias: LinearBias | None = None
        self._patterns: dict[Operation, int] = {}

    # --- bounds -----------------------------------------------------------------------------------------------------

    def blocks(self, scope: Scope) -> tuple[BlockRange, BlockRange]:
        """Prints the blocks of the innermost axis within its bounds; returns these, and those within its lowest masks.

        Blocks beyond the lowest masks have no weights in rows whose maximum is above `FAR_ABOVE_LOWEST`.
        """
        size, outside = self.index_printer(scope).size_operand(self.inner.size), frozenset([*self.outer, *self.leading])
        limits = dict[AxisBound, str]()
        self.limits = {}
        for bound in (*self.parts.bounds, *self.parts.masks):
            if bound.axis == self.inner and self.kernel.value_axes[bound.limit] <= outside | {self.parts.row}:
                limits[bound] = self._limit(bound, size, scope)
        inside = [bound for bound in limits if bound in self.parts.bounds]
        lowest = [bound for bound in limits if bound in self.parts.lowest_masks and len(self.parts.axes) == 1]
        ends = [limits[bound] for bound in inside if not bound.is_lower]
        end = _combined("minimum", ends) or size
        start = _combined("maximum", [limits[bound] for bound in inside if bound.is_lower])
        if start:
            self.line(f"first_tile = {start} // KEY_BLOCK")
            self.line(f"tiles = tl.maximum(tl.cdiv({end}, KEY_BLOCK) - first_tile, 0)")
        else:
            self.line(f"tiles = tl.cdiv({end}, KEY_BLOCK)")
        every = BlockRange("tiles", "first_tile" if start else "")
        if not lowest:
            return every, every
        last, first = every.text(every.count), every.first
        start = _combined("maximum", [limits[bound] for bound in lowest if bound.is_lower])
        end = _combined("minimum", [limits[bound] for bound in lowest if not bound.is_lower])
        if start:
            self.line(f"near_first = tl.minimum(tl.maximum({start} // KEY_BLOCK, {first or '0'}), {last})")
            first = "near_first"
        near_end = f"tl.minimum(tl.cdiv({end}, KEY_BLOCK), {last})" if end else last
        self.line(f"near_tiles = tl.maximum({near_end} - {first or '0'}, 0)")
        return every, BlockRange("near_tiles", first)

    def far_blocks(self, blocks: BlockRange, near: BlockRange, scope: Scope) -> BlockRange:
        """Prints which blocks beyond the lowest masks some row needs, after the other ones; returns these."""
        row, largest = self.parts.row, "largest"
        if row in scope.masks:
            largest = f"tl.where({scope.masks[row]}, largest, 0.0)"
        self.line(f"needs_far = tl.min({largest}) <= {FAR_ABOVE_LOWEST}")
        self.line(f"far_tiles = tl.where(needs_far, {blocks.count} - {near.count}, 0)")
        return BlockRange("far_tiles", blocks.first, near)

    def split_blocks(self, blocks: BlockRange, scope: Scope) -> tuple[BlockRange, BlockRange]:
        """Prints which blocks of a range are within all limits of all rows; returns the other ones, and these."""
        first = blocks.first or "0"
        self.line(f"full_end = {blocks.text(blocks.count)}")
        has_lower = has_upper = False
        for bound, limit in self._strictest(scope):
            if bound.is_lower:
                last = blocks.text(blocks.count)
                self.line(f"first_full = tl.minimum(tl.maximum(tl.cdiv({limit}, KEY_BLOCK), {first}), {last})")
                first, has_lower = "first_full", True
            else:
                self.line(f"full_end = tl.minimum(full_end, {limit} // KEY_BLOCK)")
                has_upper = True
        self.line(f"full_tiles = tl.maximum(full_end - {first}, 0)")
        self.line(f"partial_tiles = {blocks.count} - full_tiles")
        full = BlockRange("full_tiles", "first_full" if has_lower else blocks.first)
        return BlockRange("partial_tiles", blocks.first, full if has_upper else None), full

    def _limit(self, bound: AxisBound, size: str, scope: Scope) -> str:
        """Prints the limit of a bound of an axis; returns the text of that of a block of rows, from 0 to the size."""
        limit = next((name for item, name in self.limits.items() if item.limit == bound.limit), None)
        if limit is None:
            limit = self._printed_limit(bound, size, scope)
        self.limits[bound] = limit
        return self._of_rows("min" if bound.is_lower else "max", bound, size, scope)

    def _printed_limit(self, bound: AxisBound, size: str, scope: Scope) -> str:
        self.write([bound.limit], scope)
        limit: str = self.names.create_name("limit")
        index = "tl.int64" if self.use_int64 else "tl.int32"
        self.line(f"{limit} = tl.minimum(tl.maximum({self.value(bound.limit, scope)}, 0), {size}).to({index})")
        return limit

    def _of_rows(self, extremum: str, bound: AxisBound, size: str, scope: Scope) -> str:
        """Returns the text of the least or largest limit ("min" or "max") of a block of rows."""
        limit, row = self.limits[bound], self.parts.row
        if row not in self.kernel.value_axes[bound.limit]:
            return limit
        if row in scope.masks:
            limit = f"tl.where({scope.masks[row]}, {limit}, {size if extremum == 'min' else '0'})"
        return f"tl.{extremum}({limit})"

    def partial_blocks(self, scope: Scope) -> str:
        """Prints the strictest limits of rows; returns the condition of blocks that are beyond some."""
        conditions = [
            f"(first_key < {limit})" if bound.is_lower else f"(first_key + KEY_BLOCK > {limit})"
            for bound, limit in self._strictest(scope)
        ]
        return " | ".join(conditions)

    def _strictest(self, scope: Scope) -> list[tuple[AxisBound, str]]:
        """Prints the strictest limits of a block of rows; returns them, and a bound of each."""
        size, strictest = self.index_printer(scope).size_operand(self.inner.size), list[tuple[AxisBound, str]]()
        for bound in {(item.limit, item.is_lower): item for item in self.limits}.values():
            name = self.names.create_name("strictest")
            self.line(f"{name} = {self._of_rows('max' if bound.is_lower else 'min', bound, size, scope)}")
            strictest.append((bound, name))
        return strictest

    def write_conditions(self, scope: Scope) -> None:
        """Prints the conditions of bounds as comparisons with limits, which have no more bits than indices."""
        for bound, limit in self.limits.items():
            if bound.condition in scope.text:
                continue
            name = self.names.create_name("inside")
            relation = ">=" if bound.is_lower == bound.holds else "<"
            self.line(f"{name} = {scope.names[self.inner]} {relation} {limit}")
            scope.text[bound.condition] = name

    # --- arithmetic -------------------------------------------------------------------------------------------------

    def element_text(self, position: int, scope: Scope) -> str:
        """Prints what a value is computed from; returns its text."""
        self.write([position], scope)
        return self.value(position, scope)

    def score_text(self, position: int, scope: Scope) -> str:
        """Prints scores, in half precision but for final multiplications by positive constants; returns the text.

        `score_unit` is the factor from the text to units in which the weight is a power of 2. A linear bias is that of
        the position in its block: `write_linear_bias` prints the rest.
        """
        scaled, masked, bias = self._scaled(position), masked_score(self.kernel, position), self.linear_bias
        if self.is_half and masked is not None:
            condition, inside = masked
            text = self.score_text(inside, scope)
            return f'tl.where({self.element_text(condition, scope)}, {text}, float("-inf"))'
        if bias is not None and bias.is_added(self.kernel, position):
            return self.fma("steps", "slope", self.score_text(bias.scores, scope))
        return self.element_text(position, scope) if scaled is None else self.score_text(scaled[0], scope)

    def score_unit(self, position: int) -> float:
        """Returns the factor from the text of scores to units in which the weight is a power of 2."""
        scaled, masked, bias = self._scaled(position), masked_score(self.kernel, position), self.linear_bias
        if masked is not None:
            return self.score_unit(masked[1])
        if bias is not None and bias.is_added(self.kernel, position):
            return self.score_unit(bias.scores)
        return LOG2_E if scaled is None else self.score_unit(scaled[0]) * scaled[1]

    def write_linear_bias(self, scores: int, scope: Scope) -> str:
        """Prints the parts of a linear bias of a block; returns what it adds to scores in units of powers of 2.

        The bias is that of the first position, a value of each row, and a slope times the distance from it: the integer
        is converted once a row, and slopes are added with the products. Returns nothing without such a bias.
        """
        bias = self.linear_bias
        if bias is None:
            return ""
        slope, first = self._bias_of_block(bias, scope)
        inside = self.score_unit(bias.scores) / LOG2_E
        self.line(f"slope = tl.cast({slope} * {bias.step / inside}, tl.float32)")
        self.line(f"steps = {self._steps(scope)}")
        self.line(f"first_bias = {first} * {self.score_unit(scores) / inside}")
        return "first_bias"

    def _steps(self, scope: Scope) -> str:
        """Returns the distances of the positions of a block from its first one, as floats."""
        size = self.inner.size
        if self.configuration.hoists_distances or not isinstance(size, int) or size >= _SHORT_INDEX:
            return "tl.arange(0, KEY_BLOCK)[None, :].to(tl.float32)"
        return _float_difference(scope.names[self.inner], "first_key")

    def _bias_of_block(self, bias: LinearBias, scope: Scope) -> tuple[str, str]:
        """Prints the parts of a linear bias; returns its slope, and that of the first position of a block."""
        first = scope.inner()
        for known in (first.dimension, first.masks, first.blocks):
            known.pop(self.inner, None)
        first.names[self.inner] = "first_key"
        first.text = {item: text for item, text in scope.text.items() if self.inner not in self.kernel.value_axes[item]}
        self.write([bias.integer, *bias.factors], first)
        slope = " * ".join([str(bias.constant), *[f"({self.value(item, first)})" for item in bias.factors]])
        return slope, f"{slope} * tl.cast({self.value(bias.integer, first)}, tl.float32)"

    @cached_property
    def may_overflow(self) -> bool:
        """Whether scores that a maximum shifts may be below `LOWEST` and finite."""
        softmax = self.parts.softmax
        return softmax is not None and may_be_lowest(self.parts.kernel, self.parts, softmax.scores)

    def _scaled(self, position: int) -> tuple[int, float] | None:
        """Returns the operand and the factor of a multiplication by a positive constant in half precision's kernels."""
        return scaled_score(self.kernel, position) if self.is_half else None

    def _constant(self, position: int) -> float | None:
        return constant_of(self.kernel, position)

    def compute_text(self, position: int, operation: Compute, scope: Scope) -> tuple[str, str]:
        """Returns a name for the result of an operation, and its expression."""
        if self.is_half and operation.dtype is torch.float32:
            text = self._half_precision_text(operation, scope)
            if text is not None:
                return operation.name, text
        return super().compute_text(position, operation, scope)

    def _half_precision_text(self, operation: Compute, scope: Scope) -> str | None:
        """Returns an expression with fewer operations of a value that is computed in float32, if there is one."""
        texts = {item: f"({self.value(item, scope)})" for item in operation.operands}
        match operation.name, operation.operands:
            case "exp", (operand,):
                exponent = self._exponent_text(operand, scope)
                return None if exponent is None else f"tl.exp2({exponent})"
            case "where", (condition, inside, other) if self._constant(other) == 0:
                exponential = self.kernel.operations[inside]
                if isinstance(exponential, Compute) and exponential.name == "exp":
                    exponent = self._exponent_text(exponential.operands[0], scope)
                    if exponent is not None:  # a select of a result that is rounded would be one of 16 bits, and slower
                        return f'tl.exp2(tl.where({texts[condition]}, {exponent}, float("-inf")))'
            case "add", (left, right):
                for one, other in ((left, right), (right, left)):
                    factors = self._factors_of_score(one)
                    if factors is not None:
                        first, second = [f"({self.value(item, scope)})" for item in factors]
                        return self.fma(first, second, texts[other])
            case "div", (left, right):
                axes = self.kernel.value_axes
                if not axes[left].isdisjoint(self.parts.columns) and axes[right].isdisjoint(self.parts.columns):
                    return f"{texts[left]} * tl.div_rn(1.0, {texts[right]})"
                if self._is_score(left):
                    factor = safe_reciprocal(self._constant(right))
                    return f"{texts[left]} / {texts[right]}" if factor is None else f"{texts[left]} * {factor!r}"
            case "tanh", (operand,) if self._is_score(operand):
                return f"{self.use('score_tanh')}({texts[operand]})"
            case "cast", (operand,):
                return self._float_difference(operand, scope)
            case _:
                pass
        return None

    def _exponent_text(self, position: int, scope: Scope) -> str | None:
        """Returns the power of 2 of the exponential of a difference of scores and another value, if it is one."""
        difference = self.kernel.operations[position]
        is_score = self.inner in self.kernel.value_axes[position]
        if not is_score or not isinstance(difference, Compute) or difference.name != "sub":
            return None
        left, *shifts = difference.operands
        shifted, both = self.kernel.operations[left], {self.parts.row, self.inner}
        if isinstance(shifted, Compute) and shifted.name == "sub":
            score, shift = shifted.operands
            if not both <= self.kernel.value_axes[shift] and not may_be_lowest(self.kernel, self.parts, score):
                left, shifts = score, [*shifts, shift]  # a vector
        scaled = self._scaled(left)
        score, factor = (left, 1.0) if scaled is None else scaled
        bias = linear_addition(self.kernel, self.parts, score)
        if bias is not None and not any(both <= self.kernel.value_axes[item] for item in shifts):
            return self._exponent_of_linear_bias(bias, factor, shifts, scope)
        unit = f"tl.full((), {factor * LOG2_E}, tl.float32)"
        addend = " + ".join([self._negative_shift(item, scope) for item in shifts])
        return self.fma(self.value(score, scope), unit, f"({addend})" if len(shifts) > 1 else addend)

    def _exponent_of_linear_bias(self, bias: LinearBias, factor: float, shifts: Sequence[int], scope: Scope) -> str:
        """Returns the exponent of scores with a linear bias: their multiple, values of rows and those of positions."""
        slope, first = self._bias_of_block(bias, scope)
        rows, positions = (
            [f"{first} * {factor * LOG2_E}"],
            [f"{slope} * {bias.step * factor * LOG2_E} * ({self._steps(scope)})"],
        )
        for item in shifts:
            addends = positions if self.inner in self.kernel.value_axes[item] else rows
            addends.append(self._negative_shift(item, scope))
        unit = f"tl.full((), {factor * self.score_unit(bias.scores)}, tl.float32)"
        multiple = self.fma(self.score_text(bias.scores, scope), unit, f"({' + '.join(rows)})")
        return f"{multiple} + ({' + '.join(positions)})"

    def _negative_shift(self, position: int, scope: Scope) -> str:
        """Returns the negative of a value in units in which the exponential is a power of 2."""
        value, factor = self._scaled(position) or (position, 1.0)
        factor *= LOG2_E
        factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor
        return f"({self.value(value, scope)}) * {-factor}"  # a multiplication by -1 needs no instruction, unlike 0 - x

    def fma(self, left: str, right: str, addend: str) -> str:
        """Returns left * right + addend, rounded once, of which one varies over rows and streamed positions."""
        block = "(ROW_BLOCK, KEY_BLOCK)"
        return f"tl.fma({', '.join([f'tl.broadcast_to({item}, {block})' for item in (left, right, addend)])})"

    def _factors_of_score(self, position: int) -> tuple[int, ...] | None:
        """Returns the operands of a multiplication of a value that varies over rows and streamed positions."""
        operation = self.kernel.operations[position]
        if not isinstance(operation, Compute) or operation.name != "mul":
            return None
        return operation.operands if self._is_score(position) else None

    def _is_score(self, position: int) -> bool:
        """Whether a value that varies over streamed positions is computed from products."""
        products = {item.position for item in self.parts.products}
        is_streamed = self.inner in self.kernel.value_axes[position]
        return is_streamed and not products.isdisjoint(self.kernel.backward_slice([position]))

    def _float_difference(self, position: int, scope: Scope) -> str | None:
        """Returns the float of a difference of an integer of rows and one of streamed positions, if that is exact."""
        operation = self.kernel.operations[position]
        if not isinstance(operation, Compute) or operation.name != "sub" or operation.dtype.is_floating_point:
            return None
        sides = [{self.parts.row, self.inner} & self.kernel.value_axes[item] for item in operation.operands]
        if [len(item) for item in sides] != [1, 1] or sides[0] == sides[1]:
            return None
        if not all(self._is_short(item) for item in operation.operands):
            return None
        return _float_difference(*[self.value(item, scope) for item in operation.operands])

    def _is_short(self, position: int) -> bool:
        """Whether an integer is never negative and below 2**22, as an index, and one that is computed from it."""
        low, high = value_range(self.kernel.operations, position)
        return low >= 0 and high < _SHORT_INDEX

    # --- factors ----------------------------------------------------------------------------------------------------

    def dot(self, left: str, right: str, factor: int, start: str = "") -> str:
        """Returns the product of two matrices; those of half precision have float32 sums."""
        dtype = self.factor_dtype(factor)
        precision = "" if dtype in HALF_PRECISION else ', input_precision="ieee"'
        out = ", out_dtype=tl.float64" if dtype is torch.float64 else ""
        return f"tl.dot({left}, {right}{', ' + start if start else ''}{precision}{out})"

    def factor(self, position: int, scope: Scope) -> str:
        """Prints a factor of a product, in half precision if it has been loaded so; returns its name."""
        source = self._factor_source(position)
        self.write([source], scope)
        axes = self.kernel.value_axes[source]
        shape = [next((scope.blocks[axis] for axis in axes if scope.dimension.get(axis) == n), "") for n in (0, 1)]
        if not all(shape):
            raise KernelError("a factor of its streaming reduction does not vary along both axes")
        text = self.value(source, scope)
        masks = [scope.masks[axis] for axis in axes if axis in scope.masks]
        if masks and not isinstance(self.kernel.operations[source], Load):
            text = f"tl.where({' & '.join(sorted(masks))}, {text}, 0.0)"
        return text

    def _factor_source(self, position: int) -> int:
        operation = self.kernel.operations[position]
        if not self.configuration.half_products:
            return position
        if isinstance(operation, Compute) and operation.name == "cast" and operation.dtype is torch.float32:
            if self.dtype_of(operation.operands[0]) in HALF_PRECISION:
                return operation.operands[0]
        return position

    def factor_dtype(self, position: int) -> torch.dtype:
        return self.dtype_of(self._factor_source(position))

    def pattern(self, position: int, axis: Axis) -> int:
        """Returns a number that values have in common which are equal but for the name of one axis."""
        lane, known = Axis("lane", axis.size), dict[int, int]()

        def number(at: int) -> int:
            if axis not in self.kernel.value_axes[at]:
                return at
            if at not in known:
                operation = map_operation(
                    self.kernel.operations[at], number, lambda index: renumber_index(number, {axis: lane}, index)
                )
                known[at] = self._patterns.setdefault(operation, -1 - len(self._patterns))
            return known[at]

        return number(position)


def _float_difference(*texts: str) -> str:
    """Returns the float of a difference of integers that are never negative and below 2**23.

    The bits of 2**23 plus a smaller number are those of 2**23 plus the number: the difference of two such floats needs
    no conversion for each element, unlike that of the numbers.
    """
    integers = [f"tl.cast({text}, tl.int32)" for text in texts]
    return " - ".join([f"tl.cast({text} + {_FLOAT_BITS:#x}, tl.float32, bitcast=True)" for text in integers])


def _combined(extremum: str, limits: list[str]) -> str:
    """Returns the text of the "minimum" or "maximum" of limits; "" without any."""
    text = ""
    for limit in limits:
        text = f"tl.{extremum}({text}, {limit})" if text else limit
    return text


def _dot_extent(axis: Axis) -> int:
    assert isinstance(axis.size, int)
    return max(next_power_of_2(axis.size), MIN_DOT)

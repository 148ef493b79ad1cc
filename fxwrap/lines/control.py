"""Lines that contain or end blocks.

A block sees its arguments, which borrow the operands, and the program's symbols. It yields or frees the values that it
owns. The yielded values become the line's results, each with its own storage.
"""

from __future__ import annotations

from typing import ClassVar

import sympy
import torch

from fxwrap.lines.operands import slice_types, stacked_type_mismatch, type_mismatch, types_of, writes_error
from fxwrap.symbolic import expression_kind
from fxwrap.wrapper_ir import (
    Block,
    Form,
    FunctionSummary,
    LineBase,
    Operand,
    Result,
    ScalarType,
    TensorType,
    Terminator,
    Type,
    Value,
    attribute,
    block,
    define,
    leaves,
    line_class,
    print_literal,
    read,
    target,
    write,
)


def _yielded(nested: Block) -> tuple[Operand, ...] | None:
    """Returns the results of a block, or None if it has no terminator, which the verifier reports."""
    last = nested.lines[-1] if nested.lines else None
    return last.values if isinstance(last, Yield) else None


def _arguments_mismatch(label: str, nested: Block, operands: list[Type | None]) -> str | None:
    return type_mismatch(f"arguments of ^{label}", types_of(nested.arguments), operands)


def _results_mismatch(label: str, nested: Block, results: list[Type | None]) -> str | None:
    yielded = _yielded(nested)
    return None if yielded is None else type_mismatch(f"results of ^{label}", types_of(yielded), results)


def _is_predicate(predicate: Operand) -> bool:
    """Returns whether a predicate is a boolean tensor that may have one element, a boolean value, or a condition."""
    if not isinstance(predicate, Value):
        return isinstance(predicate, bool) or (
            isinstance(predicate, sympy.Basic) and expression_kind(predicate) == "bool"
        )
    type_ = predicate.type
    if not isinstance(type_, TensorType):
        return type_ == ScalarType("bool")
    return type_.dtype == torch.bool and all(size == 1 for size in type_.sizes if isinstance(size, int))


_NO_SCANNED_TENSORS = "`over` must have a tensor, whose first size is the number of iterations"


@line_class("control.cond")
class Cond(LineBase):
    """Runs one of two blocks, selected by a boolean tensor of one element or a condition. Source: torch's `cond`.

    Example:
        %y = control.cond(%flag, %x) : f32[4]@cpu {
        ^then(%t: f32[4]@cpu):
          %t1 = extern.call @aten.sin.default(%t) : f32[4]@cpu
          control.yield(%t1)
        ^else(%e: f32[4]@cpu):
          %e1 = extern.call @aten.cos.default(%e) : f32[4]@cpu
          control.yield(%e1)
        }
    """

    results: tuple[Result, ...] = define(Form.RESULTS)
    predicate: Operand = read()
    operands: tuple[Operand, ...] = read(Form.ARGUMENTS)
    then: Block = block()
    else_: Block = block()

    def verify_self(self) -> str | None:
        if not _is_predicate(self.predicate):
            return "the predicate must be a boolean tensor of one element or a condition"
        operands, results = types_of(self.operands), types_of(self.results)
        return (
            _arguments_mismatch("then", self.then, operands)
            or _arguments_mismatch("else", self.else_, operands)
            or _results_mismatch("then", self.then, results)
            or _results_mismatch("else", self.else_, results)
        )


@line_class("control.while")
class While(LineBase):
    """Repeats `body` on the carried values while `cond` yields true.

    The arguments of both blocks are the carried values, then `extra`; `body` yields the next carried values. The first
    iteration borrows the carried operands. The results are owned even if no iteration runs. With `stacked`, each result
    stacks the carried values of all iterations along a new first dimension. Source: torch's `while_loop` and
    `while_loop_stack_output`.

    Example:
        %end = control.while(%i) : i64[]@cpu {
        ^cond(%c: i64[]@cpu):
          %go = extern.call @aten.lt.Scalar(%c, 5) : bool[]@cpu
          control.yield(%go)
        ^body(%b: i64[]@cpu):
          %next = extern.call @aten.add.Scalar(%b, 1) : i64[]@cpu
          control.yield(%next)
        }
    """

    results: tuple[Result, ...] = define(Form.RESULTS)
    carried: tuple[Operand, ...] = read(Form.ARGUMENTS)
    cond: Block = block()
    body: Block = block()
    extra: tuple[Operand, ...] = read(Form.SEQUENCE, default=())
    stacked: bool = attribute(default=False)

    def verify_self(self) -> str | None:
        carried, operands = types_of(self.carried), types_of((*self.carried, *self.extra))
        predicates = _yielded(self.cond)
        if predicates is not None and (len(predicates) != 1 or not _is_predicate(predicates[0])):
            return "^cond must yield one boolean tensor of one element or one condition"
        return (
            _arguments_mismatch("cond", self.cond, operands)
            or _arguments_mismatch("body", self.body, operands)
            or _results_mismatch("body", self.body, carried)
            or (stacked_type_mismatch("results", self.results, carried) if self.stacked else None)
            or (None if self.stacked else type_mismatch("results", types_of(self.results), carried))
        )


@line_class("control.scan")
class ScanLoop(LineBase):
    """Runs `body` for each slice of `over` along the first dimension, with carried values.

    The block's arguments are the carried values, one slice of each tensor in `over`, then `extra`. It yields the new
    carried values, then a slice of each stacked result. The results are the last carried values, then the stacked ones.
    `reverse` starts at the last slice; stacked results keep the order of the slices. Source: torch's `scan`.

    Example:
        %last, %sums = control.scan(%start) over=(%xs) : f32[4]@cpu, f32[5, 4]@cpu {
        ^body(%carry: f32[4]@cpu, %slice: f32[4]@cpu):
          %sum = extern.call @aten.add.Tensor(%carry, %slice) : f32[4]@cpu
          %out = extern.call @aten.clone.default(%sum) : f32[4]@cpu
          control.yield(%sum, %out)
        }
    """

    results: tuple[Result, ...] = define(Form.RESULTS)
    carried: tuple[Operand, ...] = read(Form.ARGUMENTS)
    over: tuple[Value, ...] = read(Form.SEQUENCE)
    body: Block = block()
    extra: tuple[Operand, ...] = read(Form.SEQUENCE, default=())
    reverse: bool = attribute(default=False)

    def verify_self(self) -> str | None:
        if not self.over:
            return _NO_SCANNED_TENSORS
        count, carried = len(self.carried), types_of(self.carried)
        operands = [*carried, *slice_types(self.over), *types_of(self.extra)]
        yielded = types_of(_yielded(self.body) or ())
        return (
            _arguments_mismatch("body", self.body, operands)
            or type_mismatch("carried results of ^body", yielded[:count], carried)
            or type_mismatch("carried results", types_of(self.results[:count]), carried)
            or stacked_type_mismatch("stacked results", self.results[count:], yielded[count:])
        )


@line_class("control.map")
class Map(LineBase):
    """Runs `body` for each slice of `over` along the first dimension and stacks the values that it yields.

    Source: torch's `map_impl`.

    Example:
        %y = control.map(%xs) : f32[5, 4]@cpu {
        ^body(%row: f32[4]@cpu):
          %sin = extern.call @aten.sin.default(%row) : f32[4]@cpu
          control.yield(%sin)
        }
    """

    results: tuple[Result, ...] = define(Form.RESULTS)
    carried: ClassVar[tuple[Operand, ...]] = ()
    reverse: ClassVar[bool] = False

    over: tuple[Value, ...] = read(Form.VALUES)
    body: Block = block()
    extra: tuple[Operand, ...] = read(Form.SEQUENCE, default=())

    def verify_self(self) -> str | None:
        if not self.over:
            return _NO_SCANNED_TENSORS
        operands = [*slice_types(self.over), *types_of(self.extra)]
        return _arguments_mismatch("body", self.body, operands) or stacked_type_mismatch(
            "results", self.results, types_of(_yielded(self.body) or ())
        )


@line_class("control.call")
class CallFunction(LineBase):
    """Runs a function of the program, a block that several lines share. Source: torch's `invoke_subgraph`.

    The function sees the symbols that are defined before the call. `writes` lists the operands that it writes.

    If `max_captures` is above 0, the runtime may capture the function's work as a device graph, once for each value of
    its symbols, and replay it. It caches at most `max_captures` graphs. A captured graph has its own copy of each
    operand, except for those in `static_operands`, whose addresses never change.

    Example: `%y = control.call @layer(%x, %w) max_captures=8 static_operands=(%w) : f32[4, 8]@cpu`
    """

    results: tuple[Result, ...] = define(Form.RESULTS)
    function: str = target("function")
    operands: tuple[Operand, ...] = read(Form.ARGUMENTS)
    writes: tuple[Value, ...] = write(Form.SEQUENCE, default=())
    max_captures: int = attribute(default=0)
    static_operands: tuple[Value, ...] = attribute(default=(), form=Form.SEQUENCE)

    def verify_self(self) -> str | None:
        if self.max_captures < 0:
            return f"max_captures is the number of cached graphs, not {self.max_captures}"
        if self.static_operands and not self.max_captures:
            return "static_operands needs max_captures above 0"
        operands = list(leaves(self.operands))
        for value in self.static_operands:
            if value not in operands:
                return f"%{value.name} is listed in `static_operands` but is not an operand"
        return writes_error(operands, self.writes)

    def verify_function(self, function: FunctionSummary) -> str | None:
        block = function.block
        reason = type_mismatch("arguments", types_of(block.arguments), types_of(self.operands))
        reason = reason or type_mismatch("results", types_of(_yielded(block) or ()), types_of(self.results))
        if reason is not None:
            return reason
        for argument, operand in zip(block.arguments, self.operands):
            if argument.name in function.written and operand not in self.writes:
                return f"it writes its argument %{argument.name}; list {print_literal(operand)} in `writes`"
        return None

    def operand_positions(self, values: tuple[Value, ...]) -> tuple[int, ...]:
        """Returns the positions of the operands that are among these values."""
        names = {value.name for value in values}
        operands = enumerate(self.operands)
        return tuple([index for index, item in operands if isinstance(item, Value) and item.name in names])


@line_class("control.yield")
class Yield(LineBase):
    """Ends a nested block and returns its results: owned values with distinct roots, scalars or none.

    Example: `control.yield(%t1)`
    """

    terminator: ClassVar[Terminator] = "block"

    values: tuple[Operand, ...] = read(Form.ARGUMENTS)


@line_class("control.return")
class Return(LineBase):
    """Ends the program and returns its flat outputs: values, scalars or none.

    Several returned values may alias one owned root, which is released once.

    Example: `control.return(%y, s0, none)`
    """

    terminator: ClassVar[Terminator] = "program"

    values: tuple[Operand, ...] = read(Form.ARGUMENTS)

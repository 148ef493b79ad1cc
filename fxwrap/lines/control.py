"""Lines that hold or leave blocks.

A block sees its arguments, which borrow from the operands, and the program's symbols. It owns what it makes and must
yield or free it; what it yields is the line's result, and each result has memory of its own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import sympy
import torch

from fxwrap.lines.blocks import mismatch, slice_types, stacked_mismatch, types_of
from fxwrap.lines.results import wrong_writes
from fxwrap.symbolic import expression_kind
from fxwrap.wrapper_ir import (
    Block,
    Form,
    LineBase,
    ScalarType,
    TensorType,
    Type,
    Value,
    attribute,
    block,
    define,
    leaves,
    line_class,
    read,
    target,
    write,
)


def _yielded(nested: Block) -> tuple[Any, ...] | None:
    """Returns what a block gives; None for one without its end, which the verifier reports by itself."""
    last = nested.lines[-1] if nested.lines else None
    return last.values if isinstance(last, Yield) else None


def _arguments_mismatch(label: str, nested: Block, operands: list[Type | None]) -> str | None:
    return mismatch(f"arguments of ^{label}", types_of(nested.arguments), operands)


def _results_mismatch(label: str, nested: Block, results: list[Type | None]) -> str | None:
    given = _yielded(nested)
    return None if given is None else mismatch(f"results of ^{label}", types_of(given), results)


def _is_truth(predicate: Any) -> bool:
    """Whether a predicate is a boolean tensor that may have one element, a boolean value, or a condition."""
    if not isinstance(predicate, Value):
        return isinstance(predicate, bool) or (
            isinstance(predicate, sympy.Basic) and expression_kind(predicate) == "bool"
        )
    type_ = predicate.type
    if not isinstance(type_, TensorType):
        return type_ == ScalarType("bool")
    return type_.dtype == torch.bool and all(size == 1 for size in type_.sizes if isinstance(size, int))


_NOTHING_OVER = "there is no tensor to go over, so nothing says how many rounds there are"


@line_class("control.cond")
class Cond(LineBase):
    """Runs one of two blocks, by a boolean tensor of one element, or a condition over symbols. Source: torch's `cond`.

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

    results: tuple[Any, ...] = define(Form.RESULTS)
    predicate: Any = read()
    operands: tuple[Any, ...] = read(Form.ARGUMENTS)
    then: Block = block()
    else_: Block = block()

    def verify_self(self) -> str | None:
        if not _is_truth(self.predicate):
            return "the predicate is a boolean tensor of one element, or a condition"
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

    Both blocks take the carried values, then `extra`; `body` yields the next carried values. The carried operands are
    borrowed: the first round reads them, each further round takes what the last one yielded, and the results are owned
    also when no round runs. With `stacked`, results are the carried values of all rounds, each stacked along a new
    first dimension. Source: torch's `while_loop` and `while_loop_stack_output`.

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

    results: tuple[Any, ...] = define(Form.RESULTS)
    carried: tuple[Any, ...] = read(Form.ARGUMENTS)
    cond: Block = block()
    body: Block = block()
    extra: tuple[Any, ...] = read(Form.SEQUENCE, default=())
    stacked: bool = attribute(default=False)

    def verify_self(self) -> str | None:
        carried, operands = types_of(self.carried), types_of((*self.carried, *self.extra))
        verdict = _yielded(self.cond)
        if verdict is not None and (len(verdict) != 1 or not _is_truth(verdict[0])):
            return "^cond yields one boolean tensor of one element, or a condition"
        return (
            _arguments_mismatch("cond", self.cond, operands)
            or _arguments_mismatch("body", self.body, operands)
            or _results_mismatch("body", self.body, carried)
            or self._wrong_results(carried)
        )

    def _wrong_results(self, carried: list[Type | None]) -> str | None:
        if self.stacked:
            return stacked_mismatch("results", self.results, carried)
        return mismatch("results", types_of(self.results), carried)


@line_class("control.scan")
class Scan(LineBase):
    """Runs `body` once for each slice of `over` along their first dimension, passing carried values on.

    The block's arguments are the carried values, one slice of each tensor in `over`, then `extra`. It yields the new
    carried values, then a slice of each stacked result. Results are the last carried values, then the stacked ones.
    With `reverse`, the slices come from the last to the first and results are stacked in the order of the slices.
    Source: torch's `scan`.

    Example:
        %last, %sums = control.scan(%start) over=(%xs) : f32[4]@cpu, f32[5, 4]@cpu {
        ^body(%carry: f32[4]@cpu, %slice: f32[4]@cpu):
          %sum = extern.call @aten.add.Tensor(%carry, %slice) : f32[4]@cpu
          %out = extern.call @aten.clone.default(%sum) : f32[4]@cpu
          control.yield(%sum, %out)
        }
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    carried: tuple[Any, ...] = read(Form.ARGUMENTS)
    over: tuple[Value, ...] = read(Form.SEQUENCE)
    body: Block = block()
    extra: tuple[Any, ...] = read(Form.SEQUENCE, default=())
    reverse: bool = attribute(default=False)

    def verify_self(self) -> str | None:
        if not self.over:
            return _NOTHING_OVER
        count, carried = len(self.carried), types_of(self.carried)
        operands = [*carried, *slice_types(self.over), *types_of(self.extra)]
        given = types_of(_yielded(self.body) or ())
        return (
            _arguments_mismatch("body", self.body, operands)
            or mismatch("carried results of ^body", given[:count], carried)
            or mismatch("carried results", types_of(self.results[:count]), carried)
            or stacked_mismatch("stacked results", self.results[count:], given[count:])
        )


@line_class("control.map")
class Map(LineBase):
    """Runs `body` once for each slice of `over` along their first dimension and stacks what it yields.

    Source: torch's `map_impl`.

    Example:
        %y = control.map(%xs) : f32[5, 4]@cpu {
        ^body(%row: f32[4]@cpu):
          %sin = extern.call @aten.sin.default(%row) : f32[4]@cpu
          control.yield(%sin)
        }
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    over: tuple[Value, ...] = read(Form.VALUES)
    body: Block = block()
    extra: tuple[Any, ...] = read(Form.SEQUENCE, default=())

    def verify_self(self) -> str | None:
        if not self.over:
            return _NOTHING_OVER
        operands = [*slice_types(self.over), *types_of(self.extra)]
        return _arguments_mismatch("body", self.body, operands) or stacked_mismatch(
            "results", self.results, types_of(_yielded(self.body) or ())
        )


@line_class("control.call")
class CallFunction(LineBase):
    """Runs a function of the program, a block that several lines share. Source: torch's `invoke_subgraph`.

    The function sees the symbols that are defined where it is called. The operands that it writes stand in `writes`.

    With `replay` above 0 the function's work on its device may be recorded once for each value of its symbols, and
    replayed from then on; `replay` is the most recordings that are kept. A recording copies what it reads to a place of
    its own first, but for the operands in `fixed`, which keep their address from call to call. It means the same with
    and without.

    Example: `%y = control.call @layer(%x, %w) replay=8 fixed=(%w) : f32[4, 8]@cpu`
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    function: str = target("function")
    operands: tuple[Any, ...] = read(Form.ARGUMENTS)
    writes: tuple[Value, ...] = write(Form.SEQUENCE, default=())
    replay: int = attribute(default=0)
    fixed: tuple[Value, ...] = attribute(default=(), form=Form.SEQUENCE)

    def verify_self(self) -> str | None:
        if self.replay < 0:
            return f"replay is the number of recordings that are kept, not {self.replay}"
        if self.fixed and not self.replay:
            return "what is fixed is for recordings, which need replay"
        operands = list(leaves(self.operands))
        for value in self.fixed:
            if value not in operands:
                return f"%{value.name} is fixed but is no operand"
        return wrong_writes(operands, self.writes)

    def verify_target(self, target: Any) -> str | None:
        return (
            mismatch("arguments", types_of(target.arguments), types_of(self.operands))
            or mismatch("results", types_of(_yielded(target) or ()), types_of(self.results))
            or self._wrong_writes(target)
        )

    def places(self, values: tuple[Value, ...]) -> tuple[int, ...]:
        """Returns the positions of the operands that are among these values."""
        names = {value.name for value in values}
        operands = enumerate(self.operands)
        return tuple([index for index, item in operands if isinstance(item, Value) and item.name in names])

    def _wrong_writes(self, target: Any) -> str | None:
        for argument, operand in zip(target.arguments, self.operands):
            if argument.name in target.written and operand not in self.writes:
                return f"it writes its argument %{argument.name}, so %{operand.name} stands in `writes`"
        return None


@line_class("control.yield")
class Yield(LineBase):
    """Ends a nested block and gives its results: owned values, each of its own root, numbers or none.

    Example: `control.yield(%t1)`
    """

    terminator: ClassVar[Literal["", "program", "block"]] = "block"

    values: tuple[Any, ...] = read(Form.ARGUMENTS)


@line_class("control.return")
class Return(LineBase):
    """Ends the program and gives its outputs: values, numbers or none, in flat order.

    Each distinct owned root is released once, however many values over it are returned.

    Example: `control.return(%y, s0, none)`
    """

    terminator: ClassVar[Literal["", "program", "block"]] = "program"

    values: tuple[Any, ...] = read(Form.ARGUMENTS)

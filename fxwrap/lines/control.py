"""Lines that hold or leave blocks.

A block sees its arguments, which borrow from the operands, and the program's symbols. It owns what it makes and must
yield or free it; what it yields is the line's result.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from fxwrap.wrapper_ir import Block, Form, LineBase, Value, attribute, block, define, leaves, line_class, read, target


def _types(values: tuple[Any, ...]) -> list[Any]:
    return [leaf.type if isinstance(leaf, Value) else leaf for leaf in leaves(values)]


def _mismatch(where: str, got: list[Any], wanted: list[Any]) -> str | None:
    if len(got) != len(wanted):
        return f"{where}: {len(got)} instead of {len(wanted)}"
    for position, (have, want) in enumerate(zip(got, wanted, strict=True)):
        if type(have) is not type(want) or getattr(have, "dtype", None) != getattr(want, "dtype", None):
            return f"{where}: number {position} is {have} instead of {want}"
        if getattr(have, "device", None) != getattr(want, "device", None):
            return f"{where}: number {position} is on {have.device} instead of {want.device}"
    return None


def _check_block(label: str, nested: Block, operands: list[Any], results: list[Any]) -> str | None:
    """Compares a block's arguments with the operands and what it yields with the results, by dtype and device."""
    if not nested.lines or not isinstance(nested.lines[-1], Yield):
        return f"block ^{label} does not end in control.yield"
    return _mismatch(f"arguments of ^{label}", _types(nested.arguments), operands) or _mismatch(
        f"results of ^{label}", _types(nested.lines[-1].values), results
    )


@line_class("control.cond")
class Cond(LineBase):
    """Runs one of two blocks, by a boolean tensor of one element, or a boolean symbol or expression.

    Example: see `tests/samples.py`; in text `%y = control.cond(%flag, %x) : f32[4]@cpu { ^then(%t: ...): ... ^else(%e: ...): ... }`
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    predicate: Any = read()
    operands: tuple[Value, ...] = read(Form.VALUES)
    then: Block = block()
    else_: Block = block()

    def verify_self(self) -> str | None:
        operands, results = _types(self.operands), _types(self.results)
        return _check_block("then", self.then, operands, results) or _check_block("else", self.else_, operands, results)


@line_class("control.while")
class While(LineBase):
    """Repeats `body` on the carried values while `cond` yields true.

    The carried operands are borrowed: the first round reads them, each further round takes what the last one yielded,
    and the results are owned also when no round runs. With `stacked`, results are the carried values of all rounds, each
    stacked along a new first dimension. Source: torch's `while_loop` and `while_loop_stack_output`.
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    carried: tuple[Value, ...] = read(Form.VALUES)
    cond: Block = block()
    body: Block = block()
    extra: tuple[Value, ...] = read(Form.SEQUENCE, ())
    stacked: bool = attribute(False)

    def verify_self(self) -> str | None:
        operands = _types((*self.carried, *self.extra))
        if _mismatch("arguments of ^cond", _types(self.cond.arguments), operands):
            return _mismatch("arguments of ^cond", _types(self.cond.arguments), operands)
        return _check_block("body", self.body, operands, _types(self.carried))


@line_class("control.scan")
class Scan(LineBase):
    """Runs `body` once for each slice of `over` along their first dimension, passing carried values on.

    The block's arguments are the carried values, one slice of each tensor in `over`, then `extra`. It yields the new
    carried values, then a slice of each stacked result. Results are the last carried values, then the stacked ones.
    Source: torch's `scan`.
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    carried: tuple[Value, ...] = read(Form.VALUES)
    over: tuple[Value, ...] = read(Form.SEQUENCE)
    body: Block = block()
    extra: tuple[Value, ...] = read(Form.SEQUENCE, ())
    reverse: bool = attribute(False)

    def verify_self(self) -> str | None:
        return _check_block(
            "body", self.body, _types((*self.carried, *self.over, *self.extra)), _types(self.results)
        )


@line_class("control.map")
class Map(LineBase):
    """Runs `body` once for each slice of `over` along their first dimension and stacks what it yields.

    Source: torch's `map_impl`.
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    over: tuple[Value, ...] = read(Form.VALUES)
    body: Block = block()
    extra: tuple[Value, ...] = read(Form.SEQUENCE, ())

    def verify_self(self) -> str | None:
        return _check_block("body", self.body, _types((*self.over, *self.extra)), _types(self.results))


@line_class("control.call")
class CallFunction(LineBase):
    """Runs a function of the program, a block that several lines share. Source: torch's `invoke_subgraph`.

    Example: `%y = control.call @layer(%x, %w) : f32[4, 8]@cpu`
    """

    results: tuple[Any, ...] = define(Form.RESULTS)
    function: str = target("function")
    operands: tuple[Value, ...] = read(Form.VALUES)


@line_class("control.yield")
class Yield(LineBase):
    """Ends a nested block and gives its results: owned values, numbers or none.

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

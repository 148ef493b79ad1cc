"""Lines that communicate between processes."""

from __future__ import annotations

from typing import ClassVar

from fxwrap.lines.operands import alias_error, aliased_operand, writes_error
from fxwrap.wrapper_ir import (
    Effect,
    Form,
    LineBase,
    Operand,
    Result,
    Value,
    attribute,
    communication_effect,
    define,
    leaves,
    line_class,
    read,
    target,
    write,
)


@line_class("collective.start")
class StartCollective(LineBase):
    """Starts a collective. Until `collective.wait`, its results are in flight and its operands are borrowed.

    An in-place collective lists its operand in `writes` and `aliases`, as `extern.mutate` does. An out variant writes
    `outs`, the operator's out arguments in the order of its schema, which `aliases` lists too.

    Example: `%sum = collective.start @_c10d_functional.all_reduce.default(%x, "sum", "0") group="0" : f32[8]@cpu`
    """

    is_async_start: ClassVar[bool] = True

    results: tuple[Result, ...] = define(Form.RESULTS)
    operator: str = target()
    arguments: tuple[Operand, ...] = read(Form.ARGUMENTS)
    group: str = attribute()
    stream: int = attribute(default=0)
    writes: tuple[Value, ...] = write(Form.SEQUENCE, default=())
    outs: tuple[Value, ...] = write(Form.SEQUENCE, default=())
    aliases: tuple[Value | None, ...] = attribute(default=(), form=Form.SEQUENCE)

    def effects(self) -> tuple[Effect, ...]:
        return (communication_effect(self.group),)

    def alias_of(self, result: Value) -> Value | None:
        return aliased_operand(self.results, self.aliases, result)

    def verify_self(self) -> str | None:
        operands = [*leaves(self.arguments), *self.outs]
        return writes_error(operands, self.writes) or alias_error(self.results, operands, self.aliases)


@line_class("collective.wait")
class WaitCollective(LineBase):
    """Waits for a collective's result; the new value aliases it. A second wait for the same memory has no effect.

    Example: `%ready = collective.wait(%sum) group="0" : f32[8]@cpu`
    """

    is_async_wait: ClassVar[bool] = True

    result: Value = define(alias="pending")
    pending: Value = read()
    group: str = attribute()

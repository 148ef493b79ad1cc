"""Lines that communicate between processes."""

from __future__ import annotations

from typing import Any, ClassVar

from fxwrap.lines.results import aliased_operand, wrong_aliases, wrong_writes
from fxwrap.wrapper_ir import (
    Effect,
    Form,
    LineBase,
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
    """Starts a collective, whose results may be touched only by `collective.wait`; operands are borrowed until then.

    One that works in place lists the operand in `writes` and `aliases`, as `extern.mutate` does.

    Example: `%sum = collective.start @_c10d_functional.all_reduce.default(%x, "sum", "0") group="0" : f32[8]@cpu`
    """

    starts_flight: ClassVar[bool] = True

    results: tuple[Any, ...] = define(Form.RESULTS)
    operator: str = target()
    arguments: tuple[Any, ...] = read(Form.ARGUMENTS)
    group: str = attribute()
    stream: int = attribute(default=0)
    writes: tuple[Value, ...] = write(Form.SEQUENCE, default=())
    aliases: tuple[Value | None, ...] = attribute(default=(), form=Form.SEQUENCE)

    def effects(self) -> tuple[Effect, ...]:
        return (communication_effect(self.group),)

    def alias_of(self, result: Value) -> Value | None:
        return aliased_operand(self.results, self.aliases, result)

    def verify_self(self) -> str | None:
        operands = list(leaves(self.arguments))
        return wrong_writes(operands, self.writes) or wrong_aliases(self.results, operands, self.aliases)


@line_class("collective.wait")
class WaitCollective(LineBase):
    """Waits for a collective's result, which the new name stands for from here on.

    Example: `%ready = collective.wait(%sum) group="0" : f32[8]@cpu`
    """

    ends_flight: ClassVar[bool] = True

    result: Value = define(alias="pending")
    pending: Value = read()
    group: str = attribute()

    def effects(self) -> tuple[Effect, ...]:
        return (communication_effect(self.group),)

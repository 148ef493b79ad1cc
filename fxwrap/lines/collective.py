"""Lines that communicate between processes."""

from __future__ import annotations

from typing import Any, ClassVar

from ..wrapper_ir import Effect, Form, LineBase, Value, attribute, communication_effect, define, line_class, read, target


@line_class("collective.start")
class StartCollective(LineBase):
    """Starts a functional collective. Its result may be touched only by `collective.wait`; operands are borrowed until then.

    Example: `%sum = collective.start @_c10d_functional.all_reduce.default(%x, "sum", "0") group="0" : f32[8]@cpu`
    """

    starts_flight: ClassVar[bool] = True

    results: tuple[Any, ...] = define(Form.RESULTS)
    operator: str = target()
    arguments: tuple[Any, ...] = read(Form.ARGUMENTS)
    group: str = attribute()
    stream: int = attribute(0)

    def effects(self) -> tuple[Effect, ...]:
        return (communication_effect(self.group),)


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

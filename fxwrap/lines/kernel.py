"""The line that launches a kernel of the program."""

from __future__ import annotations

from typing import Any

from fxwrap.wrapper_ir import Effect, Form, LineBase, Size, Value, attribute, line_class, read, target, write


@line_class("kernel.launch")
class Launch(LineBase):
    """Launches a kernel definition of the program over a grid of one to three dimensions.

    The kernel's parameters are, in this order: the tensors among `arguments`, `outs`, the numbers among `arguments`.
    What a kernel also reads of a tensor in `outs` need not be said.

    Example: `kernel.launch @relu_0(%x, n0) outs=(%buf0) grid=(ceildiv(n0, 1024), 1, 1)`
    """

    kernel: str = target("kernel")
    arguments: tuple[Any, ...] = read(Form.ARGUMENTS)
    outs: tuple[Value, ...] = write(Form.SEQUENCE)
    grid: tuple[Size, ...] = attribute((1, 1, 1), form=Form.SEQUENCE)
    effect_set: tuple[Effect, ...] = attribute((), form=Form.SEQUENCE)
    stream: int = attribute(0)

    def effects(self) -> tuple[Effect, ...]:
        return self.effect_set

    def verify_self(self) -> str | None:
        return None if 1 <= len(self.grid) <= 3 else f"a grid has one to three dimensions, not {len(self.grid)}"

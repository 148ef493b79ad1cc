"""The line that launches a kernel of the program."""

from __future__ import annotations

from typing import Any

from fxwrap.wrapper_ir import Effect, Form, LineBase, Size, Value, attribute, line_class, read, target, write


@line_class("kernel.launch")
class Launch(LineBase):
    """Launches a kernel definition of the program over a grid of one to three dimensions.

    The kernel's parameters are, in this order: the tensors among `arguments`, `outs`, the numbers among `arguments`.
    What a kernel also reads of a tensor in `outs` need not be said. Tensors and numbers are as many as the kernel's
    signature has, if it has one.

    Example: `kernel.launch @relu_0(%x, n0) outs=(%buf0) grid=(ceildiv(n0, 1024), 1, 1)`
    """

    kernel: str = target("kernel")
    arguments: tuple[Any, ...] = read(Form.ARGUMENTS)
    outs: tuple[Value, ...] = write(Form.SEQUENCE)
    grid: tuple[Size, ...] = attribute(default=(1, 1, 1), form=Form.SEQUENCE)
    effect_set: tuple[Effect, ...] = attribute(default=(), form=Form.SEQUENCE)
    stream: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return self.effect_set

    def verify_self(self) -> str | None:
        return None if 1 <= len(self.grid) <= 3 else f"a grid has one to three dimensions, not {len(self.grid)}"

    def verify_target(self, target: Any) -> str | None:
        if not target.signature:
            return None
        tensors = [item for item in self.arguments if isinstance(item, Value)]
        given = len(tensors) + len(self.outs)
        wanted = sum(entry.startswith("*") for entry in target.signature)
        if given != wanted:
            return f"the kernel takes {wanted} tensors, not {given}"
        given, wanted = len(self.arguments) + len(self.outs), len(target.signature)
        return None if given == wanted else f"the kernel takes {wanted} parameters, not {given}"

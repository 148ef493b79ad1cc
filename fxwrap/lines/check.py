"""The line that checks what the program was given."""

from __future__ import annotations

from ..wrapper_ir import ASSERT, Effect, Form, LineBase, TensorType, Value, attribute, line_class, read


@line_class("check.layout")
class CheckLayout(LineBase):
    """Raises InputError unless a tensor has this dtype, device, sizes and strides; `name` is what the message calls it.

    Strides of dimensions of size 1, and of empty tensors, are not compared.

    Example: `check.layout(%x) name="x" : f32[s0, 8]@cpu`
    """

    tensor: Value = read()
    expected: TensorType = attribute(form=Form.TYPE)
    name: str = attribute("")

    def effects(self) -> tuple[Effect, ...]:
        return (ASSERT,)

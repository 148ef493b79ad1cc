"""The line that checks the layout of an input, or of the result of a call."""

from __future__ import annotations

from typing import ClassVar

from fxwrap.wrapper_ir import ASSERT, Effect, Form, LineBase, TensorType, Value, attribute, line_class, read


@line_class("check.layout")
class CheckLayout(LineBase):
    """Raises InputError unless a tensor has this dtype, device, sizes and strides; the message calls it `name`.

    Strides of dimensions of size 1, and of empty tensors, are not compared. The address of the first element must be a
    multiple of `alignment` bytes. With an `operator`, the tensor is a result of its call, and the error a ResultError.

    Example: `check.layout(%x) name="x" alignment=16 : f32[s0, 8]@cpu`
    """

    on_host: ClassVar[bool] = True

    tensor: Value = read()
    expected: TensorType = attribute(form=Form.TYPE)
    name: str = attribute(default="")
    alignment: int = attribute(default=1)
    operator: str = attribute(default="")

    def effects(self) -> tuple[Effect, ...]:
        return (ASSERT,)

    def verify_self(self) -> str | None:
        tensor = self.tensor.tensor_type
        if tensor.dtype != self.expected.dtype or len(tensor.sizes) != len(self.expected.sizes):
            return f"%{self.tensor.name} has another dtype or number of dimensions than the expected type"
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            return f"an alignment is a power of two, not {self.alignment}"
        return None

"""The line that launches a kernel of the program."""

from __future__ import annotations

from fxwrap.wrapper_ir import Effect, Form, LineBase, Operand, Size, Value, attribute, line_class, read, target, write


@line_class("kernel.launch")
class Launch(LineBase):
    """Launches a kernel definition of the program over a grid of one to three dimensions.

    The kernel's parameters are, in this order: the tensors among `arguments`, `outs`, the scalars among `arguments`.
    The kernel may also read the tensors in `outs`; none of its other tensors has elements of these, but for a kernel
    that a user wrote (rule `overlap` of the verifier). If it has a signature, the numbers of tensors and scalars match
    it. A `dependent` launch may start before the launch before it has ended, for which its kernel then waits
    (`wrapper_ir/dependent_launches.py`).

    Example: `kernel.launch @relu_0(%x, n0) outs=(%buf0) grid=(ceildiv(n0, 1024), 1, 1)`
    """

    kernel: str = target("kernel")
    arguments: tuple[Operand, ...] = read(Form.ARGUMENTS)
    outs: tuple[Value, ...] = write(Form.SEQUENCE)
    grid: tuple[Size, ...] = attribute(default=(1, 1, 1), form=Form.SEQUENCE)
    effect_set: tuple[Effect, ...] = attribute(default=(), form=Form.SEQUENCE)
    stream: int = attribute(default=0)
    dependent: bool = attribute(default=False)

    def effects(self) -> tuple[Effect, ...]:
        return self.effect_set

    def verify_self(self) -> str | None:
        return None if 1 <= len(self.grid) <= 3 else f"a grid has one to three dimensions, not {len(self.grid)}"

    def verify_kernel(self, signature: tuple[str, ...]) -> str | None:
        arguments = (*self.arguments, *self.outs)
        tensors = sum(isinstance(item, Value) for item in arguments)
        pointers = sum(entry.startswith("*") for entry in signature)
        if signature and tensors != pointers:
            return f"the kernel takes {pointers} tensors, not {tensors}"
        if signature and len(arguments) != len(signature):
            return f"the kernel takes {len(signature)} parameters, not {len(arguments)}"
        return None

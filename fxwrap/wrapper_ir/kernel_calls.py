"""The ATen calls that a launch computes, with operands by role: the provenance that patterns of kernels match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fxwrap.wrapper_ir.types import Type


@dataclass(frozen=True, slots=True)
class LaunchOperand:
    """A tensor that a launch reads: the one at a position of its arguments or, with `is_out`, of its outputs.

    With `is_base`, it is the tensor of which that output is a view. `type` is the type that the operator takes: passes
    may store the same memory with other sizes.
    """

    position: int
    is_out: bool = False
    is_base: bool = False
    type: Type | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call of the same kernel; `index` is the position of one of several results."""

    call: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class UnreadOperand:
    """A tensor that an operator takes and the kernel does not read, such as that of `full_like`."""


CallOperand: TypeAlias = "LaunchOperand | CallResult | UnreadOperand | object"
"""An operand of a call: a tensor, a literal, or a tuple of these."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of an overload ("aten.add.Tensor"); `is_view` is whether its result is a view of an operand."""

    target: str
    arguments: tuple[CallOperand, ...]
    keywords: tuple[tuple[str, CallOperand], ...] = ()
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class KernelCalls:
    """The calls that a launch computes, in the order of the graph.

    `results` has the tensor stored in each output, and `result_types` the type that its operator returns.
    """

    calls: tuple[KernelCall, ...]
    results: tuple[CallOperand, ...]
    result_types: tuple[Type, ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """The overload names of the calls, views included, in order."""
        return tuple([call.target for call in self.calls])

"""The result of an emitter: a text and a callable, which is built at the first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NoReturn, cast

import sympy
import torch
from typing_extensions import Self

from fxwrap.errors import JitTraceError, PickleError
from fxwrap.lines import CheckLayout, Launch
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton.compile import KernelUse
from fxwrap.signature import gradient_error
from fxwrap.symbolic import Number, evaluate
from fxwrap.torch_compat import (
    DisableAutocast,
    any_requires_grad,
    has_tangent,
    is_any_autocast_enabled,
    is_jit_tracing,
    set_grad_enabled,
    without_fake_mode,
)
from fxwrap.wrapper_ir import Program, TensorType, Value, hints_with_fallback

BoxedCallable = Callable[[list[Any]], Any]
"""Takes the flat inputs in a list, which it clears, and returns the tuple of outputs."""

FlatCallable = Callable[..., Any]
"""Takes the flat inputs as arguments and returns the tuple of outputs."""


class EmittedProgram:
    """An executable program. A call with the flat inputs returns the tuple of flat outputs.

    `flat` is the same entry with less overhead. `boxed` takes the inputs in a list, which it clears, so that donated
    inputs are freed after their last use. Grad mode and autocast are off, since the captured graph has the casts; a
    call raises InputError for inputs that require gradients, unless grad mode is off, or have tangents, and
    JitTraceError under torch.jit.trace. Pickling and `copy.deepcopy` raise PickleError.
    """

    def __init__(
        self, source: str, build: Callable[[], BoxedCallable], flat: Callable[[], FlatCallable] | None = None
    ) -> None:
        """`build` returns the boxed entry; `flat` returns the flat one if it does not call the boxed one."""
        self._source = source
        self._build = build
        self._flat = flat
        self._lock = threading.Lock()

    @property
    def source(self) -> str:
        """The emitted text."""
        return self._source

    @cached_property
    def boxed(self) -> BoxedCallable:
        """The boxed entry, which is built (imported, compiled) at the first use."""
        with self._lock, without_fake_mode():  # torch.compile may build it under fake mode
            if "boxed" not in self.__dict__:  # another thread may have built it
                self.__dict__["boxed"] = self._build()
            return cast(BoxedCallable, self.__dict__["boxed"])

    @cached_property
    def flat(self) -> FlatCallable:
        """The flat entry, which is built at the first use."""
        if self._flat is None:
            return disable_autograd_and_autocast(self.boxed)
        with without_fake_mode():
            return self._flat()

    def __copy__(self) -> Self:
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise PickleError(type(self).__name__)

    def __call__(self, *inputs: object) -> Any:
        if (torch.is_grad_enabled() and any_requires_grad(*inputs)) or has_tangent(inputs):
            raise gradient_error(inputs, range(len(inputs)))
        if is_jit_tracing():
            raise JitTraceError
        return self.flat(*inputs)


def disable_autograd_and_autocast(boxed: BoxedCallable) -> FlatCallable:
    """Returns a flat entry that calls a boxed one with grad mode and autocast off."""

    def flat(*inputs: object) -> Any:
        if is_any_autocast_enabled():
            with torch.no_grad(), DisableAutocast():
                return boxed([*inputs])
        if not torch.is_grad_enabled():
            return boxed([*inputs])
        set_grad_enabled(False)
        try:
            return boxed([*inputs])
        finally:
            set_grad_enabled(True)

    return flat


def checks_inputs(program: Program) -> bool:
    """Whether a program checks its inputs: anybody may call it, not only torch.compile behind Dynamo's guards."""
    return any(isinstance(line, CheckLayout) and not line.operator for line in program.body.lines)


def has_complex_inputs(program: Program) -> bool:
    """Whether an input is a complex tensor."""
    types = [item.value.type for item in program.inputs if isinstance(item.value, Value)]
    return any(isinstance(type_, TensorType) and type_.dtype.is_complex for type_ in types)


def kernel_texts(program: Program) -> tuple[KernelText, ...]:
    """Returns a program's kernels in the runtime's form."""
    return tuple([KernelText.of(item) for item in program.kernels])


def kernel_uses(program: Program) -> dict[str, KernelUse]:
    """Returns each launched kernel of a program by name, with its device and typical scalars of its first launch."""
    launches: dict[str, Launch] = {}
    for line in program.lines():
        if isinstance(line, Launch):
            launches.setdefault(line.kernel, line)
    values = hints_with_fallback(program)
    return {name: _kernel_use(program, launch, values) for name, launch in launches.items()}


def _kernel_use(program: Program, launch: Launch, values: Mapping[str, Number]) -> KernelUse:
    kernel = program.kernel(launch.kernel)
    scalars = [item for item in launch.arguments if isinstance(item, int | float | sympy.Basic)]
    tensors = [item for item in (*launch.outs, *launch.arguments) if isinstance(item, Value)]
    return KernelUse(
        KernelText.of(kernel),
        tensors[0].tensor_type.device if tensors else torch.device("cpu"),
        tuple([evaluate(item, values) if isinstance(item, sympy.Basic) else item for item in scalars]),
    )

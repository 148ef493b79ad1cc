"""A program in the form that an emitter gives it, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fxwrap.converters.checked import CheckedInterpreter
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.emitted import Emitted
from fxwrap.converters.fx import to_fx
from fxwrap.converters.interpreter import Interpreter
from fxwrap.converters.python import to_python
from fxwrap.device_registry import line_handlers
from fxwrap.memory_planning import MemoryPlan, memory_error_text
from fxwrap.torch_compat import FakeTensor
from fxwrap.wrapper_ir import Program


def emit(program: Program, emitter: str, fake_inputs: Mapping[str, FakeTensor] | None = None) -> Emitted:
    """Returns the program in the form that an emitter gives; `fake_inputs` by name are for FX graphs' metadata.

    Vendors' lines become what their registered devices say, else the core lines that they expand to.
    """
    return to_fx(program, fake_inputs=fake_inputs) if emitter == "fx" else _EMITTERS[emitter](program)


def interpreted(program: Program) -> Emitted:
    """Returns the program run by the interpreter, line by line; its text is the IR."""
    return Emitted(str(program), lambda: lambda inputs: Interpreter(program).run(inputs))


def checked(program: Program) -> Emitted:
    """Returns the program run by the interpreter that watches its memory; its text is the IR."""
    handlers = line_handlers(Interpreter.name)
    return Emitted(str(program), lambda: lambda inputs: CheckedInterpreter(program, handlers).run(inputs))


_EMITTERS: dict[str, Callable[[Program], Emitted]] = {
    "python": to_python,
    "cpp": to_cpp,
    "interpreter": interpreted,
}


def explained(entry: Callable[..., Any], plan: MemoryPlan | None, program: Program) -> Callable[..., Any]:
    """Returns an entry whose errors for want of memory say what the program needs, by its plan if it has one."""
    if plan is None:
        return entry

    def run(*inputs: Any) -> Any:
        try:
            return entry(*inputs)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            raise type(error)(f"{error}\n{memory_error_text(plan, program)}") from error

    return run


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""What torch's allocators say where there is no memory left."""

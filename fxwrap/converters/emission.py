"""Selection of an emitter by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.fx import FxForm, to_fx
from fxwrap.converters.interpreter import Interpreter
from fxwrap.converters.python import to_python
from fxwrap.devices import line_handlers
from fxwrap.memory_planning import MemoryPlan, out_of_memory_message
from fxwrap.passes.communication import GroupCommunication, communication, size_values
from fxwrap.runtime.rank_agreement import check_group_size, check_ranks_agree
from fxwrap.torch_compat import FakeTensor, process_group
from fxwrap.wrapper_ir import Program

EntryT = TypeVar("EntryT", bound=Callable[..., object])


def emit(
    program: Program, emitter: str, fake_inputs: Mapping[str, FakeTensor] | None = None, fx_form: FxForm = "in_place"
) -> EmittedProgram:
    """Emits a program with an emitter. FX graphs have a form, and the metadata of `fake_inputs` by name."""
    if emitter == "fx":
        return to_fx(program, fake_inputs=fake_inputs, form=fx_form)
    return EMITTER_FUNCTIONS[emitter](program)


def emit_interpreter(program: Program, interpreter: type[Interpreter] = Interpreter) -> EmittedProgram:
    """Returns a program that an interpreter runs, with the devices' handlers for "interpreter"; its text is the IR."""
    handlers = line_handlers(Interpreter.name)
    return EmittedProgram(str(program), lambda: lambda inputs: interpreter(program, handlers).run(inputs))


EMITTER_FUNCTIONS: dict[str, Callable[[Program], EmittedProgram]] = {
    "python": to_python,
    "cpp": to_cpp,
    "interpreter": emit_interpreter,
}


def user_entry(
    entry: EntryT,
    program: Program,
    plan: MemoryPlan | None,
    *,
    boxed: bool,
    group_sizes: Mapping[str, int] = MappingProxyType({}),
) -> EntryT:
    """Returns the entry that users call: its first call compares the program's collectives with those of other ranks.

    Out-of-memory errors report the memory plan, and the options that need less memory. The entry itself for a program
    without a plan and collectives.

    Args:
        entry: the entry of the emitted program.
        program: the program.
        plan: its memory plan, if it has one.
        boxed: whether the entry takes the inputs in a list.
        group_sizes: the ranks of groups by name that the program holds for.
    """
    groups = communication(program)
    explained = entry
    if plan is not None or groups:
        explained = explain_out_of_memory(entry, lambda: _memory_advice(program, plan, communicates=bool(groups)))
    return _check_ranks_first(explained, program, groups, boxed, group_sizes) if groups else explained


def _memory_advice(program: Program, plan: MemoryPlan | None, *, communicates: bool) -> list[str]:
    plan_text = [] if plan is None else [out_of_memory_message(plan, program)]
    buckets = "Its collectives may run in buckets: bucket_collectives=False needs less memory"
    return [*plan_text, *([buckets] if communicates else [])]


def explain_out_of_memory(entry: EntryT, explanation: Callable[[], Sequence[str]]) -> EntryT:
    """Returns an entry whose out-of-memory errors end with the lines of an explanation."""

    def run(*inputs: object) -> object:
        try:
            return entry(*inputs)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            raise type(error)("\n".join([str(error), *explanation()])) from error

    return cast(EntryT, run)


def _check_ranks_first(
    entry: EntryT, program: Program, groups: Sequence[GroupCommunication], boxed: bool, group_sizes: Mapping[str, int]
) -> EntryT:
    checked = False

    def run(*inputs: Any) -> object:
        nonlocal checked
        if not checked:
            for item in groups:
                values = inputs[0] if boxed else inputs
                group = process_group(item.label) if item.input is None else values[item.input]
                if group is not None:
                    check_group_size(group, item.label, program.name, group_sizes.get(item.label))
                    sizes = size_values(program, values)
                    check_ranks_agree(group, item.label, program.name, item.texts({}), item.texts(sizes))
            checked = True
        return entry(*inputs)

    return cast(EntryT, run)


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Messages of torch's allocators."""

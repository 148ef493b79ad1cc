"""The confirmation of tuning: a tuned program is timed as a whole beside the program without tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fxwrap.artifact.environment import code_identity
from fxwrap.devices import CPU, CUDA
from fxwrap.events import EventLog
from fxwrap.fx_passes import PreparedGraph
from fxwrap.lines import CheckLayout
from fxwrap.options import Options
from fxwrap.passes.graph_capture import captures_all
from fxwrap.report import graph_text
from fxwrap.tuning import Tuner, group_ends, input_sets, random_tensors
from fxwrap.wrapper_ir import ASSERT, Program, Role, TensorType, Value, program_key, random_effect


def is_tuning_faster(
    tuner: Tuner, tuned: Program, source: PreparedGraph, options: Options,
    programs: Callable[[], Sequence[Callable[..., object]] | None], events: EventLog,
) -> bool:  # fmt: skip
    """Whether a tuned program of a graph is as fast as the one without tuning, by its record or by running both.

    Choices are timed part by part, where neighbours, cache, clock and power are not those of the program. Programs that
    cannot be timed as a whole, and those that tuning does not change, count as faster. `programs` returns the compiled
    programs, the tuned one first, or None for such programs; it is called where there is no record.
    """
    types = _timed_inputs(tuned)
    if types is None or not can_time_program(tuned, types[0].device):
        return True
    graph = source.graph_module.graph
    # the program without tuning is determined by graph, options and code
    key = (program_key(tuned.replace(header=()), options.text()), graph_text(source.graph_module), code_identity())

    def inputs() -> list[list[torch.Tensor]]:
        first = random_tensors(types)
        for position, ends in group_ends(graph, source.fakes.__getitem__).items():
            first[position].copy_(ends)
        return input_sets(first)

    return tuner.is_program_faster("\n".join(key), types[0].device, inputs, programs, events)


def is_timed_beside(tuned: Program, untuned: Program) -> bool:
    """Whether a program without tuning differs from the tuned one, and can be timed as that."""
    types = _timed_inputs(untuned)
    is_equal = tuned.replace(header=()) == untuned.replace(header=())
    return not is_equal and types is not None and can_time_program(untuned, types[0].device)


def _timed_inputs(program: Program) -> list[TensorType] | None:
    """Returns the types of the inputs if all are tensors of static sizes on one device that is timed; else None."""
    types = [item.value.type if isinstance(item.value, Value) else None for item in program.inputs]
    tensors = [item for item in types if isinstance(item, TensorType) and item.is_static]
    devices = {item.device for item in tensors}
    is_timed = len(devices) == 1 and next(iter(devices)).type in (CPU.device_type, CUDA.device_type)
    return tensors if is_timed and len(tensors) == len(types) else None


def can_time_program(program: Program, device: torch.device) -> bool:
    """Whether a program can run several times for timing: without communication, control flow and other effects.

    A CUDA graph captures all lines of a program on a GPU, except checks of inputs, which run on the host.
    """
    allowed = {ASSERT, random_effect(str(device))}
    if any(line.fields_by_role[Role.BLOCK] or not allowed.issuperset(line.effects()) for line in program.lines()):
        return False
    work = [line for line in program.body.lines if not isinstance(line, CheckLayout)]
    unchecked = program.replace(body=replace(program.body, lines=tuple(work)))
    return device.type == CPU.device_type or captures_all(unchecked, [device.type])

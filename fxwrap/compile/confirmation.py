"""The confirmation of tuning: a tuned program is timed as a whole beside the program without tuning."""

from __future__ import annotations

import torch

from fxwrap.compile.compiled import Compiled
from fxwrap.devices import CPU, CUDA
from fxwrap.events import EventLog
from fxwrap.fx_passes import PreparedGraph
from fxwrap.passes.graph_capture import captures_all
from fxwrap.tuning import Tuner, group_ends, input_sets, random_tensors
from fxwrap.wrapper_ir import ASSERT, Program, Role, TensorType, Value, program_key, random_effect


def is_tuning_faster(tuner: Tuner, tuned: Compiled, untuned: Compiled, source: PreparedGraph, events: EventLog) -> bool:
    """Whether a tuned program of a graph is as fast as the one without tuning, by its record or by running both.

    Choices are timed part by part, where neighbours, cache, clock and power are not those of the program. Programs that
    cannot be timed as a whole, and those that tuning does not change, count as faster.
    """
    mine, other = [item.program.replace(header=()) for item in (tuned, untuned)]
    types = _timed_inputs(mine)
    if mine == other or types is None or not all(can_time_program(item, types[0].device) for item in (mine, other)):
        return True
    key = f"{program_key(mine)} {program_key(other)}"

    def inputs() -> list[list[torch.Tensor]]:
        first = random_tensors(types)
        for position, ends in group_ends(source.graph_module.graph, source.fakes.__getitem__).items():
            first[position].copy_(ends)
        return input_sets(first)

    return tuner.is_program_faster(key, types[0].device, inputs, [tuned.flat, untuned.flat], events)


def _timed_inputs(program: Program) -> list[TensorType] | None:
    """Returns the types of the inputs if all are tensors of static sizes on one device that is timed; else None."""
    types = [item.value.type if isinstance(item.value, Value) else None for item in program.inputs]
    tensors = [item for item in types if isinstance(item, TensorType) and item.is_static]
    devices = {item.device for item in tensors}
    is_timed = len(devices) == 1 and next(iter(devices)).type in (CPU.device_type, CUDA.device_type)
    return tensors if is_timed and len(tensors) == len(types) else None


def can_time_program(program: Program, device: torch.device) -> bool:
    """Whether a program can run several times for timing: without communication, control flow and other effects.

    A CUDA graph captures all lines of a program on a GPU.
    """
    allowed = {ASSERT, random_effect(str(device))}
    if any(line.fields_by_role[Role.BLOCK] or not allowed.issuperset(line.effects()) for line in program.lines()):
        return False
    return device.type == CPU.device_type or captures_all(program, [device.type])

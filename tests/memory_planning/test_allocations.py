"""The allocations of emitted code for models on a CPU, as the allocator reports them, are those of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.comparison import capture
from fxwrap.compile import emit, plan_program_memory
from fxwrap.debugging import copy_inputs
from fxwrap.lines import Reuse
from fxwrap.memory_planning import apply_plan
from fxwrap.passes.out_variants import use_out_variants
from fxwrap.torch_compat import allocation_trace, quiet_profiler
from fxwrap.wrapper_ir import Program, TensorType, Value, defined, live_bytes
from tests.support.models import MODELS

OPTIONS = fxwrap.Options(memory_planning="auto")


@cache
def _programs(model: str, training: bool) -> dict[str, Program]:
    """The programs of a model with one layer, by kind, without planning."""
    case = MODELS[model]
    module = case.build(seed=0, layers=1).train(training)
    graphs = capture(module, case.inputs(seed=1, training=training), training=training)
    return {graph.name: graph.compiled.program for graph in graphs}


def _planned(program: Program) -> Program:
    filled = use_out_variants(program)
    return apply_plan(filled, plan_program_memory(filled, OPTIONS))


def _inputs(program: Program) -> list[Tensor]:
    """Tensors of the inputs' types; integers are token numbers that every table has."""
    generator, tensors = torch.Generator().manual_seed(0), []
    for item in program.inputs:
        assert isinstance(item.value, Value) and isinstance(item.value.type, TensorType)
        type_ = item.value.type
        tensor = torch.empty_strided([int(size) for size in type_.sizes], [int(stride) for stride in type_.strides],
                                   dtype=type_.dtype)  # fmt: skip
        floating = type_.dtype.is_floating_point
        sizes = tuple(tensor.shape)
        tensors.append(tensor.copy_(torch.rand(sizes, generator=generator) if floating else
                                torch.randint(0, 2, sizes, generator=generator)))  # fmt: skip
    return tensors


def _allocation_trace(program: Program, emitter: str, inputs: Sequence[Tensor]) -> tuple[list[int], list[Any]]:
    """The bytes of each allocation and release of one call, in order, and its results. Its inputs are created first."""
    entry = emit(program, emitter).boxed
    entry(list(copy_inputs(inputs)))  # what libraries allocate once
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with quiet_profiler(), torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        results = entry(list(copy_inputs(inputs)))
    return list(allocation_trace(profile)), list(results)


def _allocated(record: Iterable[int]) -> Counter[int]:
    return Counter([size for size in record if size > 0])


def _allocation_counts(program: Program) -> Counter[int]:
    """How often a program has so many bytes allocated: its inputs, pools, allocations and results of operators."""
    values = [item.value for item in program.inputs]
    values += [value for line in program.body.lines if not isinstance(line, Reuse) for value in defined(line)
             if line.alias_of(value) is None]  # fmt: skip
    sizes = [int(value.type.storage_bytes) for value in values
             if isinstance(value, Value) and isinstance(value.type, TensorType)]  # fmt: skip
    return Counter([size for size in sizes if size])


@cache
def _operator_allocations(model: str, kind: str) -> tuple[Counter[int], list[Any], list[Tensor]]:
    """What operators allocate besides the lines of a program without pools, the program's results, and its inputs."""
    program = _programs(model, kind != "inference")[kind]
    inputs = _inputs(program)
    record, results = _allocation_trace(program, "python", inputs)
    allocated = _allocated(record)
    assert not _allocation_counts(program) - allocated
    return allocated - _allocation_counts(program), results, inputs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
@pytest.mark.parametrize(
    ("emitter", "model"), [("python", "gpt2"), ("python", "llama"), ("python", "resnet"), ("cpp", "gpt2")]
)
def test_allocations_and_peak_match_the_plan(emitter: str, model: str, kind: str) -> None:
    """Each line that allocates does so once, and else there is only scratch of operators, the same as without pools.

    The peak is the program's, and at most the scratch more, and what lies between elements of inputs.
    """
    program = _programs(model, kind != "inference")[kind]
    planned = _planned(program)
    scratch, wanted, inputs = _operator_allocations(model, kind)
    record, results = _allocation_trace(planned, emitter, inputs)
    torch.testing.assert_close(results, wanted, rtol=0, atol=0, equal_nan=True)
    assert _allocated(record) == _allocation_counts(planned) + scratch
    bound = live_bytes(planned, include_constants=False).peak
    gaps = sum([item.untyped_storage().nbytes() - item.nbytes for item in inputs])
    assert bound <= max(accumulate(record)) <= bound + sum(scratch.elements()) + gaps
    if kind != "forward":  # nearly all of which is saved for the backward
        assert _allocation_counts(planned).total() < _allocation_counts(program).total()

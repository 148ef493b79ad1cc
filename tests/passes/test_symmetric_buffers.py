"""Buffers of all_reduces over symmetric memory are allocations in a memory space of their group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators

import fxwrap
from fxwrap.converters.emission import emit
from fxwrap.devices import CPU, SYMMETRIC_MEMORY
from fxwrap.errors import VerifyError
from fxwrap.lines import Alloc
from fxwrap.memory_planning import apply_plan, plan_memory
from fxwrap.options import EMITTERS
from fxwrap.passes.communication import communication
from fxwrap.passes.graph_capture import CaptureChecker
from fxwrap.passes.reuse import reuse_memory
from fxwrap.passes.symmetric_buffers import allocate_symmetric_buffers
from fxwrap.wrapper_ir import Program
from tests.support.jobs import fake_job
from tests.support.symmetric_memory import operators_on_cpu

PROGRAM = """
program @decode(%x: borrowed f32[2, 8]@cpu, %w: borrowed f32[8, 8]@cpu) {
  %y = extern.call @fxwrap_runtime.one_shot_all_reduce.default(%x, "0") effect_set=(communicate("")) : f32[2, 8]@cpu
  %z = extern.call @aten.mm.default(%y, %w) : f32[2, 8]@cpu
  memory.free(%y)
  %s = extern.call @fxwrap_runtime.one_shot_all_reduce.default(%z, "0") effect_set=(communicate("")) : f32[2, 8]@cpu
  memory.free(%z)
  control.return(%s)
}
"""

SPECS = {"cpu": replace(CPU, memory_spaces=("", SYMMETRIC_MEMORY))}


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    with fake_job(2), operators_on_cpu():
        yield


def with_buffers() -> Program:
    return fxwrap.verify(allocate_symmetric_buffers(fxwrap.parse(PROGRAM), SPECS))


def test_buffers_are_allocations_that_later_lines_reuse() -> None:
    program = with_buffers()
    allocations = [line.result.tensor_type for line in program.body.lines if isinstance(line, Alloc)]
    assert [type_.memory_space for type_ in allocations] == ["symmetric:0"] * 2
    assert [type_.symmetric_group for type_ in allocations] == ["0"] * 2
    text = str(program)
    assert '%x_buffer = memory.alloc() : f32[2, 8]@cpu<"symmetric:0", "">' in text
    assert '@symm_mem.one_shot_all_reduce_copy.default(%x_buffer, %x, "sum", "0") writes=(%x_buffer)' in text
    assert str(fxwrap.parse(text)) == text
    reused = [line for line in reuse_memory(program).body.lines if isinstance(line, Alloc)]
    assert len(reused) == 1


def test_pools_hold_other_memory_only() -> None:
    program = with_buffers()
    plan = plan_memory(program, alignment=lambda _device: 64)
    planned = apply_plan(program, plan)
    assert [line.result.tensor_type.symmetric_group for line in planned.body.lines if isinstance(line, Alloc)] == [
        "0"
    ] * 2


def test_ranks_compare_them() -> None:
    (group,) = communication(with_buffers())
    assert group.texts({}) == ('one_shot_all_reduce_copy(torch.float32[2, 8], torch.float32[2, 8], "sum")',) * 2


def test_devices_without_symmetric_memory_call_the_operator() -> None:
    program = fxwrap.parse(PROGRAM)
    assert str(allocate_symmetric_buffers(program, {"cpu": CPU})) == str(program)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_allocates_in_the_memory_space(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime serves the allocations; results are those of the program without them."""
    groups: list[str] = []
    allocate = fxwrap.runtime.symmetric_memory.allocate

    def recorded(*arguments: object) -> torch.Tensor:
        groups.append(str(arguments[-1]))
        return allocate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fxwrap.runtime.symmetric_memory, "allocate", recorded)
    x, w = torch.rand(2, 8), torch.rand(8, 8)
    (have,) = emit(with_buffers(), emitter)(x, w)
    torch.testing.assert_close(have, x @ w)
    if emitter in ("python", "interpreter"):  # the others call the operator, which has the function itself
        assert groups == ["0", "0"]


def test_captures_contain_all_reduces_over_symmetric_memory() -> None:
    for program in (fxwrap.parse(PROGRAM), with_buffers()):
        text = str(program).replace("@cpu", "@cuda:0")
        on_gpu = fxwrap.parse(text)
        calls = [line for line in on_gpu.body.lines if "one_shot" in getattr(line, "target", "")]
        assert [CaptureChecker(on_gpu, ["cuda"])(line) for line in calls] == [torch.device("cuda", 0)] * 2


def test_graphs_are_imported_with_the_memory_space() -> None:
    graph = fxwrap.to_fx(with_buffers(), form="in_place").graph_module
    assert [str(node.target) for node in graph.graph.nodes].count("fxwrap.allocate_symmetric.default") == 2
    types = [line.result.tensor_type for line in fxwrap.from_fx(graph).body.lines if isinstance(line, Alloc)]
    assert [type_.memory_space for type_ in types] == ["symmetric:0"] * 2


def test_symmetric_memory_of_no_group() -> None:
    text = PROGRAM.replace("  %y =", '  %b = memory.alloc() : f32[2]@cpu<"symmetric:", "">\n  memory.free(%b)\n  %y =')
    with pytest.raises(VerifyError, match="%b is in symmetric memory of no group; its memory space is 'symmetric:G"):
        fxwrap.verify(fxwrap.parse(text))

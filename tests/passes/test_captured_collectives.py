"""Collectives and their waits are in one captured function, or outside of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators

import fxwrap
from fxwrap.converters.emission import emit
from fxwrap.errors import GraphCaptureWarning
from fxwrap.lines import CallFunction, StartCollective, WaitCollective
from fxwrap.options import EMITTERS
from fxwrap.passes.communication import communication
from fxwrap.passes.graph_capture import CaptureChecker
from fxwrap.passes.partition import partition
from fxwrap.wrapper_ir import Block, Program, all_effects, canonicalize_program, communication_effect, print_line
from tests.runtime.cuda_graphs.cpu_graph_capturer import CpuGraphCapturer, cpu_with_graph_capture
from tests.support.jobs import fake_job

REDUCTIONS = """
program @p(%x: borrowed f32[4, 4]@cpu, %w: borrowed f32[4, 4]@cpu) {
  %a = extern.call @aten.mm.default(%x, %w) : f32[4, 4]@cpu
  %flat = memory.view(%a) : f32[16]@cpu
  %sum = collective.start @_c10d_functional.all_reduce.default(%flat, "sum", "0") group="0" : f32[16]@cpu
  %side = extern.call @aten.sin.default(%w) : f32[4, 4]@cpu
  %ready = collective.wait(%sum) group="0" : f32[16]@cpu
  memory.free(%a)
  %square = memory.view(%ready) : f32[4, 4]@cpu
  %b = extern.call @aten.mm.default(%square, %side) : f32[4, 4]@cpu
  memory.free(%side)
  %whole = collective.start @_c10d_functional.all_gather_into_tensor.default(%b, 2, "0") group="0" : f32[8, 4]@cpu
  %gathered = collective.wait(%whole) group="0" : f32[8, 4]@cpu
  memory.free(%b)
  %c = extern.call @aten.mm.default(%gathered, %square) : f32[8, 4]@cpu
  memory.free(%whole)
  control.return(%ready, %c)
}
"""


def partitioned(text: str, excluded: Sequence[str] = (), collectives: Sequence[str] = ("cpu",)) -> Program:
    program = fxwrap.parse(text)
    checker = CaptureChecker(program, ["cpu"], excluded, collectives)
    return fxwrap.verify(partition(program, checker, min_calls=1))


def starts_and_waits(block: Block) -> tuple[int, int]:
    lines = block.lines
    return sum(isinstance(line, StartCollective) for line in lines), sum(
        isinstance(line, WaitCollective) for line in lines
    )


@pytest.fixture
def capturer() -> Iterator[CpuGraphCapturer]:
    with fake_job(2), cpu_with_graph_capture() as capturer:
        yield capturer


def test_a_function_has_the_collectives_and_their_users() -> None:
    program = partitioned(REDUCTIONS)
    assert [type(line) for line in program.body.lines[:-1]] == [CallFunction]
    ((_, block),) = program.functions
    assert starts_and_waits(block) == (2, 2)
    assert communication_effect("0") in all_effects(program.body.lines[0], dict(program.functions))
    assert fxwrap.parse(str(program)) == program


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_replays_them(emitter: str, capturer: CpuGraphCapturer) -> None:
    program, w = partitioned(REDUCTIONS), torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = emit(program, emitter)
        for _ in range(4):
            x = torch.randn(4, 4)
            expected = fxwrap.run(fxwrap.parse(REDUCTIONS), [x, w])
            assert all(map(torch.equal, compiled(x, w), expected))
    assert (capturer.recorded, capturer.replayed) == ((0, 0) if emitter == "interpreter" else (1, 3))


def test_emitted_graphs_import_them() -> None:
    program = partitioned(REDUCTIONS)
    assert canonicalize_program(fxwrap.from_fx(fxwrap.to_fx(program))) == canonicalize_program(program)


def test_results_of_waits_outside_are_operands_of_functions() -> None:
    program = partitioned(REDUCTIONS, ["_c10d_functional.all_reduce.default"])
    assert starts_and_waits(program.body) == (1, 1)
    calls = [line for line in program.body.lines if isinstance(line, CallFunction)]
    assert [starts_and_waits(block) for _, block in program.functions] == [(0, 0), (1, 1)]
    assert "%sum" in print_line(calls[1])
    with fake_job(2):
        inputs = [torch.randn(4, 4), torch.randn(4, 4)]
        assert all(map(torch.equal, fxwrap.run(program, inputs), fxwrap.run(fxwrap.parse(REDUCTIONS), inputs)))


def test_ranks_that_captured_others_agree() -> None:
    texts = [communication(program)[0].texts({}) for program in (fxwrap.parse(REDUCTIONS), partitioned(REDUCTIONS))]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2


def test_devices_decide() -> None:
    program = partitioned(REDUCTIONS, collectives=())
    assert starts_and_waits(program.body) == (2, 2)
    assert all(starts_and_waits(block) == (0, 0) for _, block in program.functions)


_OTHERS = """
program @p(%x: borrowed f32[4]@cpu, %pending: borrowed f32[4]@cpu) {{
  %a = extern.call @aten.sin.default(%x) : f32[4]@cpu
  {lines}
  memory.free(%a)
  control.return({results})
}}
"""


_WAIT = '%r = collective.wait(%s) group="0" : f32[4]@cpu'
_CUSTOM = '%s = collective.start @_c10d_functional.broadcast.default(%a, 0, "") group="" : f32[4]@cpu'
_IN_PLACE = '%s = collective.start @_c10d_functional.all_reduce_.default(%a, "sum", "0") group="0" writes=(%a) '
_USE = "%c = extern.call @aten.sin.default(%r) : f32[4]@cpu"


@pytest.mark.parametrize(
    ("lines", "results", "reason"),
    [
        ([_CUSTOM, _WAIT.replace("0", "")], "%r", "it is point-to-point or custom communication"),
        ([_IN_PLACE + "aliases=(%a) : f32[4]@cpu", _WAIT, _USE], "%c", None),
        ([_WAIT.replace("%s", "%pending"), _USE], "%c", None),
    ],
    ids=["custom", "in-place", "of the caller"],
)
def test_collectives_outside_of_functions(lines: list[str], results: str, reason: str | None) -> None:
    """The operator is custom, the collective writes memory of others, or the caller started it."""
    text = _OTHERS.format(lines="\n  ".join(lines), results=results)
    program = partitioned(text)
    assert starts_and_waits(program.body)[1] == 1
    assert all(starts_and_waits(block) == (0, 0) for _, block in program.functions)
    if reason is not None:
        original = fxwrap.parse(text)
        (start,) = [line for line in original.body.lines if isinstance(line, StartCollective)]
        assert CaptureChecker(original, ["cpu"], (), ["cpu"])(start) == reason


_ORDERED = """
program @p(%x: borrowed f32[4]@cpu) {
  %s1 = collective.start @_c10d_functional.all_reduce.default(%x, "sum", "0") group="0" : f32[4]@cpu
  %r1 = collective.wait(%s1) group="0" : f32[4]@cpu
  %s2 = collective.start @_c10d_functional.broadcast.default(%x, 0, "0") group="0" : f32[4]@cpu
  %r2 = collective.wait(%s2) group="0" : f32[4]@cpu
  %s3 = collective.start @_c10d_functional.all_reduce.default(%x, "max", "0") group="0" : f32[4]@cpu
  %r3 = collective.wait(%s3) group="0" : f32[4]@cpu
  control.return(%r1, %r2, %r3)
}
"""


def test_the_order_in_a_group_stays() -> None:
    """A broadcast that is not captured runs between two functions with all_reduces."""
    program = partitioned(_ORDERED, ["_c10d_functional.broadcast.default"])
    kinds = [type(line) for line in program.body.lines if isinstance(line, CallFunction | StartCollective)]
    assert kinds == [CallFunction, StartCollective, CallFunction]
    assert [starts_and_waits(block) for _, block in program.functions] == [(1, 1), (1, 1)]


def test_groups_without_capture_run_eagerly(capturer: CpuGraphCapturer) -> None:
    capturer.captures_groups = False
    compiled, x = emit(partitioned(REDUCTIONS), "python"), torch.randn(4, 4)
    with pytest.warns(GraphCaptureWarning, match="partition_0 runs eagerly: the backend of its process groups does"):
        for _ in range(3):
            compiled(x, x)
    assert (capturer.recorded, capturer.replayed) == (0, 0)


def test_graphs_are_freed_before_their_groups() -> None:
    """NCCL waits for captured graphs when it destroys communicators."""
    with cpu_with_graph_capture() as capturer:
        compiled, x = emit(partitioned(REDUCTIONS), "python"), torch.randn(4, 4)
        for job in range(2):
            with fake_job(2):
                for _ in range(3):
                    compiled(x, x)
                assert capturer.recorded == job + 1

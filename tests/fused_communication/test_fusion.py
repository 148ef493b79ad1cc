"""Collectives become part of fused operators; each one that does not has a reason in the report."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import rms_norm
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxwrap
from fxwrap.errors import CommunicationFusionWarning
from fxwrap.fused_communication import CommunicationFusion, FusedCommunication, symmetric_memory_decline
from fxwrap.options import EMITTERS, Options
from fxwrap.passes.communication import communication
from fxwrap.wrapper_ir import Program
from tests.distributed.processes import run_ranks
from tests.support.child_processes import run_python
from tests.support.documents import ROOT, check_printed
from tests.support.symmetric_memory import operators_on_cpu, supported

C10D = torch.ops._c10d_functional
FUSION = CommunicationFusion(decline=supported, one_shot_bytes=0)
RANKS = 4


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of four ranks whose all_gathers return this rank's part four times."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def gathered(x: Tensor, dimension: int = 0) -> Tensor:
    whole = C10D.wait_tensor(C10D.all_gather_into_tensor(x, RANKS, "0"))
    return torch.cat(whole.split(x.shape[0]), dimension) if dimension else whole


def scattered(x: Tensor, dimension: int = 0, reduction: str = "sum") -> Tensor:
    parts = torch.cat(x.split(x.shape[dimension] // RANKS, dimension)) if dimension else x
    result: Tensor = C10D.wait_tensor(C10D.reduce_scatter_tensor(parts, reduction, RANKS, "0"))
    return result


def reduced(x: Tensor) -> Tensor:
    result: Tensor = C10D.wait_tensor(C10D.all_reduce(x, "sum", "0"))
    return result


def fuse(function: Callable[..., Any], *inputs: Tensor, fusion: CommunicationFusion = FUSION) -> FusedCommunication:
    return fusion.fuse(make_fx(function, tracing_mode="fake")(*inputs))


def fused_calls(program: Program) -> list[str]:
    targets = [getattr(line, "target", "") for line in program.lines()]
    return [target.split(".")[1] for target in targets if target.startswith(("symm_mem", "fxwrap_runtime.matmuls"))]


# --- all_gather + matmul ----------------------------------------------------------------------------------------------

X, ROWS = torch.rand(2, 3, 8), torch.rand(3, 8)
B, C = torch.rand(8, 5), torch.rand(8, 6)


def rows(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return (gathered(x) @ b,)


def batches(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return ((gathered(x) @ b).relu(),)


def sequence(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return (gathered(x, 1) @ b + 1,)


def several(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    whole = gathered(x, 1)
    return whole @ b, (whole @ c).exp()


def read_elsewhere(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    whole = gathered(x, 1)
    return whole @ b, whole.sum()


def returned_whole(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    whole = gathered(x)
    return whole @ b, whole @ c, whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "x", "matmuls"),
    [(rows, ROWS, 1), (batches, X, 1), (sequence, X, 1), (several, X, 2), (read_elsewhere, X, 1),
     (returned_whole, ROWS, 2)],
)  # fmt: skip
def test_all_gather_and_matmuls_become_one_operator(function: Any, x: Tensor, matmuls: int) -> None:
    result = fuse(function, x, B, C)
    assert len(result.fused) == 1 and not result.unfused
    assert fused_calls(result.program) == ["fused_all_gather_matmul"]
    (line,) = [line for line in result.program.lines() if getattr(line, "target", "").startswith("symm_mem")]
    assert len(line.arguments[1]) == matmuls
    with operators_on_cpu():
        for emitter in EMITTERS:
            options = Options(passes=[FUSION], emitter=emitter, compile_cache=False)
            compiled = fxwrap.compile_graph(make_fx(function, tracing_mode="fake")(x, B, C), [x, B, C], options=options)
            assert fused_calls(compiled.program) == ["fused_all_gather_matmul"]
            torch.testing.assert_close(list(compiled(x, B, C)), list(function(x, B, C)))


# --- matmul + reduce_scatter ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dimension", "reduction"), [(0, "sum"), (1, "avg")])
@pytest.mark.parametrize("is_returned", [False, True])
def test_matmul_and_reduce_scatter_become_one_operator(dimension: int, reduction: str, is_returned: bool) -> None:
    def function(x: Tensor, b: Tensor) -> Tensor:
        result = scattered(x @ b, dimension, reduction)
        return result if is_returned else result + 1

    result = fuse(function, torch.rand(4, 8, 8), B)
    assert len(result.fused) == 1 and not result.unfused
    expected = "matmuls_reduce_scatter" if dimension else "fused_matmul_reduce_scatter"
    assert fused_calls(result.program) == [expected]
    fxwrap.verify(result.program)


def test_sums_of_matmuls_become_one_operator_that_needs_no_copies() -> None:
    """The gradient of an activation that several layers read."""

    def function(x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return scattered(y @ c + x @ b, 1)

    result = fuse(function, torch.rand(4, 8, 8), torch.rand(4, 8, 6), torch.rand(8, 5), torch.rand(6, 5))
    assert len(result.fused) == 1 and not result.unfused
    (line,) = [line for line in result.program.lines() if "reduce_scatter" in getattr(line, "target", "")]
    assert line.target == "fxwrap_runtime.matmuls_reduce_scatter.default"
    assert [len(items) for items in line.arguments[:2]] == [2, 2]
    assert not [line for line in result.program.lines() if getattr(line, "target", "").startswith("aten.c")]
    (group,) = communication(result.program)
    assert group.texts({})[0].startswith("matmuls_reduce_scatter(torch.float32[4, 8, ")


@pytest.mark.long  # `overlap_rank.py` runs fused operators on two ranks, and tests of this file compile the graphs
def test_training_on_two_ranks(tmp_path: Path) -> None:
    """A Llama with sequence parallelism: forward and backward fuse, in every emitter."""
    for number, results in enumerate(run_ranks("tests.fused_communication.rank", tmp_path, "training", "2")):
        assert results == {"training": ""}, f"rank {number}:\n" + results["training"]


_LOAD = """
import sys, torch, fxwrap
from tests.support.jobs import fake_job

with fake_job(4):
    for path in sys.argv[1:]:
        try:
            fxwrap.load(path)(torch.rand(3, 8), torch.rand(8, 5), torch.rand(8, 6))
        except NotImplementedError as error:
            print(str(error).partition(" with arguments")[0])
"""


def test_a_saved_program_is_loaded_where_nothing_imported_the_operators(tmp_path: Path) -> None:
    """The call then finds the operator, which has no kernel for CPUs."""
    paths = []
    with operators_on_cpu():
        for emitter in ("python", "cpp"):
            options = Options(passes=[FUSION], emitter=emitter, compile_cache=False)
            graph = make_fx(rows, tracing_mode="fake")(ROWS, B, C)
            paths.append(str(tmp_path / f"{emitter}.fxw"))
            fxwrap.compile_graph(graph, [ROWS, B, C], options=options).save(paths[-1])
    run = run_python(["-c", _LOAD, *paths])
    assert run.stdout.splitlines() == ["Could not run 'symm_mem::fused_all_gather_matmul'"] * 2, run.stderr


# --- all_reduce + residual + RMSNorm ----------------------------------------------------------------------------------


@torch.library.custom_op("test_vendor::all_reduce_rms_norm", mutates_args=())
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """The operator of a vendor."""
    total = reduced(x) + residual
    return rms_norm(total, weight.shape, weight, epsilon), total


@all_reduce_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def torch_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + reduced(x)
    return rms_norm(total, weight.shape, weight, 1e-6), total


def llama_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of transformers' Llama."""
    total = residual + reduced(x)
    y = total.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * y.to(total.dtype), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [torch_norm, llama_norm])
def test_all_reduce_and_rms_norm_become_one_operator(norm: Any, dtype: torch.dtype) -> None:
    inputs = [torch.rand(2, 3, 8, dtype=dtype), torch.rand(2, 3, 8, dtype=dtype), torch.rand(8, dtype=dtype)]
    fusion = CommunicationFusion(0, "test_vendor.all_reduce_rms_norm.default", supported, 0)
    options = Options(passes=[fusion], compile_cache=False)
    compiled = fxwrap.compile_graph(make_fx(norm, tracing_mode="fake")(*inputs), inputs, options=options)
    targets = [getattr(line, "target", "") for line in compiled.program.lines()]
    assert targets.count("test_vendor.all_reduce_rms_norm.default") == 1
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(list(compiled(*inputs)), list(norm(*inputs)), rtol=tolerance, atol=tolerance)


def broadcast_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch_norm(x, residual[:1], weight)


def other_dimension(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + reduced(x)
    return total * torch.rsqrt(total.pow(2).mean(1, keepdim=True) + 1e-6) * weight, total


def no_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return residual + reduced(x), weight


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (broadcast_residual, "the residual, %slice_1, is broadcast"),
        (other_dimension, "the norm is not over the last dimension"),
        (no_norm, "no RMSNorm of its sum with a residual follows"),
    ],
)
def test_why_a_norm_is_not_fused(norm: Any, reason: str) -> None:
    fusion = CommunicationFusion(0, "test_vendor.all_reduce_rms_norm.default", supported, 0)
    result = fuse(norm, torch.rand(2, 3, 8), torch.rand(2, 3, 8), torch.rand(8), fusion=fusion)
    assert [item.reason for item in result.unfused] == [reason] and not result.fused


# --- small all_reduces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitter", EMITTERS)
def test_small_all_reduces_become_one_kernel(emitter: str) -> None:
    def function(x: Tensor) -> Tensor:
        return reduced(x * 2) + 1

    options = Options(passes=[replace(FUSION, one_shot_bytes=128)], emitter=emitter, compile_cache=False)
    x = torch.rand(4, 8)
    compiled = fxwrap.compile_graph(make_fx(function, tracing_mode="fake")(x), [x], options=options)
    targets = [getattr(line, "target", "") for line in compiled.program.lines()]
    assert targets.count("fxwrap_runtime.one_shot_all_reduce.default") == 1
    torch.testing.assert_close(compiled(x)[0], function(x))
    (group,) = communication(compiled.program)
    assert group.texts({}) == ("one_shot_all_reduce(torch.float32[4, 8])",)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.rand(5, 8), "has 160 bytes, which is no multiple of 16 from 16 to 128"),
        (torch.rand(3, 3), "has 36 bytes, which is no multiple of 16 from 16 to 128"),
        (torch.rand(4, 8).half(), "is neither bfloat16 nor float32"),
        (torch.rand(8, 4).t(), "is not a contiguous tensor of static sizes"),
    ],
)
def test_why_an_all_reduce_stays(x: Tensor, reason: str) -> None:
    (item,) = fuse(reduced, x, fusion=replace(FUSION, one_shot_bytes=128)).unfused
    assert reason in item.reason


# --- reasons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, b: gathered(x).sum(), "no matmul reads the gathered tensor"),
        (lambda x, b: gathered(b, 1).flatten(0, 0) @ torch.ones(20, 2), "columns of the matmul's left operand"),
        (
            lambda x, b: x.flatten(0, 1) @ gathered(b[:2]),
            "it is the right operand of a matmul, and the fused operator gathers the left one",
        ),
        (lambda x, b: gathered(x).transpose(0, 1).flatten(0, 1) @ b, "but it is aten.clone.out"),
        (
            lambda x, b: torch.addmm(b[0], gathered(x).flatten(0, 1), b),
            "aten.addmm.default is no plain matmul of two matrices",
        ),
        (lambda x, b: scattered((x @ b).sin()), "aten.mm.default is expected, but it is aten.sin.default"),
        (lambda x, b: scattered(x @ b, 1, "max"), "its reduction is 'max', and the fused operator has sum and avg"),
        (lambda x, b: scattered(x.flatten(0, 1) @ b[:, :4], 1), "it scatters the columns of the matmul's result"),
        (lambda x, b: (lambda y: (scattered(y), y.sum()))(x @ b), "is used by another line too"),
    ],
)
def test_why_a_collective_is_not_fused(function: Any, reason: str) -> None:
    result = fuse(function, torch.rand(4, 4, 8), B)
    (item,) = result.unfused
    assert reason in item.reason and not result.fused
    assert item.line in str(result.program)
    assert result.report().startswith(f"0 fused, 1 not fused\nnot fused: {item.line}\n    ")


def test_it_is_off_where_there_is_no_hardware() -> None:
    """The graph stays, with one warning that names the reason, and the report has it for each collective."""
    graph = make_fx(several, tracing_mode="fake")(X, B, C)
    with pytest.warns(CommunicationFusionWarning, match="are on 'cpu', and symmetric memory needs CUDA") as warnings:
        result = CommunicationFusion().fuse(graph)
    assert len(warnings) == 1 and result.graph_module is graph and not result.fused
    assert [item.reason for item in result.unfused] == [
        "its tensors are on 'cpu', and symmetric memory needs CUDA devices"
    ]


def test_ranks_compare_fused_operators() -> None:
    (group,) = communication(fuse(several, X, B, C).program)
    expected = "fused_all_gather_matmul(torch.float32[2, 3, 8], torch.float32[8, 5], torch.float32[8, 6], 1)"
    assert (group.label, group.texts({})) == ("0", (expected,))


def test_what_symmetric_memory_needs() -> None:
    from torch.distributed import _symmetric_memory

    device = torch.device("cuda")
    assert "there is no process group 'other' now" in symmetric_memory_decline(device, "other")
    assert "call fxwrap.fused_communication.enable_symmetric_memory('0')" in symmetric_memory_decline(device, "0")
    with _symmetric_memory._test_mode():
        assert symmetric_memory_decline(device, "0") == ""


def test_the_report_is_logged_and_graphs_without_collectives_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fxwrap.fused_communication"):
        plain = make_fx(lambda x: x.sin(), tracing_mode="fake")(X)
        assert FUSION(plain) is plain and not caplog.messages
        FUSION(make_fx(rows, tracing_mode="fake")(ROWS, B, C))
    assert caplog.messages[0].startswith("1 fused, 0 not fused\nfused: %mm = extern.call @aten.mm.default(")


def test_the_guide_shows_the_report_of_the_example(update_golden: bool, capsys: pytest.CaptureFixture[str]) -> None:
    dist.destroy_process_group()
    try:
        runpy.run_path(str(ROOT / "examples" / "fused_communication.py"), run_name="__main__")
    finally:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    check_printed("docs/fused_communication.md", {"fusion_report": capsys.readouterr().out}, update_golden)


def test_the_key_has_all_that_the_pass_depends_on() -> None:
    keys = {
        FUSION.key,
        CommunicationFusion().key,
        CommunicationFusion(2).key,
        CommunicationFusion(4, "a.b.default").key,
        CommunicationFusion(one_shot_bytes=64).key,
    }
    assert len(keys) == 5

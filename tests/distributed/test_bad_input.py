"""Programs with collectives without their process group, in another job, and in files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.errors import ArtifactError, RankError
from fxwrap.options import EMITTERS, Options
from tests.distributed.processes import run_ranks
from tests.support.jobs import fake_job
from tests.support.versions import fails_before

C10D = torch.ops._c10d_functional
X = torch.linspace(-1, 1, 8)


def compiled(function: Callable[[Tensor], Tensor], emitter: str) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode="fake")(X)
    return fxwrap.compile_graph(graph, [X], options=Options(emitter=emitter, fuse=False))


def reduced(x: Tensor) -> Tensor:
    result: Tensor = C10D.wait_tensor(C10D.all_reduce(x * 2, "sum", "0"))
    return result


def gathered(x: Tensor) -> Tensor:
    """A collective of two ranks."""
    result: Tensor = C10D.wait_tensor(C10D.all_gather_into_tensor(x * 2, 2, "0"))
    return result


def start_job(folder: Path) -> None:
    """Initialises a job of this process alone, whose group has the name "0"."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder), 1), rank=0, world_size=1)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_group_that_is_not_initialised_or_destroyed(emitter: str, tmp_path: Path) -> None:
    program = compiled(reduced, emitter)
    for number in range(2):
        with pytest.raises(RuntimeError, match="Could not resolve the process group registered under the name 0"):
            program(X)
        start_job(tmp_path / str(number))
        try:
            torch.testing.assert_close(program(X)[0], 2 * X)
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_loaded_program_in_a_job_of_another_size(emitter: str, tmp_path: Path) -> None:
    with fake_job(2):
        compiled(gathered, emitter).save(tmp_path / "first.fxw")
    loaded: Any = fxwrap.load(tmp_path / "first.fxw")
    loaded.save(tmp_path / "program.fxw")
    loaded = fxwrap.load(tmp_path / "program.fxw")
    start_job(tmp_path / "store")
    try:
        with pytest.raises(
            RankError, match=r"'program' was saved where group '0' has 2 ranks, and here it has 1\. Comp"
        ):
            loaded(X)
    finally:
        dist.destroy_process_group()


@fails_before("2.12", "meshes are no opaque objects", raises=TypeError)
def test_a_mesh_in_a_file(tmp_path: Path) -> None:
    start_job(tmp_path / "store")
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        graph = Graph()
        x = graph.placeholder("x")
        graph.output((x, graph.get_attr("mesh")))
        module = GraphModule({"mesh": mesh}, graph)
        program = fxwrap.compile_graph(module, [X])
        with pytest.raises(ArtifactError, match="mesh"):
            program.save(tmp_path / "program.fxw")
    finally:
        dist.destroy_process_group()


def test_collectives_that_fail(tmp_path: Path) -> None:
    """Errors reach the caller, also that of the timeout, and the processes end: `run_ranks` waits for them."""
    cases = ("uneven", "no_memory", "stalled", "dead")
    first, second = run_ranks("tests.distributed.compile_rank", tmp_path, *cases)
    for kind, text in (first["uneven"], second["uneven"]):
        assert kind == "RankError"
        assert "number 1 is all_gather_into_tensor(torch.float32[4, 4], 2) on rank 0 and " in text
        assert "all_gather_into_tensor(torch.float32[6, 4], 2) on rank 1" in text and "of the same sizes" in text
    kind, text = first["no_memory"]
    assert kind == "RuntimeError" and "can't allocate memory" in text
    assert "Its collectives may run in buckets: bucket_collectives=False needs less memory" in text
    assert second["no_memory"][0] == "RuntimeError"  # it waits for rank 0
    assert len(first["stalled"]) == len(EMITTERS)
    for kind, text in first["stalled"]:
        assert kind == "RuntimeError" and re.search("[Tt]imed out waiting 3000ms", text)
    assert first["dead"] == "RuntimeError"
    assert second["dead"] == ""

"""Programs with collectives without their process group, in another job, and in files."""

from __future__ import annotations

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
from fxwrap.errors import ArtifactError
from fxwrap.options import EMITTERS, Options
from tests.distributed.processes import run_ranks
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
    compiled(gathered, emitter).save(tmp_path / "program.fxw")
    loaded: Any = fxwrap.load(tmp_path / "program.fxw")
    start_job(tmp_path / "store")
    try:
        with pytest.raises(RuntimeError, match="invalid size of output tensor"):
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


def test_a_rank_that_dies(tmp_path: Path) -> None:
    first, second = run_ranks("tests.distributed.compile_rank", tmp_path, "dead")
    assert first["dead"] == "RuntimeError"
    assert second["dead"] == ""

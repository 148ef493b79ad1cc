"""`fxwrap.compare` runs functions of opaque inputs: every run has the same objects, in their initial state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxwrap.comparison import COMPARED_EMITTERS, compare
from tests.support.jobs import single_rank_job
from tests.support.opaque import Counter


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with single_rank_job():
        yield dist.group.WORLD


def test_an_object_that_runs_change_is_restored() -> None:
    counter = Counter(3)
    report = compare(lambda counter, x: torch.ops.fxwrap_tests.add_count(counter, x), (counter, torch.randn(4)))
    assert report.agrees and [outcome.name for outcome in report.emitters] == list(COMPARED_EMITTERS), report
    assert counter.count == 3


def test_objects_that_are_returned() -> None:
    def function(counter: Counter, x: Tensor) -> tuple[Counter, Tensor]:
        return counter, x * 2

    assert compare(function, (Counter(1), torch.randn(4)), repeats=0).agrees


def test_process_groups_and_meshes(group: ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def function(group: ProcessGroup, mesh: DeviceMesh, x: Tensor) -> Tensor:
        return all_reduce(x + mesh.size(), "sum", group) * 2

    report = compare(function, (group, mesh, torch.randn(4)), repeats=0)
    assert report.agrees, report
    assert report["eager"].float64_error is not None


def test_random_number_generators() -> None:
    def function(generator: torch.Generator, x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=generator)

    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    report = compare(function, (generator, torch.randn(4)), repeats=0)
    assert torch.equal(generator.get_state(), before)
    assert report.agrees, report

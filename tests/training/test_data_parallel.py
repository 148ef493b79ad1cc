"""DDP and FSDP2 modules in a step: their hooks stay as they were, and features without a functional form are errors.

`tests/distributed/training_cases.py` compares the results of ranks with eager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxwrap
from fxwrap.errors import StepError
from fxwrap.lines import StartCollective
from fxwrap.options import Options
from fxwrap.training.data_parallel import with_functional_collectives
from tests.support.jobs import fake_job
from tests.training.trainer import Trainer

OPTIONS = Options(emitter="python", bucket_collectives=False)
X = torch.ones(4, 8)


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with fake_job(2):
        yield


def trainer_of(model: nn.Module) -> Trainer:
    trainer = Trainer()
    trainer.model = model  # type: ignore[assignment]
    trainer.optimizer = torch.optim.AdamW(model.parameters())
    return trainer


def collectives_of(step: fxwrap.CompiledStep) -> Counter[str]:
    lines = step.compiled.program.lines()
    return Counter(line.operator.split(".")[1] for line in lines if isinstance(line, StartCollective))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_ddp_averages_each_gradient_and_sends_buffers() -> None:
    ddp = DistributedDataParallel(model())
    trainer = trainer_of(ddp)
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    assert collectives_of(compiled) == {"all_reduce_": 6, "broadcast_": 3}
    assert "forward" not in vars(ddp) and ddp.require_forward_param_sync
    assert not any(parameter._post_accumulate_grad_hooks for parameter in ddp.parameters())
    assert compiled(X).isfinite() and ddp(X).shape == (4, 4)


def test_fsdp_gathers_parameters_and_scatters_gradients() -> None:
    sharded = model()
    fully_shard(sharded[0])
    fully_shard(sharded)
    trainer = trainer_of(sharded)
    hooks = [list(part._forward_pre_hooks.values()) for part in sharded.modules()]
    trainer.step(X)  # it also leaves gathered parameters, which are sharded again
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    counts = collectives_of(compiled)
    assert counts["reduce_scatter_tensor"] == 6 <= counts["all_gather_into_tensor"]
    assert [list(part._forward_pre_hooks.values()) for part in sharded.modules()] == hooks
    assert not any("weight" in vars(part) for part in sharded.modules())
    assert compiled(X).shape == trainer.step(X).shape == ()  # memory that the fake group gathers is uninitialised


class Places(nn.Module):
    """Records the devices of its inputs."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.inner, self.devices = nn.Linear(8, 8), inner, []  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor, masks: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self.devices.append((x.device.type, masks["mask"].device.type))
        y: torch.Tensor = self.layer(x.cpu()) * masks["mask"].cpu()
        return y if self.inner is None else self.inner(y, masks={"mask": y})


@pytest.mark.filterwarnings("error::FutureWarning")  # of former names of torch's collectives
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_the_outermost_module_moves_its_inputs(wrapper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced on fake tensors of a GPU that may not exist; parameters stay on the CPU."""
    mesh, inner = init_device_mesh("cpu", (2,)), Places()
    outer = Places(inner)
    if wrapper == "ddp":
        parallel: nn.Module = DistributedDataParallel(outer)
        monkeypatch.setattr(parallel, "device_ids", [0])
        monkeypatch.setattr(parallel, "device_type", "cuda")
    else:
        for unit in (inner, outer):
            fully_shard(unit, mesh=mesh)
            monkeypatch.setattr(unit._get_fsdp_state(), "_device", torch.device("cuda:0"))
        parallel = outer
    modules = [item for item in (inner, outer, parallel) if isinstance(item, FSDPModule | DistributedDataParallel)]
    with FakeTensorMode(allow_non_fake_inputs=True), with_functional_collectives(dict.fromkeys(modules)):
        for _ in range(2):
            parallel(torch.empty(4, 8), masks={"mask": torch.empty(4, 8)})
    assert outer.devices == [("cuda", "cuda")] * 2 and inner.devices == [("cpu", "cpu")] * 2


def _with_hook() -> nn.Module:
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, lambda _state, bucket: bucket.buffer())
    return ddp


def _with_factor() -> nn.Module:
    sharded: Any = fully_shard(model())
    sharded.set_gradient_divide_factor(3.0)
    return sharded  # type: ignore[no-any-return]


def _without_sync() -> nn.Module:
    sharded: Any = fully_shard(model())
    sharded.set_requires_gradient_sync(False)
    return sharded  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_with_hook, "'self.model' is a DistributedDataParallel with a communication hook, which its functional form"),
        (_with_factor, "'self.model' is a FSDPSequential with set_gradient_divide_factor, which"),
        (_without_sync, r"'self.model' is a FSDPSequential with set_requires_gradient_sync\(False\), which"),
        (lambda: fully_shard(model(), offload_policy=CPUOffloadPolicy(pin_memory=False)), "with an offload policy"),
    ],
)
def test_features_without_a_functional_form(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(StepError, match=text):
        fxwrap.compile_step(trainer_of(make()).step, (X,), options=OPTIONS)


def test_a_group_that_is_destroyed() -> None:
    trainer = trainer_of(DistributedDataParallel(model()))
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="Could not resolve the process group registered under the name 0"):
        compiled(X)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

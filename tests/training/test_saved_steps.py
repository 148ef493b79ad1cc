"""Steps in files: loaded in another process, with another state, and in another job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

import fxwrap
from fxwrap.errors import ArtifactError, RankError, StepError
from fxwrap.options import Options
from tests.distributed.cases import Mlp, simple_fsdp
from tests.support.jobs import fake_job
from tests.training.saved_step import train
from tests.training.steps import mlp, square_step
from tests.training.trainer import Trainer

OPTIONS = Options(emitter="python")
X = torch.ones(4, 8)


def test_a_saved_step_goes_on_in_another_process(tmp_path: Path) -> None:
    """The state is outside of the file; nothing of the step is traced again."""
    training = mlp()
    compiled = fxwrap.compile_step(training.step, training.inputs(0))
    compiled.save(tmp_path / "step.fxw")
    results = train(training, compiled)
    command = [sys.executable, "-m", "tests.training.saved_step", str(tmp_path)]
    subprocess.run(command, check=True)
    loaded = torch.load(tmp_path / "results.pt")
    assert loaded.keys() == results.keys()
    for name, value in results.items():
        assert torch.equal(loaded[name], value), name


def test_a_loaded_step_is_saved_again(tmp_path: Path) -> None:
    trainer, other = Trainer(), Trainer()
    other.model.load_state_dict(trainer.model.state_dict())
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    compiled.save(tmp_path / "first.fxw")
    fxwrap.load_step(tmp_path / "first.fxw", trainer.step).save(tmp_path / "second.fxw")
    assert (tmp_path / "first.fxw").read_bytes() == (tmp_path / "second.fxw").read_bytes()
    loaded = fxwrap.load_step(tmp_path / "second.fxw", other.step)
    assert list(loaded.state) == list(compiled.state)
    assert torch.equal(loaded(X), compiled(X))
    other.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    with pytest.raises(StepError, match=r"'self.optimizer.param_groups.0.betas' was \(0.9, 0.999\)"):
        loaded(X)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    fxwrap.compile_step(Trainer().step, (X,), options=OPTIONS).save(tmp_path / "step.fxw")
    with pytest.raises(StepError, match=r"'self\.optimizer\.state\.self\.model\.weight\.step' is no part of its state"):
        fxwrap.load_step(tmp_path / "step.fxw", Trainer(torch.optim.SGD, lr=0.1).step)
    program: Any = fxwrap.load(tmp_path / "step.fxw").program
    fxwrap.save(program, tmp_path / "program.fxw")
    with pytest.raises(ArtifactError, match=r"it contains no training step\. Load it with fxwrap.load"):
        fxwrap.load_step(tmp_path / "program.fxw", Trainer().step)


# --- jobs -------------------------------------------------------------------------------------------------------------


def sharded_step() -> Callable[[Tensor], Tensor]:
    """Returns a step with DTensor parameters."""
    model = simple_fsdp(Mlp(), dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return square_step(model)


def test_a_step_with_sharded_state_in_a_job_of_another_size(tmp_path: Path) -> None:
    with fake_job(2):
        fxwrap.compile_step(sharded_step(), (X,), options=OPTIONS).save(tmp_path / "step.fxw")
        fxwrap.load_step(tmp_path / "step.fxw", sharded_step())(X)
    with fake_job(4), pytest.raises(StepError, match=r"'model.norm.weight' is DTensor.*Compile the step for this job"):
        fxwrap.load_step(tmp_path / "step.fxw", sharded_step())


def test_a_step_with_collectives_in_a_job_of_another_size(tmp_path: Path) -> None:
    trainer = Trainer()

    def step(x: Tensor) -> Tensor:
        return all_reduce(trainer.step(x), "sum", dist.group.WORLD)

    with fake_job(2):
        fxwrap.compile_step(step, (X,), options=OPTIONS).save(tmp_path / "step.fxw")
        fxwrap.load_step(tmp_path / "step.fxw", step)(X)
    with fake_job(4), pytest.raises(RankError, match="'step' was saved where group '0' has 2 ranks, and here it has 4"):
        fxwrap.load_step(tmp_path / "step.fxw", step)(X)


def test_results_that_no_file_can_hold(tmp_path: Path) -> None:
    def step(x: Tensor) -> Any:
        return trainer.step(x), nn.ReLU

    trainer = Trainer()
    compiled = fxwrap.compile_step(step, (X,), options=OPTIONS)
    with pytest.raises(StepError, match="its arguments or results cannot be saved"):
        compiled.save(tmp_path / "step.fxw")

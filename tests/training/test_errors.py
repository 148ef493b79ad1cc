"""Training steps that cannot become one program, and state that changed after the compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import fxwrap
from fxwrap.errors import InputError, StepError
from fxwrap.options import Options
from tests.support.jobs import fake_job
from tests.training.trainer import Trainer

OPTIONS = Options(emitter="python")
X = torch.ones(4, 8)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Trainer().branch, r"trainer.py:\d+\): its Python code depends on the content of a tensor"),
        (Trainer().count, "it changes 'self.calls': Python numbers are constants"),
        (Trainer().keep_gradients, "it adds gradients to those of the call before, of 2 parameters"),
        (Trainer().number, "it returns a number that it reads from a tensor"),
        (Trainer().fail, "ValueError: the model's own"),
        (Trainer(torch.optim.LBFGS).with_closure, "depends on the content of a tensor"),
        (Trainer(torch.optim.SGD, lr=0.1, momentum=0.9).step, r"creates its state \['momentum_buffer'\] during"),
    ],
)
def test_steps_that_are_no_program(step: Callable[..., Any], text: str) -> None:
    with pytest.raises(StepError, match=text):
        fxwrap.compile_step(step, (X,), options=OPTIONS)


def test_a_scheduler_within_the_step() -> None:
    trainer = Trainer()
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)

    def step(x: Tensor) -> Tensor:
        loss = trainer.step(x)
        scheduler.step()
        return loss

    with pytest.raises(StepError, match=r"it changes 'trainer.optimizer.param_groups.0.lr'"):
        fxwrap.compile_step(step, (X,), options=OPTIONS)
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3


def test_a_tensor_out_of_reach() -> None:
    trainer = Trainer()
    hidden = (torch.ones(4),)

    def step(x: Tensor) -> Tensor:
        return trainer.update((trainer.model(x) * hidden[0]).sum())

    with pytest.raises(StepError, match="it reads a tensor that is no input"):
        fxwrap.compile_step(step, (X,), options=OPTIONS)


def test_modules_with_collectives_in_hooks() -> None:
    trainer = Trainer()
    trainer.model = nn.DataParallel(trainer.model)
    with pytest.raises(StepError, match=r"'self\.model' is a DataParallel, whose hooks run collectives .* fully_shard"):
        fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)


def test_inputs() -> None:
    trainer = Trainer()
    with pytest.raises(StepError, match="an input is of type int"):
        fxwrap.compile_step(trainer.step, (3,), options=OPTIONS)
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    with pytest.raises(StepError, match="its inputs have the structure"):
        compiled({"x": X})
    with pytest.raises(InputError, match="input_0"):
        compiled(torch.ones(3, 8))


def test_distributed_state_with_another_layout() -> None:
    """Each call reads the state where it is: another tensor of the same layout is fine, no other one is."""
    with fake_job(2):
        mesh = init_device_mesh("cpu", (2,))
        layer = nn.Module()

        def set_weight(placement: Placement, factor: float = 1.0) -> None:
            layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 8) * factor, mesh, [placement]))

        def step(x: Tensor) -> Tensor:
            return (layer.weight.detach().to_local() * x).sum()  # type: ignore[operator, union-attr]

        set_weight(Shard(0))
        compiled = fxwrap.compile_step(step, (X[:2],), options=OPTIONS)
        set_weight(Shard(0), 3.0)
        assert torch.equal(compiled(X[:2]), step(X[:2]))
        set_weight(Replicate())
        with pytest.raises(StepError, match="a DTensor has another layout, mesh or placement"):
            compiled(X[:2])
        layer.weight = nn.Parameter(torch.ones(2, 8))
        with pytest.raises(StepError, match="a Parameter has another layout, mesh or placement"):
            compiled(X[:2])


def test_a_failed_compile_changes_nothing() -> None:
    trainer = Trainer()
    weight = trainer.model.weight
    before = weight.detach().clone()
    with pytest.raises(StepError):
        fxwrap.compile_step(trainer.branch, (X,), options=OPTIONS)
    assert trainer.model.weight is weight
    assert trainer.optimizer.param_groups[0]["params"][0] is weight
    assert torch.equal(weight, before)
    assert weight.grad is None
    assert torch.equal(trainer.optimizer.state[weight]["exp_avg"], torch.zeros_like(weight))


def test_a_learning_rate_that_is_a_number_may_not_change() -> None:
    trainer = Trainer()
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StepError, match=r"'self.optimizer.param_groups.0.lr' was 0.001 .* and is 0.5 now"):
        compiled(X)


def test_a_learning_rate_that_is_a_tensor_may_change() -> None:
    torch.manual_seed(0)
    eager = Trainer(lr=torch.tensor(1e-3))
    torch.manual_seed(0)
    trainer = Trainer(lr=torch.tensor(1e-3))
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    for factor in (1.0, 10.0, 0.1):
        for item in (eager, trainer):
            item.optimizer.param_groups[0]["lr"].mul_(factor)
        torch.testing.assert_close(compiled(X), eager.step(X))
    torch.testing.assert_close(trainer.model.weight, eager.model.weight)


@pytest.mark.parametrize("method", ["with_closure", "smooth", "step"])
def test_other_forms_of_a_step(method: str) -> None:
    trainers = []
    for _ in range(2):
        torch.manual_seed(0)
        trainers.append(Trainer(fused=method == "step"))
    eager, trainer = trainers
    compiled = fxwrap.compile_step(getattr(trainer, method), (X,), options=OPTIONS)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), getattr(eager, method)(X).detach())
    torch.testing.assert_close(trainer.average, eager.average)
    torch.testing.assert_close(trainer.model.weight, eager.model.weight)


def test_a_checkpoint_that_is_loaded_between_calls() -> None:
    trainer = Trainer()
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    compiled(X)
    model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    model = {name: value.clone() for name, value in model.items()}
    optimizer["state"] = {number: {name: value.clone() for name, value in items.items()}
                          for number, items in optimizer["state"].items()}  # fmt: skip
    expected = [compiled(X) for _ in range(2)]
    trainer.model.load_state_dict(model)
    trainer.optimizer.load_state_dict(optimizer)
    assert [compiled(X) for _ in range(2)] == expected


def test_several_backwards_accumulate() -> None:
    def step_of(trainer: Trainer) -> Callable[..., Any]:
        def step(*parts: Tensor) -> Tensor:
            trainer.optimizer.zero_grad()
            losses = []
            for part in parts:
                loss = trainer.model(part).square().sum()
                loss.backward()
                losses.append(loss.detach())
            trainer.optimizer.step()
            return torch.stack(losses)

        return step

    torch.manual_seed(0)
    eager, trainer = Trainer(), Trainer()
    trainer.model.load_state_dict(eager.model.state_dict())
    compiled = fxwrap.compile_step(step_of(trainer), (X, 2 * X), options=OPTIONS)
    for _ in range(2):
        torch.testing.assert_close(compiled(X, 2 * X), step_of(eager)(X, 2 * X))


def test_an_optimizer_that_branches_on_its_step_counter() -> None:
    trainers = []
    for _ in range(2):
        torch.manual_seed(0)
        trainers.append(Trainer(torch.optim.RAdam, lr=0.01))
    eager, trainer = trainers
    compiled = fxwrap.compile_step(trainer.step, (X,), options=OPTIONS)
    for _ in range(8):  # rectification begins in the sixth step; its factor is a difference of float32 numbers here
        torch.testing.assert_close(compiled(X), eager.step(X), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(trainer.model.weight, eager.model.weight, rtol=1e-3, atol=1e-4)

"""Training steps as one program: equal to eager training, in every emitter, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxwrap
from fxwrap.comparison.measure import peak_bytes
from fxwrap.lines import Mutate
from fxwrap.options import EMITTERS, Options
from tests.support.models import MODELS

STEPS = 20


@dataclass(frozen=True)
class Training:
    """A model with its optimizer and a step; `inputs(number)` are those of a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]


# Models are in float64: where a gradient is rounding noise, Adam amplifies it to the size of an update in float32.


def mlp(make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    ).double()
    optimizer = make_optimizer(model.parameters(), **options)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, mlp_inputs)


def mlp_inputs(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 8, generator=generator, dtype=torch.float64), torch.randint(4, (6,), generator=generator)


def transformer(name: str) -> Training:
    """A small model of `transformers`."""
    case = MODELS[name]
    model = case.build(0).double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: dict[str, Tensor]) -> Tensor:
        loss = case.loss(model(**inputs))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step, lambda number: (case.inputs(number, training=True),))


def assert_same_training(make: Callable[[], Training], options: Options, steps: int = STEPS) -> fxwrap.CompiledStep:
    """Compares losses, parameters, buffers and optimizer state of eager and compiled training."""
    eager, training = make(), make()
    compiled = fxwrap.compile_step(training.step, training.inputs(0), options=options)
    for number in range(steps):
        losses = []
        for step in (eager.step, compiled):
            torch.manual_seed(number)
            losses.append(step(*eager.inputs(number)))
        torch.testing.assert_close(losses[1], losses[0])
    assert_same_state(training, eager)
    return compiled


def assert_same_state(training: Training, eager: Training) -> None:
    """Compares by relative norm: Adam amplifies the rounding of single gradients that are nearly 0."""
    have, expected = tensors_of(training), tensors_of(eager)
    assert have.keys() == expected.keys()
    for name, value in expected.items():
        error = (have[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
        assert error < 1e-6, (name, error)


def tensors_of(training: Training) -> dict[str, Tensor]:
    """Returns the tensors of model and optimizer by name."""
    optimizer = training.optimizer.state_dict()["state"]
    state = {f"{number}.{name}": value for number, items in optimizer.items() for name, value in items.items()}
    return {**training.model.state_dict(), **state}


@pytest.mark.parametrize("emitter", EMITTERS)
def test_training_equals_eager(emitter: str) -> None:
    compiled = assert_same_training(mlp, Options(emitter=emitter))
    assert not any(isinstance(line, Mutate) for line in compiled.compiled.program.lines())


@pytest.mark.parametrize(("name", "emitter"), [("gpt2", "cpp"), ("llama", "python")])
def test_transformers_train_as_in_eager(name: str, emitter: str) -> None:
    assert_same_training(partial(transformer, name), Options(emitter=emitter))


def test_a_saved_step_goes_on_in_another_program(tmp_path: Path) -> None:
    """The state is outside of the file; the loaded program takes it in the order of the compiled step."""
    first, second = mlp(), mlp()
    compiled = fxwrap.compile_step(first.step, first.inputs(0))
    other = fxwrap.compile_step(second.step, second.inputs(0))
    compiled.save(tmp_path / "step.fxw")
    loaded: Any = fxwrap.load(tmp_path / "step.fxw")
    for number in range(3):
        torch.manual_seed(number)
        loss = compiled(*first.inputs(number))
        torch.manual_seed(number)
        (loaded_loss,) = loaded(*other.plain_inputs(*first.inputs(number)))
        assert torch.equal(loaded_loss, loss)
    assert_same_state(second, first)
    assert [item.name for item in loaded.program.inputs][:2] == ["model_0_weight", "model_1_weight"]


def test_peak_memory_is_at_most_that_of_separate_programs() -> None:
    """The backward recomputes what the partitioner of separate graphs lets it recompute, and gradients die early."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU("tanh"))])
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, optimizer.step

    def step_of(model: Callable[..., Any], optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> Any:
        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss.detach()

        return step

    x = torch.randn(512, 64)
    model, optimizer, update = make()
    compiled = fxwrap.compile_step(step_of(model, optimizer, update), (x,))
    model, optimizer, update = make()
    parts = [torch.compile(part, backend="fxwrap") for part in (model, update)]
    separate = step_of(parts[0], optimizer, parts[1])
    peaks = []
    for step in (compiled, separate):
        step(x)
        step(x)
        peaks.append(peak_bytes(lambda: (x,), lambda inputs: step(*inputs)))  # noqa: B023
    assert peaks[0] <= peaks[1]
    activations = 3 * x.nbytes  # the three results of the linear layers; GELU is computed again
    assert peaks[0] < activations + 4 * x.nbytes

"""A model with its optimizer and a step, for processes that import little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


def square_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a step of AdamW with the mean of the squares of a model's results as its loss."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mlp_inputs(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 8, generator=generator, dtype=torch.float64), torch.randint(4, (6,), generator=generator)


def tensors_of(training: Training) -> dict[str, Tensor]:
    """Returns the tensors of model and optimizer by name."""
    optimizer = training.optimizer.state_dict()["state"]
    state = {f"{number}.{name}": value for number, items in optimizer.items() for name, value in items.items()}
    return {**training.model.state_dict(), **state}

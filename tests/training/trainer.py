"""A training loop's object whose methods are steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Trainer:
    """A model and an optimizer with a Python counter."""

    def __init__(self, make_optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        self.model = nn.Linear(8, 4)
        self.optimizer = make_optimizer(self.model.parameters(), **options)
        self.average = torch.zeros(())
        self.calls = 0

    def update(self, loss: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, x: Tensor) -> Tensor:
        return self.update(self.model(x).square().sum())

    def branch(self, x: Tensor) -> Tensor:
        loss = self.model(x).sum()
        return self.update(loss * 2 if loss > 0 else loss)

    def count(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.step(x)

    def keep_gradients(self, x: Tensor) -> Tensor:
        loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def number(self, x: Tensor) -> float:
        return self.step(x).item()

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError("the model's own")

    def with_closure(self, x: Tensor) -> Any:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().sum()
            loss.backward()
            return loss

        return self.optimizer.step(closure)

    def smooth(self, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + self.step(x)
        return self.average

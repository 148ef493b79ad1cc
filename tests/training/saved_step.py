"""Another process, which goes on with the steps of a file: `saved_step.py FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fxwrap
from tests.training.steps import STEPS, Training, mlp, tensors_of


def train(training: Training, step: Callable[..., Any]) -> dict[str, Tensor]:
    """Returns the losses of steps, and the state after them."""
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        losses.append(step(*training.inputs(number)))
    return {"losses": torch.stack(losses), **tensors_of(training)}


def go_on(folder: Path) -> None:
    """Trains with the saved step and a new model, in a process that traces nothing."""
    training = mlp()
    before = fxwrap.compile_counts()
    step = fxwrap.load_step(folder / "step.fxw", training.step, binaries="required")
    results = train(training, step)
    assert fxwrap.compile_counts() == before
    assert "torch._functorch.aot_autograd" not in sys.modules
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    go_on(Path(sys.argv[1]))

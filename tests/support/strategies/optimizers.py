"""Random optimizers over random parameters, several steps of which run in a row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.strategies.functions import Compile, RandomFunction

DTYPES = (torch.float32, torch.float64, torch.float32, torch.bfloat16)
SIZES = ((3, 4), (7,), (), (0, 3), (2, 1, 5), (16, 16), (1,))
LAYOUTS = ("contiguous", "contiguous", "transposed", "view")
CHOICES: dict[str, dict[str, Sequence[Any]]] = {
    "SGD": {"momentum": (0.9, 0.0), "dampening": (0.0, 0.1), "nesterov": (False,), "weight_decay": (0.0, 0.1)},
    "Adam": {"amsgrad": (False, True), "weight_decay": (0.0, 0.1)},
    "AdamW": {"amsgrad": (False, True), "weight_decay": (0.01, 0.0)},
    "Adafactor": {"weight_decay": (0.0, 0.1), "beta2_decay": (-0.8,)},
    "RMSprop": {"momentum": (0.0, 0.9), "centered": (False, True)},
    "Adagrad": {"lr_decay": (0.0, 0.1)},
    "NAdam": {"momentum_decay": (4e-3,)},
    "Adamax": {"weight_decay": (0.0, 0.1)},
}


@dataclass(frozen=True, repr=False)
class RandomSteps(RandomFunction):
    """An optimizer whose steps are compiled; each run takes the parameters, and gradients of each step."""

    make: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = torch.optim.SGD
    steps: int = 3
    tied: bool = False
    clips: bool = False
    """`tied`: the second parameter is the memory of the first, in another shape; `clips`: gradients are clipped."""

    def results(self, inputs: Sequence[Any], compile_function: Compile | None = None) -> list[Tensor]:
        """Returns parameters and the optimizer's state after each of several steps."""
        count = len(inputs) // (self.steps + 1)
        parameters = [nn.Parameter(copy.deepcopy(item)) for item in inputs[:count]]
        bases = [item.detach() for item in parameters]
        if self.tied and len(parameters) > 1 and parameters[0].numel() and parameters[0].is_contiguous():
            parameters[1] = nn.Parameter(parameters[0].detach().view(-1))
        optimizer = self.make(parameters)

        def step() -> None:
            if self.clips:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        run = step if compile_function is None else compile_function(step)
        results: list[Tensor] = []
        for number in range(1, self.steps + 1):
            gradients = inputs[number * count : (number + 1) * count]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                fits = gradient.numel() == parameter.numel()
                parameter.grad = gradient.clone().reshape(parameter.shape).to(parameter.dtype) if fits else None
            run()
            results += [item.detach().clone() for item in (*bases, *parameters)]
            results += [item.clone() for item in _tensors(optimizer.state_dict()["state"])]
        return results


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors(value)


@st.composite
def optimizers(draw: st.DrawFn) -> RandomFunction:
    """Draws an optimizer, parameters and gradients."""
    choice: Callable[..., Any] = lambda options: draw(st.sampled_from(options))  # noqa: E731
    name = choice(tuple(CHOICES))
    options = {key: choice(values) for key, values in CHOICES[name].items()}
    options["foreach"] = choice((None, True, False))
    options["lr"] = choice((0.1, 1e-3))
    if choice((False, False, True)) and name in ("Adam", "AdamW", "SGD") and options["foreach"] is not True:
        options["lr"] = torch.tensor(options["lr"])
    if name != "Adafactor":
        options["maximize"] = choice((False, False, True))
    groups, tied, clips, steps = choice((1, 2)), choice((False, False, True)), choice((False, True)), choice((3, 2, 5))
    dtype = choice(DTYPES)
    mixed = choice((False, False, True))
    # Adafactor divides by the number of elements
    sizes = [item for item in SIZES if name != "Adafactor" or 0 not in item]
    shapes = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=5))
    dtypes = [choice(DTYPES) if mixed else dtype for _ in shapes]
    runs = []
    layouts = [choice(LAYOUTS) for _ in shapes]
    for _ in range(2):
        parameters = [_parameter(*item) for item in zip(shapes, dtypes, layouts, strict=True)]
        runs.append((*parameters, *[_random(item.shape, item.dtype) for _ in range(steps) for item in parameters]))

    def make(items: Sequence[Tensor]) -> torch.optim.Optimizer:
        own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
        parts = [{"params": items[:1], "lr": 0.01}, {"params": items[1:]}] if groups == 2 and len(items) > 1 else items
        return cast("torch.optim.Optimizer", getattr(torch.optim, name)(parts, **own))

    text = f"optimizer {name} {options}, groups {groups}, tied {tied}, clips {clips}, steps {steps}"
    return RandomSteps(make, runs, text, make=make, steps=steps, tied=tied, clips=clips)


def _random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64).to(dtype)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    x = _random(shape, dtype)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "view" and x.dim():
        return torch.cat([x, x])[x.shape[0] :]
    return x

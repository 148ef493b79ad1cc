"""Operators on lists of tensors are taken apart, whatever the overload, and optimizers that call them fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

import fxwrap
from fxwrap import Options
from fxwrap.compiler import Compiled
from fxwrap.lines import Call, Launch
from fxwrap.lowering.foreach import foreach_decompositions
from fxwrap.torch_compat import OpOverload
from tests.capture import watching

SIZES = ((2, 3), (), (4,))
APART = sorted(foreach_decompositions(), key=str)


def drawn(seed: int, *, matrices: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand((3, 3) if matrices else size, generator=generator) * 0.8 + 0.1 for size in SIZES]


def arguments(operator: OpOverload) -> list[Any]:
    """What a call passes for each argument without a default, and for numbers that have one."""
    found: list[Any] = []
    matrices = "_mm" in str(operator)
    for number, item in enumerate(operator._schema.arguments):
        match str(item.type):
            case "List[Tensor]":
                found.append(drawn(number, matrices=matrices))
            case "List[number]":
                found.append([0.5, 2, 1.5])
            case "number" if item.name != "alpha":
                found.append(3)
            case "Tensor":
                found.append(torch.tensor(0.7))
    return found


@pytest.mark.parametrize("operator", APART, ids=str)
def test_every_overload_gives_what_torch_gives(operator: OpOverload) -> None:
    given = arguments(operator)
    keywords = {"alpha": 2.5} if any(item.name == "alpha" for item in operator._schema.arguments) else {}

    tensors, spec = tree_flatten(given)
    places = [place for place, item in enumerate(tensors) if isinstance(item, Tensor)]

    def call(*own: Tensor) -> Any:
        filled = list(tensors)
        for place, item in zip(places, own, strict=True):
            filled[place] = item
        return operator(*tree_unflatten(filled, spec), **keywords)

    inputs = [tensors[place] for place in places]
    program = fxwrap.lower(make_fx(call, tracing_mode="fake")(*inputs), options=Options(fuse=False))
    assert not [line for line in program.lines() if isinstance(line, Call) and "_foreach" in line.target]
    torch.testing.assert_close(list(fxwrap.run(program, inputs)), list(call(*inputs)), rtol=1e-6, atol=1e-6)


def test_the_overloads_of_optimizers_are_among_them() -> None:
    known = {str(operator) for operator in APART}
    assert {"aten._foreach_lerp.Scalar", "aten._foreach_addcdiv.ScalarList", "aten._foreach_pow.ScalarAndTensor",
            "aten._foreach_add.List", "aten._foreach_maximum.List", "aten._foreach_norm.Scalar"} <= known  # fmt: skip


def stepped(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clipped: bool = False, steps: int = 3
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[Compiled]]:
    """Parameters after some steps of a compiled optimizer and of an eager one, and what was compiled."""
    compiled: list[Compiled] = []

    sides = [[nn.Parameter(item.clone()) for item in drawn(0)] for _ in range(2)]
    optimizers = [make(parameters) for parameters in sides]

    def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        if clipped:
            nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
        optimizer.step()

    run = torch.compile(step, backend=watching(compiled, Options(emitter="cpp")))
    for number in range(steps):
        for parameters, optimizer, function in zip(sides, optimizers, (run, step), strict=True):
            for parameter, gradient in zip(parameters, drawn(number + 1), strict=True):
                parameter.grad = gradient - 0.5
            function(parameters, optimizer)
    return sides[0], sides[1], compiled


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda given: torch.optim.AdamW(given, weight_decay=0.1, foreach=True),
    "nadam": lambda given: torch.optim.NAdam(given, foreach=True),
    "rmsprop": lambda given: torch.optim.RMSprop(given, centered=True, momentum=0.9, foreach=True),
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
}


@pytest.mark.filterwarnings("ignore:.*Profiler record function")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer_is_kernels_alone(name: str) -> None:
    torch._dynamo.reset()
    found, wanted, compiled = stepped(OPTIMIZERS[name], clipped=name == "adamw")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    lines = [line for part in compiled for line in part.program.lines()]
    assert any(isinstance(line, Launch) for line in lines)
    assert not [line.target for line in lines if isinstance(line, Call)]

"""Every overload of operators on lists of tensors is decomposed, and optimizers that call them are fused."""

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
from fxwrap.compile import Compiled
from fxwrap.fx_passes.decompositions import foreach_decompositions
from fxwrap.lines import ExternCall, Launch
from fxwrap.torch_compat import OpOverload
from tests.support.capture import recording_backend
from tests.support.long_form import long_only

SIZES = ((2, 3), (), (4,))
DECOMPOSED = sorted(foreach_decompositions(), key=str)


def drawn(seed: int, *, matrices: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand((3, 3) if matrices else size, generator=generator) * 0.8 + 0.1 for size in SIZES]


def arguments(operator: OpOverload) -> list[Any]:
    """Values for each argument without a default, and for numbers that have one."""
    actual: list[Any] = []
    matrices = "_mm" in str(operator)
    for number, item in enumerate(operator._schema.arguments):
        match str(item.type):
            case "List[Tensor]":
                actual.append(drawn(number, matrices=matrices))
            case "List[number]":
                actual.append([0.5, 2, 1.5])
            case "number" if item.name != "alpha":
                actual.append(3)
            case "Tensor":
                actual.append(torch.tensor(0.7))
    return actual


@pytest.mark.sampled(2)
@pytest.mark.parametrize("operator", DECOMPOSED, ids=str)
def test_every_overload_matches_eager(operator: OpOverload) -> None:
    operands = arguments(operator)
    keywords = {"alpha": 2.5} if any(item.name == "alpha" for item in operator._schema.arguments) else {}

    tensors, spec = tree_flatten(operands)
    places = [place for place, item in enumerate(tensors) if isinstance(item, Tensor)]

    def call(*own: Tensor) -> Any:
        filled = list(tensors)
        for place, item in zip(places, own, strict=True):
            filled[place] = item
        return operator(*tree_unflatten(filled, spec), **keywords)

    inputs = [tensors[place] for place in places]
    program = fxwrap.lower(make_fx(call, tracing_mode="fake")(*inputs), options=Options(fuse=False))
    assert not [line for line in program.lines() if isinstance(line, ExternCall) and "_foreach" in line.target]
    torch.testing.assert_close(list(fxwrap.run(program, inputs)), list(call(*inputs)), rtol=1e-6, atol=1e-6)


def test_optimizer_overloads_are_covered() -> None:
    known = {str(operator) for operator in DECOMPOSED}
    assert {"aten._foreach_lerp.Scalar", "aten._foreach_addcdiv.ScalarList", "aten._foreach_pow.ScalarAndTensor",
            "aten._foreach_add.List", "aten._foreach_maximum.List", "aten._foreach_norm.Scalar"} <= known  # fmt: skip


def stepped(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clipped: bool = False, steps: int = 3
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[Compiled]]:
    """Parameters after some steps of a compiled and an eager optimizer, and the compiled programs."""
    compiled: list[Compiled] = []

    sides = [[nn.Parameter(item.clone()) for item in drawn(0)] for _ in range(2)]
    optimizers = [make(parameters) for parameters in sides]

    def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        if clipped:
            nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
        optimizer.step()

    run = torch.compile(step, backend=recording_backend(compiled, Options(emitter="cpp")))
    for number in range(steps):
        for parameters, optimizer, function in zip(sides, optimizers, (run, step), strict=True):
            for parameter, gradient in zip(parameters, drawn(number + 1), strict=True):
                parameter.grad = gradient - 0.5
            function(parameters, optimizer)
    return sides[0], sides[1], compiled


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.1, foreach=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*Profiler record function")
@pytest.mark.parametrize("name", [long_only(name) if name in ("rmsprop", "sgd") else name for name in OPTIMIZERS])
def test_an_optimizer_step_is_fully_fused(name: str) -> None:
    torch._dynamo.reset()
    actual, expected, compiled = stepped(OPTIMIZERS[name], clipped=name == "adamw")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    lines = [line for part in compiled for line in part.program.lines()]
    assert any(isinstance(line, Launch) for line in lines)
    assert not [line.target for line in lines if isinstance(line, ExternCall)]

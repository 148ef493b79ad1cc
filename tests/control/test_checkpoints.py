"""Checkpointed dropout draws the numbers of eager for the same seed, and again the same ones in the backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxwrap.compare import COMPARED
from tests.control.cases import DEVICES, random, to_device

aten = torch.ops.aten


def _part(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.dropout((x @ w).sin(), 0.5)


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    y = checkpoint(_part, x, w, use_reentrant=False)
    return checkpoint(_part, y, w, use_reentrant=False) + torch.rand_like(x)


def _keep_products(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    kept = operator in (aten.mm.default, aten.native_dropout.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selectively_checkpointed(x: Tensor, w: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    y = checkpoint(_part, x, w, use_reentrant=False, context_fn=contexts)
    return checkpoint(_part, y, w, use_reentrant=False, context_fn=contexts) + torch.rand_like(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [checkpointed, selectively_checkpointed])
def test_random_numbers_are_those_of_eager(function: Any, device: str, fresh_dynamo: None) -> None:
    x, w = to_device((random(4, 8), random(8, 8, seed=1, gradient=True)), device)

    def run(called: Any) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(11)
        w.grad = None
        result = called(x, w)
        result.square().sum().backward()
        return result.detach(), w.grad, torch.rand(3, device=device)

    wanted = run(function)
    for emitter in COMPARED:
        torch.compiler.reset()
        compiled = torch.compile(function, backend="fxwrap", fullgraph=True, options={"emitter": emitter})
        result, gradient, next_numbers = run(compiled)
        assert torch.equal(result == 0, wanted[0] == 0) and torch.equal(next_numbers, wanted[2]), emitter
        torch.testing.assert_close((result, gradient), wanted[:2], rtol=1e-5, atol=1e-6)


def test_the_partitioner_leaves_the_default_generator_in_use(fresh_dynamo: None) -> None:
    """On GPUs it would take generators of its own, which do not give eager's numbers; what is set comes back after."""
    from functorch.compile import config, default_partition

    seen: list[bool] = []

    def partition(*arguments: Any, **keywords: Any) -> Any:
        seen.append(config.graphsafe_rng_functionalization)
        return default_partition(*arguments, **keywords)

    options = {"partitioner": partition, "emitter": "interpreter", "fuse": False}
    torch.compile(checkpointed, backend="fxwrap", options=options)(random(4, 8), random(8, 8, gradient=True))
    assert seen == [False] and config.graphsafe_rng_functionalization

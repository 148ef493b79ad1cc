"""The joint graph of training: what is cheap to compute again is not saved for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxwrap
from fxwrap.lines import Return
from fxwrap.wrapper_ir import TensorType, Value

ROWS, WIDTH, CLASSES = 6, 5, 9


def cross_entropy(x: Tensor, w: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy((x @ w).float(), labels, **options).sum()


def mean_of_counted(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x, w, labels)


def summed(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x, w, labels, reduction="sum", ignore_index=3)


def one_by_one(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(x @ w, labels, reduction="none") * torch.arange(ROWS)).sum()


def weighted(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x, w, labels, weight=torch.linspace(0.5, 2, CLASSES))


def log_softmax_of_columns(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return (F.log_softmax(x @ w, 0) * torch.arange(CLASSES)).sum()


def tangents(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return (torch.tanh(x @ w) * torch.sigmoid(x @ w) * 3).sum()


SAVED: dict[Callable[..., Tensor], int] = {mean_of_counted: 1, summed: 1, one_by_one: 1, tangents: 1}
"""Functions whose forward saves one tensor as large as the product alone, the product itself."""
FUNCTIONS = (*SAVED, weighted, log_softmax_of_columns)


def run(
    function: Callable[..., Tensor], dtype: torch.dtype, options: dict[str, Any] | None
) -> tuple[list[Tensor], list[fxwrap.Program]]:
    """The loss and the gradients, eagerly or compiled, and the programs of forward and backward."""
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(WIDTH, CLASSES, generator=generator).to(dtype).requires_grad_()
    labels = torch.tensor([0, 3, -100, 8, 3, 1] if function is mean_of_counted else [0, 3, 2, 8, 3, 1])
    if options is not None:
        torch._dynamo.reset()
        given = {"emitter": "interpreter", "passes": (keep,), **options}
        loss = torch.compile(function, backend="fxwrap", fullgraph=True, options=given)(x, w, labels)
    else:
        loss = function(x, w, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and w.grad is not None
    return [loss.detach(), x.grad, w.grad], programs


def saved(program: fxwrap.Program) -> int:
    """How many of a forward's results are as large as the product."""
    last = program.body.lines[-1]
    assert isinstance(last, Return)
    types = [item.type for item in last.values if isinstance(item, Value)]
    return sum(isinstance(type_, TensorType) and type_.sizes == (ROWS, CLASSES) for type_ in types)


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [item.double() for item in tensors]


@pytest.mark.parametrize("function", FUNCTIONS, ids=[item.__name__ for item in FUNCTIONS])
def test_gradients(function: Callable[..., Tensor], fresh_dynamo: None) -> None:
    """Against float64; without kernels, so that each operator rounds what it gives."""
    wide, _ = run(function, torch.float64, None)
    found, programs = run(function, torch.float32, {"fuse": False})
    torch.testing.assert_close(in_double(found), in_double(wide), rtol=1e-5, atol=1e-5)
    if function in SAVED:
        assert saved(programs[0]) == SAVED[function]


@pytest.mark.parametrize("function", [one_by_one, tangents], ids=lambda item: item.__name__)
def test_gradients_in_half_precision(function: Callable[..., Tensor], fresh_dynamo: None) -> None:
    eager, _ = run(function, torch.bfloat16, None)
    found, _ = run(function, torch.bfloat16, {"fuse": False})
    torch.testing.assert_close(found, eager, rtol=2e-2, atol=2e-2)


def test_what_the_options_keep_is_saved(fresh_dynamo: None) -> None:
    _, programs = run(mean_of_counted, torch.float32, {"fuse": False, "keep": ["aten._log_softmax.default"]})
    assert "aten._log_softmax.default" in str(programs[0])


def test_another_partitioner_gets_the_graph_as_it_is(fresh_dynamo: None) -> None:
    from functorch.compile import default_partition

    seen: list[bool] = []

    def partition(joint: torch.fx.GraphModule, *arguments: Any, **keywords: Any) -> Any:
        seen.append(any(node.target is torch.ops.aten.tanh_backward.default for node in joint.graph.nodes))
        return default_partition(joint, *arguments, **keywords)

    run(tangents, torch.float32, {"fuse": False, "partitioner": partition})
    assert seen == [True]


def test_fused(fresh_dynamo: None) -> None:
    wide, _ = run(mean_of_counted, torch.float64, None)
    found, _ = run(mean_of_counted, torch.float32, {"emitter": "python"})
    torch.testing.assert_close(in_double(found), in_double(wide), rtol=1e-5, atol=1e-5)

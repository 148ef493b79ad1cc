"""`bisect` and the option `debug`: the first wrong line, and the part of the compiler that is at fault."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.caching import clear_caches
from fxwrap.errors import CompareError, DivergenceError, OptionError
from fxwrap.lowering import RULES
from fxwrap.options import Options
from tests.support import seeded_bugs
from tests.support.seeded_bugs import BUGS


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patch after which no printed kernel is cached."""
    yield monkeypatch
    monkeypatch.undo()
    clear_caches()


def chain(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor) -> Tensor:
    """Six matmuls with fused operators between them; `tanh` once, in a kernel with others."""
    x = torch.relu(x @ w1)
    x = torch.sigmoid(x @ w2) * 0.5
    x = torch.relu(x @ w3) + 1
    x = torch.tanh(x.sum(0) / 16 + x)
    x = torch.relu(x @ w4)
    return (torch.softmax(x, -1) @ w1).relu()


def tensors(training: bool = False, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, size, generator=generator).requires_grad_(training) for _ in range(5)]


def bisect(emitter: str, *, training: bool = False, dynamic: bool = False, **keywords: int) -> fxwrap.Bisection:
    options = {"emitter": emitter}
    return fxwrap.bisect(chain, tensors(training), options=options, training=training, dynamic=dynamic, **keywords)


@pytest.mark.covering
@pytest.mark.parametrize(("emitter", "training", "dynamic"), [("cpp", False, False), ("python", True, True)])
@pytest.mark.parametrize("part", BUGS)
def test_a_bug_is_found(part: str, emitter: str, training: bool, dynamic: bool, patch: pytest.MonkeyPatch) -> None:
    BUGS[part](patch)
    bisection = bisect(emitter, training=training, dynamic=dynamic)
    divergence = bisection.divergence
    assert divergence is not None and not bisection.agrees
    assert divergence.part == part
    assert divergence.culprit.startswith({
        "lowering": "of aten.tanh", "kernel printer": "'cpp', kernel @relu_add_sum_", "pass": "'insert_device_guards'",
        "graph pass": "'unfuse_biases'", "converter": f"'{emitter}'",
    }[part])  # fmt: skip
    assert divergence.graph == ("forward" if training else "inference")
    assert divergence.runs + divergence.reference_runs <= 2 * math.log2(divergence.lines)
    if part == "graph pass":
        assert divergence.line is None
        return
    assert divergence.line is not None
    operator = "aten.tanh" if part in ("lowering", "kernel printer") else "aten.mm"
    assert operator in divergence.line.operators
    assert all(location.startswith("test_bisection.py:") for location in divergence.line.locations)
    assert divergence.line.locations
    assert divergence.line.agreement.error > divergence.line.agreement.allowed
    assert divergence.line.actual != divergence.line.eager
    assert f"At fault: {part} {divergence.culprit}" in str(bisection)
    assert json.loads(bisection.to_json())["divergence"]["part"] == part


@pytest.mark.parametrize("emitter", ["cpp", "fx"])
def test_without_a_bug_everything_agrees(emitter: str) -> None:
    bisection = bisect(emitter, training=True)
    assert bisection.agrees and bisection.graphs == 2
    assert str(bisection) == "chain: all values of 2 graphs agree with eager"


def test_a_bug_of_the_backward_is_found(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(RULES, "aten.neg.default", RULES["aten.abs.default"])
    divergence = bisect("python", training=True).divergence
    assert divergence is not None and divergence.line is not None
    assert (divergence.graph, divergence.part, divergence.culprit) == ("backward", "lowering", "of aten.neg")
    assert divergence.runs + divergence.reference_runs <= 2 * math.log2(divergence.lines)


@pytest.mark.parametrize("part", ["lowering", "converter"])
def test_with_little_memory_halving_finds_the_same_line(part: str, patch: pytest.MonkeyPatch) -> None:
    BUGS[part](patch)
    at_once, halved = bisect("python").divergence, bisect("python", memory_bytes=1).divergence
    assert at_once is not None and halved is not None
    assert (halved.part, halved.culprit, halved.line) == (at_once.part, at_once.culprit, at_once.line)
    assert at_once.runs < halved.runs <= 2 * math.log2(halved.lines)


def test_the_option_debug_raises_at_the_call(patch: pytest.MonkeyPatch) -> None:
    seeded_bugs.lowering(patch)
    compiled = torch.compile(chain, backend="fxwrap", options={"debug": "bisect"})
    with pytest.raises(DivergenceError, match=r"At fault: lowering of aten\.tanh") as caught:
        compiled(*tensors())
    assert caught.value.part == "lowering" and caught.value.location.startswith("test_bisection.py:")


def test_a_call_that_agrees_returns_the_result_and_mutates_once() -> None:
    def step(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return torch.rand_like(x) + x * count

    x, count = torch.ones(4), torch.zeros(1)
    torch.manual_seed(3)
    result = torch.compile(step, backend="fxwrap", options={"debug": "bisect"})(x, count)
    torch.manual_seed(3)
    assert torch.equal(result, torch.rand(4) + 1) and count.item() == 1


def test_graphs_and_exported_programs_are_bisected(patch: pytest.MonkeyPatch) -> None:
    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight)

    x = torch.randn(4, 4)
    seeded_bugs.lowering(patch)
    for graph in (make_fx(lambda x: torch.tanh(x @ x))(x), torch.export.export(Chain(), (x,))):
        divergence = fxwrap.bisect(graph, x).divergence
        assert divergence is not None and divergence.part == "lowering"


def test_a_difference_before_the_graphs_is_reported() -> None:
    def wrong_decomposition(x: Tensor) -> Tensor:
        return x * 2

    options = Options(decompositions={torch.ops.aten.square.default: wrong_decomposition,
                                      torch.ops.aten.pow.Tensor_Scalar: lambda x, _: x * 2})  # fmt: skip
    bisection = fxwrap.bisect(lambda x: x.pow(2), torch.full((4,), 3.0), options=options)
    assert bisection.divergence is None and not bisection.agrees
    assert "the difference arises before fxwrap lowers the graphs" in str(bisection)


@pytest.mark.parametrize(("subject", "training", "message"), [
    (fxwrap.parse("program @p() {\n  control.return()\n}\n"), False, "a program has no graph to compare with"),
    (3, False, "an object of type int cannot be bisected"),
    (make_fx(lambda x: x + 1)(torch.ones(1)), True, "a graph has no gradients"),
])  # fmt: skip
def test_other_objects_are_refused(subject: object, training: bool, message: str) -> None:
    with pytest.raises(CompareError, match=message):
        fxwrap.bisect(subject, torch.ones(1), training=training)


def test_debug_and_on_graph_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="option 'debug' checks compiled graphs"):
        Options(debug="bisect", on_graph=lambda graph, info: graph)

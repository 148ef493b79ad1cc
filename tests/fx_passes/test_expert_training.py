"""Loops over experts in training: their forward and their backward become grouped matmuls."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Interpreter

import fxwrap
from fxwrap import Options
from fxwrap.fx_passes.training.joint_graph import partitioner
from fxwrap.lines import ExternCall
from tests.fx_passes.expert_layers import EXPERTS, SORTING, WIDTH, Experts, MaskedWrites, Switch, inputs_of, routed

_GROUPED = torch.ops.aten._grouped_mm.default
_ON_HOST = (torch.ops.fxwrap.grouped_matmul.default, torch.ops.fxwrap.grouped_products.default)
_COUNT = 40


@pytest.fixture(autouse=True)
def _captured() -> Any:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def _traced(function: Callable[..., Tensor]) -> tuple[list[GraphModule], Callable[..., Tensor]]:
    """Returns the forward and backward graphs of a function, filled at its first step, and the function."""
    graphs: list[GraphModule] = []

    def compile_graph(module: GraphModule, _examples: list[Any]) -> Any:
        graphs.append(module)
        return make_boxed_func(Interpreter(module).run)

    backend = aot_autograd(fw_compiler=compile_graph, partition_fn=partitioner(Options(devices=(SORTING,))))
    return graphs, torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def _gradients(function: Callable[..., Tensor], layer: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the result and the gradients of the inputs and parameters, in float64; zeros where there are none."""
    torch.manual_seed(1)
    layer.zero_grad()
    leaves = [item.detach().clone().requires_grad_() for item in inputs]
    result = function(*leaves)
    result.backward(torch.randn(result.shape).to(result.dtype))
    gradients = [item.grad for item in (*leaves, *layer.parameters())]
    return [result.detach().double(), *[torch.zeros(1) if item is None else item.double() for item in gradients]]


_ROUNDED_BIAS = 1.6
"""The bound of errors where a library's grouped matmul is rounded before the bias is added, which eager adds first."""


def _check(
    traced: Callable[..., Tensor], layer: nn.Module, inputs: tuple[Tensor, ...], known: bool = True, bound: float = 1.2
) -> None:
    """Checks that results and gradients are about as near to those of float64 as eager's are."""
    double = copy.deepcopy(layer).double()
    exact = _gradients(routed(double, known), double, tuple([item.double() for item in inputs]))
    results, eager = _gradients(traced, layer, inputs), _gradients(routed(layer, known), layer, inputs)
    for mine, other, reference in zip(results, eager, exact, strict=True):
        errors = [float((item - reference).norm() / (reference.norm() + 1e-9)) for item in (mine, other)]
        rounding = torch.finfo(next(layer.parameters()).dtype).eps
        assert mine.shape == reference.shape and errors[0] <= bound * max(errors[1], rounding), errors


def _counts(graphs: list[GraphModule], targets: tuple[Any, ...] = (_GROUPED,)) -> list[int]:
    """Returns the grouped matmuls of each graph, which have no call whose size depends on data."""
    assert not [node for graph in graphs for node in graph.graph.nodes if "nonzero" in str(node.target)]
    assert not [node for graph in graphs for node in graph.graph.nodes if "unbacked_bindings" in node.meta]
    return [sum(node.target in targets for node in graph.graph.nodes) for graph in graphs]


_FORMS = [
    ("where", "bias", "index_add"), ("one_hot", "unbind", "assign"), ("nonzero", "sliced", "scatter_add"),
    ("columns", "transposed", "index_put"), ("where", "reshaped", "index_add"),
    ("reshaped one_hot", "addmm", "index_add"),
    ("masked",), ("switch",), ("where", "selected", "index_add"), ("where", "modules", "index_add"),
    ("one_hot", "biased modules", "assign"),
]  # fmt: skip


def _layer(form: tuple[str, ...]) -> nn.Module:
    layers = {("masked",): MaskedWrites, ("switch",): Switch}
    return (layers[form]() if form in layers else Experts(*form)).bfloat16()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("form", _FORMS)
def test_a_loop_and_its_backward_are_grouped_matmuls(form: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layer = _layer(form)
    graphs, traced = _traced(routed(layer))
    _check(traced, layer, inputs_of(_COUNT), bound=_ROUNDED_BIAS if "addmm" in form else 1.2)
    if form == ("switch",) or {"modules", "biased modules"} & {*form}:
        assert _counts(graphs, _ON_HOST) == [3, 9 if "biased modules" in form else 6]
        return
    forward = 3 if "sliced" in form else 2
    assert _counts(graphs) == [forward, 2 * forward + ("bias" in form or "addmm" in form)]


_WEIGHTS = ("stacked", "unbind", "sliced", "transposed", "reshaped", "addmm", "bias", "modules", "biased modules")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(12))
def test_random_loops(seed: int) -> None:
    """Loops of random forms; indices may be beyond the experts, and there may be a single token."""
    choices = random.Random(seed)
    form = tuple([choices.choice(names) for names in (("where", "one_hot", "nonzero", "columns"), _WEIGHTS)])
    known = form[0] == "one_hot" or choices.random() < 0.7
    stores = ("index_add", "scatter_add", "index_put", "assign")
    store = choices.choice(stores if known else stores[:2])
    torch.manual_seed(seed)
    dtype = choices.choice((torch.bfloat16, torch.float16, torch.float32))
    layer = _layer((*form, store)).to(dtype)
    graphs, traced = _traced(routed(layer, known))
    count = choices.choice((1, 7, _COUNT))
    is_library = dtype is torch.bfloat16 and "modules" not in form[1]
    bound = _ROUNDED_BIAS if is_library and form[1] == "addmm" else 1.2
    _check(traced, layer, inputs_of(count, EXPERTS if known else EXPERTS + 3, dtype), known, bound)
    assert min(_counts(graphs, (_GROUPED,) if is_library else _ON_HOST)) >= 2


def test_an_expert_without_tokens_has_zero_gradients() -> None:
    torch.manual_seed(0)
    layer = _layer(("where", "addmm", "index_add"))
    _, traced = _traced(routed(layer))
    _gradients(traced, layer, inputs_of(_COUNT))
    for parameter in layer.parameters():
        assert parameter.grad is not None and not parameter.grad[1].any() and parameter.grad[0].any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_emitters(emitter: str) -> None:
    """Numbers of tokens are symbolic; the indices of the second layer are not known to be experts."""
    torch.manual_seed(0)
    layer, known = _layer(("where", "addmm", "scatter_add")), emitter == "python"
    compiled = torch.compile(
        routed(layer, known), backend="fxwrap", options={"emitter": emitter}, fullgraph=True, dynamic=True
    )
    for count in (_COUNT, 2):
        _check(compiled, layer, inputs_of(count, EXPERTS if known else EXPERTS + 3), known, _ROUNDED_BIAS)


class Pair(nn.Module):
    """Two loops whose gradients of tokens are one sum, with weights that something else reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Experts(), Experts("nonzero", "transposed", "scatter_add")

    def forward(self, tokens: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        result = self.one(tokens, chosen, factors) + self.other(tokens, chosen + 0, factors) + tokens
        return result * self.one.up.square().mean()


def test_two_loops_and_other_gradients() -> None:
    torch.manual_seed(0)
    layer = Pair().bfloat16()
    graphs, traced = _traced(routed(layer))
    _check(traced, layer, inputs_of(_COUNT))
    assert _counts(graphs) == [4, 8]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weights", ["unbind", "modules"])
def test_a_training_step(weights: str) -> None:
    torch.manual_seed(0)
    layer = _layer(("one_hot", weights, "assign"))
    tokens, scores = inputs_of(_COUNT)
    losses = []
    for is_compiled in (True, False):
        module = copy.deepcopy(layer)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        train = _trainer(module, optimizer)
        step: Callable[..., Tensor] = train
        if is_compiled:
            step = fxwrap.compile_step(train, (tokens, scores), options=Options(devices=(SORTING,)))
            names = ("_grouped_mm",) if weights == "unbind" else ("grouped_matmul", "grouped_products")
            assert sum(_calls(step.compiled.program, name) for name in names) == (5 if weights == "unbind" else 7)
            assert not _calls(step.compiled.program, "nonzero")
        losses.append([float(step(tokens, scores)) for _ in range(3)])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-3)


def _calls(program: Any, name: str) -> int:
    return sum(isinstance(line, ExternCall) and name in line.target for line in program.lines())


def _trainer(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    run = routed(module)

    def train(tokens: Tensor, scores: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = run(tokens, scores).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def _read_outside(layer: Experts, tokens: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """Returns what a loop does whose second expert's rows something else reads."""
    result, more = torch.zeros_like(tokens), tokens.new_zeros(())
    for number in range(EXPERTS):
        token, position = torch.where(chosen == number)
        rows = (tokens[token] @ layer.up[number].t())[:, :WIDTH]
        more = more + rows.sum() if number == 1 else more
        result = result.index_add(0, token, rows * factors[token, position, None].to(rows.dtype))
    return result + more


def test_other_loops_stay() -> None:
    torch.manual_seed(0)
    layer = Experts().bfloat16()
    function = routed(lambda *arguments: _read_outside(layer, *arguments))
    graphs, traced = _traced(function)
    inputs = inputs_of(_COUNT)
    results, eager = _gradients(traced, layer, inputs), _gradients(function, layer, inputs)
    assert not any(node.target is _GROUPED for graph in graphs for node in graph.graph.nodes)
    torch.testing.assert_close(results, eager)

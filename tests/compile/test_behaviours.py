"""PyTorch programs beyond computing: state, aliasing, mutation, odd types, the backend by name, memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Program
from fxwrap.comparison import CapturedGraph, CompiledFunction, capture, peak_bytes
from fxwrap.compile import emit
from fxwrap.debugging import copy_inputs
from fxwrap.errors import OptionError
from fxwrap.fx_passes.decompositions import foreach_decompositions
from fxwrap.lines import ExternCall
from fxwrap.options import EMITTERS, MODES
from fxwrap.testing import assert_emitters_agree
from fxwrap.wrapper_ir import Ownership, TensorType, Value
from fxwrap.wrapper_ir.analyses import live_bytes
from tests.support.long_form import LONG
from tests.support.models import MODELS

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# --- state ----------------------------------------------------------------------------------------------------------


class TiedWeights(nn.Module):
    """An embedding whose weight is also the output layer's, and whose padding gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=3)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def test_running_statistics_are_updated_in_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    report = assert_emitters_agree(model, (torch.randn(2, 3, 8, 8),), training=True)
    assert report.graphs == 2
    with torch.no_grad():
        before = model[1].running_mean.clone()
        torch.compile(model, backend="fxwrap")(torch.randn(2, 3, 8, 8))
    assert not torch.equal(model[1].running_mean, before) and int(model[1].num_batches_tracked) == 1


def test_tied_weights_get_one_gradient_and_padding_none() -> None:
    assert_emitters_agree(TiedWeights(), (torch.tensor([[1, 3, 5], [3, 3, 7]]),), training=True)
    embedding = nn.Embedding(16, 8, padding_idx=3)
    torch.compile(embedding, backend="fxwrap")(torch.tensor([1, 3])).sum().backward()
    assert embedding.weight.grad[1].all() and not embedding.weight.grad[3].any()


def test_dropout_matches_eager_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.1)).train()
    assert_emitters_agree(model, (torch.randn(8, 32),), training=True)
    assert_emitters_agree(lambda x: (torch.rand_like(x), torch.randint(9, (4,)), torch.bernoulli(x)), (torch.rand(5),))


# --- outputs, aliasing, mutation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_returned_detached_tensor_leaves_the_gradient_of_the_other(emitter: str) -> None:
    """Both were one tensor, which AOTAutograd marked as one without a gradient."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        return hidden.t(), hidden.detach()

    torch.compiler.reset()
    x = torch.randn(3, 4, requires_grad=True)
    loss, detached = torch.compile(both, backend="fxwrap", options={"emitter": emitter})(x)
    loss.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0)) and not detached.requires_grad


@pytest.mark.parametrize("emitter", EMITTERS)
@torch.no_grad()
def test_returned_views_are_tensors_of_their_own(emitter: str) -> None:
    def views(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y.detach(), y.view_as(y)

    inputs = [torch.randn(3, 4)]
    outputs = fxwrap.compile_graph(make_fx(views)(*inputs), inputs, options=fxwrap.Options(emitter=emitter))(*inputs)
    assert len({id(output) for output in outputs}) == 3
    assert len({output.data_ptr() for output in outputs}) == 1


@pytest.mark.parametrize("emitter", EMITTERS)
def test_results_may_be_written_in_place(emitter: str) -> None:
    """The result of `linear` is no view in eager; a torch view that a compiled forward returns could not be written.

    The first call runs in a dispatch mode of AOTAutograd's, later ones do not. The second result saves the memory of
    the first one, so that the backward notices the write.
    """
    weight = torch.randn(8, 8, requires_grad=True)

    def one(x: Tensor) -> tuple[Tensor, ...]:
        return (nn.functional.linear(x, weight),)

    def two(x: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.linear(x, weight)
        return y, y.reshape(-1, 8) @ weight

    for function in (one, two):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="fxwrap", options={"emitter": emitter})
        for _ in range(2):
            x = torch.randn(2, 3, 8)
            expected = function(x)
            results = compiled(x)
            assert not results[0]._is_view()
            results[0].mul_(2)
            torch.testing.assert_close(results[0], expected[0] * 2)
            if function is two:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    results[1].sum().backward()
        if function is one:
            results[0].sum().backward()


def _mutated_view(x: Tensor) -> Tensor:
    row = x[1]
    row.mul_(2)
    return x.sum(0) + row


def _mutated_through_a_view_of_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    part = x.t()[1:]
    part.copy_(part + 1)
    return part, x + 1


def _scattered(x: Tensor, index: Tensor) -> Tensor:
    x.index_add_(0, index, torch.ones(len(index), x.shape[1]))
    x[index] = 5.0
    return x.scatter(1, index[:, None], 2.0)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "output_is_an_input": (lambda x: (x, x + 1), (torch.randn(3),)),
    "output_is_a_view_of_an_input": (lambda x: (x[1:], x.t() * 2), (torch.randn(3, 4),)),
    "output_is_a_view_of_another": (lambda x: (y := x + 1, y.t(), y[0]), (torch.randn(3, 4),)),
    "view_without_its_base": (lambda x: (x + 1)[1:, ::2], (torch.randn(4, 6),)),
    "output_twice": (lambda x: (y := x + 1, y, [y]), (torch.randn(3),)),
    "none_and_numbers": (lambda x: {"a": None, "b": 3, "c": x + 1, "d": (x.shape[0], 1.5, True)}, (torch.randn(3),)),
    "split_and_unbind": (lambda x: (*x.split(2), *(x * 2).unbind(1)), (torch.randn(5, 3),)),
    "mutated_input": (lambda x: x.add_(1), (torch.randn(3),)),
    "mutated_view": (_mutated_view, (torch.randn(3, 4),)),
    "mutated_view_of_a_view": (_mutated_through_a_view_of_a_view, (torch.randn(3, 4),)),
    "mutated_and_read": (lambda x, y: (x.mul_(y), y.add_(x), x - y)[2], (torch.randn(3), torch.randn(3))),
    "scattered_input": (_scattered, (torch.zeros(4, 3), torch.tensor([0, 2]))),
    "zero_size": (lambda x: (x + 1, x.sum(0), torch.cat([x, x]), x @ x.t()), (torch.randn(0, 4),)),
    "scalar_tensors": (lambda x: (x.sum(), x.sum() * 2, x.max(0)), (torch.randn(3),)),
    "transposed_scalar": (lambda x: (x.sum().transpose(0, -1), x.sum().t() + 1), (torch.randn(3),)),
    "factories": (lambda x: (torch.arange(5), torch.full((2,), 7), torch.ones(2, 3) * x), (torch.randn(3),)),
    "channels_last": (lambda x: nn.functional.relu(x) + 1, (torch.randn(2, 4, 4, 3).permute(0, 3, 1, 2),)),
    "expanded_input": (lambda x: (x + 1, x.contiguous(), x.reshape(-1)), (torch.randn(3, 1).expand(3, 4),)),
    "multiple_results": (lambda x: (*torch.topk(x, 2), *torch.sort(x), *torch.linalg.qr(x)), (torch.randn(4, 4),)),
    "int64": (lambda x: (x * 3 + 2**40, x // 3, x % 3, x << 2, x.sum()), (torch.arange(-5, 5),)),
    "bool": (lambda x: (x & ~x.flip(0), x.any(), x.sum(), torch.where(x, 1, 2)), (torch.tensor([True, False, True]),)),
    "complex64": (
        lambda x: (x * (1 + 2j), x.conj() * x, x.abs(), torch.view_as_real(x) * 2),
        (torch.randn(4, dtype=torch.complex64),),
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_behave_as_in_eager_mode(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    assert_emitters_agree(function, inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_floating_dtypes_forward_and_backward(dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x @ y, -1) * 3 + x.exp().sum()

    inputs = (torch.randn(4, 4, dtype=dtype, requires_grad=True), torch.randn(4, 4, dtype=dtype, requires_grad=True))
    assert_emitters_agree(function, inputs, training=True)


def test_complex_gradients() -> None:
    inputs = (torch.randn(4, dtype=torch.complex64, requires_grad=True),)
    assert_emitters_agree(lambda x: (x * (2 - 1j)).abs() + x.real, inputs, training=True)
    assert_emitters_agree(lambda x: x.tanh() * 1j + x.sigmoid(), inputs, training=True)


def test_one_dynamic_program_covers_every_size() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x.reshape(-1, x.shape[1] // 2) * x.shape[0], x.mean(0), x.shape[1] + 1

    subject = CompiledFunction(function, fxwrap.Options(), dynamic=True)
    for emitter in EMITTERS:
        for sizes in ((4, 6), (5, 10), (7, 8)):
            x = torch.randn(sizes)
            torch.testing.assert_close(subject.call(emitter)(x), function(x))
    assert len(subject.graphs) == 1


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_graph_without_operators_returns_its_inputs(emitter: str) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((x, None, 3))
    module = torch.fx.GraphModule({}, graph)
    inputs = torch.randn(3)
    compiled = fxwrap.compile_graph(module, [inputs], options=fxwrap.Options(emitter=emitter))
    outputs = compiled(inputs)
    assert outputs[0] is inputs and tuple(outputs[1:]) == (None, 3)
    empty = torch.fx.Graph()
    empty.output(())
    nothing = fxwrap.compile_graph(torch.fx.GraphModule({}, empty), [], options=fxwrap.Options(emitter=emitter))
    assert tuple(nothing()) == ()


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_backward_runs_twice_when_the_graph_is_retained(emitter: str) -> None:
    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda x: (x.exp() * x).sum(), backend="fxwrap", options={"emitter": emitter})
    loss = compiled(x)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    torch.testing.assert_close(first, (x.exp() * (x + 1)).detach())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# --- the backend by name, its options -------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_each_emitter_trains_through_the_backend(emitter: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 4)  # the variance of three rows may be so small that gradients amplify rounding
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="fxwrap", options={"emitter": emitter})(x).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_torch_compile_is_accepted(mode: str) -> None:
    x = torch.randn(3)
    assert torch.equal(torch.compile(torch.neg, backend="fxwrap", mode=mode)(x), -x)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'; known modes: default, reduce-overhead, max-autotune"),
        ({"options": {"emiter": "cpp"}}, "unknown option 'emiter' \\(did you mean 'emitter'.* emitter, check_"),
        ({"options": {"emitter": "rust"}}, "option 'emitter' takes 'python', 'cpp', 'fx' or 'interpreter', not 'rust'"),
        ({"options": {"verify": 3}}, "option 'verify' takes a bool, not 3"),
    ],
)  # fmt: skip
def test_unknown_modes_and_options_are_rejected(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        torch.compile(torch.sin, backend="fxwrap", **keywords)(torch.randn(3))
    causes = [raised.value, raised.value.__cause__, getattr(raised.value, "inner_exception", None)]
    assert any(isinstance(cause, OptionError) for cause in causes)


def test_options_reach_the_backward_that_is_compiled_later() -> None:
    seen: list[str] = []

    def record(program: Program) -> Program:
        seen.append(program.name)
        return program

    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: x.exp().sum(), backend="fxwrap", options={"passes": (record,)}, dynamic=True)
    loss = compiled(x)
    loss.backward()
    assert seen == ["forward", "backward"]


# --- decompositions -------------------------------------------------------------------------------------------------

DECOMPOSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "aten.native_dropout_backward.default": (lambda x: nn.functional.dropout(x, 0.3), (torch.randn(6, 5),))
}


def test_every_decomposition_has_a_case() -> None:
    """Others are in `fx_passes/test_foreach.py`, `lowering/test_collectives.py` and `fx_passes/test_decompose.py`."""
    elsewhere = {"_c10d_functional.wait_tensors.default", "aten.native_batch_norm.default"}
    tested = {*DECOMPOSED, *map(str, foreach_decompositions()), *elsewhere}
    assert tested >= {str(overload) for overload in fxwrap.default_decompositions()} >= {*DECOMPOSED}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_gradients_of_decompositions_match_eager(name: str) -> None:
    function, tensors = DECOMPOSED[name]
    inputs = tuple(tensor.clone().requires_grad_() for tensor in tensors)
    assert_emitters_agree(function, inputs, training=True)
    preserved = capture(function, inputs, training=True, options={"preserve_ops": frozenset({name})})
    assert name in _targets(preserved)  # else the case would not test this operator
    assert name not in _targets(capture(function, inputs, training=True))


def _targets(graphs: tuple[CapturedGraph, ...]) -> set[str]:
    return {line.target for graph in graphs for line in graph.compiled.program.lines() if isinstance(line, ExternCall)}


# --- memory ---------------------------------------------------------------------------------------------------------


def _tensor(value: Value, generator: torch.Generator) -> Tensor:
    """A tensor of an input's type; integers are token numbers that every table has."""
    type_ = value.type
    assert isinstance(type_, TensorType)
    sizes = [int(size) for size in type_.sizes]
    result = torch.empty_strided(sizes, [int(stride) for stride in type_.strides], dtype=type_.dtype)
    if type_.dtype.is_floating_point:
        return result.copy_(torch.rand(sizes, generator=generator))
    return result.copy_(torch.randint(0, 2, sizes, generator=generator))


@cache
def _deep_programs(training: bool) -> dict[str, Program]:
    """The programs of a model with some layers, by kind, captured once for all emitters."""
    case = MODELS["gpt2"]
    model = case.build(seed=0, dropout=True, layers=3 if LONG else 2).train(training)
    graphs = capture(model, case.inputs(seed=1, training=training), training=training)
    return {graph.name: graph.compiled.program for graph in graphs}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_peak_memory_is_bounded_by_live_bytes(kind: str, emitter: str) -> None:
    """Emitted code holds the memory that the program declares, and a backward releases its activations.

    The inputs of a backward are allocated while memory is counted and belong to the boxed entry alone.
    """
    program, owns_inputs = _deep_programs(kind != "inference")[kind], kind == "backward"
    bound = live_bytes(program, include_inputs=owns_inputs, include_constants=False).peak
    generator = torch.Generator().manual_seed(0)
    arguments = [_tensor(item.value, generator) for item in program.inputs if isinstance(item.value, Value)]
    entry = emit(program, emitter).boxed

    def run(inputs: list[Tensor]) -> Any:
        with torch.no_grad():
            return entry(copy_inputs(inputs) if owns_inputs else inputs)

    measured = peak_bytes(lambda: list(arguments), run)
    assert abs(measured - bound) <= 0.02 * bound, f"{measured} bytes were live, the program says {bound}"
    if owns_inputs:
        released = [item for item in program.inputs if item.ownership in (Ownership.SHARED, Ownership.OWNED)]
        assert len(released) > len(program.inputs) // 4


def test_numbers_of_python_random() -> None:
    """Dynamo before torch 2.15 passes a float64 tensor where it traced a float32 one."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + random.uniform(10, 20), x * random.randint(2, 90)

    for dynamic in (False, True):
        compiled = torch.compile(function, backend="fxwrap", fullgraph=True, dynamic=dynamic)
        x = torch.randn(3, requires_grad=dynamic)
        random.seed(1)
        results = [compiled(x) for _ in range(3)]
        random.seed(1)
        torch.testing.assert_close(results, [function(x) for _ in range(3)])

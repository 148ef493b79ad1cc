"""Compiled functions called with fake or functional tensors return such tensors, with eager's metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fxwrap
from fxwrap.errors import InputError
from fxwrap.options import EMITTERS, Options
from tests.support.long_form import sampled

every_emitter = pytest.mark.parametrize("emitter", EMITTERS)
some_emitters = pytest.mark.parametrize("emitter", sampled(EMITTERS, 0, 2))
other_emitters = pytest.mark.parametrize("emitter", sampled(EMITTERS, 1, 2))


def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x @ w).softmax(-1).t(), x.sum(0)


def metadata(outputs: Sequence[Tensor | None]) -> list[Any]:
    assert all(type(item) is FakeTensor for item in outputs)
    return [(item.shape, item.stride(), item.dtype, item.device, item.requires_grad) for item in outputs]


def check(run: Callable[..., Sequence[Tensor]], reference: Callable[..., Sequence[Tensor]], rows: int = 3) -> None:
    mode = FakeTensorMode()
    with mode:
        inputs = torch.empty(rows, 8), torch.empty(8, 5)
        expected = metadata(reference(*inputs))
        assert metadata(run(*inputs)) == expected
    assert metadata(run(*inputs)) == expected  # also outside the mode


@pytest.mark.sampled(2)
@some_emitters
def test_a_compiled_function(emitter: str) -> None:
    compiled = torch.compile(function, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    x, w = torch.rand(3, 8), torch.rand(8, 5)
    check(compiled, function)  # compiles under the mode
    torch.testing.assert_close(compiled(x, w), function(x, w))
    check(compiled, function)
    check(compiled, function, rows=7)
    torch.testing.assert_close(compiled(x, w), function(x, w))


@every_emitter
def test_a_compiled_graph_checks_layouts(emitter: str) -> None:
    x, w = torch.rand(3, 8), torch.rand(8, 5)
    compiled = fxwrap.compile_graph(make_fx(function)(x, w), (x, w), options=Options(emitter=emitter))
    check(compiled, function)
    with FakeTensorMode(), pytest.raises(InputError, match=r"expected f32\[3, 8\] .*, got f32\[2, 8\]"):
        compiled(torch.empty(2, 8), torch.empty(8, 5))
    with pytest.raises(InputError, match="got None"):
        compiled(None, w)
    torch.testing.assert_close(compiled(x, w), function(x, w))


@pytest.mark.sampled(2)
@other_emitters
def test_constants_parameters_and_training(emitter: str) -> None:
    constant = torch.arange(4.0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    run = torch.compile(lambda x: model(x) + constant, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    run(torch.rand(3, 8)).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=True):  # the parameters and the constant are real
        result = run(torch.empty(3, 8, requires_grad=True))
        assert metadata([result]) == [((3, 4), (4, 1), torch.float32, torch.device("cpu"), True)]
    with FakeTensorMode():
        fake = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
        compiled = torch.compile(fake, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
        compiled(torch.empty(3, 8)).sum().backward()
        gradients = [parameter.grad for parameter in fake.parameters()]
        assert [shape for shape, *_ in metadata(gradients)] == [parameter.shape for parameter in model.parameters()]


@some_emitters
def test_a_function_without_inputs(emitter: str) -> None:
    def factory() -> tuple[Tensor, Tensor]:
        return torch.ones(3) * 2, torch.arange(4).float().sin()

    compiled = torch.compile(factory, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    torch.testing.assert_close(compiled(), factory())
    with FakeTensorMode():
        assert metadata(compiled()) == metadata(factory())
    torch.testing.assert_close(compiled(), factory())


# --- sizes, mutation, nested tensors ----------------------------------------------------------------------------------


def with_dynamic_rows(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


@pytest.mark.sampled(2)
@some_emitters
def test_symbolic_sizes(emitter: str) -> None:
    compiled = torch.compile(function, backend="fxwrap", options={"emitter": emitter}, dynamic=True, fullgraph=True)
    compiled(torch.rand(3, 8), torch.rand(8, 5))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, w = with_dynamic_rows(mode, torch.rand(6, 8)), mode.from_tensor(torch.rand(8, 5))
    with mode:
        results, expected = compiled(x, w), function(x, w)
    assert str(results[0].shape[1]) == str(x.shape[0])
    assert metadata(results) == metadata(expected)


@other_emitters
def test_unbacked_sizes(emitter: str) -> None:
    def positions(x: Tensor) -> Tensor:
        return x.nonzero() * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(positions, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
        assert compiled(torch.ones(4)).shape == (4, 1)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            result = compiled(torch.ones(4))
    assert type(result) is FakeTensor
    assert str(result.shape[0]).startswith("u")
    assert (result.shape[1], result.dtype) == (1, torch.int64)


@some_emitters
def test_mutated_inputs(emitter: str) -> None:
    def halve(x: Tensor) -> Tensor:
        return x.mul_(0.5).sum(0)

    compiled = torch.compile(halve, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    real = torch.ones(3, 4)
    compiled(real)
    with FakeTensorMode():
        fake = torch.ones(3, 4)
        version = fake._version
        assert metadata([compiled(fake)]) == metadata([halve(torch.ones(3, 4))])
        assert fake._version > version
    assert (real == 0.5).all()


@pytest.mark.sampled(2)
@other_emitters
def test_jagged_nested_tensors(emitter: str) -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu().sin()

    def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(size, 8, generator=generator) for size in (3, 5)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        w = torch.randn(8, 4, generator=generator).requires_grad_()
        result = run(x, w)
        result.values().square().sum().backward()
        assert x.grad is not None and w.grad is not None
        return result.values().detach(), x.grad.values(), w.grad

    compiled = torch.compile(layer, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    for actual, expected in zip(gradients(compiled), gradients(layer), strict=True):
        torch.testing.assert_close(actual, expected)


# --- loaded programs, functional tensors, transforms ------------------------------------------------------------------


def writing(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return torch.relu(x @ w), x.sum(0)


def programs(run: Callable[..., Any], emitter: str, folder: Path) -> list[Callable[..., Any]]:
    """Returns the compiled graph, and the same saved and loaded."""
    x, w = torch.rand(3, 8), torch.rand(8, 5)
    compiled = fxwrap.compile_graph(make_fx(run)(x, w), (x, w), options=Options(emitter=emitter))
    compiled.save(folder / "program.fxw")
    return [compiled, fxwrap.load(folder / "program.fxw")]


@every_emitter
def test_loaded_programs(tmp_path: Path, emitter: str) -> None:
    loaded = programs(function, emitter, tmp_path)[1]
    check(loaded, function)
    with FakeTensorMode(), pytest.raises(InputError, match=r"expected f32\[3, 8\] .*, got f32\[2, 8\]"):
        loaded(torch.empty(2, 8), torch.empty(8, 5))


@every_emitter
@pytest.mark.parametrize("run", [function, writing])
def test_functional_tensors(tmp_path: Path, emitter: str, run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    for program in programs(run, emitter, tmp_path):
        x, w = torch.rand(3, 8), torch.rand(8, 5)
        written = x.clone()
        expected = run(written, w)
        transformed = x.clone()
        results = torch.func.functionalize(lambda x, w, program=program: tuple(program(x, w)))(transformed, w)
        torch.testing.assert_close((*results, transformed), (*expected, written))
        with FunctionalTensorMode():
            inputs = FunctionalTensor.to_functional(x), FunctionalTensor.to_functional(w)
            functional = (*program(*inputs), inputs[0])
            assert {type(item) for item in functional} == {FunctionalTensor}
            for item in functional:
                torch._sync(item)
            plain = tuple([torch._from_functional_tensor(item.elem) for item in functional])
        torch.testing.assert_close(plain, (*expected, written))


@every_emitter
@pytest.mark.parametrize("run", [function, writing])
@pytest.mark.parametrize("active", [True, False], ids=["active", "inactive"])
def test_functional_tensors_of_fake_ones(
    tmp_path: Path, emitter: str, run: Callable[..., tuple[Tensor, Tensor]], active: bool
) -> None:
    """The results are functional tensors of fake ones, as an operator's are, whether the fake mode is active or not."""
    x, w = torch.rand(3, 8), torch.rand(8, 5)
    expected = run(x.clone(), w)
    for program in programs(run, emitter, tmp_path):
        fake = FakeTensorMode()
        fakes = fake.from_tensor(x), fake.from_tensor(w)
        with fake if active else nullcontext(), FunctionalTensorMode():
            results = program(*[FunctionalTensor.to_functional(item) for item in fakes])
        assert {type(item) for item in results} == {FunctionalTensor}
        for item, like in zip(results, expected, strict=True):
            torch._sync(item)
            content = torch._from_functional_tensor(item.elem)
            assert isinstance(content, FakeTensor) and content.fake_mode is fake
            assert (content.shape, content.stride(), content.dtype) == (like.shape, like.stride(), like.dtype)


@every_emitter
def test_vmapped_programs(tmp_path: Path, emitter: str) -> None:
    x, w = torch.rand(2, 3, 8), torch.rand(8, 5)
    for program in programs(function, emitter, tmp_path):
        results = torch.vmap(program, in_dims=(0, None))(x, w)
        torch.testing.assert_close(results, torch.vmap(function, in_dims=(0, None))(x, w))


@every_emitter
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_traced_programs(tmp_path: Path, emitter: str, tracing_mode: str) -> None:
    x, w = torch.rand(3, 8), torch.rand(8, 5)

    def trace(program: Callable[..., Any]) -> Callable[..., Any]:
        return make_fx(lambda x, w: program(x, w), tracing_mode=tracing_mode)(x, w)

    for program in programs(function, emitter, tmp_path):
        torch.testing.assert_close(trace(program)(x, w), function(x, w))


@pytest.mark.parametrize("backend", ["aot_eager", "fxwrap"])
def test_functionalized_functions(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """AOTAutograd rejects functional inputs; a graph from its cache would read their memory."""
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "1")
    x, w = torch.rand(3, 8), torch.rand(8, 5)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, w), function(x, w))
    with pytest.raises(BackendCompilerFailed, match="must not already be a functional tensor"):
        torch.func.functionalize(compiled)(x, w)

"""Derivatives through compiled graphs: those of eager mode under torch.compile, and an error of direct calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.errors import FxwrapError

NO_DERIVATIVES = "a launched kernel has no gradient|requires gradients, which|has a tangent, which"


def model(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    return (y @ weight).relu() * y.sum(), weight


X, WEIGHT = torch.rand(4, 5), torch.rand(5, 3)

Forms = dict[str, Callable[..., Any]]


def forms(emitter: Any = "python", form: Any = "in_place") -> Forms:
    options = Options(emitter=emitter, fx_form=form)
    compiled = fxwrap.compile_graph(make_fx(model)(X, WEIGHT), [X, WEIGHT], options=options)
    return {"compiled": compiled, "graph": compiled.graph_module}


def exported() -> Callable[..., Any]:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return model(x, weight)

    program = torch.export.export(Module(), (X, WEIGHT))
    module: Callable[..., Any] = fxwrap.fx.export(fxwrap.compile_graph(program)).module()
    return module


def tangent_of(function: Callable[..., Any], *inputs: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        tangent: Tensor | None = forward_ad.unpack_dual(function(dual, *inputs[1:])[0]).tangent
        return tangent


@pytest.mark.parametrize("called_before", [False, True])
def test_tangents_flow_through_torch_compile(called_before: bool) -> None:
    compiled = torch.compile(model, backend="fxwrap")
    if called_before:
        torch.testing.assert_close(compiled(X, WEIGHT)[0], model(X, WEIGHT)[0])
    for x in (X, X.clone().requires_grad_()):
        tangent, wanted = tangent_of(compiled, x, WEIGHT), tangent_of(model, x, WEIGHT)
        torch.testing.assert_close(tangent, wanted)
    with forward_ad.dual_level():  # an active level without tangents
        torch.testing.assert_close(compiled(X, WEIGHT)[0], model(X, WEIGHT)[0])
    torch.testing.assert_close(compiled(X, WEIGHT)[0], model(X, WEIGHT)[0])


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "grad": lambda function: grad(lambda x: function(x).sum())(X),
    "vjp": lambda function: vjp(function, X)[1](torch.ones(4, 3)),
    "jacrev": lambda function: jacrev(function)(X),
    "jvp": lambda function: jvp(function, (X,), (X,)),
    "jacfwd": lambda function: jacfwd(function)(X),
    "hessian": lambda function: hessian(lambda x: function(x).square().sum())(X),
    "linearize": lambda function: linearize(function, X),
    "grad of vmap": lambda function: grad(lambda xs: vmap(function)(xs).sum())(X[None]),
    "vmap of grad": lambda function: vmap(grad(lambda x: function(x).sum()))(X[None]),
    "jvp of vmap": lambda function: jvp(vmap(function), (X[None],), (X[None],)),
    "vmap of jvp": lambda function: vmap(lambda x: jvp(function, (x,), (x,))[1])(X[None]),
    "dual_level": lambda function: tangent_of(lambda x: [function(x)], X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_of_launched_kernels_raise(transform: str) -> None:
    """They were zeros, or gradients that left the kernels out."""
    functions = {**forms(), "functional": forms(form="functional")["graph"]}
    if "vmap" not in transform:  # torch has no batching rule of an exported graph's checks
        functions["exported"] = exported()
    for name, function in functions.items():
        with pytest.raises(FxwrapError, match=NO_DERIVATIVES):
            TRANSFORMS[transform](lambda x: function(x, WEIGHT)[0])  # noqa: B023  called at once
            pytest.fail(name)


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_an_emitted_program_rejects_tangents(emitter: str) -> None:
    compiled: Any = forms(emitter)["compiled"]
    for function in (compiled, compiled.emitted):
        with pytest.raises(FxwrapError, match="has a tangent, which a compiled graph does not record"):
            tangent_of(function, X, WEIGHT)


@pytest.mark.parametrize("form", ["in_place", "functional"])
@pytest.mark.parametrize("required", [(True, False), (False, True), (True, True)])
def test_a_backward_through_an_emitted_graph_raises(form: str, required: tuple[bool, bool]) -> None:
    """The weight's gradient was that of the matmul alone, without the kernel behind it."""
    graph = forms(form=form)["graph"]
    x, weight = [item.clone().requires_grad_(flag) for item, flag in zip((X, WEIGHT), required, strict=True)]
    result, returned = graph(x, weight)
    torch.testing.assert_close(result, model(X, WEIGHT)[0].requires_grad_())
    assert returned is weight
    with pytest.raises(FxwrapError, match="a launched kernel has no gradient"):
        result.sum().backward()
    with torch.no_grad():
        assert not graph(x, weight)[0].requires_grad


def test_a_graph_without_kernels_records_gradients() -> None:
    options = Options(fuse=False)
    graph = fxwrap.compile_graph(make_fx(lambda x: x.sin())(X), [X], options=options).graph_module
    assert "fxwrap.cpp_kernel" not in str(graph.graph)
    x = X.clone().requires_grad_()
    (result,) = graph(x) if isinstance(graph(x), tuple) else (graph(x),)
    result.sum().backward()
    torch.testing.assert_close(x.grad, X.cos())


def test_vmap_of_a_graph_whose_input_a_transform_differentiates() -> None:
    """Checks of inputs have no batching rule, so the graph is one operator at each level."""
    graph = forms()["graph"]
    results = vmap(lambda x: vjp(lambda y: graph(y, WEIGHT)[0], x)[0])(torch.stack([X, 2 * X]))
    torch.testing.assert_close(results, torch.stack([model(X, WEIGHT)[0], model(2 * X, WEIGHT)[0]]))

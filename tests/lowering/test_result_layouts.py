"""Extern calls of pointwise and similar operators return the declared strides, whatever the operands' layouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.lines import ExternCall, Return
from fxwrap.options import EMITTERS
from fxwrap.torch_compat import operator_overload, overload_names_of, torch_schema
from fxwrap.wrapper_ir import Value

aten = torch.ops.aten

FORMS = [*[(emitter, "in_place") for emitter in EMITTERS], ("fx", "functional")]

P = torch.randn(4, 2, 1, 1, dtype=torch.complex64).permute(2, 3, 0, 1)
LT = torch.randn(4, 1, 1, dtype=torch.complex64)


def _places() -> Tensor:
    """Returns different numbers for different places."""
    return torch.arange(1, 33.0).view(1, 4, 4, 2)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "product": (lambda p, q: torch.view_as_real(p * q) + 1, (P, LT), "aten.mul.Tensor"),
    "where": (lambda p, q: aten.where.self(p, q, q) + _places(), (P.real > 0, LT.real.clone()), "aten.where.self"),
    "logical_and": (
        lambda p, q: aten.logical_and.default(p, q) + _places(), (P.real > 0, LT.real > 0), "aten.logical_and.default",
    ),
    "copysign": (
        lambda p, q: aten.copysign.Tensor(p, q) * _places(), (P.real.clone(), LT.real.clone()), "aten.copysign.Tensor",
    ),
    "always contiguous": (
        lambda x: aten.pow.Scalar(2.0, x) + torch.arange(6.0).view(3, 2).t(), (torch.randn(3, 2).t(),),
        "aten.pow.Scalar",
    ),
    "parts": (
        lambda x, y: torch.view_as_real(torch.complex(x[:, :1].expand(3, 2), y)) + 1,
        (torch.randn(3, 2), torch.randn(2, 3).t()), "aten.complex.default",
    ),
    "loss": (
        lambda x, y: aten.binary_cross_entropy.default(x, y, None, 0) * torch.arange(6.0).view(3, 2),
        (torch.rand(2, 3).t(), torch.rand(3, 2)), "aten.binary_cross_entropy.default",
    ),
    "padded": (
        lambda x, y: aten.reflection_pad3d.default(x, (1, 1, 1, 1, 1, 1)) * y,
        (torch.randn(3, 3, 4, 2).permute(3, 2, 1, 0), torch.randn(2, 6, 5, 5)), "aten.reflection_pad3d.default",
    ),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("emitter", "form"), FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_readers_see_the_elements_of_a_call(name: str, dynamic: bool, emitter: Any, form: Any) -> None:
    function, inputs, operator = CASES[name]
    traced = make_fx(function, tracing_mode="symbolic" if dynamic else "fake", _allow_non_fake_inputs=True)(*inputs)
    options = Options(emitter=emitter, fx_form=form, preserve_ops=frozenset({operator}), compile_cache=False)
    actual = fxwrap.compile_graph(traced, inputs, options=options)(*inputs)[0]
    torch.testing.assert_close(actual, function(*inputs), atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    "inputs", [(_places(), _places()), (torch.rand(3, 4, 5), torch.rand(5)), (P.real, _places() * 2)]
)
@pytest.mark.parametrize("form", ["in_place", "functional"])
def test_the_way_back_from_fx_computes_the_same(inputs: tuple[Tensor, Tensor], form: Any) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.copysign.Tensor(x, y).permute(*range(x.dim())) * 2

    program = fxwrap.compile_graph(
        make_fx(function, tracing_mode="fake")(*inputs), inputs, options=Options(fuse=False)
    ).program
    again = fxwrap.from_fx(fxwrap.to_fx(program, form=form).graph_module)
    module = fxwrap.to_fx(again, form="in_place").graph_module
    torch.testing.assert_close(module(*inputs)[0], function(*inputs), atol=0, rtol=0)


@pytest.mark.parametrize("shapes", [((3, 4, 5), (3, 4, 5)), ((3, 4, 5), (5,)), ((3, 1, 5), (3, 1, 5))])
def test_contiguous_operands_stay_plain_calls(shapes: tuple[tuple[int, ...], ...]) -> None:
    inputs = [torch.rand(shape) for shape in shapes]
    traced = make_fx(lambda x, y: aten.copysign.Tensor(x, y))(*inputs)
    program = fxwrap.compile_graph(traced, inputs, options=Options(fuse=False, compile_cache=False)).program
    (call,) = [line for line in program.lines() if isinstance(line, ExternCall)]
    assert call.target == "aten.copysign.Tensor" and not call.outs


# --- a sweep over operators and layouts -------------------------------------------------------------------------------


def _tensor_arguments(name: str) -> int:
    """Returns the number of arguments of an operator of tensors alone that returns one, else 0."""
    schema = torch_schema(operator_overload(name))
    arguments, is_single = schema.arguments, [str(item.type) for item in schema.returns] == ["Tensor"]
    is_plain = is_single and all(str(item.type) == "Tensor" and item.alias_info is None for item in arguments)
    return len(arguments) if is_plain and not name.startswith("aten._") else 0


def _pointwise_operators() -> list[str]:
    names = [name for name in overload_names_of("aten") if _is_overload(name)]
    pointwise = [name for name in names if torch.Tag.pointwise in operator_overload(name).tags]
    return [name for name in pointwise if _tensor_arguments(name)]


def _is_overload(name: str) -> bool:
    try:
        operator_overload(name)
    except LookupError:
        return False
    return True


def _operand(generator: random.Random, sizes: list[int], layout: str, dtype: torch.dtype) -> Tensor:
    order = generator.sample(range(4), 4) if layout == "permuted" else [0, 1, 2, 3]
    if layout != "equal":
        sizes = [size if generator.random() < 0.7 else 1 for size in sizes]
    tensor = torch.randint(1, 3, [sizes[item] for item in order]).to(dtype)
    return tensor.permute([order.index(item) for item in range(4)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, 1])
def test_declared_strides_are_actual_strides(seed: int) -> None:
    generator, checked = random.Random(seed), 0
    for name in _pointwise_operators():
        operator = operator_overload(name)
        layout = generator.choice(["permuted", "permuted", "broadcast", "equal"])
        for dtype in (torch.float32, torch.bool, torch.int64):
            sizes = [generator.choice([2, 3] if layout == "broadcast" else [1, 2, 3]) for _ in range(4)]
            inputs = [_operand(generator, sizes, layout, dtype) for _ in range(_tensor_arguments(name))]
            if name.startswith("aten.where"):
                inputs[0] = inputs[0] > 1
            try:
                expected = operator(*inputs)
                traced = make_fx(lambda *items, call=operator: call(*items), tracing_mode="fake")(*inputs)
            except (RuntimeError, NotImplementedError):
                continue
            options = Options(fuse=False, preserve_ops=frozenset({name}), compile_cache=False)
            compiled = fxwrap.compile_graph(traced, inputs, options=options)
            actual, declared = compiled(*inputs)[0], compiled.program.body.lines[-1]
            assert isinstance(declared, Return) and isinstance(value := declared.values[0], Value)
            assert actual.stride() == value.tensor_type.strides, f"{name} of {[item.stride() for item in inputs]}"
            torch.testing.assert_close(actual, expected, equal_nan=True)
            checked += 1
            break
    assert checked > 80

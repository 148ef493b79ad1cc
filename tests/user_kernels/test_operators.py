"""Operators that a model's author registers, in every emitter: functional, writing, with lists, views and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import fxwrap
from fxwrap.errors import GraphError
from fxwrap.testing import assert_emitters_agree
from tests.support.long_form import long_only
from tests.user_kernels import operators
from tests.user_kernels.cases import Case
from tests.user_kernels.triton_on_cpu import triton_on_cpu

OLD = torch.ops.user_code_old


@pytest.fixture(autouse=True)
def _triton_on_cpu() -> Iterator[None]:
    with triton_on_cpu():
        yield


def functional(x: Tensor, bias: Tensor) -> Tensor:
    return operators.scaled(x.sin(), 3.0, bias.cos()) * 2 + operators.scaled(x)


def writing(x: Tensor) -> Tensor:
    y = x + 1
    operators.shift_(y, 2.0)
    operators.shift_(x, 1.0)
    return y * 2


def mutating_with_results(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    first = operators.double_and_sum(y, count)
    second = operators.double_and_sum(y, None)
    return first + second, y + 1


def several_results(x: Tensor) -> tuple[Tensor, Tensor]:
    more, sums, size = operators.sums_and_size(x * 2)
    return more.sin() + sums[:, None], sums * size


def lists(x: Tensor) -> list[Tensor]:
    return [y * 2 for y in operators.repeats([x + 1, x * 3], [2, 3])]


def writing_lists_of_views(x: Tensor) -> Tensor:
    y = x * 1
    operators.triple_all_([y[0], y[1]])
    return y + 1


def writing_views(x: Tensor) -> Tensor:
    y = x * 1
    operators.shift_(y[:, ::2], 2.0)
    operators.shift_(y.t()[1], 2.0)
    return y + 1


def size_from_data(x: Tensor) -> Tensor:
    return (operators.positive(x.sin()) * 2 + 1).exp()


def old_functional(x: Tensor) -> Tensor:
    return OLD.scale(x + 1, 3) + OLD.scale(x, 0.5)


def old_several_results(x: Tensor) -> Tensor:
    last, first = OLD.halves(x * 2, first=False)
    return last + first.sin()


def old_out(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    OLD.into(x + 1, out=out)
    return out * 2


def old_recipe(x: Tensor) -> Tensor:
    return OLD.recipe(x) + 1


def triton_functional(x: Tensor, y: Tensor) -> Tensor:
    return operators.add(x.exp(), y) * 2


def triton_writing(x: Tensor) -> Tensor:
    y = x + 1
    operators.double_(y)
    operators.double_(x)
    return y + x


def triton_tuned(x: Tensor) -> Tensor:
    return operators.plus_one(x * 2) + 1


# Those of the long form have a function and a form that others have too, each with another one.
CASES = (
    Case(functional, ((4, 6), (4, 6))),
    Case(functional, ((4, 6), (4, 6)), dynamic=True),
    Case(functional, ((4, 6), (4, 6)), training=True),
    Case(writing, ((8,),)),
    Case(mutating_with_results, ((4, 6), (3,))),
    Case(mutating_with_results, ((4, 6), (3,)), dynamic=True, long=True),
    Case(several_results, ((4, 6),)),
    Case(several_results, ((4, 6),), dynamic=True, long=True),
    Case(lists, ((6,),)),
    Case(lists, ((6,),), dynamic=True),
    Case(writing_lists_of_views, ((4, 6),)),
    Case(writing_views, ((4, 6),)),
    Case(size_from_data, ((40,),)),
    Case(old_functional, ((6,),)),
    Case(old_several_results, ((6,),)),
    Case(old_out, ((6,),)),
    Case(old_recipe, ((6,),)),
    Case(triton_functional, ((100,), (100,))),
    Case(triton_functional, ((100,), (100,)), dynamic=True, long=True),
    Case(triton_functional, ((100,), (100,)), training=True, long=True),
    Case(triton_writing, ((100,),)),
    Case(triton_tuned, ((200,),), dynamic=True),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [long_only(case) if case.long else case for case in CASES], ids=str)
def test_on_cpu(case: Case) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        case.check("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_gpu(case: Case) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        case.check("cuda")


@pytest.mark.parametrize("function", [triton_functional, functional])
def test_exported_programs(function: Callable[..., Tensor]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return function(x, y)

    inputs, size = (torch.randn(6, 4), torch.randn(6, 4)), torch.export.Dim("size", min=2)
    exported = torch.export.export(Model(), inputs, dynamic_shapes=({0: size}, {0: size}))
    assert_emitters_agree(exported, inputs)


@pytest.mark.parametrize("namespace", ["user_code", "user_code_old"])
def test_an_operator_without_a_fake_rule(namespace: str) -> None:
    graph = Graph()
    operator = getattr(torch.ops, namespace).without_fake.default
    graph.output((graph.call_function(operator, (graph.placeholder("x"),)),))
    wanted = f"the operator {namespace}::without_fake has no fake implementation.*torch.library.register_fake"
    with pytest.raises(GraphError, match=wanted):
        fxwrap.compile_graph(GraphModule({}, graph), [torch.randn(3)])

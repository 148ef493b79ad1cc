"""Calls that read elements of their operands, in graphs without fake values, beside eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.errors import GraphError
from fxwrap.inference import call_on_fakes
from fxwrap.torch_compat import fresh_fake_mode

aten = torch.ops.aten
OPTIONS = Options(compile_cache=False)


def graph_of(operator: Callable[..., object], arguments: Sequence[object]) -> GraphModule:
    """A graph of one call without metadata, whose inputs are the tensors."""
    graph = Graph()
    operands = [
        graph.placeholder(f"x_{index}") if isinstance(item, Tensor) else item for index, item in enumerate(arguments)
    ]
    graph.output(graph.call_function(operator, tuple(operands)))
    return GraphModule({}, graph)


def losses() -> Tensor:
    return torch.randn(5, 2, 7).log_softmax(-1)


TARGETS, STEPS, LENGTHS = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([5, 5]), torch.tensor([3, 3])

CALLS: dict[str, Callable[[], tuple[Callable[..., object], list[object]]]] = {
    "cov": lambda: (aten.cov.default, [torch.randn(3, 6)]),
    "few observations": lambda: (aten.cov.default, [torch.randn(3, 1)]),
    "corrcoef": lambda: (aten.corrcoef.default, [torch.randn(3, 6)]),
    "ctc_loss of a list": lambda: (aten.ctc_loss.IntList, [losses(), TARGETS, [5, 5], [3, 3]]),
    "ctc_loss of tensors": lambda: (aten.ctc_loss.Tensor, [losses(), TARGETS, STEPS, LENGTHS]),
    "losses of each": lambda: (aten.ctc_loss.Tensor, [losses(), TARGETS, STEPS, LENGTHS, 0, 0]),
    "table": lambda: (aten._ctc_loss.default, [losses(), TARGETS, [5, 5], [3, 3]]),
    "table of tensors": lambda: (aten._ctc_loss.Tensor, [losses(), TARGETS, STEPS, LENGTHS]),
    "indices": lambda: (aten.tensor_split.tensor_indices_or_sections, [torch.randn(6, 2), torch.tensor([1, -2, 9])]),
}


@pytest.mark.filterwarnings("ignore:cov")
@pytest.mark.parametrize("name", CALLS)
def test_results_that_no_element_decides_are_known(name: str) -> None:
    torch.manual_seed(0)
    operator, arguments = CALLS[name]()
    tensors = [item for item in arguments if isinstance(item, Tensor)]
    expected = operator(*arguments)
    results = fxwrap.run(fxwrap.lower(graph_of(operator, arguments), tensors, options=OPTIONS), tensors)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)  # type: ignore[call-overload]
    torch.testing.assert_close(list(results), expected, equal_nan=True)


def test_results_that_elements_decide_are_an_error() -> None:
    arguments = [torch.randn(6, 2), torch.tensor(3)]
    graph = graph_of(aten.tensor_split.tensor_indices_or_sections, arguments)
    with pytest.raises(GraphError, match=r"the results of aten\.tensor_split\..* are known only at run time"):
        fxwrap.lower(graph, arguments)


def branching(size_if_positive: int) -> Callable[[Tensor], Tensor]:
    """A function that checks elements, and returns another size for some of them."""

    def function(x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x.new_zeros(size_if_positive) if bool((x > 0).any()) else x.new_ones(3)

    return function


def test_all_branches_of_a_call_are_compared() -> None:
    mode = fresh_fake_mode()
    x = mode.from_tensor(torch.randn(2))
    assert call_on_fakes(mode, branching(3), [x], {}).shape == (3,)
    with pytest.raises(fxwrap.errors.FxwrapError, match="known only at run time"):
        call_on_fakes(mode, branching(4), [x], {})


def switched(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return torch.cov(x) + y.sum()


def switched_in_a_branch(x: Tensor) -> Tensor:
    def branch(z: Tensor) -> Tensor:
        with torch.no_grad():
            return z * 2

    return torch.cond(x.sum() > 0, branch, lambda z: z + 1, (x,))


@pytest.mark.parametrize("function", [switched, switched_in_a_branch])
def test_a_graph_traced_before_dispatch_may_switch_the_gradient_mode(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    graph = make_fx(function, pre_dispatch=True)(x)
    assert any("_set_grad_enabled" in part.code for part in graph.modules() if isinstance(part, GraphModule))
    (result,) = fxwrap.run(fxwrap.lower(graph, [x], options=OPTIONS), [x])
    torch.testing.assert_close(result, function(x))

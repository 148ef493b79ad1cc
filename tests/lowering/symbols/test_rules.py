"""One rule of how symbols are bound a case: the program, and what emitted Python and C++ make of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from tests.lowering.control.cases import random
from tests.lowering.symbols.test_numbers import Symbolic
from tests.lowering.symbols.test_unbacked import pairs, parted, positives
from tests.support.golden import check_golden, sections

GOLDENS = Path(__file__).parent / "golden"
ATEN = torch.ops.aten


def exported(function: Callable[..., Any], *inputs: Tensor, sizes: Any = None) -> Any:
    class Module(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Any:
            return function(*arguments)

    dynamic = None if sizes is None else (tuple(sizes),)
    return torch.export.export(Module(), inputs, dynamic_shapes=dynamic)


def a_symbol_is_an_input_size() -> Any:
    return exported(lambda x: x.sin(), random(4, 6), sizes=[{0: torch.export.Dim("b", min=2, max=50)}])


def a_symbol_is_solved_from_a_size() -> Any:
    return exported(lambda x: x.sin(), random(4, 6), sizes=[{1: 2 * torch.export.Dim("h", min=2, max=50)}])


def an_unsolvable_number_gets_its_own_symbol() -> Any:
    graph = make_fx(lambda x, n: x.sin() + n, tracing_mode="symbolic")(random(9, 4), 4)
    shape_env = next(iter(graph.graph.nodes)).meta["val"].shape[0].node.shape_env
    small = torch._subclasses.FakeTensorMode(shape_env=shape_env)
    rows = next(iter(graph.graph.nodes)).meta["val"].shape[0]
    for node in graph.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            with small:
                node.meta["val"] = torch.empty(rows // 2, 4)
    return graph


def a_symbol_is_solved_from_a_bool() -> GraphModule:
    symbolic = Symbolic()
    x, b = symbolic.tensor("x", 4, 6), symbolic.truth("b")
    return symbolic.module(
        symbolic.call(ATEN.mul.Tensor, x, symbolic.call(torch.sym_ite, b, 2, 3)), symbolic.call(torch.sym_not, b)
    )


def a_symbol_is_a_result_size() -> Any:
    return exported(lambda x: positives(x).sin(), random(9))


def a_symbol_is_a_divided_size() -> Any:
    return exported(lambda x: pairs(x).sin(), random(9))


def symbols_are_bound_from_nested_results() -> Any:
    def function(x: Tensor) -> Any:
        below, (above, rest), count = parted(x)
        return below.sin(), above.sin(), rest.sin(), count

    return exported(function, random(9))


def numbers_are_read_from_tensors() -> Any:
    inputs = random(4), torch.tensor(2.5), torch.tensor(3), torch.tensor(True)
    return make_fx(lambda x, f, n, b: (x * f.item() + n.item(), b.item()), tracing_mode="fake")(*inputs)


def a_number_is_asserted() -> Any:
    def function(x: Tensor, n: Tensor) -> Tensor:
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= x.shape[0], lambda: "too many")
        return x[:k].sin()

    return exported(function, random(9), torch.tensor(3))


RULES: tuple[Callable[[], Any], ...] = (
    a_symbol_is_an_input_size,
    a_symbol_is_solved_from_a_size,
    an_unsolvable_number_gets_its_own_symbol,
    a_symbol_is_solved_from_a_bool,
    a_symbol_is_a_result_size,
    a_symbol_is_a_divided_size,
    symbols_are_bound_from_nested_results,
    numbers_are_read_from_tensors,
    a_number_is_asserted,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules(rule: Callable[[], Any], update_golden: bool) -> None:
    program = fxwrap.lower(rule(), options=fxwrap.Options(fuse=False))
    fxwrap.verify(program)
    stages = [("program", str(program)), ("python", fxwrap.to_python(program).source)]
    source = fxwrap.to_cpp(program).source
    start = source.index("static void run")
    stages.append(("cpp", source[start : source.index("// namespace program")].rpartition("}")[0]))
    check_golden(GOLDENS / f"{rule.__name__}.txt", sections(stages), update_golden)

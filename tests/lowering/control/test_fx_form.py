"""Emitted graphs with control flow go through torch's own tools and keep their results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.comparison.driver import capture
from tests.lowering.control import test_cond, test_loops, test_operators, test_slices, test_subgraphs
from tests.lowering.control.cases import random
from tests.lowering.control.operators import LOG

Tool = Callable[[GraphModule, Sequence[Any]], Any]
X, W = random(4, 8), random(8, 8, seed=1)


def _eliminated(module: GraphModule, inputs: Sequence[Any]) -> Any:
    before = [node.target for node in module.graph.nodes]
    module.graph.eliminate_dead_code()
    after = [node.target for node in module.graph.nodes]
    assert [target for target in before if target not in after and "check_layout" in str(target)] == []
    module.recompile()
    return module(*inputs)


def _copied(module: GraphModule, inputs: Sequence[Any]) -> Any:
    copied = copy.deepcopy(module)
    copied.recompile()
    return copied(*inputs)


def _interpreted(module: GraphModule, inputs: Sequence[Any]) -> Any:
    return Interpreter(module).run(*inputs)


def _retraced(module: GraphModule, inputs: Sequence[Any]) -> Any:
    return make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)(*inputs)


def _compiled(module: GraphModule, inputs: Sequence[Any]) -> Any:
    torch.compiler.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)(*inputs)


def _compiled_again(module: GraphModule, inputs: Sequence[Any]) -> Any:
    torch.compiler.reset()
    return torch.compile(module, backend="fxwrap", fullgraph=True)(*inputs)


def _reversed_scan(x: torch.Tensor) -> Any:
    return test_slices.scan(test_slices._tanh, x.new_zeros(8), x, reverse=True)


TOOLS: dict[str, Tool] = {
    tool.__name__.lstrip("_"): tool
    for tool in (_eliminated, _copied, _interpreted, _retraced, _compiled, _compiled_again)
}
SUBJECTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cond": (test_cond.pointwise, (X.abs(),)),
    "nested cond": (test_cond.nested, (X.abs() + 1,)),
    "while": (test_loops.a_tensor_counts, (X,)),
    "scan": (test_slices.over_rows, (X,)),
    "reversed scan": (_reversed_scan, (X,)),
    "map": (test_slices.map_rows, (X, W)),
    "call": (test_subgraphs.called_many_times, (X, W)),
}

# Dynamo rejects calls of invoke_subgraph that it did not create.
CASES = [
    (subject, tool) for subject in SUBJECTS for tool in TOOLS
    if (subject == "cond" if tool == "compiled_again" else subject != "call" or tool != "compiled")
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("subject", "tool"), CASES)
@torch.no_grad()
def test_fx_tools_preserve_results(subject: str, tool: str, emitted: Callable[[str], fxwrap.Program]) -> None:
    inputs = SUBJECTS[subject][1]
    program = emitted(subject)
    module = fxwrap.to_fx(program).graph_module
    for nested in module.modules():
        if isinstance(nested, GraphModule):
            nested.graph.lint()
    actual = TOOLS[tool](module, [item.clone() for item in inputs])
    torch.testing.assert_close(list(actual), list(fxwrap.run(program, inputs)), rtol=0, atol=0)


@pytest.fixture(scope="module")
def emitted() -> Callable[[str], fxwrap.Program]:
    """Returns the program of a subject, which is captured once."""
    programs: dict[str, fxwrap.Program] = {}

    def program(subject: str) -> fxwrap.Program:
        if subject not in programs:
            (graph,) = capture(*SUBJECTS[subject])
            programs[subject] = graph.compiled.program
        return programs[subject]

    return program


def test_operators_match_those_of_export(emitted: Callable[[str], fxwrap.Program]) -> None:
    names = {"cond": "cond", "while": "while_loop", "scan": "scan", "map": "map_impl", "call": "invoke_subgraph"}
    for subject, name in names.items():
        module = fxwrap.to_fx(emitted(subject)).graph_module
        called = [node for node in module.graph.nodes if node.target is getattr(torch.ops.higher_order, name)]
        assert called
        for node in called:
            submodules = [item for item in node.all_input_nodes if item.op == "get_attr"]
            assert submodules and all(isinstance(getattr(module, item.target), GraphModule) for item in submodules)
            assert isinstance(node.meta["val"], tuple) and all(isinstance(item, Tensor) for item in node.meta["val"])


@pytest.mark.parametrize("tool", ["eliminated", "copied", "interpreted"])
def test_effectful_calls_are_preserved(tool: str) -> None:
    x = torch.ones(4)
    (graph,) = capture(test_operators._noted, (x,))
    program = graph.compiled.program
    module = fxwrap.to_fx(program).graph_module
    LOG.clear()
    TOOLS[tool](module, [None, x][2 - len(program.inputs) :])
    assert LOG == ["first 4", "second 8", "third 8"]

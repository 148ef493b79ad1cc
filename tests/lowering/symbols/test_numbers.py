"""Symbolic floats and bools as inputs and outputs of a graph, in every emitter."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.compile import emit
from fxwrap.errors import InputError
from fxwrap.lines import Launch
from fxwrap.symbolic import SymbolInfo, evaluate, expression_kind, parse_expr
from tests.lowering.control.cases import random
from tests.lowering.symbols.check_sizes import check_all_sizes
from tests.support.versions import is_before

EMITTERS = COMPARED_EMITTERS
X = random(4, 6)
ATEN = torch.ops.aten


POWERS = (
    "s0**3*s1", "-s0**2", "(s0 - s1)**3", "(s0 + 1)**-2", "2*s0**-1", "-f0**-3", "1/3*f0**2", "f0**-1 + s0**-1",
    "sqrt(s0)", "pow_by_natural(-2, s0)", "float_pow(f0, 2.5)", "floordiv(s0**2 - 20, s1)", "mod(s0 - 9, s1)",
    "min(s0**2, s1)", "floordiv(s0 - 9, -2)", "ceildiv(s0 - 9, 4)", "modular_indexing(s0**2, 2, 3)",
    "int_true_div(s0, s1**2)",
)  # fmt: skip


class Symbolic:
    """A hand-written graph with symbolic numbers as fake values."""

    def __init__(self) -> None:
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self.graph = Graph()

    def tensor(self, name: str, *sizes: int) -> Node:
        with self.mode:
            return self._placeholder(name, torch.empty(*sizes))

    def real(self, name: str, hint: float) -> Node:
        """A float that the graph was traced with."""
        source = ConstantSource(name)
        symbol = self.shape_env.create_unspecified_symbol(hint, source=source)
        return self._placeholder(name, self.shape_env.create_symfloatnode(symbol, hint=hint, source=source))

    def unknown_real(self, name: str) -> Node:
        return self._placeholder(name, self.shape_env.create_unbacked_symfloat())

    def truth(self, name: str) -> Node:
        return self._placeholder(name, self.shape_env.create_unbacked_symbool())

    def call(self, target: Callable[..., Any], *arguments: Any) -> Node:
        node = self.graph.call_function(target, arguments)
        with self.mode:
            node.meta["val"] = target(*[item.meta["val"] if isinstance(item, Node) else item for item in arguments])
        return node

    def module(self, *results: Any) -> GraphModule:
        self.graph.output(results)
        return GraphModule(torch.nn.Module(), self.graph)

    def _placeholder(self, name: str, fake: Any) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = fake
        return node


def compiled_for(emitter: str, graph: GraphModule) -> Any:
    return fxwrap.compile_graph(graph, options=Options(emitter=emitter, fallback="error"))


def same(actual: Any, wanted: Any) -> None:
    """Compares outputs, those that are numbers with their class."""
    assert [type(item) for item in actual] == [type(item) for item in wanted]
    for got, want in zip(actual, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("known", [True, False])
def test_a_float_is_an_input_an_operand_and_an_output(emitter: str, known: bool) -> None:
    symbolic = Symbolic()
    x, f = symbolic.tensor("x", 4, 6), symbolic.real("f", 2.5) if known else symbolic.unknown_real("f")
    scaled = symbolic.call(ATEN.mul.Tensor, x, f)
    twice = symbolic.call(operator.mul, f, 2.0)
    moved = symbolic.call(ATEN.sin.default, symbolic.call(ATEN.add.Tensor, scaled, twice))
    compiled = compiled_for(emitter, symbolic.module(moved, f, twice, symbolic.call(operator.truediv, f, 3.0)))
    assert sum(isinstance(line, Launch) for line in compiled.program.body.lines) == 1
    for number in (2.5, -0.125, 3.0):
        same(compiled(X, number), (torch.sin(X * number + 2 * number), number, 2 * number, number / 3))


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_bool_is_an_input_a_condition_and_an_output(emitter: str) -> None:
    symbolic = Symbolic()
    x, b = symbolic.tensor("x", 4, 6), symbolic.truth("b")
    number = symbolic.call(torch.sym_ite, b, 2, 3)
    scaled = symbolic.call(ATEN.sin.default, symbolic.call(ATEN.mul.Tensor, x, number))
    compiled = compiled_for(emitter, symbolic.module(scaled, b, number, symbolic.call(torch.sym_not, b)))
    for truth in (True, False):
        same(compiled(X, truth), (torch.sin(X * (2 if truth else 3)), truth, 2 if truth else 3, not truth))


@pytest.mark.parametrize("emitter", EMITTERS)
def test_floats_are_compared(emitter: str) -> None:
    symbolic = Symbolic()
    x, f, g = symbolic.tensor("x", 4, 6), symbolic.unknown_real("f"), symbolic.unknown_real("g")
    less = symbolic.call(operator.lt, f, g)
    compiled = compiled_for(emitter, symbolic.module(symbolic.call(ATEN.add.Tensor, x, f), less))
    for pair in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0)):
        same(compiled(X, *pair), (X + pair[0], pair[0] < pair[1]))


@pytest.mark.parametrize("emitter", EMITTERS)
def test_numbers_read_from_tensors_are_returned(emitter: str) -> None:
    def function(x: Tensor, f: Tensor, b: Tensor) -> Any:
        return x * f.item(), f.item() * 2, b.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
        for real, truth in ((2.5, True), (-1.0, False)):
            same(compiled(X, torch.tensor(real), torch.tensor(truth)), (X * real, 2 * real, truth))


class Exported(torch.nn.Module):
    def forward(self, x: Tensor, f: Tensor, b: Tensor) -> Any:
        real = f.item()
        if not is_before("2.13"):  # whose export cannot print a condition on such a number
            torch._check(real > -100)
        return (x * real).cos(), real, b.item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_numbers_of_an_exported_program(emitter: str) -> None:
    inputs = (X, torch.tensor(2.5), torch.tensor(True))
    compiled = fxwrap.compile_graph(torch.export.export(Exported(), inputs), options=Options(emitter=emitter))
    for real, truth in ((2.5, True), (-1.0, False)):
        same(compiled(X, torch.tensor(real), torch.tensor(truth)), ((X * real).cos(), real, truth))


@pytest.mark.parametrize("emitter", EMITTERS)
def test_inputs_of_the_wrong_number_type(emitter: str) -> None:
    symbolic = Symbolic()
    x, f, b = symbolic.tensor("x", 4, 6), symbolic.unknown_real("f"), symbolic.truth("b")
    compiled = compiled_for(emitter, symbolic.module(symbolic.call(ATEN.mul.Tensor, x, f), b))
    for inputs, text in (((X, "2", True), "expected a float, got str"), ((X, 2.0, None), "expected a bool, got None")):
        with pytest.raises(InputError, match=text):
            compiled(*inputs)


def test_a_bool_saved_for_the_backward() -> None:
    """The backward of a branch takes the number that chose it, which is an input of that graph."""

    def function(x: Tensor, b: Tensor) -> Any:
        truth = b.item()
        return torch.cond(truth, lambda x: x * 2, lambda x: x.sin(), (x,)), truth

    arguments = random(4, 6, gradient=True), torch.tensor(True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graphs = check_all_sizes(
            function, [arguments, (arguments[0], torch.tensor(False))], training=True, dynamic=None
        )
    backward = graphs[-1].compiled.program
    assert next(item.value.name for item in backward.inputs if isinstance(item.value, SymbolInfo)).startswith("b")


@pytest.mark.parametrize("emitter", EMITTERS)
def test_powers_and_quotients(emitter: str) -> None:
    """Negative powers, those of negative numbers and of sums; quotients of negative numbers are rounded down."""
    expressions = [parse_expr(text) for text in POWERS]
    names = [f"{expression_kind(item)[0].replace('i', 'n')}{number}" for number, item in enumerate(expressions, 1)]
    lines = [f"{name} = symbol.let expr={text}" for name, text in zip(names, POWERS, strict=True)]
    sizes = ("s0 = symbol.size(%x) dim=0", "s1 = symbol.size(%x) dim=1")
    body = "\n  ".join((*sizes, *lines, f"control.return({', '.join(names)})"))
    program = fxwrap.parse(f"program @powers(%x: borrowed f32[s0, s1]@cpu, f0: float) {{\n  {body}\n}}\n")
    result = emit(program, emitter)(torch.zeros(3, 5), 1.5)
    known = {"s0": 3, "s1": 5, "f0": 1.5}
    expected = [evaluate(item, known) for item in expressions]
    assert [type(number) for number in result] == [type(number) for number in expected]
    assert result == pytest.approx(expected, rel=1e-15)

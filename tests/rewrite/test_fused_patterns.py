"""Patterns of kernels: operands are bound by role, numbers are captured and constrained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options, Pass
from fxwrap import rewrite as rw
from fxwrap.debugging import copy_inputs
from fxwrap.errors import ParseError
from fxwrap.wrapper_ir import (
    CallResult,
    LaunchOperand,
    Program,
    UnreadOperand,
    launched_calls,
    parse_kernel_calls,
    print_kernel_calls,
    types_agree,
)  # fmt: skip
from tests.support.capture import capture_graphs
from tests.support.long_form import long_only
from tests.support.models import SHALLOW

X, Y, Z = rw.tensors("x y z")
SUB, ADD, GELU, ROUND, DIV = (
    "aten.sub.Tensor",
    "aten.add.Tensor",
    "aten.gelu.default",
    "aten.round.default",
    "aten.div.Tensor",
)
MM = rw.call("aten.mm.default", X, Y)


def lowered(function: Callable[..., object], *inputs: Tensor) -> Program:
    return fxwrap.lower(make_fx(function)(*inputs), list(inputs))


def square(count: int) -> list[Tensor]:
    return [torch.randn(8, 8) for _ in range(count)]


def minuend_product(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x @ y - z


def subtrahend_product(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return z - x @ y


PATTERNS = {
    "names": lambda first, second: rw.launch(rw.computes(SUB), first, second),
    "calls": lambda first, second: rw.launch(rw.computes(rw.call(SUB, first, second))),
    "computed": lambda first, second: rw.computed(SUB, first, second),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_operands_of_a_kernel_are_bound_by_role(kind: str) -> None:
    """Both kernels write the product's memory in place, with the same launch line."""
    inputs = square(3)
    programs = [lowered(function, *inputs) for function in (minuend_product, subtrahend_product)]
    launches = [next(line for line in program.lines() if line.opcode == "kernel.launch") for program in programs]
    assert str(launches[0]).replace("_1", "") == str(launches[1]).replace("_1", "")
    pattern = PATTERNS[kind](MM, Z)
    assert [len(rw.find(program, pattern).matches) for program in programs] == [1, 0]
    assert [len(rw.find(program, PATTERNS[kind](Z, MM)).matches) for program in programs] == [0, 1]
    result = rw.rewrite(programs[0], pattern, rw.call("aten.rsub.Tensor", Z, rw.call("aten.mm.default", X, Y)))
    torch.testing.assert_close(fxwrap.run(result.program, inputs)[0], minuend_product(*inputs))


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_a_rewritten_difference_has_its_sign_in_every_emitter(emitter: str) -> None:
    inputs = square(3)
    named = rw.launch(rw.computes(SUB), Y, Z)
    as_rsub = rw.rewrite_pass(named, rw.call("aten.rsub.Tensor", Z, Y), key="1", name="as_rsub")
    for function in (minuend_product, subtrahend_product):
        compiled = fxwrap.compile_graph(
            make_fx(function)(*inputs),
            inputs,
            options=Options(emitter=emitter, passes=[as_rsub]),  # type: ignore[arg-type]
        )
        assert "aten.rsub" in str(compiled.program)
        torch.testing.assert_close(compiled(*inputs)[0], function(*inputs))


@pytest.mark.parametrize("point", ["ir_before_emission", "fx_emitted"])
@pytest.mark.parametrize("form", ["functional", "in_place"])
def test_roles_are_those_of_planned_and_of_emitted_programs(point: Any, form: Any) -> None:
    inputs = square(3)
    as_rsub = rw.rewrite_pass(rw.launch(rw.computes(SUB), Y, Z), rw.call("aten.rsub.Tensor", Z, Y), key="1", at=point)
    options = Options(emitter="fx", fx_form=form, passes=[as_rsub])
    for function in (minuend_product, subtrahend_product):
        compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)
        assert "aten.rsub" in str(compiled.program)
        torch.testing.assert_close(compiled(*inputs)[0], function(*inputs))


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("form", ["functional", "in_place"])
def test_kernel_nodes_of_emitted_graphs_have_operands_by_role(form: Any, language: Any) -> None:
    inputs = square(3)
    options = Options(emitter="fx", fx_form=form, cpu_kernels=language)
    aten = torch.ops.aten
    for function in (minuend_product, subtrahend_product):
        graph_module = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options).graph_module
        (match,) = rw.replace_in_graph(
            graph_module, lambda x, y: rw.kernel_node(SUB)(x, y), lambda x, y: aten.add.Tensor(aten.neg.default(y), x)
        )
        assert not match.failure_reason
        torch.testing.assert_close(graph_module(*inputs)[0], function(*inputs))
        assert not list(rw.kernel_nodes(graph_module))


def test_numbers_of_kernel_nodes_are_operands() -> None:
    (x,) = square(1)
    options = Options(emitter="fx")
    scaled = make_fx(lambda x: torch.round(x / 7))(x)
    graph_module = fxwrap.compile_graph(scaled, [x], options=options).graph_module

    def rounded(scale: float) -> list[rw.GraphMatch]:
        kernel = rw.kernel_node(DIV, ROUND)
        return rw.replace_in_graph(graph_module, lambda x: kernel(x, scale), lambda x: torch.ops.aten.neg.default(x))

    assert (len(rounded(0.05)), len(rounded(7))) == (0, 1)


def test_numbers_are_captured_and_constrained() -> None:
    (x,) = square(1)
    fine, coarse = lowered(lambda x: torch.round(x / 0.05), x), lowered(lambda x: torch.round(x / 7), x)
    scale = rw.number("scale")
    any_scale = rw.launch(rw.computes(rw.call(ROUND, rw.call(DIV, X, scale))))
    assert [rw.find(item, any_scale).matches[0]["scale"] for item in (fine, coarse)] == [0.05, 7]
    for pattern in (
        rw.launch(rw.computes(rw.call(ROUND, rw.call(DIV, X, 0.05)))),
        rw.launch(rw.computes(DIV, ROUND), X, 0.05),
        rw.launch(rw.computes(DIV, ROUND), X, rw.number("scale", where=lambda scale: scale < 1)),
    ):
        assert [len(rw.find(item, pattern).matches) for item in (fine, coarse)] == [1, 0]
        assert rw.find(coarse, pattern).match_failures[0].reason
    assert not rw.find(fine, rw.launch(rw.computes(DIV, ROUND), X)).matches  # the number is an operand
    reason = rw.find(coarse, rw.launch(rw.computes(rw.call(ROUND, rw.call(DIV, X, 0.05))))).match_failures[0].reason
    assert reason == "operand 0 of aten.round.default: operand 1 of aten.div.Tensor: 0.05 is expected, not 7"


def test_an_argument_that_is_not_its_default_is_an_operand() -> None:
    (x,) = square(1)
    program = lowered(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), x)
    assert not rw.find(program, rw.launch(rw.computes(GELU), X)).matches
    assert not rw.find(program, rw.computed(GELU, X)).matches
    assert rw.find(program, rw.computed(GELU, X, approximate="tanh")).matches
    assert rw.find(program, rw.launch(rw.computes(GELU), X, "tanh")).matches


def test_a_kernel_that_computes_more_does_not_match() -> None:
    inputs = square(3)
    program = lowered(lambda x, y, z: x + y + z, *inputs)
    once = rw.launch(rw.computes(rw.call(ADD, X, Y)))
    assert not rw.find(program, once).matches and not rw.find(program, rw.launch(rw.computes(ADD), ...)).matches
    assert "'x' is computed by the kernel itself: aten.add.Tensor" in rw.find(program, rw.computed(ADD, X, Y)).report()
    assert rw.find(program, rw.launch(rw.computes(rw.call(ADD, rw.call(ADD, X, Y), Z)))).matches
    assert rw.find(program, rw.launch(rw.computes(ADD, ADD), X, Y, Z)).matches
    transposed = lowered(lambda x, y: x - y.t(), *inputs[:2])
    assert not rw.find(transposed, rw.launch(rw.computes(SUB), X, Y)).matches
    assert rw.find(transposed, rw.launch(rw.computes(rw.call(SUB, X, rw.view(Y))))).matches
    assert rw.find(transposed, rw.launch(rw.computes("aten.t.default", SUB), Y, X)).matches[0]["x"].name == "x_1"


def test_results_have_the_order_of_the_pattern() -> None:
    inputs = square(2)

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return torch.nn.functional.gelu(total), total

    program = lowered(both, *inputs)
    total = rw.call(ADD, X, Y)
    for order in ((0, 1), (1, 0)):
        roots = [(rw.call(GELU, total), total)[index] for index in order]
        new = [(rw.call("aten.relu.default", Y), rw.call("aten.neg.default", X))[index] for index in order]
        result = rw.rewrite(program, rw.launch(rw.computes(*roots)), tuple(new))
        assert len(result.matches) == 1
        outputs = fxwrap.run(result.program, inputs)
        torch.testing.assert_close(outputs, [torch.relu(inputs[1]), -inputs[0]])


def test_a_call_is_matched_within_the_kernel_or_before_it() -> None:
    """Whether the first operator is fused is a choice of the compiler."""
    inputs = square(2)
    graph = make_fx(lambda x, y: torch.nn.functional.gelu(x + y))(*inputs)
    pattern = rw.launch(rw.computes(rw.call(GELU, rw.call(ADD, X, Y))))
    for preserved in ((), (ADD,)):
        program = fxwrap.lower(graph, inputs, options=Options(preserve_ops=frozenset(preserved)))
        (match,) = rw.find(program, pattern).matches
        assert (match["x"].name, match["y"].name) == ("x_1", "y_1") and len(match.lines) == 1 + len(preserved)


def test_commutative_operands_may_be_swapped_within_a_kernel() -> None:
    (x,) = square(1)
    program = lowered(lambda x: torch.relu(x) + x, x)
    call = rw.call(ADD, X, rw.call("aten.relu.default", X))
    assert not rw.find(program, rw.launch(rw.computes(call))).matches
    assert rw.find(program, rw.launch(rw.computes(call.as_commutative()))).matches


def test_symbolic_numbers_are_operands() -> None:
    x = torch.randn(5, 8)
    graph = make_fx(lambda x: x * x.shape[0], tracing_mode="symbolic")(x)
    (match,) = rw.find(fxwrap.lower(graph, [x]), rw.computed("aten.mul.Tensor", X, rw.number("n"))).matches
    assert str(match["n"]) in ("s0", "s77", "s97") or match["n"].is_Symbol


def test_a_saved_program_has_roles(tmp_path: Path) -> None:
    x, y, z = square(3)
    program = lowered(lambda x, y, z: (minuend_product(x, y, z), torch.full_like(x, 2.5) - x.sum()), x, y, z)
    fxwrap.save(program, tmp_path / "saved.fxw")
    loaded = fxwrap.load(tmp_path / "saved.fxw").program
    calls = [(launched_calls(a.origin), launched_calls(b.origin))
             for a, b in zip(program.lines(), loaded.lines(), strict=True)]  # fmt: skip
    assert all(before == after for before, after in calls) and any(after for _, after in calls)
    for kind in PATTERNS.values():
        (match,) = rw.find(loaded, kind(X, Z)).matches
        assert match["z"] == loaded.inputs[2].value


@pytest.mark.parametrize("text", ["[]", "[[], [], [3]]", '[[["aten.relu.default", [["what", 1]], [], false]], [], []]',
                                  "[[3], [], []]", "[[", "relu(1)"])  # fmt: skip
def test_other_texts_of_calls_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_kernel_calls(text)


def test_a_parsed_program_has_no_roles() -> None:
    program = lowered(minuend_product, *square(3))
    parsed = fxwrap.parse(str(program))
    result = rw.find(parsed, rw.launch(rw.computes(SUB), X, Y))
    assert not result.matches and "the operands of @sub_0 have no known roles" in result.match_failures[0].reason
    assert rw.find(parsed, rw.launch("sub_0", ...)).matches


def test_some_operators_of_a_kernel() -> None:
    (x,) = square(1)
    program = lowered(lambda x: torch.round(x / 7), x)
    assert rw.find(program, rw.launch(rw.computes(DIV, exactly=False), ...)).matches
    assert not rw.find(program, rw.launch(rw.computes(SUB, exactly=False), ...)).matches


# --- the calls of a launch are what its kernel computes ---------------------------------------------------------------


def as_calls(match: rw.Match, builder: rw.LineBuilder) -> Any:
    """Replaces a launch by the calls in its origin."""
    (line,) = match.lines
    calls = launched_calls(line.origin)
    if calls is None:
        raise rw.Skip("its calls are unknown")
    text = print_kernel_calls(calls)
    assert text is not None and parse_kernel_calls(text) == calls
    results: list[Any] = []

    def operand(item: object) -> Any:
        match item:
            case LaunchOperand():
                value = (line.outs if item.is_out else line.arguments)[item.position]  # type: ignore[attr-defined]
                if item.is_base:
                    raise rw.Skip("it takes the base of a view")
                is_same = types_agree(value.type, item.type, compare_strides=False)
                return value if is_same else builder.view(value, item.type.sizes)  # type: ignore[union-attr]
            case CallResult():
                return results[item.call] if item.index is None else results[item.call][item.index]
            case UnreadOperand():
                raise rw.Skip("it takes a tensor that the kernel does not read")
            case tuple():
                return tuple(map(operand, item))
            case _:
                return item

    for call in calls.calls:
        keywords = {name: operand(item) for name, item in call.keywords}
        results.append(builder.call(call.target, *map(operand, call.arguments), **keywords))
    return tuple(map(operand, calls.results))


@pytest.mark.parametrize(
    ("name", "training"),
    [("resnet", True), *[long_only(*item) for item in product(("gpt2", "llama", "t5", "bert"), (False, True))]],
)
def test_the_calls_of_a_launch_compute_what_its_kernel_does(name: str, training: bool) -> None:
    replaced = Pass(lambda program: rw.rewrite(program, rw.launch(lambda *_: True, ...), as_calls), key="1")
    counts = Counter[str]()
    for graph in capture_graphs(SHALLOW[name], training):
        inputs = [copy_inputs(graph.inputs) for _ in range(2)]
        options = Options(emitter="interpreter", passes=[replaced])
        compiled = fxwrap.compile_graph(graph.graph_module, graph.example_inputs, options=options)
        plain = fxwrap.compile_graph(graph.graph_module, graph.example_inputs, options=Options(emitter="interpreter"))
        for ours, theirs in zip(compiled.flat(*inputs[0]), plain.flat(*inputs[1]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
        counts["replaced"] += compiled.passes[0].matches or 0
        counts.update([reason for _, reason in compiled.passes[0].near_misses])
    assert counts["replaced"] >= 2, counts

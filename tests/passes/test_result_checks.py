"""Operators from outside torch whose results are not those of their fake implementation: errors, not wrong elements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.emitted_program import checks_inputs
from fxwrap.errors import ResultError
from fxwrap.lines import CheckLayout
from fxwrap.passes.result_checks import check_results

WRONG: dict[str, Callable[[Tensor], Tensor | None]] = {
    "right": lambda x: x.clone(),
    "strides": lambda x: x.t().contiguous().t(),
    "dtype": lambda x: x.double(),
    "sizes": lambda x: x[:-1].clone(),
    "none": lambda x: None,
}
"""Results of an operator whose fake result is like its operand, by the difference."""

kind = ["right"]


def _result(x: Tensor) -> Any:
    return WRONG[kind[0]](x)


def _new_rows(x: Tensor) -> Tensor:
    return torch.empty(torch.library.get_ctx().new_dynamic_size(), 3)


OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "one(Tensor x) -> Tensor": (_result, torch.empty_like),
    "two(Tensor x) -> (Tensor, Tensor)": (
        lambda x: (x + 1, _result(x)),
        lambda x: (torch.empty_like(x), torch.empty_like(x)),
    ),
    "list(Tensor x) -> Tensor[]": (lambda x: [_result(x)], lambda x: [torch.empty_like(x)]),
    "add_one(Tensor(a!) x) -> Tensor": (lambda x: _result(x.add_(1)), torch.empty_like),
    "rows(Tensor x) -> Tensor": (
        lambda x: torch.ones(3, 5).t() if kind[0] == "strides" else x.new_ones(5, 3),
        _new_rows,
    ),
}
"""Implementations and fake implementations, by schema."""


@pytest.fixture(autouse=True)
def ops() -> Iterator[Any]:
    library = torch.library.Library("fxwrap_results_checked", "DEF")
    for schema, (function, fake) in OPERATORS.items():
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fxwrap_results_checked::{name}", fake, lib=library)
    kind[0] = "right"
    yield torch.ops.fxwrap_results_checked
    library._destroy()


PROGRAMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one": lambda ops, x: ops.one(x + 1) * 3,
    "two": lambda ops, x: ops.two(x + 1)[1] * 3,
    "list": lambda ops, x: ops.list(x + 1)[0] * 3,
    "add_one": lambda ops, x: ops.add_one(x) * 3,
    "rows": lambda ops, x: ops.rows(x + 1) * 3,
    "cond": lambda ops, x: torch.cond(x.sum() > 0, lambda x: ops.one(x) + 1, lambda x: x - 1, (x,)),
}


@pytest.mark.parametrize("emitter", ["python", "cpp"])
@pytest.mark.parametrize("name", PROGRAMS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_wrong_results_are_errors(ops: Any, name: str, emitter: str) -> None:
    """They were read by the strides and the dtype of the fake result, also outside of their memory."""
    function = PROGRAMS[name]
    compiled = torch.compile(lambda x: function(ops, x), backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    x = torch.rand(6, 4)
    torch.testing.assert_close(compiled(x.clone()), function(ops, x.clone()))
    operator = "one" if name == "cond" else name
    if name == "rows":  # its fake result has no sizes
        kinds = ["strides"]
    else:  # torch itself rejects None in a list
        kinds = [item for item in WRONG if item != "right" and (name, item) != ("list", "none")]
    for kind[0] in kinds:
        message = rf"result '\w+' of fxwrap_results_checked\.{operator}\.default: its fake implementation returns f32\["
        with pytest.raises(
            ResultError, match=message + r".* Correct its fake implementation \(torch\.library\.register"
        ):
            compiled(x.clone())


def test_all_emitters_say_the_same(ops: Any) -> None:
    x = torch.rand(6, 4)
    program = fxwrap.compile_graph(
        make_fx(lambda x: ops.one(x) * 3, tracing_mode="fake")(x), example_inputs=[x]
    ).program
    kind[0] = "strides"
    expected = (
        "result 'one' of fxwrap_results_checked.one.default: its fake implementation returns f32[6, 4] on cpu with "
        "strides (4, 1), the operator f32[6, 4] on cpu with strides (1, 6). Correct its fake implementation "
        "(torch.library.register_fake), or the operator"
    )
    for item in (fxwrap.to_python(program), fxwrap.to_cpp(program)):
        with pytest.raises(ResultError, match=re.escape(expected)):
            item.flat(x)


def test_checks_follow_all_symbols_of_a_call(ops: Any) -> None:
    """No line stands between a call and the last line that defines a symbol of its types."""
    program = check_results(
        fxwrap.parse("""
program @p(%x: borrowed f32[4, 3]@cpu) {
  %a, %b = extern.call @fxwrap_results_checked.two.default(%x) : f32[u0, 3]@cpu, f32[u1, 3]@cpu
  u1 = symbol.size(%b) dim=0 rank=2
  u0 = symbol.size(%a) dim=0 rank=2
  control.return(%a, %b)
}
""")
    )
    assert [line.opcode for line in fxwrap.verify(program).body.lines] == [
        "extern.call", "symbol.size", "symbol.size", "check.layout", "check.layout", "control.return"
    ]  # fmt: skip


def test_graphs_have_no_checks_of_results(ops: Any) -> None:
    """The operator's result has the readers that it has in the model: patterns of rewrites match."""
    x = torch.rand(6, 4)
    graph_module = fxwrap.to_fx(
        fxwrap.compile_graph(make_fx(lambda x: ops.one(x) * 3, tracing_mode="fake")(x), example_inputs=[x]).program
    ).graph_module
    (call,) = graph_module.graph.find_nodes(op="call_function", target=ops.one.default)
    assert [user.op for user in call.users] == ["call_function", "output"]  # the product is written in its memory
    assert not [
        line for line in fxwrap.from_fx(graph_module).lines() if isinstance(line, CheckLayout) and line.operator
    ]


def test_a_check_follows_the_symbols_of_its_type(ops: Any) -> None:
    """And precedes the use that consumes the result. Operators of torch and unused results have none."""
    program = fxwrap.verify(
        check_results(
            fxwrap.parse("""
program @p(%x: borrowed f32[4, 3]@cpu) {
  %s = extern.call @aten.sin.default(%x) : f32[4, 3]@cpu
  %y = extern.call @fxwrap_results_checked.rows.default(%s) : f32[u0, 3]@cpu
  u0 = symbol.size(%y) dim=0 rank=2
  %z = memory.reuse(%y) : f32[u0, 3]@cpu
  extern.call @aten.sin.out(%z) outs=(%z)
  _, %b = extern.call @fxwrap_results_checked.two.default(%s) : none, f32[4, 3]@cpu
  memory.free(%s)
  control.return(%z, %b)
}
""")
        )
    )
    lines = program.body.lines
    checks = {line.tensor.name: at for at, line in enumerate(lines) if isinstance(line, CheckLayout)}
    assert [(name, lines[at - 1].opcode) for name, at in checks.items()] == [("y", "symbol.size"), ("b", "extern.call")]
    assert fxwrap.parse(str(program)) == program
    assert not checks_inputs(program)
    assert (
        check_results(unchanged := fxwrap.parse(str(program).replace("fxwrap_results_checked", "quantized")))
        is unchanged
    )

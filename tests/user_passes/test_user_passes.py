"""The user's passes: where they run and in which order, their keys, the registry, and errors of wrong ones."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options, Pass
from fxwrap import rewrite as rw
from fxwrap.errors import OptionError, PassError, PassWarning
from fxwrap.lines import ExternCall, Free
from fxwrap.options import empty_pass_registry
from fxwrap.wrapper_ir import Block, Program, Value

aten = torch.ops.aten


def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ y).t()


def inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 3), torch.randn(3, 4)]


def compiled(*passes: Any, **options: Any) -> fxwrap.Compiled:
    graph = make_fx(function, tracing_mode="fake")(*inputs())
    return fxwrap.compile_graph(graph, inputs(), options=Options(passes=passes, fuse=False, **options))


@pytest.fixture
def registry() -> Iterator[None]:
    with empty_pass_registry():
        yield


# --- where and when ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitter", ["fx", "python"])
def test_passes_run_at_their_points_in_order(emitter: str) -> None:
    seen: list[str] = []

    def watch(name: str, at: str, order: int = 0) -> Pass:
        def run(what: Any) -> Any:
            kind = "graph" if isinstance(what, GraphModule) else "program"
            planned = isinstance(what, Program) and "memory.pool" in str(what)
            seen.append(f"{name}: {kind}{' planned' if planned else ''}")
            return None if kind == "graph" else what

        return Pass(run, key=name, at=at, name=name, order=order)

    passes = [
        watch("last", "fx_emitted"), watch("third", "ir_before_planning", 1), watch("second", "ir_before_planning"),
        watch("fourth", "ir_before_emission"), watch("first", "fx_before_lowering"),
    ]  # fmt: skip
    options = {"passes": passes, "emitter": emitter, "memory_planning": "auto"}
    model = torch.compile(lambda x, y: torch.cos(torch.sin(x @ y) @ y) @ y, backend="fxwrap", options=options)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    torch.testing.assert_close(model(x, y), torch.cos(torch.sin(x @ y) @ y) @ y)
    assert [text.partition(":")[0] for text in seen] == ["first", "second", "third", "fourth", "last"]
    assert [text.partition(": ")[2] for text in seen[:3]] == ["graph", "program", "program"]
    assert seen[3].startswith("fourth: program") and seen[4] == "last: graph"


def to_sigmoid(graph_module: GraphModule) -> None:
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.tanh.default):
        node.target = aten.sigmoid.default


X = rw.tensor("x")
PASSES = {
    "fx_before_lowering": Pass(to_sigmoid, key="1", at="fx_before_lowering"),
    "ir_before_planning": rw.rewrite_pass(rw.call("aten.tanh.default", X), rw.call("aten.sigmoid.default", X), key="1"),
    "ir_before_emission": rw.rewrite_pass(
        rw.call("aten.tanh.default", X), rw.call("aten.sigmoid.default", X), key="1", at="ir_before_emission"
    ),
    "fx_emitted": Pass(to_sigmoid, key="1", at="fx_emitted"),
}


@pytest.mark.parametrize("emitter", ["fx", "python"])
@pytest.mark.parametrize("at", PASSES)
def test_a_pass_at_each_point_takes_effect(at: str, emitter: str) -> None:
    x, y = inputs()
    result = compiled(PASSES[at], emitter=emitter)
    torch.testing.assert_close(result(x, y)[0], torch.sigmoid(x @ y).t())
    assert "aten.sigmoid.default" in str(result.program) and "aten.tanh" not in str(result.program)
    stages = [stage.pass_name for stage in result.stages]
    assert at == "fx_before_lowering" or PASSES[at].name in stages
    assert f"passes=({PASSES[at].name}[1]@{at})" in str(result.program)


def test_passes_do_not_modify_the_callers_graph() -> None:
    graph = make_fx(function, tracing_mode="fake")(*inputs())
    before = str(graph.graph)
    options = Options(passes=[PASSES["fx_before_lowering"]])
    fxwrap.compile_graph(graph, inputs(), options=options)
    assert str(graph.graph) == before


# --- keys and names ---------------------------------------------------------------------------------------------------


def test_a_pass_without_a_key_warns() -> None:
    with pytest.warns(PassWarning, match="pass 'to_sigmoid' has no key, so its results are not cached"):
        options = Options(passes={"fx_emitted": [to_sigmoid]})
    assert not options.cacheable and options.passes[0].at == "fx_emitted"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not options.replace(emitter="fx").cacheable  # it has been said
        assert Options(passes=[PASSES["fx_emitted"]]).cacheable


def test_an_object_may_have_a_key_and_a_point() -> None:
    @dataclasses.dataclass(frozen=True)
    class Same:
        limit: int = 3
        at = "ir_before_emission"

        @property
        def key(self) -> str:
            return f"1 {self.limit}"

        def __call__(self, program: Program) -> Program:
            return program

    (actual,) = Options(passes=[Same(4)]).passes
    assert (actual.key, actual.at) == ("1 4", "ir_before_emission") and actual.name.endswith("Same")


def test_pass_keys_are_part_of_the_cache_key() -> None:
    def same(program: Program) -> Program:
        return program

    first, second, equal = (compiled(Pass(same, key=key)) for key in ("1", "2", "1"))
    assert first.key == equal.key != second.key
    assert fxwrap.environment_key(first.options) != fxwrap.environment_key(second.options)


@pytest.mark.usefixtures("registry")
def test_registered_passes_have_names_and_options() -> None:
    @fxwrap.register_pass("test.limit", key="7", at="ir_before_emission", order=2)
    def limited(program: Program, *, limit: int = 1, name: str = "a") -> Program:
        return program.replace(name=f"{name}{limit}")

    assert compiled("test.limit").program.name == "a1"
    assert compiled(("test.limit", {"limit": 5, "name": "b"})).program.name == "b5"
    actual = rw.registered_pass("test.limit", name="b", limit=5)
    assert (actual.key, actual.name, actual.at, actual.order) == (
        "7 limit=5, name='b'", "test.limit(limit=5, name='b')", "ir_before_emission", 2,
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"unknown pass 'test.other'; known passes: test\.limit"):
        Options(passes=["test.other"])
    with pytest.raises(OptionError, match=r"option 'limit' of pass 'test\.limit' takes plain data"):
        Options(passes=[("test.limit", {"limit": object()})])
    with pytest.raises(OptionError, match=r"pass 'test\.limit' is already registered"):
        fxwrap.register_pass("test.limit", key="1")(to_sigmoid)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pass(to_sigmoid, key=""), "the key of a pass is a string that is not empty"),
        (lambda: Pass(to_sigmoid, key="1", at="nowhere"), "unknown pass point 'nowhere'; known points: "),
        (lambda: Pass(3, key="1"), "a pass is a function"),  # type: ignore[arg-type]
        (lambda: Options(passes=3), "option 'passes' takes a list of passes"),  # type: ignore[arg-type]
        (lambda: Options(passes=[3]), "a pass is a function"),  # type: ignore[list-item,arg-type]
        (lambda: Options(passes={"fx_emitted": [PASSES["ir_before_planning"]]}), "runs at 'ir_before_planning', not"),
    ],
)  # fmt: skip
def test_invalid_passes_are_rejected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


# --- wrong passes over programs ---------------------------------------------------------------------------------------


def replacing_pass(change: Callable[[Any], Any], at: str = "ir_before_planning") -> Pass:
    """A pass that replaces each line of the body by the result of `change`, and drops it for None."""

    def wrong(program: Program) -> Program:
        lines = [new for line in program.body.lines if (new := change(line)) is not None]
        return program.replace(body=Block((), tuple(lines)))

    return Pass(wrong, key="1", at=at)


def tanh_pass(change: Callable[[ExternCall], Any]) -> Pass:
    return replacing_pass(lambda line: change(line) if getattr(line, "target", "") == "aten.tanh.default" else line)


def in_half(line: ExternCall) -> ExternCall:
    value = line.results[0]
    half = Value(value.name, dataclasses.replace(value.type, dtype=torch.float16))
    return line.replace(results=(half,), target="aten._to_copy.default", keywords=(("dtype", torch.float16),))


@pytest.mark.parametrize(
    ("wrong", "reason", "where"),
    [
        (tanh_pass(lambda line: None), r"\[undefined\] %tanh is not defined here", "> %t = memory.view(%tanh)"),
        (replacing_pass(lambda line: None if isinstance(line, Free) else line), r"\[leak\] %mm is neither",
         "> control.return"),
        (
            tanh_pass(lambda line: line.replace(arguments=(line.results[0],))),
            r"\[undefined\] %tanh",
            "> %tanh = extern",
        ),
        (tanh_pass(lambda line: line.replace(target="vendor.tanh.default")), "torch has no operator 'vendor",
         "> %tanh = extern.call @vendor.tanh.default(%mm)"),
        (tanh_pass(lambda line: line.replace(target="aten.sum.default")),
         r"aten.sum.default returns f32\[\]@cpu for %tanh, and the line declares f32\[4, 4\]@cpu",
         "> %tanh = extern.call"),
        (tanh_pass(lambda line: line.replace(target="aten.mm.default")), "aten.mm.default fails on these", "> %tanh"),
        (
            tanh_pass(in_half),
            r"\[type\] %tanh is used with another type than that of its definition",
            "> %t = memory.view",
        ),
        (tanh_pass(lambda line: line.replace(target="aten.rand_like.default")), "has the effect random", "> %tanh"),
        (tanh_pass(lambda line: line.replace(target="aten.tanh_.default")), "aten.tanh_.default writes %mm, and",
         "> %tanh"),
        (tanh_pass(lambda line: line.replace(target="aten.view.dtype", arguments=(*line.arguments, torch.float32))),
         "%tanh aliases %mm, and the line declares it as a new storage", "> %tanh"),
        (
            replacing_pass(lambda line: line.replace(values=()) if line.terminator else line),
            r"\[leak\]",
            "> control.return",
        ),
        (Pass(lambda program: program.replace(inputs=program.inputs[:1]), key="1"), r"\[undefined\] %y_1", "> "),
        (Pass(lambda program: None, key="1"), "it returned a NoneType, not a program", ""),
        (Pass(lambda program: 1 // 0, key="1"), "it raised ZeroDivisionError", ""),
    ],
)  # fmt: skip
def test_an_invalid_program_pass_is_named_with_line_and_reason(wrong: Pass, reason: str, where: str) -> None:
    with pytest.raises(PassError, match=reason) as caught:
        compiled(wrong)
    error = caught.value
    assert str(error).startswith(f"pass '{wrong.name}' (ir_before_planning): ")
    assert where in error.where and "control.return(%t)" in error.before
    assert not error.after or ("--- before" in str(error) and error.diff)


def test_a_use_after_free_is_detected() -> None:
    def early(program: Program) -> Program:
        lines = list(program.body.lines)
        (free,) = [line for line in lines if isinstance(line, Free)]
        lines.remove(free)
        place = next(i for i, line in enumerate(lines) if getattr(line, "target", "") == "aten.tanh.default")
        return program.replace(body=Block((), (*lines[:place], free, *lines[place:])))

    with pytest.raises(PassError, match=r"\[consumed\] %mm is used after its root, %mm, was consumed") as caught:
        compiled(Pass(early, key="1", at="ir_before_emission"))
    assert "> %tanh = extern.call @aten.tanh.default(%mm)" in caught.value.where
    assert "+  memory.free(%mm)" in caught.value.diff


def test_a_result_dtype_mismatch_is_detected() -> None:
    half = rw.rewrite_pass(X_TANH, rw.call("aten._to_copy.default", X, dtype=torch.float16), key="1")
    with pytest.raises(PassError, match=r"it raised RewriteError: replacing %tanh = extern\.call") as caught:
        compiled(half)
    assert "%tanh is f32[4, 4]@cpu, but its replacement is f16[4, 4]@cpu" in str(caught.value)

    def retyped(program: Program) -> Program:
        text = str(program).replace("f32", "f16")
        inputs = program.inputs
        return dataclasses.replace(fxwrap.parse(text), inputs=inputs)

    with pytest.raises(PassError, match=r"\[type\]"):
        compiled(Pass(retyped, key="1"))


X_TANH = rw.call("aten.tanh.default", X)


def test_a_missing_result_is_detected() -> None:
    def fewer(program: Program) -> Program:
        *lines, last = program.body.lines
        return program.replace(body=Block((), (*lines, Free(last.values[0]), last.replace(values=()))))

    with pytest.raises(PassError, match="it returns 0 results, and the program returned 1"):
        fxwrap.compile_graph(
            make_fx(lambda x: torch.tanh(x), tracing_mode="fake")(torch.ones(2)), [torch.ones(2)],
            options=Options(passes=[Pass(fewer, key="1")], fuse=False),
        )  # fmt: skip


# --- wrong passes over graphs -----------------------------------------------------------------------------------------


def tanh_graph_pass(change: Callable[[GraphModule, Any], Any]) -> Callable[[GraphModule], Any]:
    def wrong(graph_module: GraphModule) -> Any:
        (node,) = graph_module.graph.find_nodes(op="call_function", target=aten.tanh.default)
        return change(graph_module, node)

    return wrong


def retarget(target: Any, **keywords: Any) -> Callable[[GraphModule], Any]:
    def change(graph_module: GraphModule, node: Any) -> None:
        node.target, node.kwargs = target, keywords

    return tanh_graph_pass(change)


def dangle(graph_module: GraphModule, node: Any) -> None:
    other = torch.fx.Graph().placeholder("elsewhere")
    node.args = (other,)


def misplace(graph_module: GraphModule, node: Any) -> None:
    (user,) = node.users
    user.append(node)


def call_method(graph_module: GraphModule, node: Any) -> None:
    with graph_module.graph.inserting_after(node):
        node.replace_all_uses_with(graph_module.graph.call_method("tanh", (node.args[0],)))


def half_at_the_end(graph_module: GraphModule, node: Any) -> None:
    with graph_module.graph.inserting_after(node):
        half = graph_module.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float16})
    node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)


def more_results(graph_module: GraphModule) -> None:
    output = graph_module.graph.output_node()
    arguments = output.args[0]
    output.args = ((arguments, arguments) if not isinstance(arguments, tuple | list) else (*arguments, *arguments),)


def more_inputs(graph_module: GraphModule) -> None:
    graph = graph_module.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("z")


@pytest.mark.every_combination
@pytest.mark.parametrize("at", ["fx_before_lowering", "fx_emitted"])
@pytest.mark.parametrize(
    ("run", "reason", "where"),
    [
        (retarget(torch.tanh), "node 'tanh': 'tanh' is not an operator overload with a schema", "torch.tanh"),
        (tanh_graph_pass(call_method), "call_method of 'tanh' is not an ATen operator", "call_method[target=tanh]"),
        (
            tanh_graph_pass(dangle),
            "node 'tanh' uses 'elsewhere', which is no longer in the graph",
            "args = (%elsewhere,)",
        ),
        (tanh_graph_pass(misplace), "the graph is not well formed: Argument 'tanh' of Node", ""),
        (retarget(aten.mm.default), "node 'tanh': aten.mm.default fails on these inputs", "%tanh"),
        (retarget(aten.sum.default), "fails on these inputs|result 0 was", "%"),
        (tanh_graph_pass(half_at_the_end), r"result 0 was float32\[4, 4 | 1, 4\] on cpu and is float16", "%"),
        (more_results, "it returns 2 results, and the graph returned 1", ""),
        (more_inputs, r"it changed the graph's inputs: \(x_1, y_1\) became \(z, x_1, y_1\)", ""),
        (lambda graph_module: 1, "it returned a int, not a GraphModule", ""),
        (lambda graph_module: 1 // 0, "it raised ZeroDivisionError", ""),
    ],
)  # fmt: skip
def test_an_invalid_graph_pass_is_named_with_node_and_reason(
    at: str, run: Callable[[GraphModule], Any], reason: str, where: str
) -> None:
    with pytest.raises(PassError, match=reason) as caught:
        compiled(Pass(run, key="1", at=at, name="wrong"))
    error = caught.value
    assert str(error).startswith(f"pass 'wrong' ({at}): ")
    assert where in error.where and "aten.tanh.default" in error.before


def test_an_emitted_graph_that_cannot_be_imported_is_detected() -> None:
    def twice(graph_module: GraphModule) -> None:
        """Frees memory early: reused memory is read afterwards."""
        graph = graph_module.graph
        (node,) = graph.find_nodes(op="call_function", target=aten.tanh.default)
        (product,) = graph.find_nodes(op="call_function", target=aten.mm.default)
        with graph.inserting_before(node):
            seconds = graph.call_function(torch.ops.fxwrap.reuse.default, (product, [4, 4], [4, 1], torch.float32))
            graph.call_function(aten.fill_.Scalar, (seconds, 1.0))

    with pytest.raises(PassError, match="it cannot be imported as a program") as caught:
        compiled(Pass(twice, key="1", at="fx_emitted"))
    assert "%mm" in str(caught.value)


# --- matches ----------------------------------------------------------------------------------------------------------

X, Y = rw.tensors("x y")
TANH_OF_MM = rw.call("aten.tanh.default", rw.call("aten.mm.default", X, Y))
AS_SIN = rw.call("aten.sin.default", rw.call("aten.mm.default", X, Y))
TANH_OF_TANH = rw.call("aten.tanh.default", rw.call("aten.tanh.default", X))


@pytest.mark.parametrize("at", fxwrap.rewrite.PASS_POINTS)
def test_matches_and_near_misses_are_recorded(at: Any, caplog: pytest.LogCaptureFixture) -> None:
    replaced = rw.rewrite_pass(TANH_OF_MM, AS_SIN, key="1", at=at, name="as_sin", order=1)
    missed = rw.rewrite_pass(TANH_OF_TANH, rw.call("aten.sin.default", X), key="1", at=at, name="missed")
    with caplog.at_level("INFO", logger="fxwrap.passes"):
        result = compiled(replaced, missed)
    first, second = result.passes
    assert (first.pass_name, first.point, first.changed, first.matches) == ("missed", at, False, 0)
    ((line, reason),) = first.near_misses
    assert "aten.tanh.default(%mm)" in line and "aten.tanh.default is expected, but it is aten.mm.default" in reason
    assert (second.pass_name, second.changed, second.matches, second.near_misses) == ("as_sin", True, 1, ())
    messages = [record.getMessage() for record in caplog.records]
    assert any(f"pass 'missed' ({at}) replaced 0 matches; 1 near misses\n  " in message for message in messages)


def test_a_pass_may_return_the_result_of_several_rewrites() -> None:
    def both(program: Program) -> rw.RewriteResult:
        result = rw.rewrite(program, rw.call("aten.tanh.default", X), rw.call("aten.sin.default", X))
        return rw.rewrite(result, rw.call("aten.mm.default", X, Y), rw.call("aten.matmul.default", X, Y))

    result = compiled(Pass(both, key="1"))
    (ran,) = result.passes
    assert ran.matches == 2 and "aten.sin" in str(result.program) and "aten.matmul" in str(result.program)


@pytest.mark.parametrize("at", fxwrap.rewrite.PASS_POINTS)
def test_a_pass_that_must_match_fails_without_a_match(at: Any) -> None:
    strict = rw.rewrite_pass(TANH_OF_TANH, rw.call("aten.sin.default", X), key="1", at=at, name="s", must_match=True)
    with pytest.raises(PassError) as error:
        compiled(strict)
    assert str(error.value).startswith(f"pass 's' ({at}): it must match, and nothing matches")
    assert "aten.tanh.default is expected" in error.value.where
    compiled(rw.rewrite_pass(TANH_OF_MM, AS_SIN, key="1", at=at, must_match=True))


@pytest.mark.parametrize("at", ["fx_before_lowering", "ir_before_planning"])
def test_a_pass_that_must_match_changes_something(at: Any) -> None:
    with pytest.raises(PassError, match="it must match, and changed nothing"):
        compiled(Pass(lambda what: what, key="1", at=at, must_match=True))


def test_a_pass_that_must_match_has_another_key() -> None:
    strict = Pass(lambda what: what, key="1", name="p", must_match=True)
    assert strict.text() == "p[1]@ir_before_planning must match" != dataclasses.replace(strict, must_match=False).text()


def test_a_result_of_the_wrong_form_is_named() -> None:
    def imported(graph: GraphModule) -> rw.RewriteResult:
        return rw.rewrite(fxwrap.from_fx(graph), TANH_OF_MM, AS_SIN)

    with pytest.raises(PassError, match="it returned the rewrite of a program, not of its graph"):
        compiled(Pass(imported, key="1", at="fx_before_lowering"))

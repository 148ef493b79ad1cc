"""Opaque objects under torch.compile: script objects and their methods, registered classes, constants by content."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.torchbind_impls import init_torchbind_implementations

import fxwrap
from fxwrap.lines import ExternCall
from fxwrap.options import EMITTERS
from fxwrap.wrapper_ir import UNKNOWN
from tests.conftest import NO_SCRIPT_CLASSES
from tests.support.opaque import Counter, Shift
from tests.support.versions import fails_before

TESTS = torch.ops.fxwrap_tests


@pytest.fixture(scope="module")
def script_classes() -> Any:
    """torch's script classes for tests, and their fake classes."""
    if not (Path(torch.__file__).parent / "lib" / "libtorchbind_test.so").exists():
        pytest.skip(NO_SCRIPT_CLASSES)
    init_torchbind_implementations()
    logging.getLogger("torch._library.fake_class_registry").setLevel(logging.ERROR)  # they lack some methods
    return torch.classes._TorchScriptTesting


def compiled(function: Any, emitter: str) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_methods_of_script_objects_run_in_order(script_classes: Any, emitter: str) -> None:
    def function(queue: Any, foo: Any, x: torch.Tensor) -> torch.Tensor:
        queue.push(x.sin())
        queue.push(foo.add_tensor(x).cos())
        first = queue.pop() + queue.size()
        return first * 2 + torch.ops._TorchScriptTesting.takes_foo(foo, queue.pop())

    def call(run: Any) -> tuple[torch.Tensor, int]:
        queue = script_classes._TensorQueue(torch.zeros(2))
        queue.push(torch.full((3,), 4.0))
        return run(queue, script_classes._Foo(3, 5), x), queue.size()

    x = torch.rand(3)
    run = compiled(function, emitter)
    for _ in range(2):
        result, size = call(run)
        expected, expected_size = call(function)
        torch.testing.assert_close(result, expected)
        assert size == expected_size == 1


@pytest.mark.parametrize("emitter", EMITTERS)
def test_registered_classes_are_operands_and_outputs(emitter: str) -> None:
    def function(counter: Counter, x: torch.Tensor) -> tuple[torch.Tensor, Counter]:
        once = TESTS.add_count(counter, x)
        twice = TESTS.add_count(counter, x)  # another call: it changes the counter
        return TESTS.shift(Shift(5), once * twice).sin(), counter

    x = torch.rand(3)
    run = compiled(function, emitter)
    for start in (1, 4):
        ours, theirs = Counter(start), Counter(start)
        result, returned = run(ours, x)
        torch.testing.assert_close(result, function(theirs, x)[0])
        assert returned is ours and ours.count == theirs.count == start + 2


def shifted() -> tuple[torch.fx.GraphModule, torch.Tensor]:
    """A graph with an object of its own, and a literal one."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    own = graph.get_attr("own")
    first = graph.call_function(TESTS.sum_counts.default, ([own, own], x))
    graph.output((graph.call_function(TESTS.shift.default, (Shift(3), first)), own))
    return torch.fx.GraphModule({"own": Counter(2)}, graph), torch.rand(3)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_objects_of_a_graph_are_constants(emitter: str) -> None:
    graph, x = shifted()
    compiled_graph = fxwrap.compile_graph(graph, (x,), options=fxwrap.Options(emitter=emitter))
    assert len(compiled_graph.program.constants) == 2
    assert fxwrap.parse(str(compiled_graph.program)) == compiled_graph.program
    result, own = compiled_graph(x)
    torch.testing.assert_close(result, x + 7)
    assert own is graph.own
    again = fxwrap.from_fx(compiled_graph.graph_module)
    torch.testing.assert_close(fxwrap.run(again, [x])[0], x + 7)


@fails_before("2.13", "make_fx refuses generators", NotImplementedError)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_generator_of_a_graph_is_a_constant(emitter: str) -> None:
    generator = torch.Generator()
    graph = make_fx(lambda x: (x + torch.ops.aten.rand.generator([3], generator=generator),))(torch.rand(3))
    compiled_graph = fxwrap.compile_graph(graph, options=fxwrap.Options(emitter=emitter))
    x, results = torch.rand(3), []
    for run in (compiled_graph, graph):
        generator.manual_seed(5)
        results.append([*run(x), *run(x)])
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(*results[0])


def test_calls_that_take_objects_stay_in_order() -> None:
    graph, x = shifted()
    calls = [line for line in fxwrap.lower(graph, (x,)).body.lines if isinstance(line, ExternCall)]
    assert [line.effects() for line in calls] == [(UNKNOWN,), (UNKNOWN,)]

"""Models with streams of their own under torch.compile, on a CPU in the place of a device with streams.

What a model says is traced by Dynamo and AOTAutograd, compiled, and run; only the streams do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.variables.streams  # the operators of torch.ops.streams
from torch import Tensor
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch._aot_autograd import streams as traced_streams
from torch.fx import Graph, GraphModule, Node

import fxwrap
from fxwrap.lines import Call, Launch
from fxwrap.lowering import stream_calls, with_stream_calls
from fxwrap.options import EMITTERS
from fxwrap.torch_compat import OpOverload, get_external_object
from tests.streams.recording import Recording
from tests.streams.test_lowering import Model

CURRENT, SIDE, OTHER = [torch.Stream(stream_id=number, device_index=-1, device_type=0) for number in (0, 3, 4)]
current_stream = torch.cuda.current_stream  # which Dynamo knows, and nobody calls


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Iterator[Recording]:
    """A CPU of which Dynamo and AOTAutograd believe that it has streams; it writes down what is done with them."""
    TorchInGraphFunctionVariable._get_handlers()  # of torch's own functions, before they are replaced
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device=None: CURRENT)
    monkeypatch.setattr(traced_streams, "get_roofline_estimate", lambda _node: 1.0)
    monkeypatch.setattr(traced_streams, "get_device", lambda _node: torch.device("meta"))
    recording = Recording()
    with recording.registered():
        yield recording


@dataclass(frozen=True)
class Case:
    """A model with streams, the same without, and what its forward does with events: see `steps`."""

    model: Callable[[Tensor, Tensor], Tensor]
    plain: Callable[[Tensor, Tensor], Tensor]
    events: str


def waiting(x: Tensor, w: Tensor) -> Tensor:
    SIDE.wait_stream(current_stream())
    with SIDE:
        y = torch.tanh((x @ w).relu() @ w)
    z = (x + 1).sin() @ w
    current_stream().wait_stream(SIDE)
    return y + z


def waiting_plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh((x @ w).relu() @ w) + (x + 1).sin() @ w


def events(x: Tensor, w: Tensor) -> Tensor:
    begun, done = torch.Event(), torch.Event()
    h = x.cos() @ w
    begun.record()
    SIDE.wait_event(begun)
    with SIDE:
        y = torch.tanh(h @ w)
        done.record()
    z = h.sin() @ w
    done.wait()
    return y + z


def events_plain(x: Tensor, w: Tensor) -> Tensor:
    h = x.cos() @ w
    return torch.tanh(h @ w) + h.sin() @ w


def two_sides(x: Tensor, w: Tensor) -> Tensor:
    SIDE.wait_stream(current_stream())
    with SIDE:
        y = x.sin() @ w
        OTHER.wait_stream(SIDE)
        z = y.relu() @ w
    with OTHER:
        t = y.cos() @ w
    current_stream().wait_stream(SIDE)
    current_stream().wait_stream(OTHER)
    return z + t


def two_sides_plain(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin() @ w
    return y.relu() @ w + y.cos() @ w


def joined(x: Tensor, w: Tensor) -> Tensor:
    """What ran on the side stream before may have made `x`; nothing in the graph says so but the call."""
    current_stream().wait_stream(SIDE)
    return x @ w


def joined_plain(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


CASES = (
    Case(waiting, waiting_plain, "record 0, wait a, record a, wait 0"),
    Case(events, events_plain, "record 0 as event, wait a, record a as event, wait 0"),
    Case(two_sides, two_sides_plain, "record 0, wait a, record a, wait b, record a, wait 0, record b, wait 0"),
    Case(joined, joined_plain, "record a, wait 0"),
)


def steps(done: list[str]) -> str:
    """Returns what was done with events; streams are named in the order they come in, but for the current one."""
    names = {"0": "0"}
    found = []
    for item in done:
        words = item.partition(" for ")[0].split()
        if words[0] in ("record", "wait"):
            number = names.setdefault(words[1], "abc"[len(names) - 1])
            found.append(f"{words[0]} {number}" + (" as event" if len(words) > 2 else ""))
    return ", ".join(found)


NAMES = [case.model.__name__ for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_model_computes_what_it_does_without_streams(case: Case, recording: Recording) -> None:
    x, w = torch.rand(8, 8), torch.rand(8, 8)
    found = torch.compile(case.model, backend="fxwrap", fullgraph=True)(x, w)
    torch.testing.assert_close(found, case.plain(x, w))
    assert steps(recording.done) == case.events


@pytest.mark.parametrize(
    ("case", "emitter"),
    [(CASES[0], "python"), *[(CASES[1], emitter) for emitter in EMITTERS], (CASES[2], "python")],
    ids=[f"{NAMES[0]}-python", *[f"{NAMES[1]}-{emitter}" for emitter in EMITTERS], f"{NAMES[2]}-python"],
)
def test_gradients_are_those_without_streams(case: Case, emitter: str, recording: Recording) -> None:
    x, w = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(case.plain(x, w).sum(), w)
    torch.compile(case.model, backend="fxwrap", fullgraph=True, options={"emitter": emitter})(x, w).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, wanted)
    found = steps(recording.done)
    assert found.startswith(case.events)
    assert {"wait a", "record a", "wait 0"} <= set(found.removeprefix(case.events).replace(" as event", "").split(", "))


# --- calls of methods, as torch 2.11 has them -----------------------------------------------------------------------


class Methods:
    """Builds a graph as Dynamo gives it there: streams and events by their places, and calls of their methods."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def at(self, place: int, given: Any) -> Node:
        node = self.graph.call_function(get_external_object(), (place,))
        node.meta["example_value"] = given
        return node

    def call(self, name: str, *arguments: Node) -> Node:
        node = self.graph.call_method(name, arguments)
        node.meta["custom"] = {"stream": 0}
        return node

    def calls(self) -> list[tuple[Any, ...]]:
        """Returns the calls of operators that tracing keeps: their names and arguments."""
        self.graph.output(self.x)
        given = GraphModule({}, self.graph)
        before = given.code
        found = with_stream_calls(given)
        found.graph.lint()
        assert given.code == before and not found.graph.find_nodes(op="call_method", target="wait_stream")
        nodes = [node for node in found.graph.nodes if isinstance(node.target, OpOverload)]
        return [(node.target._opname, *node.args) for node in nodes]


def test_methods_of_streams_and_events_become_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_calls, "new_external_event", iter([7, 8]).__next__)
    made, event = Methods(), torch.Event()
    side, current, own = made.at(2, SIDE), made.at(0, CURRENT), made.at(3, event)
    made.call("wait_stream", side, current)
    first = made.call("record_event", current)
    first.meta["example_value"] = event
    made.call("record_event", side)
    made.call("record_event", side, own)
    made.call("wait_event", side, first)
    made.call("wait_event", current, own)
    made.graph.call_function(torch.ops.streams.wait_event, (None, 2))  # `first.wait()`: Dynamo has lost which one it is
    made.call("synchronize", side)
    made.call("synchronize", first)
    made.graph.call_function(torch.accelerator.synchronize)
    assert made.calls() == [
        ("wait_stream", 2, 0), ("record_event", 7, 0), ("record_event", 8, 2), ("record_event", 3, 2),
        ("wait_event", 7, 2), ("wait_event", 3, 0), ("wait_event", 7, 2), ("wait_event", 8, 2),
        ("synchronize", 2), ("synchronize", 7), ("synchronize_device",),
    ]  # fmt: skip


def test_other_methods_and_graphs_without_any_stay() -> None:
    made = Methods()
    made.call("wait", made.x)
    made.graph.output(made.x)
    given = GraphModule({}, made.graph)
    assert with_stream_calls(given) is given


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_program_waits_for_a_stream_itself(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class Waited:
        def synchronize(self) -> None:
            done.append("stream")

    waited = Waited()
    table = {5: weakref.ref(waited)}
    monkeypatch.setattr(torch._dynamo.graph_bytecode_inputs, "index_to_external_object_weakref", table)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: done.append("all"))
    model = Model("cpu")
    (x,) = model.inputs
    y = model.call(torch.ops.aten.sin.default, x)
    model.call(torch.ops.fxwrap.synchronize.default, 5)
    z = model.call(torch.ops.aten.cos.default, y)
    model.call(torch.ops.fxwrap.synchronize_device.default)
    compiled = fxwrap.compile_graph(model.module(z), options=fxwrap.Options(emitter=emitter))
    x_ = torch.rand(8, 8)
    torch.testing.assert_close(compiled(x_)[0], x_.sin().cos())
    assert done == ["stream", "all"]
    order = [line.kernel if isinstance(line, Launch) else line.target for line in compiled.program.body.lines
             if isinstance(line, Launch | Call)]  # fmt: skip
    assert order == ["sin_0", "fxwrap.synchronize.default", "cos_0", "fxwrap.synchronize_device.default"]

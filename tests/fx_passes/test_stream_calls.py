"""Models with streams of their own under torch.compile, on a CPU in the place of a device with streams.

What a model says is traced by Dynamo and AOTAutograd, compiled, and run; only the streams do nothing.
"""

from __future__ import annotations

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
from fxwrap.fx_passes import replace_stream_methods, stream_calls
from fxwrap.lines import ExternCall, Launch
from fxwrap.options import EMITTERS
from fxwrap.torch_compat import OpOverload, get_external_object
from tests.lowering.streams.test_lowering import Model
from tests.support.stream_log import StreamLog
from tests.support.versions import is_before

CURRENT, SIDE, OTHER = [torch.Stream(stream_id=number, device_index=-1, device_type=0) for number in (0, 3, 4)]
current_stream = torch.cuda.current_stream  # which Dynamo knows, and nobody calls


@pytest.fixture
def stream_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamLog]:
    """A CPU that pretends to have streams to Dynamo and AOTAutograd, and records their use."""
    TorchInGraphFunctionVariable._get_handlers()  # of torch's own functions, before they are replaced
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device=None: CURRENT)
    for module in (torch._dynamo.utils, torch._dynamo.guards):  # since torch 2.15 a function of theirs in C++
        monkeypatch.setattr(module, "get_current_stream", lambda _device: CURRENT)
    monkeypatch.setattr(torch._dynamo.guards, "_CLOSURE_VARS", None, raising=False)  # a cached table of functions
    monkeypatch.setattr(traced_streams, "get_roofline_estimate", lambda _node: 1.0)
    monkeypatch.setattr(traced_streams, "get_device", lambda _node: torch.device("meta"))
    stream_log = StreamLog()
    with stream_log.registered():
        yield stream_log


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


def two_side_streams(x: Tensor, w: Tensor) -> Tensor:
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


def two_side_streams_plain(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin() @ w
    return y.relu() @ w + y.cos() @ w


def joined(x: Tensor, w: Tensor) -> Tensor:
    """Earlier work on the side stream may have computed `x`; only the call in the graph shows that."""
    current_stream().wait_stream(SIDE)
    return x @ w


def joined_plain(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


CASES = (
    Case(waiting, waiting_plain, "record 0, wait a, record a, wait 0"),
    Case(events, events_plain, "record 0 as event, wait a, record a as event, wait 0"),
    Case(
        two_side_streams,
        two_side_streams_plain,
        "record 0, wait a, record a, wait b, record a, wait 0, record b, wait 0",
    ),
    Case(joined, joined_plain, "record a, wait 0"),
)


def steps(done: list[str]) -> str:
    """Returns the uses of events; streams other than the current one are named in order of appearance."""
    names = {"0": "0"}
    actual = []
    for item in done:
        words = item.partition(" for ")[0].split()
        if words[0] in ("record", "wait"):
            number = names.setdefault(words[1], "abc"[len(names) - 1])
            actual.append(f"{words[0]} {number}" + (" as event" if len(words) > 2 else ""))
    return ", ".join(actual)


NAMES = [case.model.__name__ for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_model_matches_its_stream_free_version(case: Case, stream_log: StreamLog) -> None:
    x, w = torch.rand(8, 8), torch.rand(8, 8)
    actual = torch.compile(case.model, backend="fxwrap", fullgraph=True)(x, w)
    torch.testing.assert_close(actual, case.plain(x, w))
    assert steps(stream_log.done) == case.events


@pytest.mark.sampled(2)
@pytest.mark.xfail(
    is_before("2.13") and not is_before("2.12"),
    reason="the backward calls record_stream, which CPU tensors do not have",
    raises=NotImplementedError,
)
@pytest.mark.parametrize(
    ("case", "emitter"),
    [(CASES[0], "python"), *[(CASES[1], emitter) for emitter in EMITTERS], (CASES[2], "python")],
    ids=[f"{NAMES[0]}-python", *[f"{NAMES[1]}-{emitter}" for emitter in EMITTERS], f"{NAMES[2]}-python"],
)
def test_gradients_match_the_stream_free_version(case: Case, emitter: str, stream_log: StreamLog) -> None:
    x, w = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(case.plain(x, w).sum(), w)
    torch.compile(case.model, backend="fxwrap", fullgraph=True, options={"emitter": emitter})(x, w).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, expected)
    actual = steps(stream_log.done)
    assert actual.startswith(case.events)
    assert {"wait a", "record a", "wait 0"} <= set(
        actual.removeprefix(case.events).replace(" as event", "").split(", ")
    )


# --- calls of methods, as torch 2.11 has them -----------------------------------------------------------------------


class Methods:
    """Builds a graph in Dynamo's form there: streams and events by index, and calls of their methods."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def at(self, place: int, inputs: Any) -> Node:
        node = self.graph.call_function(get_external_object(), (place,))
        node.meta["example_value"] = inputs
        return node

    def call(self, name: str, *arguments: Node) -> Node:
        node = self.graph.call_method(name, arguments)
        node.meta["custom"] = {"stream": 0}
        return node

    def calls(self) -> list[tuple[Any, ...]]:
        """Returns the calls of operators that tracing keeps: their names and arguments."""
        self.graph.output(self.x)
        inputs = GraphModule({}, self.graph)
        before = inputs.code
        actual = replace_stream_methods(inputs)
        actual.graph.lint()
        assert inputs.code == before and not actual.graph.find_nodes(op="call_method", target="wait_stream")
        nodes = [node for node in actual.graph.nodes if isinstance(node.target, OpOverload)]
        return [(node.target._opname, *node.args) for node in nodes]


def test_methods_of_streams_and_events_become_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_calls, "new_external_event", iter([7, 8]).__next__)
    result, event = Methods(), torch.Event()
    side, current, own = result.at(2, SIDE), result.at(0, CURRENT), result.at(3, event)
    result.call("wait_stream", side, current)
    first = result.call("record_event", current)
    first.meta["example_value"] = event
    result.call("record_event", side)
    result.call("record_event", side, own)
    result.call("wait_event", side, first)
    result.call("wait_event", current, own)
    result.graph.call_function(
        torch.ops.streams.wait_event, (None, 2)
    )  # `first.wait()`: Dynamo has lost which one it is
    result.call("synchronize", side)
    result.call("synchronize", first)
    result.graph.call_function(torch.accelerator.synchronize)
    assert result.calls() == [
        ("wait_stream", 2, 0), ("record_event", 7, 0), ("record_event", 8, 2), ("record_event", 3, 2),
        ("wait_event", 7, 2), ("wait_event", 3, 0), ("wait_event", 7, 2), ("wait_event", 8, 2),
        ("synchronize", 2), ("synchronize", 7), ("synchronize_device",),
    ]  # fmt: skip


def test_other_methods_and_graphs_are_unchanged() -> None:
    result = Methods()
    result.call("wait", result.x)
    result.graph.output(result.x)
    inputs = GraphModule({}, result.graph)
    assert replace_stream_methods(inputs) is inputs


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_program_synchronizes_with_a_stream(emitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class Waited:
        def synchronize(self) -> None:
            done.append(f"stream {objects.index(self)}")

    objects = [Waited() for _ in range(6)]
    torch._dynamo.graph_bytecode_inputs.store_user_object_weakrefs(*objects)
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
    assert done == ["stream 5", "all"]
    order = [line.kernel if isinstance(line, Launch) else line.target for line in compiled.program.body.lines
             if isinstance(line, Launch | ExternCall)]  # fmt: skip
    assert order == ["sin_0", "fxwrap.synchronize.default", "cos_0", "fxwrap.synchronize_device.default"]

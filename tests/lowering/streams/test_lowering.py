"""Streams that a model uses itself, as Dynamo and AOTAutograd say them in a graph, become lines on streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.graph_bytecode_inputs
import torch._dynamo.variables.streams  # the operators of torch.ops.streams
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import fxwrap
from fxwrap.compile_cache.graph_serializer import GraphSerializer, NotCacheable
from fxwrap.errors import GraphError
from fxwrap.lines import Alloc, EnterDevice, ExitDevice, ExternCall, Free, Launch, RecordEvent, WaitEvent
from fxwrap.lowering.control import streams
from fxwrap.options import EMITTERS, Options
from fxwrap.passes.device_guards import insert_device_guards
from fxwrap.torch_compat import external_object_number
from fxwrap.wrapper_ir import Program
from tests.support.stream_log import StreamLog

pytestmark = pytest.mark.usefixtures("empty_table")

ATEN, STREAMS = torch.ops.aten, torch.ops.streams
CURRENT, SIDE, OTHER = 0, 1, 2  # places in Dynamo's table
EVENT = 5


class Model:
    """Builds a graph in AOTAutograd's form: calls of overloads with fake values, and their streams."""

    def __init__(self, *devices: str) -> None:
        self.mode, self.graph = FakeTensorMode(), torch.fx.Graph()
        self.inputs = [self._input(f"x{index}", device) for index, device in enumerate(devices)]

    def _input(self, name: str, device: str) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(8, 8, device=device)
        return node

    def call(self, target: Any, *arguments: Any, stream: int | None = None) -> Node:
        """Adds a call."""
        node = self.graph.call_function(target, arguments)
        if target.namespace == "streams":
            node.meta["val"] = None  # not all versions of torch have rules for fake tensors
        else:
            with self.mode:
                node.meta["val"] = target(*map_arg(arguments, lambda item: item.meta["val"]))
        if stream is not None:
            node.meta["custom"] = {"stream": stream}
        return node

    def module(self, *outputs: Node) -> GraphModule:
        """Returns the graph."""
        self.graph.output(outputs)
        return GraphModule({}, self.graph)


def side_stream(device: str) -> GraphModule:
    """`with torch.cuda.stream(s)` between `s.wait_stream` and `current.wait_stream`, and work beside it."""
    model = Model(device)
    (x,) = model.inputs
    y = model.call(ATEN.add.Tensor, model.call(ATEN.mul.Tensor, x, 2), 1)
    model.call(STREAMS.wait_stream.default, SIDE, CURRENT)
    s = model.call(ATEN.sin.default, y, stream=SIDE)
    z = model.call(ATEN.relu.default, model.call(ATEN.mm.default, s, x, stream=SIDE), stream=SIDE)
    beside = model.call(ATEN.exp.default, model.call(ATEN.cos.default, y))
    model.call(STREAMS.wait_stream.default, CURRENT, SIDE)
    return model.module(model.call(ATEN.add.Tensor, beside, z))


def work(program: Program) -> list[str]:
    """What a program does, line by line, but for frees: the kernel, operator or step, and its stream."""
    steps = []
    for line in program.body.lines:
        match line:
            case Launch():
                steps.append(f"{line.kernel} {line.stream}")
            case ExternCall():
                steps.append(f"{line.target.split('.')[1]} {line.stream}")
            case RecordEvent():
                steps.append(f"record {line.stream}" + (f" as {line.event}" if line.event else ""))
            case WaitEvent():
                steps.append(f"wait {line.stream}")
    return steps


def lowered(graph: GraphModule, **options: Any) -> Program:
    return fxwrap.verify(fxwrap.lower(graph, options=Options(**options)))


def test_streams_and_ordering_are_preserved() -> None:
    program = lowered(side_stream("cuda:0"))
    assert work(program) == [
        "mul_add_0 0", "record 0", "wait 1", "sin_0 1", "mm 1", "relu_0 1", "cos_exp_0 0", "record 1", "wait 0",
        "add_0 0",
    ]  # fmt: skip
    assert [line.stream for line in program.body.lines if isinstance(line, Alloc)] == [0, 1, 0]


def test_fusion_does_not_cross_streams_or_events() -> None:
    model = Model("cuda:0")
    (x,) = model.inputs
    y = model.call(ATEN.sin.default, x, stream=SIDE)
    z = model.call(ATEN.cos.default, y)
    model.call(STREAMS.record_event.default, EVENT, CURRENT)
    program = lowered(model.module(model.call(ATEN.exp.default, z), model.call(ATEN.neg.default, y, stream=SIDE)))
    assert work(program) == [
        "record 0", "wait 1", "sin_0 1", "record 1", "wait 0", "cos_0 0", "record 0 as 5", "exp_0 0", "neg_0 1",
        "record 1", "wait 0",
    ]  # fmt: skip


def test_frees_wait_for_side_stream_reads() -> None:
    model = Model("cuda:0")
    t = model.call(ATEN.sin.default, model.inputs[0])
    m = model.call(ATEN.mm.default, t, t, stream=SIDE)
    program = lowered(model.module(model.call(ATEN.relu.default, m)), fuse=False)
    assert [(line.root.name, line.stream) for line in program.body.lines if isinstance(line, Free)] == [
        ("sin_default", 1), ("mm_default", 0),
    ]  # fmt: skip


def test_each_wait_has_one_event_record() -> None:
    model = Model("cuda:0")
    (x,) = model.inputs
    s = model.call(ATEN.sin.default, x, stream=SIDE)
    model.call(STREAMS.record_event.default, EVENT, SIDE)
    model.call(STREAMS.wait_event.default, EVENT, CURRENT)
    model.call(STREAMS.wait_event.default, EVENT, OTHER)
    o = model.call(ATEN.cos.default, s, stream=OTHER)
    model.call(STREAMS.sync_dealloc.default, EVENT, CURRENT, s)
    model.call(STREAMS.record_event.default, EVENT, OTHER)  # again: the waits after it are for this
    model.call(STREAMS.wait_event.default, EVENT, CURRENT)
    program = lowered(model.module(model.call(ATEN.add.Tensor, s, o)))
    assert work(program) == [
        "record 0", "wait 1", "sin_0 1", "record 1 as 5", "record 1", "record 1", "wait 0", "wait 2", "cos_0 2",
        "wait 0", "record 2 as 5", "wait 0", "add_0 0",
    ]  # fmt: skip


def test_operations_on_foreign_events_are_extern_calls() -> None:
    model = Model("cuda:0")
    (x,) = model.inputs
    model.call(STREAMS.wait_event.default, EVENT, SIDE)
    y = model.call(ATEN.exp.default, x, stream=SIDE)
    model.call(STREAMS.record_event.default, EVENT, SIDE)
    model.call(STREAMS.record_stream.default, y, CURRENT)
    program = lowered(model.module(y))
    assert work(program) == [
        "record 0", "wait_event 0", "wait 1", "exp_0 1", "record 1", "record 1 as 5", "wait 0", "record_stream 0",
    ]  # fmt: skip


def test_a_stream_is_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        device = torch.device("cuda:1")

    stream = Stream()
    model = Model("cuda:0", "cuda:1", "cpu")
    results = [model.call(ATEN.exp.default, x, stream=SIDE) for x in model.inputs]
    back = model.call(ATEN._to_copy.default, results[0], stream=SIDE)
    graph = model.module(*results, back)

    def on_each(program: Program) -> dict[str, int]:
        calls = [line for line in program.body.lines if isinstance(line, ExternCall)]
        return {str(line.results[0].tensor_type.device): line.stream for line in calls if "exp" in line.target}

    assert on_each(lowered(graph, fuse=False)) == {"cuda:0": 1, "cuda:1": 1, "cpu": 0}
    monkeypatch.setattr(streams, "external_stream", lambda _number: stream)
    assert on_each(lowered(graph, fuse=False)) == {"cuda:0": 0, "cuda:1": 1, "cpu": 0}


def test_calls_that_change_the_current_stream_are_rejected() -> None:
    model = Model("cuda:0")
    model.call(STREAMS.fork.default, CURRENT, SIDE)
    with pytest.raises(GraphError, match="it changes the current stream, which lines cannot express"):
        lowered(model.module(model.call(ATEN.exp.default, model.inputs[0], stream=SIDE)))


def test_a_device_without_streams_has_none() -> None:
    program = lowered(side_stream("cpu"))
    assert work(program) == [item.replace(" 1", " 0") for item in work(program)] and "record 0" not in work(program)


def test_stream_index_zero_is_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [external_object_number(place) for place in (0, 1)] == [0, 1]
    monkeypatch.delattr(torch._dynamo.graph_bytecode_inputs, "CURRENT_STREAM_INDEX")
    assert [external_object_number(place) for place in (0, 1)] == [1, 2]  # in 2.11 any of them may be at place 0


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_runs_a_model_with_streams(emitter: str) -> None:
    stream_log, x = StreamLog(), torch.rand(8, 8)
    y = x * 2 + 1
    expected = y.cos().exp() + (y.sin() @ x).relu()
    with stream_log.registered():
        options = Options(emitter=emitter, memory_planning="auto")
        compiled = fxwrap.compile_graph(side_stream("cpu"), options=options)
        torch.testing.assert_close(compiled(x)[0], expected)
        assert [stage.pass_name for stage in compiled.stages][-1] == "insert_device_guards"
    steps = ["record 0", "wait 1 for 0", "enter 1", "leave 1", "record 1", "wait 0 for 1"]
    done = [item for item in stream_log.done if "keep" not in item]
    guards = ("enter 1", "leave 1") if emitter == "cpp" else ()  # which are torch's own there
    assert done == [item for item in steps if item not in guards]


def test_graphs_with_streams_are_not_cached() -> None:
    with pytest.raises(NotCacheable, match="is a stream call, whose device depends on this process"):
        GraphSerializer().add(side_stream("cpu"), None)


# --- devices --------------------------------------------------------------------------------------------------------


def test_a_device_without_an_index_is_the_current_one_at_trace_time() -> None:
    model = Model("cuda:1")
    (x,) = model.inputs
    copied = model.graph.call_function(ATEN._to_copy.default, (x,), {"device": torch.device("cuda")})
    noise = model.graph.call_function(ATEN.randn.default, ([4],), {"device": torch.device("cuda")})
    with model.mode:
        copied.meta["val"], noise.meta["val"] = torch.empty(8, 8, device="cuda:0"), torch.empty(4, device="cuda:0")
    program = lowered(model.module(copied, noise, model.call(ATEN.exp.default, x)))
    devices = [dict(line.keywords)["device"] for line in program.body.lines if isinstance(line, ExternCall)]
    assert devices == [torch.device("cuda:0")] * 2  # a guard for cuda:1 may be around it


def test_tensors_on_two_devices_have_separate_kernels_and_guards() -> None:
    model = Model("cuda:0", "cuda:1")
    x, y = model.inputs
    first = model.call(ATEN.exp.default, model.call(ATEN.sin.default, x))
    moved = model.graph.call_function(ATEN._to_copy.default, (first,), {"device": torch.device("cuda:1")})
    with model.mode:
        moved.meta["val"] = torch.empty(8, 8, device="cuda:1")
    second = model.call(ATEN.relu.default, model.call(ATEN.add.Tensor, moved, y))
    program = fxwrap.verify(insert_device_guards(lowered(model.module(first, second))))
    lines = [line for line in program.body.lines if isinstance(line, EnterDevice | ExitDevice | Launch | ExternCall)]
    assert [line.device or type(line).__name__ for line in lines] == [
        "cuda:0", "Launch", "cuda:0", "ExternCall", "cuda:1", "Launch", "cuda:1",
    ]  # fmt: skip
    text = fxwrap.to_python(program).source
    assert "    with on_cuda_0():\n" in text and "    with on_cuda_1():\n" in text and "allocate_cuda_0(" in text


def test_guards_of_an_imported_graph_are_recomputed() -> None:
    text = """
program @p(%x: borrowed f32[4]@cpu) {
  device.enter() device="cpu" STREAM
  %a = extern.call @aten.exp.default(%x) STREAM : f32[4]@cpu
  device.exit() device="cpu" STREAM
  control.return(%a)
}
"""
    graph = fxwrap.to_fx(fxwrap.parse(text.replace("STREAM", ""))).graph_module
    assert work(lowered(graph, fuse=False)) == ["exp 0"]
    graph = fxwrap.to_fx(fxwrap.parse(text.replace("STREAM", "stream=1"))).graph_module
    with pytest.raises(GraphError, match=r"it refers to streams of an emitted graph. Import the graph with fxwrap"):
        lowered(graph)

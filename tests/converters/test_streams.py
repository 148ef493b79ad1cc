"""Guards, streams and events in every emitter, in the order of the program's lines."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.emission import emit
from fxwrap.errors import FxImportError, UnsupportedError
from fxwrap.lines import Free
from fxwrap.options import EMITTERS
from fxwrap.passes.device_guards import insert_device_guards
from fxwrap.runtime import device_operators
from fxwrap.wrapper_ir import canonicalize_program, line_text
from tests.support.stream_log import StreamLog

TEXT = """
program @p(%x: borrowed f32[4]@cpu) {
  %t = extern.call @aten.sin.default(%x) : f32[4]@cpu
  device.enter() device="cpu"
  %begun = device.record() device="cpu" event=7 : opaque<Event>
  device.exit() device="cpu"
  device.wait(%begun) device="cpu" stream=1
  %b = memory.alloc() stream=1 : f32[4]@cpu
  extern.call @aten.exp.out(%t) outs=(%b) stream=1
  %c = extern.call @aten.neg.default(%b) stream=1 : f32[4]@cpu
  memory.free(%b) stream=1
  memory.free(%t) stream=1
  %unused = device.record() device="cpu" stream=1 : opaque<Event>
  %done = device.record() device="cpu" stream=1 : opaque<Event>
  device.wait(%done) device="cpu"
  %y = extern.call @aten.add.Tensor(%c, %x) : f32[4]@cpu
  memory.free(%c)
  control.return(%y)
}
"""
GUARDS = ["enter cpu", "leave cpu", "enter 1", "leave 1"]
DONE = [
    "enter cpu", "record 0 as 7", "leave cpu", "wait 1 for 0", "enter 1", "leave 1", "keep for 1", "record 1",
    "record 1", "wait 0 for 1", "keep for 0",
]  # fmt: skip


@pytest.fixture
def stream_log() -> Iterator[StreamLog]:
    log = StreamLog()
    with log.registered():
        yield log


def expected(x: torch.Tensor) -> torch.Tensor:
    return x + -x.sin().exp()


@pytest.mark.parametrize("emitter", ["interpreter", *EMITTERS])
def test_emitters_preserve_line_order(emitter: str, stream_log: StreamLog) -> None:
    program = insert_device_guards(fxwrap.verify(fxwrap.parse(TEXT)))
    # emitted C++ makes devices and streams current through torch's own guards
    wanted = [item for item in DONE if emitter != "cpp" or item not in GUARDS]
    x = torch.rand(4)
    run = emit(program, emitter)
    for _ in range(2):
        stream_log.done.clear()
        torch.testing.assert_close(run(x)[0], expected(x))
        assert stream_log.done == wanted


@pytest.mark.parametrize("emitter", ["interpreter", "python", "fx"])
def test_an_unguarded_line_gets_its_own_guard(emitter: str, stream_log: StreamLog) -> None:
    x = torch.rand(4)
    torch.testing.assert_close(emit(fxwrap.parse(TEXT), emitter)(x)[0], expected(x))
    assert stream_log.done.count("enter 1") == 3
    assert [item for item in stream_log.done if item not in GUARDS[2:]] == [i for i in DONE if i not in GUARDS[2:]]


FAILS = """
program @p(%x: borrowed f32[4]@cpu, %y: borrowed f32[3]@cpu) {
  %begun = device.record() device="cpu" : opaque<Event>
  device.wait(%begun) device="cpu" stream=1
  device.enter() device="cpu" stream=1
  %z = extern.call @aten.bitwise_not.default(%x) stream=1 : f32[4]@cpu
  device.exit() device="cpu" stream=1
  %done = device.record() device="cpu" stream=1 : opaque<Event>
  device.wait(%done) device="cpu"
  control.return(%z)
}
"""


@pytest.mark.parametrize("emitter", ["interpreter", *EMITTERS])
def test_an_error_leaves_no_device_current(emitter: str, stream_log: StreamLog) -> None:
    run = emit(fxwrap.verify(fxwrap.parse(FAILS)), emitter)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bitwise_not"):
            run(torch.rand(4), torch.rand(3))
        guards = [item for item in stream_log.done if "1" in item and ("enter" in item or "leave" in item)]
        assert guards == ([] if emitter == "cpp" else ["enter 1", "leave 1"])
        assert not device_operators._DEVICE_GUARDS.guards
        stream_log.done.clear()


def test_python_has_with_blocks_that_may_be_empty() -> None:
    text = """
program @p(%x: borrowed f32[4]@cuda:0) {
  device.enter() device="cuda:1"
  note.comment() text="nothing here"
  device.exit() device="cuda:1"
  device.enter() device="cuda:0" stream=2
  %a = memory.view(%x) : f32[2, 2]@cuda:0
  device.exit() device="cuda:0" stream=2
  control.return(%a)
}
"""
    source = fxwrap.to_python(fxwrap.parse(text)).source
    assert "on_cuda_0_stream_2 = devices.device_context('cuda:0', 2)\n" in source
    assert "on_cuda_1 = devices.device_context('cuda:1')\n" in source
    body = source.partition("arguments.clear()\n")[2]
    assert body.startswith("    with on_cuda_1():\n        # nothing here\n        pass\n    with on_cuda_0_")
    assert "\n        a = x.view((2, 2))\n    return (a,)\n" in body


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_a_graph_with_streams_round_trips(stream_log: StreamLog) -> None:
    program = insert_device_guards(fxwrap.verify(fxwrap.parse(TEXT)))
    graph = fxwrap.to_fx(program).graph_module
    graph.graph.lint()
    assert canonicalize_program(fxwrap.from_fx(graph)) == canonicalize_program(program)
    copied = copy.deepcopy(graph)
    assert not copied.graph.eliminate_dead_code()
    for node in copied.graph.nodes:
        node.meta.pop("fxwrap_line", None)
    assert canonicalize_program(fxwrap.from_fx(copied)) == canonicalize_program(program)


def test_a_graph_without_guards_is_imported_with_guards() -> None:
    program = fxwrap.verify(fxwrap.parse(TEXT))
    again = fxwrap.from_fx(fxwrap.to_fx(program))
    assert again != program
    plain = [line for line in again.body.lines if not (line.bracket[1] and getattr(line, "stream", 0))]
    assert canonicalize_program(again.replace(body=again.body.__class__((), tuple(plain)))) == canonicalize_program(
        program
    )


def test_a_graph_is_run_and_traced_node_by_node(stream_log: StreamLog) -> None:
    program = insert_device_guards(fxwrap.parse(TEXT))
    graph, x = fxwrap.to_fx(program).graph_module, torch.rand(4)
    torch.testing.assert_close(Interpreter(graph).run(x)[0], expected(x))
    assert stream_log.done == DONE
    stream_log.done.clear()
    traced = make_fx(graph, tracing_mode="fake")(x)
    assert stream_log.done == []
    torch.testing.assert_close(traced(x)[0], expected(x))
    assert stream_log.done == DONE
    again = canonicalize_program(fxwrap.from_fx(traced))
    assert again.body == canonicalize_program(program).body


def test_a_moved_node_gets_the_stream_of_its_new_position(stream_log: StreamLog) -> None:
    """The memory that it reads is released after the work of that stream."""
    graph = fxwrap.to_fx(insert_device_guards(fxwrap.parse(TEXT))).graph_module
    (neg,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    (add,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    add.prepend(neg)
    program = fxwrap.from_fx(graph)
    streams = {line.root.name: line.stream for line in program.body.lines if isinstance(line, Free)}
    assert streams == {"t": 1, "b": 0, "c": 0}
    x = torch.rand(4)
    torch.testing.assert_close(fxwrap.run(program, [x])[0], expected(x))
    wait = graph.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.wait_event.default)[-1]
    wait.prepend(neg)
    with pytest.raises(
        FxImportError, match="breaks the rule 'race': %b is used on the current stream while work on str"
    ):
        fxwrap.from_fx(graph)


def test_events_are_waited_for_once() -> None:
    graph = fxwrap.to_fx(fxwrap.parse(TEXT)).graph_module
    wait = graph.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.wait_event.default)[0]
    with graph.graph.inserting_after(wait):
        graph.graph.call_function(wait.target, wait.args)
    with pytest.raises(FxImportError, match=r"after 'wait_event.*consumed its memory"):
        fxwrap.from_fx(graph)
    wait.args = (graph.graph.find_nodes(op="placeholder")[0], *wait.args[1:])
    with pytest.raises(FxImportError, match="its first operand is no event"):
        fxwrap.from_fx(graph)


def test_plain_graphs_have_no_streams() -> None:
    with pytest.raises(UnsupportedError, match=r"it needs the operator fxwrap\.enter_device"):
        fxwrap.to_fx(fxwrap.parse(TEXT), aten_only=True)


# --- releases -------------------------------------------------------------------------------------------------------

RELEASED_LATE = """
program @p(%x: borrowed f32[4]@cpu) {
  %t = extern.call @aten.sin.default(%x) : f32[4]@cpu
  %begun = device.record() device="cpu" : opaque<Event>
  device.wait(%begun) device="cpu" stream=1
  device.enter() device="cpu" stream=1
  %y = extern.call @aten.exp.default(%t) stream=1 : f32[4]@cpu
  device.exit() device="cpu" stream=1
  %done = device.record() device="cpu" stream=1 : opaque<Event>
  device.wait(%done) device="cpu"
  %z = extern.call @aten.neg.default(%x) : f32[4]@cpu
  memory.free(%t)
  memory.free(%z)
  control.return(%y)
}
"""


def test_memory_of_several_streams_is_released_where_the_program_says(stream_log: StreamLog) -> None:
    """A graph's code would drop it after its last use, which may be in progress on the other stream."""
    program = fxwrap.verify(fxwrap.parse(RELEASED_LATE))
    canonical = fxwrap.verify(canonicalize_program(program))
    freed = [line.root.name for line in canonical.body.lines if isinstance(line, Free)]
    kinds = [line.opcode for line in canonical.body.lines]
    waits = [position for position, kind in enumerate(kinds) if kind == "device.wait"]
    assert freed == ["v5", "v1"] and kinds.index("memory.free") > max(waits)
    graph = fxwrap.to_fx(program).graph_module
    nodes = [node.name for node in graph.graph.nodes]
    (release,) = graph.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.record_stream.default)
    assert release.args[0].name == "t" and nodes.index(release.name) > nodes.index("wait_event_1")  # type: ignore[union-attr]
    assert canonicalize_program(fxwrap.from_fx(graph)) == canonicalize_program(program)
    x = torch.rand(4)
    for emitter in ("interpreter", *EMITTERS):
        torch.testing.assert_close(emit(program, emitter)(x)[0], x.sin().exp())


def test_reused_memory_of_another_stream_is_released_where_the_program_says(stream_log: StreamLog) -> None:
    text = RELEASED_LATE.replace("memory.free(%t)", "%r = memory.reuse(%t) : f32[2, 2]@cpu").replace(
        "  memory.free(%z)\n",
        "  extern.mutate @aten.fill_.Scalar(%r, 1.0) writes=(%r)\n  memory.free(%z)\n  memory.free(%r)\n",
    )
    program = fxwrap.verify(fxwrap.parse(text))
    assert canonicalize_program(fxwrap.from_fx(fxwrap.to_fx(program))) == canonicalize_program(program)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_import_releases_memory_that_is_used_later_after_that(stream_log: StreamLog, through_a_view: bool) -> None:
    """Functionalization moves writes of inputs to the end, behind releases, and releases views."""
    graph = fxwrap.to_fx(insert_device_guards(fxwrap.verify(fxwrap.parse(RELEASED_LATE)))).graph_module
    (release,) = graph.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.record_stream.default)
    tensor = release.args[0]
    with graph.graph.inserting_before(release):
        if through_a_view:
            view = graph.graph.call_function(torch.ops.aten.view.default, (tensor, [2, 2]))
            release.args = (view, *release.args[1:])
    with graph.graph.inserting_after(release):
        late = graph.graph.call_function(torch.ops.aten.cos.default, (tensor,))
    output = graph.graph.output_node()
    output.args = ((*output.args[0], late),)  # type: ignore[misc]
    graph.recompile()
    program = fxwrap.from_fx(graph)
    texts = [line_text(line) for line in program.body.lines]
    (freed,) = [number for number, text in enumerate(texts) if "memory.free(%t)" in text]
    assert "aten.cos.default(%t)" in texts[freed - 1]
    x = torch.rand(4)
    for emitter in ("interpreter", *EMITTERS):
        torch.testing.assert_close(tuple(emit(program, emitter)(x)), (x.sin().exp(), x.sin().cos()))


def test_import_releases_memory_after_the_stream_that_used_it_last(stream_log: StreamLog) -> None:
    """A rewrite adds a use on another stream than that which allocated the memory."""
    graph = fxwrap.to_fx(insert_device_guards(fxwrap.verify(fxwrap.parse(RELEASED_LATE)))).graph_module
    (release,) = graph.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.record_stream.default)
    graph.graph.erase_node(release)
    (z,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    graph.recompile()
    program = fxwrap.from_fx(graph)
    (freed,) = [line for line in program.body.lines if isinstance(line, Free) and line.root.name == "t"]
    assert freed.stream == 1
    assert z.name in str(program)

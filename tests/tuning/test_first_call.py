"""Autotuning at the first call: kernels are timed for its sizes, and the tuned program replaces the first one."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fxwrap
from fxwrap.errors import FxwrapError, InputError, OptionError, TuningWarning
from fxwrap.lines import Launch
from fxwrap.options import EMITTERS
from tests.tuning.fake_timer import OPTIONS, FakeTimer, fail_timing, tuner

AT_FIRST_CALL = OPTIONS.replace(autotune="first_call")


def use(timer: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxwrap.compile.compiler.gpu_tuner", lambda: tuner(timer, folder))


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu()


@cache
def dynamic() -> torch.export.ExportedProgram:
    return torch.export.export(Scaled(), (torch.randn(600, 32),), dynamic_shapes=({0: Dim("batch", min=2, max=4096)},))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_tuning_uses_first_call_sizes_and_replaces_the_program(
    emitter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = FakeTimer(fast=1)
    use(timer, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL.replace(emitter=emitter))
    entry, before = compiled.flat, compiled.program
    assert not timer.works
    x = torch.randn(100, 32)
    torch.testing.assert_close(entry(x)[0], Scaled()(x))
    (work,) = timer.works
    assert [item.count for item in work.buffers] == [3200, 3200]
    (kernel,) = compiled.program.kernels
    assert (kernel.source, kernel.options) == (work.candidates[1].source, work.candidates[1].options)
    assert kernel.options != before.kernels[0].options
    assert compiled.stages[-1].program is compiled.program and "hint=100" in str(compiled.program)
    monkeypatch.setattr("fxwrap.compile.compiler.gpu_tuner", lambda: pytest.fail("it is compiled a third time"))
    other = torch.randn(7, 32)
    torch.testing.assert_close(entry(other)[0], Scaled()(other))
    torch.testing.assert_close(compiled(other), Scaled()(other))


def test_a_later_compile_reuses_the_record_of_equal_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = []
    for timer in (FakeTimer(fast=2), fail_timing):
        use(timer, tmp_path, monkeypatch)
        compiled = fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL)
        compiled(torch.randn(100, 32))
        programs.append(str(compiled.program))
    assert programs[0] == programs[1]


class Selected(torch.nn.Module):
    """A size that is known only when an operator has run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x) * 3 + 1


def test_computed_sizes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer(fast=1)
    use(timer, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(torch.export.export(Selected(), (torch.ones(50),)), options=AT_FIRST_CALL)
    x = torch.arange(50) % 2
    for _ in range(2):
        torch.testing.assert_close(compiled(x.float()), Selected()(x.float()))
    (work,) = timer.works
    assert [item.count for item in work.buffers] == [25]  # in place
    assert "hint=25" in str(compiled.program)


def test_block_sizes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen: torch.Tensor = torch.cond(
                x.sum() > 0, lambda x: torch.nonzero(x)[:, 0] * 2, lambda x: x.long(), [x]
            )
            return chosen + 1

    timer = FakeTimer(fast=1)
    use(timer, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(torch.export.export(Branches(), (torch.ones(40),)), options=AT_FIRST_CALL)
    x = (torch.arange(40) % 4 == 0).float()
    torch.testing.assert_close(compiled(x), Branches()(x))
    counts = [item.count for work in timer.works for item in work.buffers]
    assert 10 in counts and 40 in counts


def test_nothing_is_recompiled_when_all_records_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of fixed sizes whose kernels have records is already tuned."""
    x = torch.randn(64, 64)
    graph = make_fx(lambda x: x.t().relu() + x)(x)
    use(FakeTimer(fast=1), tmp_path, monkeypatch)
    chosen = fxwrap.compile_graph(graph, [x], options=OPTIONS)
    use(fail_timing, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(graph, [x], options=AT_FIRST_CALL)
    monkeypatch.setattr("fxwrap.compile.compiler.gpu_tuner", lambda: pytest.fail("it is compiled again"))
    compiled(x)
    assert compiled.program.kernels == chosen.program.kernels


def test_first_call_tuning_applies_mutations_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).relu() * 2

    x = torch.randn(9, 40)
    use(FakeTimer(fast=1), tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(
        make_fx(torch.func.functionalize(count))(x.clone()), [x.clone()], options=AT_FIRST_CALL
    )
    mutated, wanted = x.clone(), x.clone()
    for _ in range(2):
        torch.testing.assert_close(compiled(mutated)[0], count(wanted))
        torch.testing.assert_close(mutated, wanted)


def test_the_graph_may_be_modified_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64)
    graph = make_fx(lambda x: x.t().relu() + x)(x)
    use(FakeTimer(fast=1), tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(graph, [x], options=AT_FIRST_CALL)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = torch.ops.aten.neg.default
    graph.recompile()
    for _ in range(2):
        torch.testing.assert_close(compiled(x)[0], x.t().relu() + x)


def test_an_invalid_call_does_not_trigger_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer(fast=1)
    use(timer, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL)
    with pytest.raises(InputError):
        compiled(torch.randn(5000, 32))
    assert not timer.works
    compiled(torch.randn(30, 32))
    assert timer.works


def test_a_failed_recompile_keeps_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(works: Any) -> Any:
        raise FxwrapError("no clock")

    use(fail, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL)
    before, x = compiled.program, torch.randn(30, 32)
    with pytest.warns(TuningWarning, match="no clock"):
        torch.testing.assert_close(compiled(x), Scaled()(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(x), Scaled()(x))
    assert compiled.program is before


def test_other_threads_run_the_untuned_program_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, finish = threading.Event(), threading.Event()
    fake = FakeTimer(fast=1)

    def slow(works: Any) -> Any:
        started.set()
        assert finish.wait(600)
        return fake(works)

    use(slow, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL.replace(emitter="python"))
    before, x = compiled.program, torch.randn(30, 32)
    first = threading.Thread(target=compiled, args=(x,))
    first.start()
    assert started.wait(600)
    torch.testing.assert_close(compiled(x), Scaled()(x))
    assert compiled.program is before
    finish.set()
    first.join()
    assert compiled.program is not before and len(fake.works) == 1
    torch.testing.assert_close(compiled(x), Scaled()(x))


def test_first_calls_of_two_programs_tune_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings would disturb each other, and compiles replace parts of torch."""
    active = list[int]()
    fake = FakeTimer(fast=1)

    def slow(works: Any) -> Any:
        active.append(+1)
        time.sleep(0.3)  # a second compile comes this far within it, if it does not wait
        samples = fake(works)
        active.append(-1)
        return samples

    use(slow, tmp_path, monkeypatch)
    programs = [fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL) for _ in range(2)]
    inputs = [torch.randn(30, 32), torch.randn(70, 32)]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda program, x: program(x), programs, inputs))
    for result, x in zip(results, inputs):
        torch.testing.assert_close(result, Scaled()(x))
    assert active == [+1, -1, +1, -1]


def test_a_requested_graph_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been rewritten."""
    use(fail_timing, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL.replace(emitter="fx"))
    graph, x = compiled.graph_module, torch.randn(30, 32)
    torch.testing.assert_close(compiled(x), Scaled()(x))
    assert compiled.graph_module is graph


class Watching(TorchDispatchMode):
    """Counts operators."""

    operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.operators += 1
        return function(*arguments, **(keywords or {}))


def test_nothing_is_timed_under_a_dispatch_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer(fast=1)
    use(timer, tmp_path, monkeypatch)
    compiled = fxwrap.compile_graph(dynamic(), options=AT_FIRST_CALL)
    x = torch.randn(30, 32)
    with Watching() as watching:
        compiled(x)
    assert watching.operators
    assert not timer.works
    compiled(x)
    assert timer.works


def test_torch_compile_times_at_the_first_call_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer(fast=1)
    use(timer, tmp_path, monkeypatch)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * 3).exp().sum()

    options = {"cpu_kernels": "triton", "autotune": "first_call"}
    compiled = torch.compile(loss, backend="fxwrap", options=options, dynamic=True, fullgraph=True)
    for size in (40, 50, 60):
        x = torch.randn(size, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (gradient,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss(x), x)[0])
    counts = [max(item.count for item in work.buffers) for work in timer.works]
    assert counts == [40 * 8, 40 * 8]  # forward and backward


def test_an_exposed_graph_is_tuned_at_compile_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer(fast=1)
    use(timer, tmp_path, monkeypatch)
    seen: list[GraphModule] = []

    def keep(graph: GraphModule, _info: Any) -> GraphModule:
        assert timer.works
        seen.append(graph)
        return graph

    options = {"cpu_kernels": "triton", "autotune": "first_call", "on_graph": keep}
    x = torch.randn(12, 8)
    compiled = torch.compile(Scaled(), backend="fxwrap", options=options, fullgraph=True)
    torch.testing.assert_close(compiled(x), Scaled()(x))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"autotune": "later"}, "option 'autotune' takes a bool or 'first_call', not 'later'"),
        ({"autotune": 1}, "option 'autotune' takes a bool or 'first_call', not 1"),
        ({"symbol_hints": {"s0": 2.5}}, "option 'symbol_hints' takes integers, not 2.5 for 's0'"),
        ({"symbol_hints": 3}, "option 'symbol_hints' takes a mapping, not 3"),
    ],
)
def test_invalid_tuning_options(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        fxwrap.Options(**keywords)
    assert text in str(caught.value)


def test_a_program_on_the_cpu_is_compiled_once() -> None:
    compiled = fxwrap.compile_graph(dynamic(), options=fxwrap.Options(autotune="first_call"))
    before = compiled.program
    compiled(torch.randn(5, 32))
    assert compiled.program is before and any(isinstance(line, Launch) for line in before.body.lines)

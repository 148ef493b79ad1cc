"""The progress of compiles that take long."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.compile.progress import show_progress
from fxwrap.events import EventLog
from fxwrap.runtime.compiler_runs import count_finished_kernels
from fxwrap.runtime.cpp_kernels import GENERATED_PREAMBLE, KernelText, make_translation_units
from tests.conftest import NO_TQDM


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "fxwrap progress"]


DELAY_S = 0.05


def long_compile(shown: Callable[[], str]) -> None:
    """A compile of two kernels that begins its next step, and ends, when its progress was shown."""
    events = EventLog("layer")
    with show_progress(events, DELAY_S):
        events.begin_step("lower")
        wait_for(shown, ": lower")
        events.begin_step("compile_kernels")
        events.begin_kernels(2)
        for number in (1, 2):
            count_finished_kernels()
            wait_for(shown, f": compile_kernels, {number} of 2 kernels")


def wait_for(shown: Callable[[], str], text: str) -> None:
    end = time.monotonic() + 600
    while text not in shown():
        assert time.monotonic() < end, f"{text!r} was not shown"
        time.sleep(0.01)


def test_a_terminal_has_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm", reason=NO_TQDM)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    long_compile(terminal.getvalue)
    text = terminal.getvalue()
    assert "fxwrap: compiling 'layer': lower [00:0" in text
    assert "fxwrap: compiling 'layer': compile_kernels, 1 of 2 kernels [00:0" in text
    assert "\n" not in text and text.rstrip(" ").endswith("\r") and running() == []


def test_without_a_terminal_the_logger_has_messages_at_doubled_times(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fxwrap.compile"):
        long_compile(lambda: caplog.text)
    messages = [record.getMessage() for record in caplog.records]
    assert re.fullmatch("'layer' is compiling since [0-9]+ s: lower", messages[0])
    assert re.fullmatch("'layer' is compiling since [0-9]+ s: compile_kernels, 2 of 2 kernels", messages[-1])
    times = [record.created for record in caplog.records]
    assert len(times) >= 3
    assert all(later - earlier > 0.9 * DELAY_S * 2**number for number, (earlier, later) in enumerate(pairwise(times)))


def test_nothing_is_shown_before_the_delay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with caplog.at_level(logging.INFO, "fxwrap.compile"), show_progress(EventLog("layer"), 3600.0):
        pass
    assert terminal.getvalue() == "" and not caplog.records


def test_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="broken"), show_progress(EventLog("layer"), 0.01):
        time.sleep(0.1)
        raise ValueError("broken")
    assert running() == []


def test_compiles_report_their_steps_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    kernels: list[int] = []
    begin_step, begin_kernels = EventLog.begin_step, EventLog.begin_kernels

    def noted_step(self: EventLog, step: str) -> None:
        begin_step(self, step)
        steps.append(self.activity.step)

    def noted_kernels(self: EventLog, number: int) -> None:
        begin_kernels(self, number)
        kernels.append(self.activity.kernels)

    monkeypatch.setattr(EventLog, "begin_step", noted_step)
    monkeypatch.setattr(EventLog, "begin_kernels", noted_kernels)
    graph = make_fx(lambda x: torch.softmax(x, -1) * 3.25, tracing_mode="fake")(torch.randn(3, 5))
    fxwrap.compile_graph(graph, options=Options(compile_cache=False))
    assert steps[:1] == ["import_graph"] and kernels == [1]
    order = [steps.index(step) for step in ("propagate_fakes", "lower", "emit", "compile_kernels")]
    assert order == sorted(order)


def test_translation_units_know_their_kernels() -> None:
    source = 'extern "C" void k{}(float* x) {{ *x = 1; }}\n'
    kernels = [
        KernelText("cpp", f"{GENERATED_PREAMBLE}\n{source.format(number)}", ("*f32",), ()) for number in range(3)
    ]
    assert sum([unit.kernels for unit in make_translation_units(kernels)]) == 3

"""Threads in the C runtime under sanitizers, briefly (`make sanitize` at length), and beside Python's threads."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fxwrap
from tests.artifact import sanitize
from tests.conftest import NO_SANITIZER
from tests.support.long_form import long_only


@pytest.mark.parametrize("sanitizer", ("", long_only("thread"), long_only("address")))
def test_threads_and_errors(sanitizer: str, tmp_path: Path) -> None:
    """Results and errors are right, and sanitizers report nothing; to compile the runtime with one takes seconds."""
    if sanitizer and not sanitize.is_available(sanitizer):
        pytest.skip(NO_SANITIZER)
    runs = list(sanitize.runs(sanitizer, sanitize.Amounts(threads=16, calls=480, openings=8), tmp_path))
    assert len(runs) == 4 and not any(failure for _, failure in runs), runs
    assert runs[0][0].startswith("calls 480 wrong 0 differs 1") and runs[1][0] == "opened 8 wrong 0"


@pytest.mark.long  # the reports themselves are those of `make sanitize`
@pytest.mark.parametrize(("sanitizer", "command"), (("thread", "race"), ("address", "leak")))
def test_the_sanitizers_report_defects(sanitizer: str, command: str, tmp_path: Path) -> None:
    if not sanitize.is_available(sanitizer):
        pytest.skip(NO_SANITIZER)
    _, failure = sanitize.run(sanitizer, [command], tmp_path)
    assert {"race": "data race", "leak": "detected memory leaks"}[command] in failure


class Products(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x @ x)
        return x


def test_python_threads_run_while_a_native_program_does(tmp_path: Path) -> None:
    """Python switches threads only where one waits: another one runs during a call if that releases the GIL."""
    x = torch.randn(300, 300)
    program = fxwrap.compile_graph(torch.export.export(Products(), (x,)), options=fxwrap.Options(emitter="cpp"))
    program.save(tmp_path / "products.fxw", target="native")
    call, interval = fxwrap.load(tmp_path / "products.fxw").flat, sys.getswitchinterval()
    with torch.no_grad():
        call(x)
        start, progress = threading.Event(), list[int]()
        thread = threading.Thread(target=lambda: (start.wait(), progress.append(1)))
        thread.start()
        sys.setswitchinterval(1000)
        try:
            start.set()
            before = len(progress)
            end = time.monotonic() + 600  # less than the interval
            while not progress and time.monotonic() < end:
                call(x)
            after = len(progress)
        finally:
            sys.setswitchinterval(interval)
        thread.join()
    assert (before, after) == (0, 1)

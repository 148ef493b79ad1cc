"""Processes that compile Triton kernels, for a chip that is not here: what they compile is found, and none stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fxwrap import Options
from fxwrap.device_spec import TRITON
from fxwrap.errors import FxwrapError, OptionError
from fxwrap.preparation import begin_kernels
from fxwrap.runtime import compile_workers, triton_compile
from fxwrap.runtime.compile_workers import WORKERS_VARIABLE, WorkerPool, worker_count
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton_compile import KernelUse, gpu_function, launch_keywords, typical_arguments, worker_job
from fxwrap.torch_compat import FakeTensorMode

TARGET = GPUTarget("cuda", 90, 32)
READY = 120.0
"""Seconds within which a worker is ready, on a machine that has much else to do."""

SOURCE = """import triton
import triton.language as tl


@triton.jit
def kernel(in0_ptr, out0_ptr, n0, factor, BLOCK: tl.constexpr):
    p0 = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out0_ptr + p0, tl.load(in0_ptr + p0, p0 < n0) * factor + NUMBER, p0 < n0)
"""


def use(number: int | str, n: int = 1000) -> KernelUse:
    """A kernel, another one for each number."""
    text = KernelText(
        TRITON.name, SOURCE.replace("NUMBER", str(number)), ("*f32", "*bf16", "i64", "f64"),
        (("BLOCK", 256), ("num_warps", 8)),
    )  # fmt: skip
    return KernelUse(text, torch.device("cuda", 0), (n, 0.5))


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Triton's cache, empty."""
    folder = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pool(triton_cache: Path) -> Iterator[WorkerPool]:
    """A pool of one worker, which is ready."""
    made = WorkerPool()
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(WORKERS_VARIABLE, "1")
        made.start()
        assert made.wait(READY)
        yield made
    made.end()


def by_workers(pool: WorkerPool, uses: list[KernelUse]) -> list[str | None]:
    """What came of jobs of which this process takes one, and does nothing about it until the others are done."""
    found: list[str | None] = [None] * len(uses)
    others = Event()

    def finish(position: int, answer: str | None) -> None:
        found[position] = answer
        if answer is None:
            others.wait(READY)
        elif sum(item is not None for item in found) == len(uses) - 1:
            others.set()

    pool.run([worker_job(item, TARGET) for item in uses], finish, 1)
    return found


class _Chip:
    """What Triton asks its driver for before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> str:
        return "the chip of this test"

    def get_current_stream(self, _device: str) -> int:
        return 0


def found_in_cache(wanted: KernelUse, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether Triton, in this process, finds in its cache what it needs to launch a kernel."""
    seen: list[bool] = []
    constants, choices = launch_keywords(wanted.kernel.options)
    with monkeypatch.context() as changed:
        changed.setattr(driver, "_active", _Chip())
        changed.setattr(knobs.compilation, "listener", lambda **facts: seen.append(facts["cache_hit"]))
        function = gpu_function(wanted.kernel.source, wanted.kernel.signature, wanted.kernel.options)
        function.warmup(*typical_arguments(wanted), grid=(1,), **constants, **choices)
    return seen == [True]


def test_this_process_finds_what_a_worker_compiled(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [use(0), use(1, n=1), use(2, n=16), use("'a text'")]
    answers = by_workers(pool, uses)
    here = answers.index(None)
    assert here == 0, "the first is what this process takes"
    assert answers[1:3] == ["", ""]
    assert "CompilationError" in str(answers[3])
    assert found_in_cache(uses[1], monkeypatch) and found_in_cache(uses[2], monkeypatch)
    assert not found_in_cache(uses[0], monkeypatch)


def test_a_forked_process_has_no_workers(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "POOL", pool)
    child = os.fork()
    if not child:
        pool.forget()
        os._exit(0 if pool.processes == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert by_workers(pool, [use(10), use(11)]) == [None, ""]


def test_a_worker_that_dies_gives_its_job_back_and_is_replaced(pool: WorkerPool) -> None:
    (number,) = pool.processes
    os.kill(number, signal.SIGKILL)
    done: list[tuple[int, str | None]] = []

    def finish(position: int, answer: str | None) -> None:
        done.append((position, answer))
        time.sleep(0.2)  # so that the worker has a turn

    pool.run([worker_job(use(20), TARGET)] * 3, finish, 1)
    assert sorted(done) == [(0, None), (1, None), (2, None)]
    assert pool.processes == []
    pool.start()
    (other,) = pool.processes
    assert other != number


def _is_there(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_worker_outlives_its_process_and_a_closed_stdin_is_no_harm(
    triton_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKERS_VARIABLE, "1")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(0)
        own = WorkerPool()
        own.start()
        os.write(writing, f"{own.processes[0]} {own.wait(READY)}\n".encode())
        signal.pause()
    os.close(writing)
    with os.fdopen(reading) as lines:
        number, ready = lines.readline().split()
    assert ready == "True"
    assert _is_there(int(number))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    end = time.monotonic() + 30
    while _is_there(int(number)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_there(int(number))


def test_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKERS_VARIABLE, raising=False)
    for processors, wanted in ((1, 0), (2, 0), (4, 2), (16, 8), (128, 8)):
        monkeypatch.setattr(compile_workers, "_processors", lambda processors=processors: processors)
        assert worker_count() == wanted
    monkeypatch.setenv(WORKERS_VARIABLE, "3")
    assert worker_count() == 3
    monkeypatch.setenv(WORKERS_VARIABLE, "many")
    with pytest.raises(OptionError, match="FXWRAP_COMPILE_WORKERS is a number of processes"):
        worker_count()


class _Counted(WorkerPool):
    """A pool that counts how often it is started, and starts nothing."""

    starts = 0

    def start(self) -> None:
        self.starts += 1


def _chain(length: int, device: str) -> GraphModule:
    made = Graph()
    node = made.placeholder("x")
    with FakeTensorMode():
        node.meta["val"] = torch.empty(8, device=device)
    for _ in range(length):
        node = made.call_function(torch.ops.aten.relu.default, (node,))
    made.output((node,))
    return GraphModule({}, made)


def test_workers_start_for_large_graphs_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _Counted()
    monkeypatch.setattr(triton_compile, "POOL", counted)
    options = Options().with_devices()
    begin_kernels(_chain(40, "cpu"), options)
    begin_kernels(_chain(40, "meta"), options)
    begin_kernels(_chain(40, "cuda"), options)
    assert counted.starts == 0, "this machine has no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for graph, chosen in ((_chain(3, "cuda"), options), (_chain(40, "cuda"), options.replace(fuse=False))):
        begin_kernels(graph, chosen)
    begin_kernels(_chain(40, "cpu"), options)
    assert counted.starts == 0
    begin_kernels(_chain(40, "cuda"), options)
    assert counted.starts == 1


def test_what_fails_here_is_no_job() -> None:
    good: Any = use(0)
    unknown = KernelText(TRITON.name, SOURCE, ("*f32",), (("num_turns", 3),))
    assert triton_compile._job_if_any(good, TARGET) == worker_job(good, TARGET)
    assert triton_compile._job_if_any(KernelUse(unknown, torch.device("cuda", 0)), TARGET) is None
    untyped = KernelText(TRITON.name, SOURCE, (), ())
    assert triton_compile._job_if_any(KernelUse(untyped, torch.device("cuda", 0)), TARGET) is None
    with pytest.raises(FxwrapError):
        worker_job(KernelUse(unknown, torch.device("cuda", 0), (1.0,)), TARGET)

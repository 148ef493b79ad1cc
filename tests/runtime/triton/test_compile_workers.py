"""Processes that compile Triton kernels for a missing chip: their binaries are found, and no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from fxwrap import Options
from fxwrap.compile import kernels as compile_kernels
from fxwrap.compile.kernels import compile_kernels_ahead, print_and_compile_ahead, warm_up_kernel_compilers
from fxwrap.converters.emitted_program import kernel_uses
from fxwrap.devices import TRITON
from fxwrap.errors import FxwrapError, OptionError
from fxwrap.lowering.program import lower_with_coverage
from fxwrap.printers import print_kernel
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.triton import compile as triton_compile
from fxwrap.runtime.triton import workers as compile_workers
from fxwrap.runtime.triton.compile import (
    KernelUse,
    make_worker_job,
    split_launch_options,
    triton_jit_function,
    warmup_arguments,
)
from fxwrap.runtime.triton.prebuilt import find_prebuilt_triton, triton_binary
from fxwrap.runtime.triton.workers import WORKERS_ENV, Answer, WorkerPool, worker_count
from fxwrap.torch_compat import FakeTensorMode

TARGET = GPUTarget("cuda", 90, 32)
LONG = f"1.{'0' * 200}"
"""The number of a kernel that is expected to compile for longer than others."""

READY = 600.0
"""Seconds within which a worker is ready, on a busy machine."""

SOURCE = """import triton
import triton.language as tl


@triton.jit
def kernel(in0_ptr, out0_ptr, n0, factor, BLOCK: tl.constexpr):
    p0 = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out0_ptr + p0, tl.load(in0_ptr + p0, p0 < n0) * factor + NUMBER, p0 < n0)
"""


def kernel_use(number: int | str, n: int = 1000) -> KernelUse:
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
    workers = WorkerPool()
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(WORKERS_ENV, "1")
        workers.start()
        assert workers.wait(READY)
        yield workers
    workers.shutdown()


def worker_results(pool: WorkerPool, uses: list[KernelUse]) -> list[str | None]:
    """The errors of jobs; this process takes one of them, and waits until the others are done."""
    results: list[str | None] = [None] * len(uses)
    others = Event()

    def finish(position: int, answer: Answer | None) -> None:
        results[position] = None if answer is None else answer.error
        if answer is None:
            others.wait(READY)
        elif sum(item is not None for item in results) == len(uses) - 1:
            others.set()

    pool.run([make_worker_job(item, TARGET) for item in uses], finish, 1)
    return results


class _Chip:
    """The part of Triton's driver that it queries before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> str:
        return "the chip of this test"

    def get_current_stream(self, _device: str) -> int:
        return 0


def is_in_triton_cache(wanted: KernelUse, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether this process finds a kernel in Triton's cache."""
    seen: list[bool] = []
    constants, compile_options = split_launch_options(wanted.kernel.options)
    driver.set_active(_Chip())
    with monkeypatch.context() as changed:
        changed.setattr(knobs.compilation, "listener", lambda **event: seen.append(event["cache_hit"]))
        function = triton_jit_function(wanted.kernel.source, wanted.kernel.signature, wanted.kernel.options)
        function.warmup(*warmup_arguments(wanted), grid=(1,), **constants, **compile_options)
    driver.set_active(None)  # Triton selects its own at the next use
    return seen == [True]


def test_worker_compiled_kernels_are_loaded_from_the_cache(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [kernel_use(LONG), kernel_use(1, n=1), kernel_use(2, n=16), kernel_use("'a text'")]
    answers = worker_results(pool, uses)
    here = answers.index(None)
    assert here == 0, "this process takes the first, of the highest cost"
    assert answers[1:3] == ["", ""]
    assert "CompilationError" in str(answers[3])
    assert is_in_triton_cache(uses[1], monkeypatch) and is_in_triton_cache(uses[2], monkeypatch)
    assert not is_in_triton_cache(uses[0], monkeypatch)


def test_workers_compile_without_importing_torch(pool: WorkerPool) -> None:
    checked = "import sys\nassert 'torch' not in sys.modules\n" + SOURCE.replace("NUMBER", "4")
    later = KernelUse(replace(kernel_use(4).kernel, source=checked), torch.device("cuda", 0), (1000, 0.5))
    assert worker_results(pool, [kernel_use(f"{LONG}1"), kernel_use(3), later]) == [None, "", ""]


def test_an_answer_is_read_in_few_system_calls(pool: WorkerPool) -> None:
    """Threads that wait for answers would hand the GIL to one another, and to a graph's lowering, in each call."""

    def read_calls() -> int:
        counts = dict([line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines()])
        return int(counts["syscr"])

    (worker,) = pool._workers
    before = read_calls()
    answer = worker.run({"path": "x" * 2000})
    calls = read_calls() - before
    assert answer is not None and "KeyError" in answer.error
    assert calls < 10


def test_a_forked_process_has_no_workers(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "WORKER_POOL", pool)
    child = os.fork()
    if not child:
        pool.reset_after_fork()
        os._exit(0 if pool.processes == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker_results(pool, [kernel_use(10), kernel_use(11)]) == [None, ""]


def test_a_crashed_worker_is_replaced_and_its_job_retried(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    (number,) = pool.processes
    os.kill(number, signal.SIGKILL)
    done: list[tuple[int, Answer | None]] = []
    tried, run = Event(), compile_workers._Worker.run

    def run_and_tell(worker: Any, job: Any) -> Answer | None:
        answer = run(worker, job)
        tried.set()
        return answer

    monkeypatch.setattr(compile_workers._Worker, "run", run_and_tell)

    def finish(position: int, answer: Answer | None) -> None:
        done.append((position, answer))
        assert tried.wait(READY)  # so that the worker has a turn

    pool.run([make_worker_job(kernel_use(20), TARGET)] * 3, finish, 1)
    assert sorted(done) == [(0, None), (1, None), (2, None)]
    assert pool.processes == []
    key = triton_key()
    pool.start()
    (other,) = pool.processes
    assert other != number
    assert pool._workers[0].process.args[-1] == key  # type: ignore[index]
    assert worker_results(pool, [kernel_use(20), kernel_use(21)]) == [None, ""]
    assert is_in_triton_cache(kernel_use(21), monkeypatch), "the worker uses the key of this process"


def wait_until_started(pool: WorkerPool, number: int) -> None:
    """Waits until workers have started a number of the jobs that they compile ahead."""
    end = time.monotonic() + READY
    while sum(item.is_started for item in pool._ahead.values()) < number:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_workers_compile_kernels_before_the_program_is_complete(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = [kernel_use(30), kernel_use("'another text'"), kernel_use(31), kernel_use(32)]
    jobs = [make_worker_job(item, TARGET) for item in uses]
    for job in (*jobs[:2], jobs[0], make_worker_job(kernel_use(33), TARGET)):
        pool.compile_ahead(job)
    wait_until_started(pool, 3)
    answers: dict[int, list[Answer | None]] = {}
    pool.run(jobs, lambda position, answer: answers.setdefault(position, []).append(answer), 1)
    assert sorted(answers) == [0, 1, 2, 3] and all(len(item) == 1 for item in answers.values())
    assert "CompilationError" in str(answers[1])
    (first,), (unused,) = answers[0], pool._ahead.values()
    assert first is not None and first.error == "" and unused.answer.result().error == ""  # type: ignore[union-attr]
    assert is_in_triton_cache(uses[0], monkeypatch)
    _check_registration(uses[0], first, monkeypatch)
    pool.start()
    assert pool._ahead == {}, "finished jobs that no run asked for are forgotten"


def _check_registration(use: KernelUse, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's kernel is registered as the binary of Triton's in this process, unless only Triton can launch it."""
    monkeypatch.setattr(triton_compile, "_shared_memory", lambda _device: -1)
    assert not triton_compile._register(use, answer, 0), "Triton reports that the device has too little shared memory"
    monkeypatch.setattr(triton_compile, "_shared_memory", lambda _device: 0)
    assert answer.compiled is not None
    deleted = {**answer.compiled, "files": dict.fromkeys(answer.compiled["files"], "/nowhere")}
    assert not triton_compile._register(use, Answer("", deleted), 0)
    assert not triton_compile._register(use, Answer(""), 0)
    assert find_prebuilt_triton(use.kernel.symbol) == []
    assert triton_compile._register(use, answer, 0)
    constants, compile_options = split_launch_options(use.kernel.options)
    driver.set_active(_Chip())
    function = triton_jit_function(use.kernel.source, use.kernel.signature, use.kernel.options)
    compiled = function.warmup(*warmup_arguments(use), grid=(1,), **constants, **compile_options)
    driver.set_active(None)
    (binary,) = find_prebuilt_triton(use.kernel.symbol)
    assert binary == triton_binary(compiled, constants) and binary.variant is not None


def test_workers_start_the_jobs_of_the_highest_cost_first() -> None:
    pool = WorkerPool()
    jobs = [make_worker_job(kernel_use(number), TARGET) for number in (50, LONG, 51)]
    larger = replace(kernel_use(52).kernel, options=(("BLOCK", 2048), ("num_warps", 8)))
    jobs.append(make_worker_job(KernelUse(larger, torch.device("cuda", 0), (1000, 0.5)), TARGET))
    pool._ahead = {str(position): compile_workers._AheadJob(job) for position, job in enumerate(jobs)}
    started = [pool._start_ahead_job() for _ in range(5)]
    assert [None if item is None else jobs.index(item.job) for item in started] == [1, 3, 0, 2, None]
    order: list[int] = []
    pool.run(jobs, lambda position, _answer: order.append(position), 1)
    assert order == [1, 3, 0, 2]


def test_jobs_of_a_worker_that_dies_ahead_are_compiled_by_others(pool: WorkerPool) -> None:
    jobs = [make_worker_job(kernel_use(number), TARGET) for number in (40, 41)]
    os.kill(pool.processes[0], signal.SIGKILL)
    pool.compile_ahead(jobs[0])
    wait_until_started(pool, 1)
    answers: dict[int, Answer | None] = {}
    pool.run(jobs, answers.__setitem__, 1)
    assert answers == {0: None, 1: None}
    assert pool.processes == []
    pool.compile_ahead(jobs[0])
    assert pool._ahead == {}, "there is no worker"
    pool.start()
    assert pool.wait(READY)


def test_large_kernels_without_scalars_compile_while_the_graph_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[KernelUse] = []
    language = SimpleNamespace(kernels=SimpleNamespace(compile_ahead=started.append))
    monkeypatch.setattr(compile_kernels, "find_language", lambda _name: language)
    with FakeTensorMode():
        inputs = [torch.empty(size, device="cuda") for size in ((2048, 1024), (64, 64), (2048, 1024))]

    def function(large: torch.Tensor, small: torch.Tensor, equal: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return large.softmax(1), small.softmax(1), equal.softmax(1)

    graph = make_fx(function)(*inputs)

    def starts(options: Options, *, complete: bool = False) -> list[str]:
        started.clear()
        options = options.resolve_devices()
        program = lower_with_coverage(
            graph, options=options, print_kernel=print_and_compile_ahead(print_kernel, options)
        ).program
        if complete:
            started.clear()
            compile_kernels_ahead(program, options)
        sources = [item.source for item in program.kernels]
        assert all(use.kernel.source in sources and use.device.type == "cuda" for use in started)
        return [use.kernel.source for use in started]

    assert len(starts(Options())) == 1, "small kernels may become parts of combo kernels"
    assert len(starts(Options(combo_kernels=False))) == 2
    later = Options(combo_kernels=False, dependent_launch=True)
    assert starts(later) == starts(later, complete=True) == [], "the program decides what they read early"
    assert len(starts(Options(), complete=True)) == 2, "the pass that combines kernels has run"


@pytest.mark.parametrize("unbacked", [False, True])
def test_large_kernels_of_symbolic_sizes_compile_for_the_sizes_of_their_launches(
    unbacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[KernelUse] = []
    language = SimpleNamespace(kernels=SimpleNamespace(compile_ahead=started.append))
    monkeypatch.setattr(compile_kernels, "find_language", lambda _name: language)
    shapes = ShapeEnv(allow_scalar_outputs=True)
    mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    rows = mode.from_tensor(torch.empty(2056, 8), source=ConstantSource("rows"), symbolic_context=dynamic).shape[0]

    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        if unbacked:
            x = x.expand(count.item(), *x.shape)
        return (torch.cat([x, x], -2) * 2).softmax(-1)

    with mode, enable_python_dispatcher():
        graph = make_fx(function)(torch.empty(rows, 1024, device="cuda"), torch.empty((), dtype=torch.int64))
    options = Options().resolve_devices()
    program = lower_with_coverage(
        graph, options=options, print_kernel=print_and_compile_ahead(print_kernel, options)
    ).program
    uses = kernel_uses(program).values()
    assert any(use.numbers for use in uses)
    assert started == ([] if unbacked else [*uses])


def _is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_exit_with_their_process_and_tolerate_closed_stdin(
    triton_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKERS_ENV, "1")
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
    assert _is_running(int(number))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    end = time.monotonic() + READY
    while _is_running(int(number)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_running(int(number))


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKERS_ENV, raising=False)
    for processors, wanted in ((1, 0), (2, 0), (4, 2), (16, 8), (128, 8)):
        assert worker_count(processors) == wanted
    monkeypatch.setenv(WORKERS_ENV, "3")
    assert worker_count() == 3
    monkeypatch.setenv(WORKERS_ENV, "many")
    with pytest.raises(OptionError, match="FXWRAP_COMPILE_WORKERS must be a number of processes"):
        worker_count()


class _Counted(WorkerPool):
    """A pool that counts how often it is started, and starts nothing."""

    starts = 0

    def start(self) -> None:
        self.starts += 1


def _chain(length: int, device: str) -> GraphModule:
    graph = Graph()
    node = graph.placeholder("x")
    with FakeTensorMode():
        node.meta["val"] = torch.empty(8, device=device)
    for _ in range(length):
        node = graph.call_function(torch.ops.aten.relu.default, (node,))
    graph.output((node,))
    return GraphModule({}, graph)


def test_workers_start_only_for_large_gpu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _Counted()
    monkeypatch.setattr(triton_compile, "WORKER_POOL", counted)
    options = Options().resolve_devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warm_up_kernel_compilers(_chain(40, "cpu"), options)
    warm_up_kernel_compilers(_chain(40, "meta"), options)
    warm_up_kernel_compilers(_chain(40, "cuda"), options)
    assert counted.starts == 0, "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for graph, chosen in ((_chain(3, "cuda"), options), (_chain(40, "cuda"), options.replace(fuse=False))):
        warm_up_kernel_compilers(graph, chosen)
    warm_up_kernel_compilers(_chain(40, "cpu"), options)
    assert counted.starts == 0
    warm_up_kernel_compilers(_chain(40, "cuda"), options)
    assert counted.starts == 1


def test_kernels_that_fail_to_print_are_not_submitted() -> None:
    good: Any = kernel_use(0)
    unknown = KernelText(TRITON.name, SOURCE, ("*f32",), (("num_turns", 3),))
    assert triton_compile._job_if_any(good, TARGET) == make_worker_job(good, TARGET)
    assert triton_compile._job_if_any(KernelUse(unknown, torch.device("cuda", 0)), TARGET) is None
    untyped = KernelText(TRITON.name, SOURCE, (), ())
    assert triton_compile._job_if_any(KernelUse(untyped, torch.device("cuda", 0)), TARGET) is None
    with pytest.raises(FxwrapError):
        make_worker_job(KernelUse(unknown, torch.device("cuda", 0), (1.0,)), TARGET)

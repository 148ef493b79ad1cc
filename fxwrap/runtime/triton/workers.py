"""A pool of worker processes that compile Triton kernels.

Triton's Python code holds the GIL, so threads alone do not scale. Workers start when a compile for a GPU begins, and
import Triton while the graph is lowered. They compile kernels from when these are printed (`compile_ahead`); what is
left when the program is complete (`run`), they share with threads of this process. Of the waiting jobs, that of the
highest cost starts first, so that none of them ends long after the others. Workers end with this process. Jobs
and answers are lines of JSON. The job of a worker that ends is compiled by another.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from fxwrap.errors import OptionError

log = logging.getLogger("fxwrap.kernels")

WORKERS_ENV = "FXWRAP_COMPILE_WORKERS"
"""The environment variable with the number of workers; 0 for none."""

_MAX_WORKERS = 8
_WORKER_SCRIPT = Path(__file__).with_name("worker.py")
_BOOTSTRAP = (
    "import sys, runpy; program, path = sys.argv[1:3]; sys.argv[1:3] = []; "
    "sys.path[:] = path.split(chr(10)); runpy.run_path(program, run_name='__main__')"
)

Job = Mapping[str, Any]
"""The data of a job; with "cost", an estimate of its time in any unit, expensive jobs start first."""


@dataclass(frozen=True)
class Answer:
    """A worker's answer to a job: the text of an error, or "" and a description of the compiled kernel.

    `compiled` is None where the description of a kernel is no JSON data; it is in Triton's cache all the same.
    """

    error: str
    compiled: Mapping[str, Any] | None = None


JobCallback = Callable[[int, "Answer | None"], None]
"""`finish(position, answer)` receives the answer to a job, or None if it has no worker."""


def worker_count(processors: int | None = None) -> int:
    """Returns the maximal number of workers: the environment variable, else half the processors, at most 8.

    0 below 4 processors (by default those of this process) and without a Python executable. Raises OptionError for an
    invalid environment variable.
    """
    text = os.environ.get(WORKERS_ENV, "")
    if text and not text.isdecimal():
        raise OptionError(f"{WORKERS_ENV} must be a number of processes, or 0 for none, not {text!r}")
    if not sys.executable:
        return 0
    if text:
        return int(text)
    processors = processors or _cpu_count()
    return min(processors // 2, _MAX_WORKERS) if processors >= 4 else 0


def _cpu_count() -> int:
    with suppress(AttributeError, OSError):  # not on all systems
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _known_triton_key() -> str:
    """Returns Triton's hash of its own files, a part of all keys of its cache; "" if this process has not computed it.

    Workers that get it start several times faster: Triton's library is hundreds of megabytes.
    """
    key: Any = getattr(sys.modules.get("triton.runtime.cache"), "triton_key", None)
    is_known = hasattr(key, "cache_info") and key.cache_info().currsize > 0
    return str(key()) if is_known else ""


@dataclass(eq=False)
class _AheadJob:
    """A job that a worker may start before `run` asks for it; the answer is None if the worker dies."""

    job: Job
    is_started: bool = False
    answer: Future[Answer | None] = field(default_factory=Future)


class _Worker:
    """A process and its pipes. It reports readiness once, then answers each job."""

    def __init__(self) -> None:
        path = "\n".join([os.path.abspath(item or ".") for item in sys.path])
        command = [sys.executable, "-I", "-c", _BOOTSTRAP, str(_WORKER_SCRIPT), path, str(os.getpid())]
        command += [_known_triton_key()]
        # Unbuffered jobs: a forked process would write buffered data again.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        assert isinstance(self.process.stdout, FileIO), "the pipe has no buffer"
        # Without one, `readline` reads each byte by a system call, in which threads hand the GIL to one another.
        self._answers = BufferedReader(self.process.stdout)
        self.lock = threading.Lock()
        self.compiles_ahead = False
        self._is_ready = False

    def is_ready(self) -> bool:
        """Whether the process accepts jobs; also True for a dead one, which the first job detects."""
        if not self._is_ready and select.select([self._answers], [], [], 0)[0]:
            self._answers.readline()
            self._is_ready = True
        return self._is_ready

    def run(self, job: Job) -> Answer | None:
        """Returns the answer to a job, or None if the process died."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            line = memoryview((json.dumps(job) + "\n").encode())
            while line:
                line = line[stdin.write(line) or 0 :]
            return Answer(**json.loads(self._answers.readline()))
        except (OSError, ValueError):
            return None

    def shutdown(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self._answers):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


class WorkerPool:
    """The workers of this process. A forked process starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._ahead: dict[str, _AheadJob] = {}

    @property
    def processes(self) -> list[int]:
        """The ids of the worker processes."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Starts workers up to `worker_count`, replacing dead ones, without waiting for them."""
        count = worker_count()
        with self._lock:
            self._workers = [worker for worker in self._workers if worker.process.poll() is None]
            self._ahead = {key: item for key, item in self._ahead.items() if not item.answer.done()}
            try:
                while len(self._workers) < count:
                    self._workers.append(_Worker())
            except OSError as error:
                log.warning("cannot start a worker process for kernels: %s", error)

    def wait(self, seconds: float) -> bool:
        """Waits for all workers; returns whether they are ready."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(worker.is_ready() for worker in self._workers):
            time.sleep(_POLL_SECONDS)
        return all(worker.is_ready() for worker in self._workers)

    def compile_ahead(self, job: Job) -> None:
        """Lets a worker compile a job that `run` will probably get, and returns at once. Does nothing without workers.

        Jobs that no worker has started when a `run` begins are left to it.
        """
        with self._lock:
            key = _job_key(job)
            if key in self._ahead or not self._workers:
                return
            self._ahead[key] = _AheadJob(job)
            idle = [worker for worker in self._workers if not worker.compiles_ahead]
            for worker in idle[:1]:
                worker.compiles_ahead = True
                threading.Thread(target=self._run_ahead, args=(worker,), daemon=True).start()

    def _run_ahead(self, worker: _Worker) -> None:
        """Runs jobs on a worker until all are started."""
        with worker.lock:
            while self._has_ahead_job(worker):
                if not worker.is_ready():
                    time.sleep(_POLL_SECONDS)
                elif (item := self._start_ahead_job()) is not None:
                    answer = worker.run(item.job)
                    if answer is None:
                        self._remove(worker)
                    item.answer.set_result(answer)
                    if answer is None:
                        return

    def _has_ahead_job(self, worker: _Worker) -> bool:
        """Whether there is a job for a worker to compile ahead; it stops otherwise."""
        with self._lock:
            worker.compiles_ahead = any(not item.is_started for item in self._ahead.values())
            return worker.compiles_ahead

    def _start_ahead_job(self) -> _AheadJob | None:
        with self._lock:
            waiting = [item for item in self._ahead.values() if not item.is_started]
            item = max(waiting, key=lambda item: _cost(item.job), default=None)
            if item is not None:
                item.is_started = True
            return item

    def run(self, jobs: Sequence[Job], finish: JobCallback, threads: int) -> None:
        """Distributes jobs among ready workers and `threads` threads of this process.

        Calls `finish(position, answer)` for each job, from several threads: with the worker's answer, or with None
        for a job of this process, which `finish` compiles itself.
        """
        keys = [*map(_job_key, jobs)]
        with self._lock:
            started = {key: item for key, item in self._ahead.items() if item.is_started}
            self._ahead = {key: started[key] for key in started.keys() - keys}
            workers = list(self._workers)
        ahead = {position: started[key] for position, key in enumerate(keys) if key in started}
        waiting: SimpleQueue[int] = SimpleQueue()
        for position in sorted(range(len(jobs)), key=lambda position: -_cost(jobs[position])):
            if position not in ahead:
                waiting.put(position)
        count = max(1, min(threads, len(jobs)))
        with ThreadPoolExecutor(count + len(workers)) as pool:
            own = [pool.submit(_run_jobs_in_process, waiting, finish) for _ in range(count)]
            others = [pool.submit(_run_jobs_on_worker, worker, jobs, waiting, finish) for worker in workers]
            for position, item in ahead.items():
                answer = item.answer.result()
                if answer is None:
                    waiting.put(position)
                else:
                    finish(position, answer)
        for future in own:
            future.result()
        for worker, died in zip(workers, others, strict=True):
            if died.result():
                self._remove(worker)
        _run_jobs_in_process(waiting, finish)  # jobs of dead workers

    def _remove(self, worker: _Worker) -> None:
        log.warning("a worker process for kernels died: %d", worker.process.pid)
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)
        worker.shutdown()

    def shutdown(self) -> None:
        """Kills all workers."""
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.shutdown()

    def reset_after_fork(self) -> None:
        """Removes the parent's workers in a forked process."""
        for worker in self._workers:
            worker.process.returncode = 0  # not a child of this process
        self._lock, self._workers, self._ahead = threading.Lock(), [], {}


_POLL_SECONDS = 0.01
"""Seconds between checks of a worker's readiness."""


def _run_jobs_in_process(waiting: SimpleQueue[int], finish: JobCallback) -> None:
    while True:
        try:
            position = waiting.get_nowait()
        except Empty:
            return
        finish(position, None)


def _run_jobs_on_worker(worker: _Worker, jobs: Sequence[Job], waiting: SimpleQueue[int], finish: JobCallback) -> bool:
    """Runs jobs on a worker until none is left; returns whether it died, after requeuing its job."""
    while not worker.lock.acquire(timeout=_POLL_SECONDS):
        if waiting.empty():
            return False
    try:
        while not worker.is_ready():
            if waiting.empty():
                return False
            time.sleep(_POLL_SECONDS)
        while True:
            try:
                position = waiting.get_nowait()
            except Empty:
                return False
            answer = worker.run(jobs[position])
            if answer is None:
                waiting.put(position)
                return True
            finish(position, answer)
    finally:
        worker.lock.release()


def _cost(job: Job) -> float:
    return float(job.get("cost", 0.0))


def _job_key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)


WORKER_POOL = WorkerPool()
atexit.register(WORKER_POOL.shutdown)
os.register_at_fork(after_in_child=WORKER_POOL.reset_after_fork)

"""Processes that compile Triton kernels beside this one.

What Triton does in Python, a fifth of its time for a kernel, holds Python's lock, so with many kernels threads alone do
not keep many processors busy. Workers are started when a compile for a GPU begins, and import Triton while the graph is
lowered; until one is ready, and beside it, threads of this process do the same. They live as long as this process, and
end with it. Jobs and answers are lines of JSON. A worker that dies gives its job back, and another takes its place.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from fxwrap.errors import OptionError

log = logging.getLogger("fxwrap.kernels")

WORKERS_VARIABLE = "FXWRAP_COMPILE_WORKERS"
"""The environment variable with the number of workers; 0 compiles in this process alone."""

_MOST = 8
_PROGRAM = Path(__file__).with_name("triton_worker.py")
_START = (
    "import sys, runpy; program, path = sys.argv[1:3]; sys.argv[1:3] = []; "
    "sys.path[:] = path.split(chr(10)); runpy.run_path(program, run_name='__main__')"
)

Job = Mapping[str, Any]

Finish = Callable[[int, "str | None"], None]
"""Takes a job's position and what came of it."""


def worker_count() -> int:
    """Returns how many workers may run: what the environment says, else half the processors, 8 at most.

    None where there are fewer than 4 processors, or no Python to run them by. Raises OptionError for what is no number.
    """
    text = os.environ.get(WORKERS_VARIABLE, "")
    if text and not text.isdecimal():
        raise OptionError(f"{WORKERS_VARIABLE} is a number of processes, or 0 for none, not {text!r}")
    if not sys.executable:
        return 0
    if text:
        return int(text)
    processors = _processors()
    return min(processors // 2, _MOST) if processors >= 4 else 0


def _processors() -> int:
    with suppress(AttributeError, OSError):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """One process, and the pipes to it. It says once that it is ready, and then answers each job."""

    def __init__(self) -> None:
        path = "\n".join([os.path.abspath(item or ".") for item in sys.path])
        command = [sys.executable, "-I", "-c", _START, str(_PROGRAM), path, str(os.getpid())]
        # Without buffers, as a process that is forked from this one would write what they hold once more.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        self.lock = threading.Lock()
        self._is_ready = False

    def is_ready(self) -> bool:
        """Returns whether jobs are taken by now; also True for one that has died, which the first job finds out."""
        stdout = self.process.stdout
        assert stdout is not None
        if not self._is_ready and select.select([stdout], [], [], 0)[0]:
            stdout.readline()
            self._is_ready = True
        return self._is_ready

    def run(self, job: Job) -> str | None:
        """Returns what went wrong with a job, "" for nothing, or None where the process has died."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            line = memoryview((json.dumps(job) + "\n").encode())
            while line:
                line = line[stdin.write(line) or 0 :]
            return str(json.loads(stdout.readline())["error"])
        except (OSError, ValueError):
            return None

    def end(self) -> None:
        """Ends the process, which may be at work."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


class WorkerPool:
    """The workers of this process. A process that is forked from it has none of them, and starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []

    @property
    def processes(self) -> list[int]:
        """The numbers of the processes that run."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Starts workers up to the number of `worker_count`, also for those that died; they get ready by themselves."""
        wanted = worker_count()
        with self._lock:
            self._workers = [worker for worker in self._workers if worker.process.poll() is None]
            try:
                while len(self._workers) < wanted:
                    self._workers.append(_Worker())
            except OSError as error:
                log.warning("no process can be started to compile kernels: %s", error)

    def wait(self, seconds: float) -> bool:
        """Waits until all workers are ready; returns whether they are."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(worker.is_ready() for worker in self._workers):
            time.sleep(_LOOK)
        return all(worker.is_ready() for worker in self._workers)

    def run(self, jobs: Sequence[Job], finish: Finish, threads: int) -> None:
        """Has jobs done by the workers that are ready and by this process, whoever comes first.

        `finish(position, answer)` is called for each job, by several threads: with "" where a worker has done it, with
        what went wrong, or with None, up to `threads` at once, where it is to be done in this process.
        """
        waiting: SimpleQueue[int] = SimpleQueue()
        for position in range(len(jobs)):
            waiting.put(position)
        with self._lock:
            workers = [worker for worker in self._workers if worker.lock.acquire(blocking=False)]
        here = max(1, min(threads, len(jobs)))
        try:
            with ThreadPoolExecutor(here + len(workers)) as pool:
                own = [pool.submit(_work_here, waiting, finish) for _ in range(here)]
                others = [pool.submit(_work_there, worker, jobs, waiting, finish) for worker in workers]
            ended = [future.result() for future in others]
            for future in own:
                future.result()
        finally:
            for worker in workers:
                worker.lock.release()
        for worker, dead in zip(workers, ended, strict=True):
            if dead:
                self._remove(worker)
        _work_here(waiting, finish)  # what a worker that died has given back

    def _remove(self, worker: _Worker) -> None:
        log.warning("a process that compiles kernels has died: %d", worker.process.pid)
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)
        worker.end()

    def end(self) -> None:
        """Ends all workers."""
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def forget(self) -> None:
        """Makes a forked process have no workers: those that it knows of are its parent's."""
        for worker in self._workers:
            worker.process.returncode = 0  # it is no child of this process
        self._lock, self._workers = threading.Lock(), []


_LOOK = 0.01
"""Seconds between two looks at whether a worker has become ready."""


def _work_here(waiting: SimpleQueue[int], finish: Finish) -> None:
    while True:
        try:
            position = waiting.get_nowait()
        except Empty:
            return
        finish(position, None)


def _work_there(worker: _Worker, jobs: Sequence[Job], waiting: SimpleQueue[int], finish: Finish) -> bool:
    """Has a worker do jobs until none is left; returns whether it has died, and then gives back its job."""
    while not worker.is_ready():
        if waiting.empty():
            return False
        time.sleep(_LOOK)
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


POOL = WorkerPool()
atexit.register(POOL.end)
os.register_at_fork(after_in_child=POOL.forget)

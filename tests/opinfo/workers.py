"""Processes that run the rows of a sweep: a crash, a hang or a broken GPU context costs one row.

On CPUs a row has a process of its own, forked. A process that uses CUDA cannot be forked, and takes seconds to start:
there each process runs rows until one of them kills it or breaks its context.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from fxwrap import Options
from tests.opinfo.calls import Case, case_of
from tests.opinfo.records import Record, crashed, not_run, record_of

_START = 120.0
"""Seconds that a process may take until it asks for its first row."""


@dataclass(frozen=True)
class Setting:
    """How rows run: options, the largest number of calls per row, device."""

    options: Options
    most: int
    device: str = "cpu"

    @property
    def forks(self) -> bool:
        """Whether each row runs in a new process."""
        return self.device == "cpu"


def run_sweep(cases: Sequence[Case], setting: Setting, *, jobs: int, timeout: float, limit: float) -> Iterator[Record]:
    """Yields a record for each case as it arrives; `jobs` cases run at a time.

    A case that takes longer than `timeout` seconds fails; cases that are unfinished after `limit` seconds are not run.
    """
    until = time.monotonic() + limit
    waiting, workers = deque(cases), list[_Worker]()
    try:
        while (waiting or any(worker.case for worker in workers)) and time.monotonic() < until:
            for worker in [worker for worker in workers if worker.case is None]:
                if waiting:
                    worker.start(waiting.popleft())
            while waiting and len(workers) < jobs:
                workers.append(_Worker(setting))
                workers[-1].start(waiting.popleft())
            wait([worker.connection for worker in workers if worker.case is not None], timeout=0.2)
            for worker in list(workers):
                record = worker.poll(timeout)
                if record is not None:
                    yield record
                if worker.ended:
                    workers.remove(worker)
        late = [worker.case for worker in workers if worker.case is not None] + list(waiting)
    finally:
        for worker in workers:
            worker.end()
    yield from [not_run(case, f"the sweep's limit of {limit:.0f} s was reached") for case in late]


@dataclass
class _Worker:
    """A process, and the case that it runs."""

    setting: Setting
    case: Case | None = None
    ended: bool = False
    started: float = 0.0
    process: BaseProcess = field(init=False)
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork" if self.setting.forks else "spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.setting, child), daemon=True)
        self.process.start()
        child.close()
        self.started = time.monotonic() + (0.0 if self.setting.forks else _START)

    def start(self, case: Case) -> None:
        self.case = case
        self.started = max(time.monotonic(), self.started)
        self.connection.send(case.key)

    def poll(self, timeout: float) -> Record | None:
        """Returns the record of its case once that has finished, crashed or timed out."""
        if self.case is None:
            return None
        record: Record | None = None
        if self.connection.poll():
            try:
                record, alive = self.connection.recv()
            except (EOFError, ConnectionResetError):
                record, alive = crashed(self.case, f"its process died of {self._death()}"), False
            self.started = 0.0
            if not alive:
                self.end()
        elif time.monotonic() - self.started > timeout:
            record = crashed(self.case, f"it took more than {timeout:.0f} s")
            self.end()
        if record is not None:
            self.case = None
        return record

    def end(self) -> None:
        self.ended = True
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.connection.close()

    def _death(self) -> str:
        self.process.join(10.0)
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else str(code)


def _serve(setting: Setting, connection: Connection) -> None:
    """Runs each case that it receives, and sends its record and whether the process can run another."""
    torch.set_num_threads(1)
    alive = True
    while alive:
        case = case_of(connection.recv())
        try:
            record = record_of(case, setting.options, setting.most)
        except Exception as error:  # noqa: BLE001 - the error becomes a row
            record = crashed(case, f"{type(error).__name__}: {error}")
        alive = not setting.forks and _cuda_works()
        connection.send((record, alive))
    connection.close()
    if not setting.forks:
        os._exit(0)  # a broken CUDA context fails at exit too


def _cuda_works() -> bool:
    """Whether kernels still run; after a device-side assertion no kernel runs in the process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True

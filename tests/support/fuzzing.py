"""Processes that run the cases of many seeds: each outcome is yielded, and a process that dies or hangs is replaced."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from hypothesis.errors import StopTest, UnsatisfiedAssumption

from fxwrap.errors import FusionWarning
from tests.support.child_processes import forking_context

BATCH, LIMIT = 1000, 180
"""Seeds for each process, seconds for each case."""

MOST_FAILED_STARTS = 3
"""Starts of one worker that fail one after another before the run is given up."""


@dataclass(frozen=True)
class Drawn:
    """The example of a strategy that a seed determines, and why others were rejected before it: reasons with counts."""

    example: Any
    rejected: Mapping[str, int]


def drawn_example(strategy: st.SearchStrategy[Any], seed: int) -> Drawn:
    """Returns the example of a strategy that a seed determines."""
    drawn: list[Any] = []
    rejected = Counter[str]()

    @hypothesis_seed(seed)
    @given(st.data())
    @settings(
        max_examples=2, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck), deadline=None
    )
    def draw(data: st.DataObject) -> None:
        if data.draw(st.integers(0, 1 << 32)):  # the first example is the simplest one, all zeros
            try:
                drawn.append(data.draw(strategy))
            except UnsatisfiedAssumption:
                rejected["an assumption of the strategy fails"] += 1
                raise
            except StopTest:
                rejected["it takes more random numbers than Hypothesis has"] += 1
                raise

    torch.manual_seed(seed)
    draw()
    return Drawn(drawn[-1], rejected)


class Case(Protocol):
    """A case of a seed; its variants are numbered."""

    @property
    def seed(self) -> int: ...

    @property
    def variant(self) -> int: ...


@dataclass(frozen=True)
class Failure:
    """The error of a case, as text."""

    text: str


Outcome: TypeAlias = tuple[Any, Any]
"""A case, and its result or its `Failure`."""


@dataclass(frozen=True)
class Task:
    """How a seed is run: `subject(seed)` has `cases`, each of which `run(case, subject)` runs. Both can be pickled.

    A case may take `limit` seconds.
    """

    subject: Callable[[int], Any]
    run: Callable[[Any, Any], Any]
    limit: float = LIMIT


def work(seeds: Sequence[int], task: Task, messages: Connection, stacks: str) -> None:
    """Runs the cases of some seeds; sends each case before it starts, and its result or failure after it.

    The stacks of all threads go to the file `stacks` shortly before a case exceeds the limit.
    """
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", message="(?s).* called instead", category=FusionWarning)
    gc.collect()
    gc.freeze()  # the collector need not visit the objects of imported modules
    with Path(stacks).open("w") as file:
        for seed in seeds:
            subject = task.subject(seed)
            for case in subject.cases:
                faulthandler.dump_traceback_later(0.9 * task.limit, file=file)
                messages.send(case)
                try:
                    messages.send((task.run(case, subject),))
                except Exception:  # noqa: BLE001 - reported with its seed
                    messages.send((Failure(traceback.format_exc()),))
        faulthandler.cancel_dump_traceback_later()
    messages.send(None)


class Worker:
    """A process and the seeds it has left; replaced with the rest of them when it dies or hangs."""

    def __init__(self, seeds: Sequence[int], task: Task) -> None:
        self._seeds, self._task = list(seeds), task
        self._case: Case | None = None
        self._failed_starts = 0
        self._start()

    def _start(self) -> None:
        context = forking_context()
        self.messages, other = context.Pipe(duplex=False)
        self._stacks = tempfile.NamedTemporaryFile("r", suffix=".stacks")  # noqa: SIM115 - open while the process runs
        arguments = (self._seeds, self._task, other, self._stacks.name)
        self._process = context.Process(target=work, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self.last_message = time.monotonic()
        self._is_started = False

    @property
    def limit(self) -> float:
        """The seconds that the current case, or the start of the process, may take."""
        return LIMIT if self._case is None else self._task.limit

    def receive(self) -> Outcome | None:
        """Returns the outcome of a case, if the message is one. Raises StopIteration after the last message."""
        self.last_message = time.monotonic()
        try:
            message = self.messages.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return self.give_up(f"the process ended with status {self._process.exitcode}")
        self._is_started = True
        if message is None:
            self._process.join()
            raise StopIteration
        if not isinstance(message, tuple):
            self._case = message
            if not message.variant:
                self._seeds.remove(message.seed)
            return None
        case, self._case = self._case, None
        assert case is not None, "an outcome follows its case"
        return case, message[0]

    def give_up(self, reason: str) -> Outcome | None:
        """Ends the process, goes on in another with the seeds left, and returns the failure of the current case."""
        self.stop()
        self._failed_starts = 0 if self._is_started else self._failed_starts + 1
        if self._failed_starts == MOST_FAILED_STARTS:
            raise RuntimeError(f"a process of the fuzzer does not start: {reason}")
        case, self._case = self._case, None
        stacks = self._stacks.read()
        self._start()
        return None if case is None else (case, Failure(f"{reason}\n{stacks}".rstrip()))

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def run_seeds(task: Task, first: int, count: int, jobs: int, seconds: float) -> Iterator[Outcome]:
    """Yields each case with its result, or with its failure."""
    deadline = time.monotonic() + seconds
    batches = iter([range(start, min(start + BATCH, first + count)) for start in range(first, first + count, BATCH)])
    workers = [Worker(batch, task) for batch in itertools.islice(batches, jobs)]
    while workers and time.monotonic() < deadline:
        ready = wait([worker.messages for worker in workers], timeout=min(5, *[worker.limit for worker in workers]))
        for number, worker in enumerate(workers):
            outcome = None
            try:
                if worker.messages in ready:
                    outcome = worker.receive()
                elif time.monotonic() - worker.last_message > worker.limit:
                    outcome = worker.give_up(f"no result after {worker.limit:g} s")
            except StopIteration:
                batch = next(batches, None)
                workers[number : number + 1] = [] if batch is None else [Worker(batch, task)]
                break
            if outcome is not None:
                yield outcome
    for worker in workers:
        worker.stop()

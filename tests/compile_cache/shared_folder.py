"""Many processes compile the same graphs at once for one cache folder: one of them compiles each.

    python -m tests.compile_cache.shared_folder --processes 64

Processes are forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import compiler
from fxwrap.compile_cache import CompileCounts
from fxwrap.compile_cache.cache import FOLDER
from fxwrap.errors import GraphError
from fxwrap.options import Options

FORK = multiprocessing.get_context("fork")
OPTIONS = Options(emitter="python", fuse=False)
"""Options of programs that need no compiled code, which a cache folder of its own would build anew."""

X = torch.ones(8)


@cache
def graph_of(factor: float) -> GraphModule:
    def function(x: Tensor) -> Tensor:
        return x * factor

    return make_fx(function, tracing_mode="fake")(X)


def slow_compile(*arguments: Any, work: Callable[..., Any]) -> Any:
    """A compile that takes so long that all processes need it meanwhile."""
    time.sleep(0.3)
    return work(*arguments)


def compile_and_run(factors: tuple[float, ...], number: int) -> None:
    """Compiles graphs, in another order in every second process."""
    for factor in factors[:: 1 - 2 * (number % 2)]:
        compiled = fxwrap.compile_graph(graph_of(factor), [X], options=OPTIONS)
        assert torch.equal(compiled(X)[0], factor * X)


@cache
def bad_graph() -> GraphModule:
    """Returns a graph with a call that no program has."""
    graph = graph_of(5.0)
    graph.graph.output_node().prepend(graph.graph.call_function(print, ()))
    return graph


def fail(number: int) -> None:
    """Compiles a graph that cannot be compiled."""
    try:
        fxwrap.compile_graph(bad_graph(), [X], options=OPTIONS)
    except GraphError:
        return
    raise AssertionError


def die_while_compiling(number: int) -> None:
    """Kills the process that compiles first, of those that the others wait for."""
    marker = Path(os.environ["FXWRAP_CACHE_DIR"]) / "died"
    work = compiler._compile_request

    def die(*arguments: Any) -> Any:
        if not marker.exists():
            marker.touch()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*arguments)

    compiler._compile_request = die
    compile_and_run((7.0,), number)


def run_processes(count: int, job: Callable[[int], None]) -> tuple[CompileCounts, int]:
    """Runs a job in forked processes that begin together; returns the sum of their counts, and how many were killed."""
    barrier, results = FORK.Barrier(count), FORK.SimpleQueue()

    def process(number: int) -> None:
        barrier.wait()
        before = fxwrap.compile_counts()
        job(number)
        results.put(astuple(fxwrap.compile_counts() - before))

    processes = [FORK.Process(target=process, args=(number,)) for number in range(count)]
    for item in processes:
        item.start()
    for item in processes:
        item.join(300)
    codes = [item.exitcode for item in processes]
    assert all(code in (0, -signal.SIGKILL) for code in codes), codes
    rows = [results.get() for _ in range(codes.count(0))]
    return CompileCounts(*map(sum, zip(*rows, strict=True))), count - len(rows)


def check(processes: int, folder: Path) -> None:
    """Raises AssertionError where processes compile more than needed, or leave files behind."""
    os.environ.update(FXWRAP_CACHE_DIR=str(folder), FXWRAP_COMPILE_CACHE="1")
    compile_and_run((11.0, 11.0), 0)  # imports and traces before processes are forked
    for graph in (*map(graph_of, (2.0, 3.0, 7.0)), bad_graph()):
        assert graph.graph.nodes
    work = compiler._compile_request
    compiler._compile_request = partial(slow_compile, work=work)
    try:
        counts, _ = run_processes(processes, partial(compile_and_run, (2.0, 3.0)))
        assert counts == CompileCounts(compiled=2, loaded=2 * processes - 2), counts
        for entry in (folder / FOLDER).iterdir():
            entry.write_bytes(b"damaged")
        counts, _ = run_processes(processes, partial(compile_and_run, (2.0, 3.0)))
        assert counts == CompileCounts(compiled=2, loaded=2 * processes - 2), counts
        counts, _ = run_processes(processes, fail)
        assert counts == CompileCounts(compiled=processes), counts  # none has waited until its time limit
    finally:
        compiler._compile_request = work
    counts, killed = run_processes(processes, die_while_compiling)
    assert (counts, killed) == (CompileCounts(compiled=1, loaded=processes - 2), 1), (counts, killed)
    leftovers = [path.name for path in folder.rglob("*.tmp")]
    assert not leftovers, leftovers


def main() -> None:
    """Runs the checks in a folder of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=64)
    chosen = parser.parse_args()
    with TemporaryDirectory() as folder:
        check(chosen.processes, Path(folder))
    sys.stdout.write(f"{chosen.processes} processes, one folder: each graph was compiled once\n")


if __name__ == "__main__":
    main()

"""One rank of a job that compiles: prints as lines of JSON what it compiled itself and what it received."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.artifact.environment import environment_text
from fxwrap.compile_cache import sharing
from fxwrap.errors import FxwrapError, RankError
from fxwrap.options import Options

X = torch.linspace(-1, 1, 8)
OPTIONS = Options(emitter="python", fuse=False)
"""Options of programs that need no compiled code, which a cache folder of its own would build anew."""


def graph_of(factor: float) -> GraphModule:
    def function(x: torch.Tensor) -> torch.Tensor:
        pending = torch.ops._c10d_functional.all_reduce(x * factor, "sum", "0")
        return torch.ops._c10d_functional.wait_tensor(pending)

    return make_fx(function, tracing_mode="fake")(X)


def shared(rank: int) -> Any:
    """All ranks compile two graphs, in another order on each; returns what the counts of this rank are then."""
    before = fxwrap.compile_counts()
    compiled = {
        factor: fxwrap.compile_graph(graph_of(factor), [X], options=OPTIONS) for factor in ((2.0, 3.0)[:: 1 - 2 * rank])
    }
    for factor in (2.0, 3.0):
        torch.testing.assert_close(compiled[factor](X)[0], 2 * factor * X)
    return astuple(fxwrap.compile_counts() - before)


def late(rank: int) -> Any:
    """Rank 0 claims a compile and does not finish: rank 1 compiles after its time limit."""
    os.environ["FXWRAP_COMPILE_WAIT"] = "1"
    if rank == 0:
        work = fxwrap.compile.compiler._compile_request  # type: ignore[attr-defined]

        def slow(*arguments: Any) -> Any:
            time.sleep(4)
            return work(*arguments)

        fxwrap.compile.compiler._compile_request = slow  # type: ignore[attr-defined]
    else:
        time.sleep(1)
    before = fxwrap.compile_counts()
    compiled = fxwrap.compile_graph(graph_of(5.0), [X], options=OPTIONS)
    torch.testing.assert_close(compiled(X)[0], 10 * X)
    return astuple(fxwrap.compile_counts() - before)


def other_options(rank: int) -> Any:
    """The second rank that comes learns which options differ."""
    if rank == 1:
        dist.barrier()
    try:
        fxwrap.compile_graph(graph_of(7.0), [X], options=OPTIONS.replace(memory_planning=("none", "reuse")[rank]))
    except FxwrapError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if rank == 0:
            dist.barrier()
    return ""


def other_versions(rank: int) -> Any:
    """A rank with another release of a package learns which one differs, also where its cache has the program."""
    fxwrap.compile_graph(graph_of(13.0), [X], options=OPTIONS)
    dist.barrier()
    text = environment_text()
    if rank == 1:
        sharing.environment_text = lambda: text.replace(f"torch={version('torch')}", "torch=1.0")
    try:
        fxwrap.compile_graph(graph_of(13.0), [X], options=OPTIONS)
    except RankError as error:
        return str(error)
    finally:
        sharing.environment_text = environment_text
    return ""


def failed(rank: int) -> Any:
    """A compile that fails on the rank that claimed it is made by the others, which fail too, at once."""
    start = time.perf_counter()
    graph = graph_of(9.0)
    graph.graph.output_node().prepend(graph.graph.call_function(print, ()))
    try:
        fxwrap.compile_graph(graph, [X], options=OPTIONS)
    except FxwrapError as error:
        return [type(error).__name__, time.perf_counter() - start < 60]
    return []


def dead(rank: int) -> Any:
    """Rank 1 is gone when rank 0 waits for a collective of it."""
    compiled = fxwrap.compile_graph(graph_of(11.0), [X], options=OPTIONS)
    compiled(X)
    if rank == 1:
        print(json.dumps({"case": "dead", "error": ""}), flush=True)
        os._exit(0)
    try:
        compiled(X)
    except RuntimeError as error:
        print(json.dumps({"case": "dead", "error": type(error).__name__}), flush=True)
    sys.exit()


def main(arguments: Sequence[str]) -> None:
    """Runs cases with a cache folder of this rank: `compile_rank.py RANK STORE CASES...`."""
    rank = int(arguments[0])
    os.environ["FXWRAP_CACHE_DIR"] = f"{arguments[1]}.cache{rank}"
    store = dist.FileStore(arguments[1], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for name in arguments[2:]:
        print(json.dumps({"case": name, "error": globals()[name](rank)}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""One rank of a job that compiles: prints as lines of JSON what it compiled itself and what it received."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.artifact.environment import environment_text
from fxwrap.compile_cache import sharing
from fxwrap.devices import CPU
from fxwrap.errors import FxwrapError, RankError
from fxwrap.lines import StartCollective
from fxwrap.options import EMITTERS, Options
from fxwrap.runtime.native import build_bridge

X = torch.linspace(-1, 1, 8)
OPTIONS = Options(emitter="python", fuse=False)
"""Options of programs that need no compiled code, which a cache folder of its own would build anew."""

COLLECTIVES = torch.ops._c10d_functional


def graph_of(factor: float, group: str = "0") -> GraphModule:
    def function(x: torch.Tensor) -> torch.Tensor:
        return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x * factor, "sum", group))

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
    work = fxwrap.compile.compiler._compile_request  # type: ignore[attr-defined]

    def meet(*arguments: Any) -> Any:
        if rank == 0:
            dist.barrier()  # it has claimed the compile: rank 1 begins
        dist.barrier()  # rank 1 has waited for it in vain
        return work(*arguments)

    fxwrap.compile.compiler._compile_request = meet  # type: ignore[attr-defined]
    if rank == 1:
        dist.barrier()
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
    before = fxwrap.compile_counts()
    graph = graph_of(9.0)
    graph.graph.output_node().prepend(graph.graph.call_function(print, ()))
    try:
        fxwrap.compile_graph(graph, [X], options=OPTIONS)
    except FxwrapError as error:
        return [type(error).__name__, (fxwrap.compile_counts() - before).timeouts]
    return []


# --- collectives that fail: each in a group of its own, which does not work any more afterwards -----------------------


def fragile_group() -> dist.ProcessGroup:
    """Returns a group of all ranks that waits three seconds for a collective."""
    return dist.new_group(timeout=timedelta(seconds=3))


def error_of(call: Callable[[], object]) -> list[Any]:
    """Returns the class of an error and its text."""
    try:
        call()
    except (RuntimeError, RankError) as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def stalled(rank: int) -> Any:
    """Rank 1 calls its second collective too late, in each emitter: the group's timeout reaches the caller."""
    calls = []
    for emitter in EMITTERS:
        group, options = fragile_group(), OPTIONS.replace(emitter=emitter, compile_cache=False)
        compiled = fxwrap.compile_graph(graph_of(17.0, group.group_name), [X], options=options)
        dist.barrier()
        compiled(X)
        calls.append(partial(compiled, X))
    dist.barrier()
    with ThreadPoolExecutor(len(calls)) as threads:  # they wait at the same time
        errors = list(threads.map(error_of, calls)) if rank == 0 else []
    dist.barrier()
    return errors


def uneven(rank: int) -> Any:
    """Ranks gather parts of different sizes, which their programs allow: their sizes are symbols."""
    name = fragile_group().group_name

    def function(x: torch.Tensor) -> torch.Tensor:
        return COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(x * 2, 2, name))

    graph = make_fx(function, tracing_mode="symbolic")(torch.ones(8, 4))
    compiled = fxwrap.compile_graph(graph, options=OPTIONS)
    dist.barrier()
    return error_of(lambda: compiled(torch.ones(4 + 2 * rank, 4)))


def no_memory(rank: int) -> Any:
    """Rank 0 has no memory for a bucket."""
    name = fragile_group().group_name
    inputs = [torch.ones(1 << 20) for _ in range(16)]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(item, "sum", name)) for item in tensors]

    graph = make_fx(function, tracing_mode="fake")(*inputs)
    spec = replace(CPU, collectives=replace(CPU.collectives, latency_s=1.0, bytes_per_s=1e9, coalesced=frozenset()))
    compiled = fxwrap.compile_graph(graph, inputs, options=OPTIONS.replace(devices=(spec,), compile_cache=False))
    assert sum(isinstance(line, StartCollective) for line in compiled.program.lines()) == 1
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), limits[1]))
    try:
        return error_of(lambda: compiled(*inputs))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


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
    """Runs cases with a cache folder of this rank, which has the bridge: `compile_rank.py RANK STORE CASES...`."""
    rank, folder, bridge = int(arguments[0]), Path(f"{arguments[1]}.cache{arguments[0]}"), build_bridge().folder
    folder.mkdir()
    (folder / bridge.name).symlink_to(bridge)
    os.environ["FXWRAP_CACHE_DIR"] = str(folder)
    store = dist.FileStore(arguments[1], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    for name in arguments[2:]:
        print(json.dumps({"case": name, "error": globals()[name](rank)}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""One of four ranks that measure the groups of a mesh at their first run, and compile the next graph with the numbers.

Rank 3 loads the first graph from its cache; rank 2 compiles the second one before anybody measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile.group_speeds import with_group_speeds
from fxwrap.options import Options
from tests.distributed.processes import run_checks

C10D = torch.ops._c10d_functional
OPTIONS = Options(fuse=False)
X = torch.linspace(-1, 1, 8)


def graph_of(groups: Sequence[str], reductions: int) -> GraphModule:
    """Returns a graph that reduces several times in each group."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for group in groups:
            for _ in range(reductions):
                x = C10D.wait_tensor(C10D.all_reduce(x / 2, "sum", group))
        return x

    return make_fx(function, tracing_mode="fake")(X)


def gathered(value: object) -> list[object]:
    """Returns the values of all ranks."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    groups = [mesh.get_group(name).group_name for name in ("inner", "outer")]
    graphs = [graph_of(groups, number) for number in (1, 2, 3)]
    if rank == 3:
        assert not fxwrap.compile_graph(graphs[0], [X], options=OPTIONS).cached
    if rank == 2:
        assert with_group_speeds(OPTIONS, graphs[1]) is OPTIONS
    dist.barrier()
    first = fxwrap.compile_graph(graphs[0], [X], options=OPTIONS)
    assert first.cached == (rank == 3)
    torch.testing.assert_close(first(X)[0], X)
    speeds = [[with_group_speeds(OPTIONS, graph).collective_speeds for graph in graphs] for _ in range(2)]
    assert speeds[0] == speeds[1] and speeds[0][0] is None
    own = fxwrap.compile_graph(graphs[2], [X], options=OPTIONS)
    torch.testing.assert_close(own(X)[0], X)
    rows = gathered([{groups.index(name): speed for name, speed in (item or {}).items()} for item in speeds[0]])
    for row in rows:
        assert isinstance(row, list) and row[0] == {} and sorted(row[2]) == [0, 1]
        assert all(1e-7 < latency < 10 and 1e3 < rate < 1e13 for latency, rate in row[2].values())
    for one, other, group in ((0, 1, 0), (2, 3, 0), (0, 2, 1), (1, 3, 1)):  # equal in each group
        assert [row.get(group) for row in rows[one]] == [row.get(group) for row in rows[other]]
    assert rows[2][1] == {}  # as it decided before


def main(arguments: Sequence[str]) -> None:
    """Runs the check with a cache folder of this rank: `speed_rank.py RANK STORE`."""
    rank = int(arguments[0])
    os.environ |= {
        "FXWRAP_CACHE_DIR": f"{arguments[1]}.cache{rank}", "FXWRAP_COMPILE_CACHE": "1", "FXWRAP_COMPILE_WAIT": "0",
        "FXWRAP_MEASURE_GROUPS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    run_checks(arguments, {"speeds": lambda: check(rank)}, world_size=4)


if __name__ == "__main__":
    main(sys.argv[1:])

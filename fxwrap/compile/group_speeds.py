"""The speeds of process groups with which all ranks compile a graph: see `fxwrap.runtime.group_speeds`."""

from __future__ import annotations

import hashlib
import os

from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.options import Options
from fxwrap.runtime.group_speeds import MEASURE_ENV, chosen_speed
from fxwrap.torch_compat import process_group
from fxwrap.wrapper_ir import is_collective


def with_group_speeds(options: Options, graph: GraphModule | ExportedProgram) -> Options:
    """Returns the options with the measured speeds of the process groups that a graph's collectives name.

    They are unchanged without buckets, where they have speeds already, for groups that nobody measured, and where
    FXWRAP_MEASURE_GROUPS is 0.
    """
    is_off = not options.bucket_collectives or os.environ.get(MEASURE_ENV) == "0"
    if is_off or options.collective_speeds is not None:
        return options
    module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    calls = [node for node in module.graph.nodes if is_collective(node.target)]
    names = sorted({str(item) for node in calls for item in (*node.args, *node.kwargs.values()) if type(item) is str})
    groups = {name: group for name in names if (group := process_group(name)) is not None}
    text = "\n".join([str(node.target) for node in calls])
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    chosen = {name: speed for name, group in groups.items() if (speed := chosen_speed(group, fingerprint)) is not None}
    speeds = {name: (speed.latency_s, speed.bytes_per_s) for name, speed in chosen.items()}
    return options.replace(collective_speeds=speeds) if speeds else options

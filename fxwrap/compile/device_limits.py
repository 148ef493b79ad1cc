"""The limits of this machine's devices with which a graph is compiled, in the specs of their types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.devices import device_runtime
from fxwrap.options import Options


def with_device_limits(
    options: Options, graph: GraphModule | ExportedProgram, example_inputs: Sequence[object] | None
) -> Options:
    """Returns the options with specs whose limits are those of the devices of a graph's inputs and constants.

    Of several devices of a type, those of the first. Specs that the options name themselves are unchanged, and so are
    those of types that the machine has no device of: a compile for another machine names its specs.
    Raises DeviceError for a device whose kernel language is not registered.
    """
    resolved = options.resolve_devices()
    if options.devices is not None or resolved.devices is None:
        return resolved
    module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    nodes = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    values = [*[node.meta.get("val") for node in nodes], *(example_inputs or ())]
    first: dict[str, torch.device] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            first.setdefault(value.device.type, value.device)
    specs = []
    for spec in resolved.devices:
        read, device = device_runtime(spec.device_type).read_limits, first.get(spec.device_type)
        limits = {} if read is None or device is None else dict(read(device))
        specs.append(replace(spec, **limits) if limits else spec)  # type: ignore[arg-type]
    return resolved.replace(devices=tuple(specs))

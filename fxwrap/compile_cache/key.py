"""The key of a compile: a hash of the graph, the options, and all else that decides what comes out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.compile_cache.graph_text import GraphText, NotCacheable
from fxwrap.device_registry import find_language, registered_spec
from fxwrap.device_spec import CUDA, DEVICE_SPECS
from fxwrap.environment import environment_text
from fxwrap.options import Options
from fxwrap.pass_spec import FX_BEFORE_LOWERING, FX_EMITTED
from fxwrap.runtime.native import binary_target, compiler_identity
from fxwrap.wrapper_ir import Ownership

FORMAT = 1
"""Changes with what an entry holds."""


@dataclass(frozen=True)
class Request:
    """What `compile_graph` was asked for."""

    graph: GraphModule | ExportedProgram
    example_inputs: Sequence[Any] | None
    options: Options
    ownership: Mapping[int, Ownership]
    name: str
    free_outputs: Collection[int]
    static_inputs: Collection[int] = ()


@dataclass(frozen=True)
class Key:
    """A compile's key, 64 hex digits, with the text of its graph, and what was known of the symbols before it."""

    digest: str
    graph: GraphText
    symbols: str


def make_key(request: Request) -> Key:
    """Returns the key of a compile. Raises NotCacheable, with the reason, for one that is not to be cached."""
    _check_options(request.options)
    graph = GraphText()
    graph.add(request.graph, request.example_inputs)
    symbols = graph.symbols_text()
    for device in graph.devices:
        _check_device(device.type)
    parts = (
        f"format {FORMAT}", graph.text(), symbols,
        f"name {request.name}", f"options {request.options.text()}",
        f"ownership {sorted([(place, item.value) for place, item in request.ownership.items()])}",
        f"free {sorted(request.free_outputs)}", f"static {sorted(request.static_inputs)}",
        *[_device_text(device) for device in graph.devices],
        *_torch_settings(), *_process_parts(), compiler_identity(),
    )  # fmt: skip
    return Key(hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest(), graph, symbols)


def _check_options(options: Options) -> None:
    if not options.cacheable:
        raise NotCacheable("a pass has no key")
    if options.lowerings or options.decompositions is not None:
        raise NotCacheable("its lowerings or decompositions are functions, which may change without their names")
    if options.passes_at(FX_BEFORE_LOWERING):
        raise NotCacheable("a pass runs on the graph, and may read metadata that the key does not cover")
    if options.passes_at(FX_EMITTED) and options.emitter == "fx":
        raise NotCacheable("a pass makes the graph that runs")


def _check_device(device_type: str) -> None:
    """Raises NotCacheable for a vendor's device, whose printer and runtime may change without the key."""
    spec = registered_spec(device_type)
    if spec is None:
        return
    language = find_language(spec.kernel_language) if spec.kernel_language else None
    printer = None if language is None else language.printer
    own = printer is None or str(getattr(printer, "__module__", "")).startswith("fxwrap.")
    if spec not in DEVICE_SPECS or not own:
        raise NotCacheable(f"the device type '{device_type}' is a vendor's")


def _device_text(device: torch.device) -> str:
    if device.type != CUDA.device_type or not torch.cuda.is_available():  # what torch can say of no other device
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    return f"{device} {facts.name} {facts.major}.{facts.minor} {facts.multi_processor_count}"


def _torch_settings() -> tuple[str, ...]:
    """Returns the settings of torch's that decide what is lowered to."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch's older and its newer names, which disagree
        precision = "mixed"
    return (
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"default {torch.get_default_dtype()}",
        f"matmul {precision}",
    )


@cache
def _process_parts() -> tuple[str, ...]:
    """Returns what stays as it is while the process lives: versions, the machine, fxwrap's own files, torch's place."""
    return (environment_text(), repr(binary_target()), sources_hash(), str(torch.__file__))


def sources_hash() -> str:
    """Returns a hash of the content of fxwrap's own files, so that what an edited fxwrap makes has another key."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(root):
        folders[:] = sorted([name for name in folders if name != "__pycache__"])
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                content = file.read()
            digest.update(f"{os.path.relpath(path, root)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()

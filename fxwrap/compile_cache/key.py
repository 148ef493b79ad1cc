"""The key of a compile: a hash of graph, options, and everything else that its result depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxwrap.artifact.environment import code_identity
from fxwrap.compile_cache.graph_serializer import GraphSerializer, NotCacheable
from fxwrap.devices import CUDA, DEVICE_SPECS, find_language, registered_spec
from fxwrap.events import EventLog
from fxwrap.options import FX_BEFORE_LOWERING, FX_EMITTED, Options
from fxwrap.runtime.devices import gpu_properties
from fxwrap.runtime.native import compiler_identity
from fxwrap.wrapper_ir import Ownership

FORMAT = 2
"""The version of the entry format."""


@dataclass(frozen=True)
class CompileRequest:
    """The arguments of `compile_graph`, checked and with resolved options, and the log of the compile."""

    graph: GraphModule | ExportedProgram
    example_inputs: Sequence[object] | None
    options: Options
    ownership: Mapping[int, Ownership]
    name: str
    flexible_stride_outputs: Collection[int]
    static_inputs: Collection[int] = ()
    events: EventLog = field(default_factory=lambda: EventLog("program"), compare=False)
    compiled_by_key: MutableMapping[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Key:
    """A compile's key: digest of 64 hex digits, serialised graph, and the text of its symbols before the compile."""

    digest: str
    graph: GraphSerializer
    symbols: str


def make_key(request: CompileRequest) -> Key:
    """Returns the key of a compile. Raises NotCacheable with the reason."""
    _check_options(request.options)
    graph = GraphSerializer()
    graph.add(request.graph, request.example_inputs)
    symbols = graph.symbols_text()
    for device in graph.devices:
        _check_device(device.type)
    parts = (
        f"format {FORMAT}", graph.text(), symbols,
        f"name {request.name}", f"options {request.options.text()}",
        f"ownership {sorted([(position, item.value) for position, item in request.ownership.items()])}",
        f"free {sorted(request.flexible_stride_outputs)}", f"static {sorted(request.static_inputs)}",
        *[_device_text(device, graph.device_name(device)) for device in graph.devices],
        *_torch_settings(), *process_environment(), compiler_identity(),
    )  # fmt: skip
    return Key(_digest(parts), graph, symbols)


def backend_key(options: Options, devices: Iterable[torch.device]) -> str:
    """Returns a hash of all that a compile depends on except the graph, for caches with a key of the graph.

    The entries of such caches contain all compiled code, so the key is the same on machines of one kind, also without a
    C++ compiler. `devices` are those of the inputs. Raises NotCacheable with the reason.
    """
    _check_options(options)
    for device_type in options.device_specs():
        _check_device(device_type)
    texts = [_device_text(device, str(device)) for device in dict.fromkeys(devices)]
    return _digest((f"options {options.text()}", *texts, *_torch_settings(), code_identity()))


def content_key(graph: GraphModule, options: Options) -> str:
    """Returns a hash of all that a compiled graph depends on, for files with its constants and all compiled code.

    Graphs that differ only in their nodes' places in the model's source have the same key. Raises NotCacheable with the
    reason.
    """
    serializer = GraphSerializer(standalone=True)
    serializer.add(graph, None)
    return _digest((serializer.text(), serializer.symbols_text(), backend_key(options, serializer.devices)))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _check_options(options: Options) -> None:
    if not options.cacheable:
        raise NotCacheable("a pass has no key")
    if options.lowerings or options.decompositions is not None:
        raise NotCacheable("its lowerings or decompositions are functions, which may change under the same name")
    if options.choose_kernel_form is not None:
        raise NotCacheable("the form of its kernels is chosen by a function, which may change under the same name")
    if options.passes_at(FX_BEFORE_LOWERING):
        raise NotCacheable("a pass on the graph may read metadata that the key does not cover")
    if options.passes_at(FX_EMITTED) and options.emitter == "fx":
        raise NotCacheable("a pass changes the emitted graph")


def _check_device(device_type: str) -> None:
    """Raises NotCacheable for a vendor's device, whose printer and runtime the key does not cover."""
    spec = registered_spec(device_type)
    if spec is None:
        return
    language = find_language(spec.kernel_language) if spec.kernel_language else None
    printer = None if language is None else language.printer
    own = printer is None or str(getattr(printer, "__module__", "")).startswith("fxwrap.")
    if spec not in DEVICE_SPECS or not own:
        raise NotCacheable(f"the device type '{device_type}' is a vendor's")


def _device_text(device: torch.device, name: str) -> str:
    if device.type != CUDA.device_type or not torch.cuda.is_available():  # torch has no properties of other devices
        return name
    gpu = gpu_properties(device)
    return f"{name} {gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}"


def _torch_settings() -> tuple[str, ...]:
    """Returns the global settings of torch that lowering depends on."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's old and new settings disagree
        precision = "mixed"
    return (
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"default {torch.get_default_dtype()}",
        f"matmul {precision}",
    )


@cache
def process_environment() -> tuple[str, ...]:
    """Returns versions, machine, a hash of fxwrap's sources, and the path of torch, which are fixed for the process."""
    return (code_identity(), str(torch.__file__))

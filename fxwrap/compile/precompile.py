"""Compiled graphs inside of torch's caches and files: programs in fxwrap's own format, which torch carries as bytes.

torch pickles its own part. A compiled graph is reduced to the content of a saved program and to `load_graph`, which
verifies it as `fxwrap.load` does.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from zipfile import BadZipFile

import torch

from fxwrap.artifact import load_content, program_content
from fxwrap.artifact.binaries import bridge_content, install_bridge
from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.compile.compiled import Compiled
from fxwrap.compile.inspection import record_loaded, write_compile
from fxwrap.compile_cache import NotCacheable, backend_key, is_enabled
from fxwrap.converters.emitted_program import BoxedCallable
from fxwrap.converters.intercepted_calls import accept_fake_tensors, call_as_graph
from fxwrap.devices import language_traits
from fxwrap.errors import ArtifactError, FxwrapError, OptionError
from fxwrap.options import FIRST_CALL, Options
from fxwrap.report import dump_folder
from fxwrap.runtime.cache_folder import distrust_reason
from fxwrap.runtime.native import bridge_target, find_bridge
from fxwrap.runtime.plain_inputs import with_plain_inputs
from fxwrap.signature import locate_kernel_error
from fxwrap.torch_compat import (
    autograd_cache_folder,
    cache_bypass,
    has_float_guards,
    has_functorch_level,
    is_aot_compiling,
    is_precompiling,
    precompiled_graph,
    read_cache_artifact,
    record_cache_artifact,
    without_fake_mode,
)
from fxwrap.wrapper_ir import TensorType, Value

if TYPE_CHECKING:
    from fxwrap.torch_compat.precompiled import PrecompiledGraph


log = logging.getLogger("fxwrap.cache")


def torch_cache_key(options: Options, example_inputs: Sequence[object]) -> str | None:
    """Returns the part of a graph's key in torch's caches that is fxwrap's; None where torch cannot keep its graphs.

    A graph that is precompiled and cannot be cached gets a key that no other graph has.
    """
    if options.on_graph is not None or options.observes or options.check_memory or has_functorch_level():
        return None
    try:
        _check_usable(options)
        return backend_key(options, [item.device for item in example_inputs if isinstance(item, torch.Tensor)])
    except NotCacheable as reason:
        log.info("AOTAutograd's cache is bypassed: %s", reason)
    return uuid.uuid4().hex if is_precompiling() else None


def _check_usable(options: Options) -> None:
    """Raises NotCacheable with the reason why AOTAutograd's cache is not used."""
    if not options.compile_cache or not is_enabled():
        raise NotCacheable("the compile cache is disabled")
    if dump_folder(options.dump) is not None:
        raise NotCacheable("a dump shows every step of the compile")
    if options.autotune == FIRST_CALL:
        raise NotCacheable("kernels are timed at the first call")
    job = torch.distributed.is_available() and torch.distributed.is_initialized()
    if job and torch.distributed.get_world_size() > 1:
        raise NotCacheable("the ranks of a job compare their compiles, and exchange them")
    folder = autograd_cache_folder()
    for path in (folder, folder.parent):
        if reason := distrust_reason(path):
            raise NotCacheable(f"{path} contains code, and {reason}")


def check_not_precompiling(options: Options) -> None:
    """Raises OptionError in `aot_compile`, for options with which graphs cannot be saved."""
    if is_aot_compiling():
        names = [name for name in ("on_graph", "debug", "check_values") if getattr(options, name) is not None]
        name = next(iter(names), "check_memory")
        raise OptionError(
            f"torch.compile(...).aot_compile cannot save graphs with the option '{name}', whose code exists in this "
            f"process only: compile without '{name}'"
        )


def graph_entry(
    compiled: Compiled | LoadedProgram, static_inputs: Collection[int], negative_inputs: Sequence[int]
) -> BoxedCallable:
    """Returns the boxed entry that AOTAutograd calls.

    `static_inputs` are the positions of inputs whose address never changes, `negative_inputs` those of inputs that may
    have a negative bit.
    """

    def run_graph(inputs: tuple[Any, ...]) -> Any:
        return call_as_graph(compiled.program, lambda: compiled.graph_module, inputs)

    def locate_error(error: Exception) -> None:
        locate_kernel_error(error, compiled.program)

    entry = accept_fake_tensors(compiled.boxed, run_graph, _tensor_inputs(compiled), static_inputs, locate_error)
    return with_plain_inputs(entry, negative_inputs) if negative_inputs else entry


def _tensor_inputs(compiled: Compiled | LoadedProgram) -> list[int]:
    """Returns the positions of the flat inputs that are tensors."""
    if isinstance(compiled, LoadedProgram):  # its program may not have been read
        return [position for position, item in enumerate(_described_inputs(compiled)) if item.get("kind") == "tensor"]
    types = [item.value.type if isinstance(item.value, Value) else None for item in compiled.program.inputs]
    return [position for position, type_ in enumerate(types) if isinstance(type_, TensorType)]


def _described_inputs(loaded: LoadedProgram) -> Sequence[Mapping[str, object]]:
    described: Sequence[Mapping[str, object]] = loaded.metadata["signature"]["inputs"]
    return described


def savable_graph(
    entry: BoxedCallable, compiled: Compiled, static_inputs: Collection[int], negative_inputs: Sequence[int]
) -> PrecompiledGraph:
    """Returns a compiled graph with its entry in the form that torch can save."""

    def content() -> bytes:
        try:
            return read_content()
        except FxwrapError as error:
            if is_precompiling():
                raise
            raise cache_bypass(str(error)) from error

    def read_content() -> bytes:
        if not compiled.is_reproducible and not is_precompiling():
            raise cache_bypass("its compile had side effects")
        if has_float_guards() and not is_precompiling():
            raise cache_bypass("it depends on the value of a float")
        if not is_precompiling() and find_bridge() is None and _has_cpp_kernels(compiled):
            raise cache_bypass("the C++ bridge, which is saved with it, is not compiled yet")
        call = {"static_inputs": sorted(static_inputs), "negative_inputs": list(negative_inputs)}
        with without_fake_mode():  # AOTAutograd's is active
            label = f"the {compiled.program.name} graph"
            content, has_bridge = compiled.content_to_save(), is_precompiling()
            saved = program_content(content, compiled.emitted, label, call, has_bridge=has_bridge)
        if not has_bridge:
            _share_bridge()
        return saved

    return precompiled_graph(lambda: entry, content, load_graph)


def _has_cpp_kernels(compiled: Compiled) -> bool:
    return any(language_traits(kernel.language).links_into_cpp for kernel in compiled.program.kernels)


def load_graph(content: bytes) -> PrecompiledGraph:
    """Loads a compiled graph from its content; torch calls it where it unpickles one.

    Raises ArtifactError for damaged or foreign content.
    """
    with without_fake_mode():
        _restore_bridge()
        loaded = load_content(content, "a precompiled graph")
    if loaded.metadata.get("binaries", {}).get("bridge", {}).get("libraries") == {}:
        _share_bridge()
    static_inputs, negative_inputs = _call_description(loaded)
    record_loaded(loaded)
    write_compile(loaded, None)
    return precompiled_graph(
        lambda: graph_entry(loaded, static_inputs, negative_inputs), lambda: content, load_graph
    )  # fmt: skip


def _share_bridge() -> None:
    """Lets `torch.compiler.save_cache_artifacts` save the bridge, once for all graphs."""
    folder = find_bridge()
    if folder is not None:
        record_cache_artifact(_bridge_key(), bridge_content(folder))


def _restore_bridge() -> None:
    """Installs the bridge that `torch.compiler.load_cache_artifacts` loaded, if there is no other."""
    if find_bridge() is None:
        content = read_cache_artifact(_bridge_key())
        if content is not None:
            with suppress(BadZipFile, KeyError):  # damaged: the bridge is compiled
                install_bridge(content)


def _bridge_key() -> str:
    """Returns the name of the bridge of this torch and Python among the artifacts of torch's caches."""
    return f"fxwrap_bridge_{hashlib.sha256(repr(sorted(bridge_target().items())).encode()).hexdigest()[:32]}"


def _call_description(loaded: LoadedProgram) -> tuple[frozenset[int], list[int]]:
    """Returns the positions of static inputs, and of those that may have a negative bit."""
    call = loaded.metadata.get("call")
    static_inputs, negative_inputs = (
        [_positions(loaded, call.get(name)) for name in ("static_inputs", "negative_inputs")]
        if isinstance(call, dict) else (None, None)
    )  # fmt: skip
    if static_inputs is None or negative_inputs is None:
        raise ArtifactError(
            loaded.path, "manifest.json", "it does not describe how the graph is called", "Compile the model again"
        )
    return frozenset(static_inputs), negative_inputs


def _positions(loaded: LoadedProgram, item: object) -> list[int] | None:
    """Returns a list of positions of inputs; None for anything else."""
    inputs = range(len(_described_inputs(loaded)))
    valid = isinstance(item, list) and all(type(position) is int and position in inputs for position in item)
    return cast("list[int]", item) if valid else None

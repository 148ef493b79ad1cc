"""An entry of the compile cache: a saved program without constants, with coverage and memory plan.

It has the file format of `fxwrap.save`: texts and hashes, no pickle. Compiled C++ libraries are in the cache folder
already, and the entry lists their hashes. Triton binaries are in the entry.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from fxwrap.artifact.archive import MANIFEST, Archive, ArchiveWriter
from fxwrap.artifact.binaries import bridge_folder, install_triton_binaries, write_triton
from fxwrap.artifact.devices import move_plan, move_program
from fxwrap.artifact.program_text import check_kernels, read_program, write_program
from fxwrap.artifact.saving import PLAN
from fxwrap.compile_cache.graph_serializer import NotCacheable
from fxwrap.converters.cpp.library import EmittedCpp
from fxwrap.converters.emitted_program import EmittedProgram, kernel_texts
from fxwrap.devices import language_traits
from fxwrap.errors import PlanningError
from fxwrap.lowering import NodeCoverage
from fxwrap.memory_planning import MemoryPlan, plan_from_json, plan_to_json
from fxwrap.runtime import native
from fxwrap.runtime.cache_folder import cache_folders, file_hash, is_intact
from fxwrap.wrapper_ir import ConstantStore, Program

log = logging.getLogger("fxwrap.cache")

COVERAGE = "coverage.json"

PayloadLocations = Mapping[tuple[str, str], Any]
"""The tensors and opaque objects of a graph, by their location."""


@dataclass(frozen=True)
class CachedCompile:
    """The result of a compile: program with constants, coverage of the graph's calls, and memory plan."""

    program: Program
    coverage: tuple[NodeCoverage, ...]
    plan: MemoryPlan | None


# --- writing --------------------------------------------------------------------------------------------------------


def entry_content(
    key: str,
    cached: CachedCompile,
    emitter: str,
    emitted: EmittedProgram,
    payloads: PayloadLocations,
    devices: Sequence[torch.device],
) -> bytes:
    """Returns the content of an entry; `emitted` is the running form, `payloads` and `devices` are the graph's.

    Raises NotCacheable or ArtifactError for a program that cannot be loaded from a file.
    """
    program = cached.program
    check_kernels(program, key)
    constants = _constant_locations(program, payloads)
    libraries = _libraries(program, emitter, emitted)
    file = io.BytesIO()
    with ArchiveWriter(file) as writer:
        kernels = write_program(writer, program)
        names = [item.name for item in dataclasses.fields(NodeCoverage)]
        rows = [[getattr(item, name) for name in names] for item in cached.coverage]
        writer.add_bytes(COVERAGE, json.dumps(rows).encode())
        if cached.plan is not None:
            writer.add_bytes(PLAN, plan_to_json(cached.plan).encode())
        triton = write_triton(writer, kernel_texts(program))
        manifest = {"key": key, "kernels": kernels, "constants": constants, "libraries": libraries}
        writer.close({**manifest, "triton": triton, "devices": list(map(str, devices))})
    return file.getvalue()


def _constant_locations(program: Program, payloads: PayloadLocations) -> dict[str, list[str]]:
    """Returns the location of each constant in the graph. Raises NotCacheable for computed constants."""
    known = {id(payload): location for location, payload in reversed(list(payloads.items()))}
    locations = {}
    for item in program.constants:
        name = item.value.name
        location = known.get(id(program.store.tensors.get(name)))
        if location is None:
            raise NotCacheable(f"the constant '{name}' was computed by the compile")
        locations[name] = list(location)
    return locations


def _libraries(program: Program, emitter: str, emitted: EmittedProgram) -> dict[str, list[dict[str, object]]]:
    """Returns the libraries of a program in the cache folder, with their hashes."""
    links_into_cpp = [kernel for kernel in kernel_texts(program) if language_traits(kernel.language).links_into_cpp]
    entries: dict[str, list[dict[str, object]]] = {}
    if emitter == "cpp":
        libraries = emitted.libraries() if isinstance(emitted, EmittedCpp) else {}
        entries["programs"] = [{"source": key, **_library_entry(path)} for key, path in libraries.items()]
    elif links_into_cpp and native.find_bridge() is not None:  # else the kernels are in the cache folder alone
        symbols_of: dict[Path, list[str]] = {}
        for symbol, library in native.compiled_kernels(tuple([kernel.symbol for kernel in links_into_cpp])).items():
            symbols_of.setdefault(library, []).append(symbol)
        entries["kernels"] = [{"symbols": item, **_library_entry(library)} for library, item in symbols_of.items()]
    if entries:
        folder = bridge_folder()
        entries["bridge"] = [_library_entry(folder / name) for name in native.BRIDGE_LIBRARIES]
    return entries


def _library_entry(library: Path) -> dict[str, object]:
    digest = file_hash(library)
    for folder in cache_folders():
        if digest is not None and library.is_relative_to(folder):
            return {"path": str(library.relative_to(folder)), "sha256": digest}
    raise NotCacheable("its compiled code is not in the cache folder")


# --- reading --------------------------------------------------------------------------------------------------------


def read_entry(
    path: Path, file: IO[bytes], key: str, payloads: PayloadLocations, devices: Sequence[torch.device]
) -> CachedCompile:
    """Reads and verifies an entry, an open file that it closes, binds its constants, and registers its compiled code.

    The program is moved to `devices`, those of the graph, from those of the graph that was compiled.
    Raises ArtifactError for an entry that is damaged, truncated, or of another key or format.
    """
    with Archive(path, file) as archive:
        manifest = archive.manifest
        if manifest.get("key") != key:
            raise archive.error(MANIFEST, "it belongs to another compile")
        program = read_program(archive, ())
        try:
            store = {name: payloads[kind, place] for name, (kind, place) in manifest["constants"].items()}
            if set(store) != {item.value.name for item in program.constants}:
                raise archive.error(MANIFEST, "its constants are not those of the program")
            coverage = tuple([NodeCoverage(*map(str, row)) for row in json.loads(archive.read_text(COVERAGE))])
            present = [torch.device(name) for name in manifest["devices"]]
            moved = {old: new for old, new in zip(present, devices, strict=True) if old != new}
            _load_libraries(manifest["libraries"])
            install_triton_binaries(archive, manifest["triton"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise archive.error(MANIFEST, f"it does not describe a compile: {error!r}") from None
        try:
            plan = plan_from_json(archive.read_text(PLAN)) if archive.has(PLAN) else None
        except PlanningError as error:
            raise archive.error(PLAN, str(error)) from None
        archive.check_unread_entries()
    program = move_program(program, moved).replace(store=ConstantStore(store))
    return CachedCompile(program, coverage, None if plan is None else move_plan(plan, moved))


def _load_libraries(described: Mapping[str, Any]) -> None:
    """Registers libraries, which then need no compiler. Damaged ones are built again when they are needed."""
    if not described:
        return
    bridge = [_intact_library(item) for item in described["bridge"]]
    if None in bridge:
        return
    if not native.binding_is_loaded() and native.find_prebuilt_bridge() is None:
        native.register_prebuilt_bridge(bridge[0].parent)  # type: ignore[union-attr]
    for item in described.get("programs", ()):
        library = _intact_library(item)
        if library is not None:
            native.register_prebuilt_program(str(item["source"]), library)
    for item in described.get("kernels", ()):
        library = _intact_library(item)
        if library is not None:
            native.register_prebuilt_kernels(list(map(str, item["symbols"])), library)


def _intact_library(item: Mapping[str, Any]) -> Path | None:
    """Returns the path of a library in the cache folder if its hash is right."""
    parts = Path(str(item["path"])).parts
    if not 2 <= len(parts) <= 3 or ".." in parts or os.path.isabs(parts[0]):
        raise ValueError(f"{item['path']!r} is not a library in the cache folder")
    for folder in cache_folders():
        path = folder.joinpath(*parts)
        if file_hash(path) == item["sha256"] and is_intact(path.parent):
            return path
    log.info("the compiled code %s is missing or damaged, and is compiled again", item["path"])
    return None

"""An entry of the compile cache: a saved program without its constants, and how it came to be.

It is a file as `fxwrap.save` writes one: texts and hashes, no pickle. Libraries that the C++ compiler made are in the
cache folder already; the entry names them with their hashes. What Triton compiled is in the entry.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch

from fxwrap.artifact.archive import MANIFEST, Archive, ArchiveWriter, write_file
from fxwrap.artifact.binaries import bridge_folder, put_back_triton, write_triton
from fxwrap.artifact.parts import check_kernels, read_program, write_program
from fxwrap.artifact.saving import PLAN
from fxwrap.cache_limit import mark_used
from fxwrap.compile_cache.graph_text import NotCacheable
from fxwrap.converters.cpp_library import EmittedCpp
from fxwrap.converters.emitted import Emitted, kernel_texts
from fxwrap.device_registry import language_facts
from fxwrap.errors import PlanningError
from fxwrap.lowering import Outcome
from fxwrap.memory_planning import MemoryPlan, plan_from_json, plan_to_json
from fxwrap.runtime.native import (
    BRIDGE_LIBRARIES,
    binding_is_loaded,
    cache_folder,
    compiled_kernels,
    provide_bridge,
    provide_kernels,
    provide_program,
    provided_bridge,
)
from fxwrap.wrapper_ir import ConstantStore, Program

log = logging.getLogger("fxwrap.cache")

COVERAGE = "coverage.json"

Places = Mapping[tuple[str, str], torch.Tensor]
"""The tensors that a graph holds, by where they are found there."""


@dataclass(frozen=True)
class Cached:
    """What a compile gave: its program with constants, what became of each call of the graph, the memory's plan."""

    program: Program
    coverage: tuple[Outcome, ...]
    plan: MemoryPlan | None


# --- into a file ----------------------------------------------------------------------------------------------------


def write_entry(path: Path, key: str, found: Cached, emitter: str, emitted: Emitted, tensors: Places) -> None:
    """Writes an entry; `emitted` is what runs, `tensors` what the graph holds.

    Raises NotCacheable for a program that cannot be had from a file, ArtifactError where nothing can be written.
    """
    program = found.program
    check_kernels(program, str(path))
    constants = _places_of(program, tensors)
    libraries = _libraries(program, emitter, emitted)

    def write(file: IO[bytes]) -> None:
        with ArchiveWriter(file) as writer:
            kernels = write_program(writer, program)
            rows = [list(dataclasses.astuple(item)) for item in found.coverage]
            writer.add_bytes(COVERAGE, json.dumps(rows).encode())
            if found.plan is not None:
                writer.add_bytes(PLAN, plan_to_json(found.plan).encode())
            triton = write_triton(writer, kernel_texts(program))
            manifest = {"key": key, "kernels": kernels, "constants": constants, "libraries": libraries}
            writer.close({**manifest, "triton": triton})

    write_file(path, write)


def _places_of(program: Program, tensors: Places) -> dict[str, list[str]]:
    """Returns where the graph has each constant of a program. Raises NotCacheable for one that is made from it."""
    known = {id(tensor): place for place, tensor in reversed(list(tensors.items()))}
    found = {}
    for item in program.constants:
        name = item.value.name
        place = known.get(id(program.store.tensors.get(name)))
        if place is None:
            raise NotCacheable(f"the constant '{name}' was computed when it was compiled")
        found[name] = list(place)
    return found


def _libraries(program: Program, emitter: str, emitted: Emitted) -> dict[str, Any]:
    """Returns the libraries in the cache folder that run a program: each with its size and hash."""
    linked = [kernel for kernel in kernel_texts(program) if language_facts(kernel.language).linked]
    found: dict[str, Any] = {}
    if emitter == "cpp":
        libraries = emitted.libraries() if isinstance(emitted, EmittedCpp) else {}
        found["programs"] = [{"source": key, **_described(path)} for key, path in libraries.items()]
    elif linked:
        made: dict[Path, list[str]] = {}
        for symbol, library in compiled_kernels(tuple([kernel.symbol for kernel in linked])).items():
            made.setdefault(library, []).append(symbol)
        found["kernels"] = [{"symbols": symbols, **_described(library)} for library, symbols in made.items()]
    if found:
        found["bridge"] = [_described(bridge_folder() / name) for name in BRIDGE_LIBRARIES]
    return found


def _described(library: Path) -> dict[str, Any]:
    try:
        place = library.relative_to(cache_folder())
    except ValueError:
        raise NotCacheable("its compiled code came with a saved program") from None
    return {"path": str(place), "sha256": hashlib.sha256(library.read_bytes()).hexdigest()}


# --- out of a file --------------------------------------------------------------------------------------------------


def read_entry(path: Path, key: str, tensors: Places) -> Cached:
    """Reads an entry, checked and verified, binds its constants, and makes what was compiled known to this process.

    Raises ArtifactError for one that is damaged, truncated, or of another key or format.
    """
    with Archive(path) as archive:
        manifest = archive.manifest
        if manifest.get("key") != key:
            raise archive.error(MANIFEST, "it is of another compile")
        program = read_program(archive, ())
        try:
            store = {name: tensors[kind, place] for name, (kind, place) in manifest["constants"].items()}
            if set(store) != {item.value.name for item in program.constants}:
                raise archive.error(MANIFEST, "it describes other constants than the program has")
            coverage = tuple([Outcome(*map(str, row)) for row in json.loads(archive.read_text(COVERAGE))])
            _use_libraries(manifest["libraries"])
            put_back_triton(archive, manifest["triton"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise archive.error(MANIFEST, f"it does not describe a compile: {error!r}") from None
        try:
            plan = plan_from_json(archive.read_text(PLAN)) if archive.has(PLAN) else None
        except PlanningError as error:
            raise archive.error(PLAN, str(error)) from None
        archive.check_others()
    return Cached(program.replace(store=ConstantStore(store)), coverage, plan)


def _use_libraries(described: Mapping[str, Any]) -> None:
    """Makes libraries known to this process, so that no compiler is asked for; one that is damaged is deleted."""
    if not described:
        return
    bridge = [_whole(item) for item in described["bridge"]]
    if None in bridge:
        return
    if not binding_is_loaded() and provided_bridge() is None:
        provide_bridge(bridge[0].parent)  # type: ignore[union-attr]
    for item in described.get("programs", ()):
        library = _whole(item)
        if library is not None:
            provide_program(str(item["source"]), library)
    for item in described.get("kernels", ()):
        library = _whole(item)
        if library is not None:
            provide_kernels(list(map(str, item["symbols"])), library)


def _whole(item: Mapping[str, Any]) -> Path | None:
    """Returns the path of a library in the cache folder if it is there, as it was made; one that is not is deleted."""
    parts = Path(str(item["path"])).parts
    if not 2 <= len(parts) <= 3 or ".." in parts:
        raise ValueError(f"{item['path']!r} is no library in the cache folder")
    path = cache_folder().joinpath(*parts)
    try:
        facts = path.stat()
        same = _file_hash(path, facts.st_size, facts.st_mtime_ns) == item["sha256"]
    except OSError:
        return None
    if not same:
        log.warning("the compiled code in %s is damaged, and is made again", path)
        shutil.rmtree(path.parent, ignore_errors=True)
        return None
    mark_used(path.parent)
    return path


@cache
def _file_hash(path: Path, _size: int, _time: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

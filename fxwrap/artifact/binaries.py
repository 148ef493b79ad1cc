"""Compiled code in a file: what an emitter needs on this machine, and its use on a machine like it.

C++ is in libraries: the program for the C++ emitter, its kernels for all others, and the bridge that both need. What
Triton has compiled is in the files that its cache has of it. All of it can be made again from the texts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fxwrap.artifact.archive import Archive, ArchiveWriter
from fxwrap.cache_limit import limit_cache, mark_used
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.cpp_library import is_compiled_by_triton
from fxwrap.converters.emitted import kernel_texts
from fxwrap.device_registry import language_facts
from fxwrap.errors import FxwrapError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import kernel_library
from fxwrap.runtime.native import (
    BRIDGE_LIBRARIES,
    binary_target,
    binding_is_loaded,
    build_bridge,
    cache_folder,
    provide_bridge,
    provide_kernels,
    provide_program,
    provided_bridge,
    source_key,
    unusable,
)
from fxwrap.runtime.triton_binaries import compiled_triton, put_back
from fxwrap.runtime.triton_provided import TritonBinary, provide_triton
from fxwrap.runtime.triton_variants import TritonVariant
from fxwrap.wrapper_ir import Program

FOLDER = "binaries"


# --- into a file ----------------------------------------------------------------------------------------------------


def write_binaries(writer: ArchiveWriter, program: Program, emitters: Iterable[str]) -> dict[str, Any]:
    """Adds what emitters run on this machine, compiled now where it is not yet; returns what the manifest says of it.

    Raises NativeBuildError where C++ does not compile.
    """
    emitters = frozenset(emitters)
    if not emitters:
        return {}
    texts = kernel_texts(program)
    in_cpp = [kernel for kernel in texts if language_facts(kernel.language).linked]
    found: dict[str, Any] = {}
    if "cpp" in emitters:
        libraries = to_cpp(program).libraries()
        found["programs"] = [{"source": key, "entry": _add(writer, path)} for key, path in libraries.items()]
    if in_cpp and emitters - {"cpp"}:
        symbols = list(dict.fromkeys([kernel.symbol for kernel in in_cpp]))
        found["kernels"] = {"symbols": symbols, "entry": _add(writer, kernel_library(in_cpp))}
    if found:
        bridge = bridge_folder()
        found["bridge"] = {name: _add(writer, bridge / name) for name in BRIDGE_LIBRARIES}
        found["target"] = binary_target()
    triton = write_triton(writer, texts)
    return {**found, "triton": triton} if triton else found


def write_triton(writer: ArchiveWriter, kernels: Iterable[KernelText]) -> list[dict[str, Any]]:
    """Adds what this process has had Triton compile of these kernels; returns what the manifest says of it."""
    by_triton = [kernel for kernel in kernels if is_compiled_by_triton(language_facts(kernel.language))]
    return [item for kernel in by_triton for item in _add_triton(writer, kernel)]


def bridge_folder() -> Path:
    """Returns the folder of the bridge that C++ runs with. Raises NativeBuildError where it cannot be built."""
    return provided_bridge() or build_bridge().folder


def _add(writer: ArchiveWriter, library: Path) -> str:
    content = library.read_bytes()
    entry = f"{FOLDER}/{hashlib.sha256(content).hexdigest()}.so"
    writer.add_bytes(entry, content)
    return entry


def _add_triton(writer: ArchiveWriter, kernel: KernelText) -> list[dict[str, Any]]:
    described = []
    for binary in compiled_triton(kernel):
        files = {}
        for name, content in binary.files.items():
            files[name] = f"{FOLDER}/{hashlib.sha256(content).hexdigest()}{Path(name).suffix}"
            writer.add_bytes(files[name], content)
        variant = _variant_row(writer, binary.variant)
        described.append({"key": binary.key, "files": files, "symbol": kernel.symbol, "variant": variant})
    return described


def _variant_row(writer: ArchiveWriter, variant: TritonVariant | None) -> dict[str, Any] | None:
    """Returns a variant as data; its code is in entries of the file."""
    if variant is None:
        return None
    row: dict[str, Any] = {name: getattr(variant, name) for name in ("name", "capability", "threads", "shared")}
    row |= {name: getattr(variant, name).hex() for name in ("classes", "passed")}
    for name, content in (("cubin", variant.cubin), ("ptx", variant.ptx.encode())):
        row[name] = f"{FOLDER}/{hashlib.sha256(content).hexdigest()}.{name}"
        writer.add_bytes(row[name], content)
    return row


# --- out of a file --------------------------------------------------------------------------------------------------


def use_binaries(archive: Archive, program: Program, emitter: str) -> str:
    """Makes what a file has compiled known to this process, as far as an emitter of its program needs it.

    Returns why nothing compiled can be used: it is for another machine or version, or not there; "" where all of it is.
    Raises ArtifactError for an entry that is damaged.
    """
    described = archive.manifest.get("binaries", {})
    try:
        put_back_triton(archive, described.get("triton", ()))
        wanted = "programs" if emitter == "cpp" else "kernels"
        symbols = {kernel.symbol for kernel in kernel_texts(program) if language_facts(kernel.language).linked}
        if emitter != "cpp" and not symbols:
            return ""
        if wanted not in described:
            return f"the file has no compiled code for the emitter '{emitter}'"
        reason = unusable(described["target"])
        if reason:
            return reason
        if emitter == "cpp":
            emitted = to_cpp(program)
            sources = {source_key(unit.source) for unit in (emitted, *emitted.functions)}
            same = sources <= {item["source"] for item in described["programs"]}
        else:
            same = symbols <= set(described["kernels"]["symbols"])
        if not same:
            return "the compiled code is of another text than this version of fxwrap emits"
        return _use_libraries(archive, described, wanted)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise archive.error("manifest.json", f"it does not describe the binaries: {error!r}") from None


def _use_libraries(archive: Archive, described: Mapping[str, Any], wanted: str) -> str:
    items = described[wanted] if wanted == "programs" else [described[wanted]]
    bridge = {str(name): archive.read(str(entry)) for name, entry in described["bridge"].items()}
    libraries = [archive.read(str(item["entry"])) for item in items]
    if sorted(bridge) != sorted(BRIDGE_LIBRARIES):
        raise archive.error("manifest.json", f"it names the libraries {sorted(bridge)}, which are not the bridge's")
    try:
        if not binding_is_loaded() and provided_bridge() is None:
            provide_bridge(_on_disk(bridge))
        paths = [_on_disk({"program.so": library}) / "program.so" for library in libraries]
    except OSError as error:
        return f"compiled code cannot be written to a folder: {error.strerror}"
    bridge_folder = provided_bridge()
    if bridge_folder is not None:
        failure = _fails_to_load((str(bridge_folder / BRIDGE_LIBRARIES[0]), *map(str, paths)))
        if failure:
            return failure
    for item, path in zip(items, paths, strict=True):
        if wanted == "programs":
            provide_program(str(item["source"]), path)
        else:
            provide_kernels([str(symbol) for symbol in item["symbols"]], path)
    return ""


@cache
def _fails_to_load(libraries: Sequence[str]) -> str:
    """Returns why libraries cannot be loaded here; a library that one of them needs may be missing."""
    try:
        for library in libraries:
            ctypes.CDLL(library)
    except OSError as error:
        return f"compiled code cannot be loaded: {error}"
    return ""


def put_back_triton(archive: Archive, described: Iterable[Mapping[str, Any]]) -> None:
    """Makes what Triton compiled known to this process, and puts it into Triton's cache.

    Where there is no Triton, or no room, it says so when it runs. Raises ArtifactError for an entry that is damaged,
    KeyError, TypeError, ValueError or AttributeError for a manifest that is.
    """
    for item in described:
        read = cache(archive.read)  # a variant's code is among the files
        files = {str(name): read(str(entry)) for name, entry in item["files"].items()}
        binary = TritonBinary(str(item["key"]), files, _variant(read, item["variant"]))
        provide_triton(str(item["symbol"]), binary)
        with suppress(FxwrapError, OSError):
            put_back(binary)


def _variant(read: Callable[[str], bytes], row: Mapping[str, Any] | None) -> TritonVariant | None:
    if row is None:
        return None
    return TritonVariant(
        str(row["name"]), read(str(row["cubin"])), read(str(row["ptx"])).decode(),
        int(row["capability"]), int(row["threads"]), int(row["shared"]),
        bytes.fromhex(row["classes"]), bytes.fromhex(row["passed"]),
    )  # fmt: skip


def _on_disk(files: Mapping[str, bytes]) -> Path:
    """Returns a folder with these files, named by their content; one that is there already is checked.

    Raises OSError where none can be written.
    """
    digest = hashlib.sha256(repr([(name, hashlib.sha256(files[name]).hexdigest()) for name in sorted(files)]).encode())
    name = digest.hexdigest()[:32]
    folder = cache_folder() / "loaded" / name
    there = folder.is_dir()
    try:
        found = _folder_with(folder, files)
        mark_used(found)
        if not there:
            limit_cache()
        return found
    except OSError:
        return _folder_with(Path(tempfile.mkdtemp(prefix="fxwrap-")) / name, files)  # a cache folder that is read-only


def _folder_with(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    return folder

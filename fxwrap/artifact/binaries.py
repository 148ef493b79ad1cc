"""Compiled code in saved programs, for emitters on this machine and compatible ones.

C++ code is in libraries: the program for the C++ emitter, its kernels for all others, and the bridge for both. Triton
binaries are the files of Triton's cache. All of it can be compiled again from the sources.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fxwrap.artifact.archive import Archive, ArchiveWriter
from fxwrap.artifact.native_target import native_entry
from fxwrap.caching import bounded_cache
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.cpp.library import EmittedCpp, is_compiled_by_triton
from fxwrap.converters.emitted_program import EmittedProgram, kernel_texts
from fxwrap.devices import language_traits
from fxwrap.errors import FxwrapError
from fxwrap.runtime import native
from fxwrap.runtime.cache_eviction import evict_cache_when_due
from fxwrap.runtime.cache_folder import find_or_build_entry
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernel_library
from fxwrap.runtime.triton.binaries import collect_triton_binaries, install_triton_binary
from fxwrap.runtime.triton.prebuilt import TritonBinary, register_prebuilt_triton
from fxwrap.runtime.triton.variants import TritonVariant
from fxwrap.wrapper_ir import Program

FOLDER = "binaries"


# --- writing --------------------------------------------------------------------------------------------------------


def write_binaries(
    writer: ArchiveWriter,
    program: Program,
    emitters: Iterable[str],
    emitted: EmittedProgram | None = None,
    *,
    reuse: bool = False,
    relink: bool = False,
    has_bridge: bool = True,
) -> dict[str, object]:
    """Adds the compiled code of emitters, compiled now if necessary; returns its manifest entry.

    `emitted` is the program in the form of one of them, which is emitted again if it is not that of the C++ emitter.
    `reuse` prefers a library that this process has, which may contain kernels of other programs, over one of the
    program's kernels alone; `relink` links all Triton code of this process instead of using the library of a loaded
    file. Without `has_bridge` the bridge is only described: see `bridge_content`. Raises NativeBuildError where C++
    does not compile.
    """
    emitters = frozenset(emitters)
    if not emitters:
        return {}
    texts = kernel_texts(program)
    in_cpp = [kernel for kernel in texts if language_traits(kernel.language).links_into_cpp]
    manifest: dict[str, object] = {}
    if "cpp" in emitters:
        in_native = emitted if isinstance(emitted, EmittedCpp) else to_cpp(program)
        entries = {key: _add(writer, path) for key, path in in_native.libraries(relink).items()}
        manifest["programs"] = [{"source": key, "entry": entry} for key, entry in entries.items()]
        manifest["native"] = native_entry(program, in_native, lambda unit: entries[native.source_key(unit.source)])
    if in_cpp and emitters - {"cpp"}:
        symbols = list(dict.fromkeys([kernel.symbol for kernel in in_cpp]))
        known = set(native.compiled_kernels(tuple(symbols)).values()) if reuse else set()
        library = known.pop() if len(known) == 1 else compile_kernel_library(in_cpp)
        manifest["kernels"] = {"symbols": symbols, "entry": _add(writer, library)}
    if manifest:
        names = native.BRIDGE_LIBRARIES if has_bridge else ()
        libraries = {name: _add(writer, bridge_folder() / name) for name in names}
        manifest["bridge"] = {"target": native.bridge_target(), "libraries": libraries}
        manifest["target"] = native.binary_target()
    triton = write_triton(writer, texts)
    return {**manifest, "triton": triton} if triton else manifest


def write_triton(writer: ArchiveWriter, kernels: Iterable[KernelText]) -> list[dict[str, object]]:
    """Adds the Triton binaries of kernels in this process; returns their manifest entries."""
    by_triton = [kernel for kernel in kernels if is_compiled_by_triton(language_traits(kernel.language))]
    return [item for kernel in by_triton for item in _add_triton(writer, kernel)]


def bridge_folder() -> Path:
    """Returns the folder of the bridge. Raises NativeBuildError where it cannot be built."""
    return native.find_prebuilt_bridge() or native.build_bridge().folder


def _add(writer: ArchiveWriter, library: Path) -> str:
    content = library.read_bytes()
    entry = f"{FOLDER}/{hashlib.sha256(content).hexdigest()}.so"
    writer.add_bytes(entry, content)
    return entry


def _add_triton(writer: ArchiveWriter, kernel: KernelText) -> list[dict[str, object]]:
    described: list[dict[str, object]] = []
    for binary in collect_triton_binaries(kernel):
        files = {}
        for name, content in binary.files.items():
            files[name] = f"{FOLDER}/{hashlib.sha256(content).hexdigest()}{Path(name).suffix}"
            writer.add_bytes(files[name], content)
        variant = _variant_row(writer, binary.variant)
        described.append({"key": binary.key, "files": files, "symbol": kernel.symbol, "variant": variant})
    return described


def _variant_row(writer: ArchiveWriter, variant: TritonVariant | None) -> dict[str, object] | None:
    """Returns a variant as JSON data; its code is in entries of the file."""
    if variant is None:
        return None
    numbers = ("capability", "threads", "shared", "scratch")
    row: dict[str, Any] = {name: getattr(variant, name) for name in ("name", *numbers)}
    row |= {name: getattr(variant, name).hex() for name in ("classes", "parameter_passing")}
    for name, content in (("cubin", variant.cubin), ("ptx", variant.ptx.encode())):
        row[name] = f"{FOLDER}/{hashlib.sha256(content).hexdigest()}.{name}"
        writer.add_bytes(row[name], content)
    return row


# --- reading --------------------------------------------------------------------------------------------------------


def load_binaries(
    archive: Archive, emitter: str, kernels: Sequence[KernelText], sources: Callable[[], Collection[str]]
) -> str:
    """Registers the compiled code of a file that an emitter of its program needs.

    `kernels` are those of the program, `sources` returns the keys of its emitted C++. Returns why the code cannot be
    used: it is missing or for another machine or version; "" if all of it can be used. Raises ArtifactError for a
    damaged entry.
    """
    described = archive.manifest.get("binaries", {})
    try:
        install_triton_binaries(archive, described.get("triton", ()))
        section = _section(emitter)
        symbols = {kernel.symbol for kernel in kernels if language_traits(kernel.language).links_into_cpp}
        if emitter != "cpp" and not symbols:
            return ""
        if section not in described:
            return f"the file has no compiled code for the emitter '{emitter}'"
        reason = native.incompatibility_reason(described["target"])
        if reason:
            return reason
        if emitter == "cpp":
            same = set(sources()) <= {item["source"] for item in described["programs"]}
        else:
            same = symbols <= set(described["kernels"]["symbols"])
        if not same:
            return "this version of fxwrap emits another source than the compiled one"
        return _load_libraries(archive, described, section)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise archive.error("manifest.json", f"it does not describe the binaries: {error!r}") from None


def has_binaries(archive: Archive, emitter: str) -> bool:
    """Returns whether a file has compiled C++ for an emitter."""
    return _section(emitter) in archive.manifest.get("binaries", {})


def _section(emitter: str) -> str:
    return "programs" if emitter == "cpp" else "kernels"


def program_sources(program: Program) -> set[str]:
    """Returns the keys of a program's emitted C++ and that of its captured functions."""
    return {native.source_key(unit.source) for unit in to_cpp(program).units()}


def _load_libraries(archive: Archive, described: Mapping[str, Any], section: str) -> str:
    items = described[section] if section == "programs" else [described[section]]
    bridge = {str(name): str(entry) for name, entry in described["bridge"]["libraries"].items()}
    libraries = [archive.read(str(item["entry"])) for item in items]
    if bridge and sorted(bridge) != sorted(native.BRIDGE_LIBRARIES):
        raise archive.error("manifest.json", f"it names the libraries {sorted(bridge)}, which are not the bridge's")
    paths = [_write_to_cache({"program.so": library}) / "program.so" for library in libraries]
    fits = described["bridge"]["target"] == native.bridge_target()
    if bridge and fits and not native.binding_is_loaded() and native.find_prebuilt_bridge() is None:
        contents = {name: archive.read(entry) for name, entry in bridge.items()}
        native.register_prebuilt_bridge(_write_to_cache(contents))
    prebuilt = native.find_prebuilt_bridge()
    bridges = () if prebuilt is None else (prebuilt / native.BRIDGE_LIBRARIES[0],)
    failure = _load_failure(tuple([str(path) for path in (*bridges, *paths)]))
    if failure:
        return failure
    for item, path in zip(items, paths, strict=True):
        if section == "programs":
            native.register_prebuilt_program(str(item["source"]), path)
        else:
            native.register_prebuilt_kernels([str(symbol) for symbol in item["symbols"]], path)
    if native.binding_is_loaded() or native.find_bridge() is not None:
        return ""
    target = described["bridge"]["target"]
    return (
        f"its bridge is for torch {target['torch']!r} and Python {target['python']!r}, and none is built for this one"
    )


@bounded_cache(1)
def bridge_content(folder: Path) -> bytes:
    """Returns the libraries of the bridge in a folder as one archive, for graphs that are saved without it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in native.BRIDGE_LIBRARIES:
            archive.write(folder / name, name)
    return content.getvalue()


def install_bridge(content: bytes) -> None:
    """Registers the bridge of an archive of `bridge_content`. Raises zipfile.BadZipFile, KeyError for a damaged one."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        contents = {name: archive.read(name) for name in native.BRIDGE_LIBRARIES}
    native.register_prebuilt_bridge(_write_to_cache(contents))


@bounded_cache(256)
def _load_failure(libraries: Sequence[str]) -> str:
    """Returns why libraries cannot be loaded, e.g. a missing dependency, or ""."""
    try:
        for library in libraries:
            ctypes.CDLL(library)
    except OSError as error:
        return f"compiled code cannot be loaded: {error}"
    return ""


def install_triton_binaries(archive: Archive, described: Iterable[Mapping[str, Any]]) -> None:
    """Registers Triton binaries and imports them into Triton's cache, if Triton is installed.

    Raises ArtifactError for a damaged entry; KeyError, TypeError, ValueError or AttributeError for a damaged manifest.
    """
    for item in described:
        read = cache(archive.read)  # a variant shares entries with the files
        files = {str(name): read(str(entry)) for name, entry in item["files"].items()}
        binary = TritonBinary(str(item["key"]), files, _variant(read, item["variant"]))
        register_prebuilt_triton(str(item["symbol"]), binary)
        with suppress(FxwrapError, OSError):
            install_triton_binary(binary)


def _variant(read: Callable[[str], bytes], row: Mapping[str, Any] | None) -> TritonVariant | None:
    if row is None:
        return None
    return TritonVariant(
        str(row["name"]), read(str(row["cubin"])), read(str(row["ptx"])).decode(),
        int(row["capability"]), int(row["threads"]), int(row["shared"]), int(row.get("scratch", 0)),
        bytes.fromhex(row["classes"]), bytes.fromhex(row["parameter_passing"]),
    )  # fmt: skip


def _write_to_cache(files: Mapping[str, bytes]) -> Path:
    """Returns a folder with these files, named by their content. Raises CacheError where none can be written."""
    digest = hashlib.sha256(repr([(name, hashlib.sha256(files[name]).hexdigest()) for name in sorted(files)]).encode())
    name = f"loaded/{digest.hexdigest()[:32]}"

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        evict_cache_when_due()

    return find_or_build_entry(name, write)

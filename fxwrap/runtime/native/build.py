"""Compiles emitted C++ with the user's compiler, through a content-addressed cache on disk.

`cache_folder.py` builds and checks its entries; `bridge_build.py` builds the library that programs call.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxwrap.runtime import cache_folder
from fxwrap.runtime.compiler_runs import count_finished_kernels
from fxwrap.runtime.native.compiler import Compiler, find_compiler, parallel_map, run_compiler, user_kernel_flags
from fxwrap.runtime.native.identity import (
    COMMON_FLAGS,
    KERNEL_FLAGS,
    KERNEL_HEADER,
    PROGRAM_FLAGS,
    cpu_description,
    interface_digest,
    kernel_header,
    native_digest,
    native_entry_key,
)
from fxwrap.runtime.native.prebuilt import find_prebuilt_kernel, register_prebuilt_kernels
from fxwrap.runtime.native.precompiled_headers import include_flags


@dataclass(frozen=True, slots=True)
class NativeSource:
    """An additional translation unit of a program.

    Fields:
        text: its source.
        flags: compiler flags, by default those of CPU kernels.
        files: the files that it includes, by name.
        kernels: the number of kernels that it defines.
    """

    text: str
    flags: tuple[str, ...] = KERNEL_FLAGS
    files: tuple[tuple[str, bytes], ...] = ()
    kernels: int = 0


def compile_cpp(source_text: str, *, name: str, extra_sources: Iterable[NativeSource] = ()) -> Path:
    """Returns the path of an emitted program's shared library, compiled now unless it is in the cache.

    `source_text` is the emitted translation unit, which includes `bridge.h`; `extra_sources` (CPU kernels) are linked
    with it. The sources remain beside the library for debuggers. `CXX` selects the compiler (default: the first of g++,
    c++ and clang++). Raises NativeBuildError with the command and the compiler's output.
    """
    sources = (NativeSource(source_text, PROGRAM_FLAGS), *extra_sources)
    compiler = find_compiler()
    stem = re.sub(r"\W+", "_", name) or "program"
    key = native_entry_key(
        compiler,
        interface_digest(),
        *(text for source in sources for text in (source.text, *source.flags)),
        *(f"{file} {hashlib.sha256(content).hexdigest()}" for source in sources for file, content in source.files),
        *[kernel_header() for source in sources if KERNEL_HEADER in source.text],
        *[flag for source in sources if source.flags == KERNEL_FLAGS for flag in user_kernel_flags()],
        cpu_description() if any("-march=native" in source.flags for source in sources) else "",
    )

    def build(folder: Path) -> None:
        paths = [folder / f"{stem}.cpp", *[folder / f"{stem}_kernels_{index}.cpp" for index in range(1, len(sources))]]
        units = list(zip(sources, paths, strict=True))
        for source, path in units:
            path.write_text(source.text, encoding="utf-8")
            for file, content in source.files:
                (folder / file).write_bytes(content)
        precompiled = _claim_precompiled(compiler, source_text, paths[0].with_suffix(".o"))
        parallel_map(lambda unit: _compile_counted_unit(compiler, *unit), units[precompiled:])
        objects = [path.with_suffix(".o").name for path in paths]
        shared = ["-fopenmp"] if any("-fopenmp" in source.flags for source in sources) else []
        is_generated = all(source.flags in (PROGRAM_FLAGS, KERNEL_FLAGS) for source in sources)
        libraries = (*(_c_library(compiler) if is_generated else ()), *_standard_library(compiler))
        linked = [*shared, *objects, *libraries]
        run_compiler([*compiler.command, "-shared", *linked, "-o", f"{stem}.so"], folder)
        for item in (*objects, *[file for source in sources for file, _ in source.files]):
            (folder / item).unlink()

    return cache_folder.find_or_build_entry(f"programs/{key}", build) / f"{stem}.so"


def _standard_library(compiler: Compiler) -> tuple[str, ...]:
    """Returns linker arguments by which a program names the C++ standard library, which its process has loaded.

    A linker spends most of its time on that library's symbols, of which programs use those of exceptions: it gets an
    empty library of the same name, and the symbols are bound when the program is loaded.
    """
    if compiler.runtime or platform.system() != "Linux":
        return compiler.runtime

    def build(folder: Path) -> None:
        (folder / _EMPTY_UNIT).write_text("")
        flags = ("-shared", "-nostdlib", f"-Wl,-soname,{_STANDARD_LIBRARY}.6")
        run_compiler([*compiler.command, *flags, _EMPTY_UNIT, "-o", _STANDARD_LIBRARY], folder)
        (folder / _EMPTY_UNIT).unlink()

    name = f"standard-library-{native_entry_key(compiler)}"
    folder = cache_folder.find_or_build_entry(name, build)
    # Some compilers leave out libraries that define no symbol which the program uses.
    return ("-L", str(folder), "-Wl,--push-state,--no-as-needed", "-lstdc++", "-Wl,--pop-state")


_EMPTY_UNIT, _STANDARD_LIBRARY = "empty.cpp", "libstdc++.so"


def _c_library(compiler: Compiler) -> tuple[str, ...]:
    """Returns linker arguments by which a program of generated code names glibc, as it names `_standard_library`.

    Its functions are bound to their oldest versions, which are the only ones of those that generated code calls, but
    for memcpy on x86-64: the library has its newer one. Kernels of users may call any function of glibc.
    """
    if compiler.runtime or platform.libc_ver()[0] != "glibc":
        return ()
    has_versions = platform.machine() in ("x86_64", "AMD64")

    def build(folder: Path) -> None:
        (folder / _EMPTY_UNIT).write_text('asm(".globl memcpy; memcpy:");\n' if has_versions else "")
        (folder / _VERSIONS).write_text("GLIBC_2.14 { memcpy; };\n")
        flags = ["-shared", "-nostdlib", f"-Wl,-soname,{_C_LIBRARY}.6"]
        flags += [f"-Wl,--version-script,{_VERSIONS}"] if has_versions else []
        run_compiler([*compiler.command, *flags, _EMPTY_UNIT, "-o", _C_LIBRARY], folder)
        (folder / _EMPTY_UNIT).unlink()
        (folder / _VERSIONS).unlink()

    return ("-L", str(cache_folder.find_or_build_entry(f"c-library-{native_entry_key(compiler)}", build)))


_C_LIBRARY, _VERSIONS = "libc.so", "versions"


def _compile_counted_unit(compiler: Compiler, source: NativeSource, path: Path) -> str:
    output = _compile_unit(compiler, source, path)
    count_finished_kernels(source.kernels)
    return output


def _compile_unit(compiler: Compiler, source: NativeSource, path: Path) -> str:
    """Compiles a translation unit to an object file beside it.

    Objects of CPU kernels are cached: the programs of all emitters link the same ones.
    """
    if source.flags != KERNEL_FLAGS or source.files:
        return run_compiler(_unit_command(compiler, source, path), path.parent)
    flags = (*KERNEL_FLAGS, *user_kernel_flags())
    key = native_entry_key(compiler, source.text, *flags, kernel_header(), cpu_description())

    def build(folder: Path) -> None:
        unit = folder / _UNIT
        unit.write_text(source.text, encoding="utf-8")
        run_compiler(_unit_command(compiler, source, unit), folder)
        unit.unlink()

    cached = cache_folder.find_or_build_entry(f"units/{key}", build) / _UNIT.with_suffix(".o")
    shutil.copyfile(cached, path.with_suffix(".o"))
    return ""


_UNIT = Path("kernels.cpp")


def _unit_command(compiler: Compiler, source: NativeSource, path: Path) -> list[str]:
    own = (*compiler.kernel_flags, *user_kernel_flags()) if source.flags == KERNEL_FLAGS else ()
    flags = (*COMMON_FLAGS, *source.flags, *own, *include_flags(compiler))
    return [*compiler.command, *flags, "-c", path.name, "-o", path.with_suffix(".o").name]


def precompile_cpp(source_text: str) -> None:
    """Compiles an emitted translation unit ahead of `compile_cpp`, which links the object. Raises as `compile_cpp`."""
    compiler = find_compiler()

    def build(folder: Path) -> None:
        path = folder / _PRECOMPILED_OBJECT.with_suffix(".cpp")
        path.write_text(source_text, encoding="utf-8")
        run_compiler(_unit_command(compiler, NativeSource(source_text, PROGRAM_FLAGS), path), folder)

    cache_folder.find_or_build_entry(_precompiled_name(compiler, source_text), build)


_PRECOMPILED_OBJECT = Path("program.o")


def _precompiled_name(compiler: Compiler, source_text: str) -> str:
    return f"programs/ahead-{native_entry_key(compiler, interface_digest(), source_text)}"


def _claim_precompiled(compiler: Compiler, source_text: str, target: Path) -> bool:
    """Moves a precompiled object to `target`; returns whether there was one that no other process claimed."""
    folder = cache_folder.find_entry(_precompiled_name(compiler, source_text))
    if folder is None:
        return False
    try:
        os.replace(folder / _PRECOMPILED_OBJECT, target)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def compiled_kernels(symbols: tuple[str, ...]) -> dict[str, Path]:
    """Returns the libraries of compiled kernels by symbol, from the index files in the cache."""
    libraries = {symbol: path for symbol in symbols if (path := find_prebuilt_kernel(symbol)) is not None}
    others = tuple([symbol for symbol in symbols if symbol not in libraries])
    for symbol, name in zip(others, _kernel_index_names(others) if others else (), strict=True):
        library = _indexed_library(name)
        if library is not None:
            libraries[symbol] = library
    return libraries


_LIBRARY_NAME = re.compile(r"programs/[0-9a-f]{32}/\w+\.so")


def _indexed_library(name: str) -> Path | None:
    """Returns the intact library that an index file names."""
    for root in cache_folder.cache_folders():
        text = (cache_folder.read_cache_file(root / name) or b"").decode(errors="replace")
        if _LIBRARY_NAME.fullmatch(text) and (root / text).is_file() and cache_folder.is_intact((root / text).parent):
            return root / text
    return None


def index_kernel_library(symbols: Sequence[str], library: Path) -> None:
    """Writes index files of kernels for a library in the cache. If they cannot be written, this process remembers."""
    root = library.parents[2]
    try:
        for name in _kernel_index_names(symbols):
            cache_folder.write_cache_file(root, name, str(library.relative_to(root)).encode())
    except OSError:
        register_prebuilt_kernels(symbols, library)


def _kernel_index_names(symbols: Sequence[str]) -> list[str]:
    compiler = find_compiler()
    flags = (*KERNEL_FLAGS, *user_kernel_flags())
    common = native_entry_key(compiler, interface_digest(), kernel_header(), *flags, cpu_description())
    return [f"kernels/{native_digest(common, symbol)}" for symbol in symbols]

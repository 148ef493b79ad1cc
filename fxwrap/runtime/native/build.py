"""Compiles emitted C++ with the user's compiler, through a content-addressed cache on disk.

There are two kinds of entries: the bridge with its Python binding, one per torch, Python and compiler, and programs.
`cache_folder.py` builds and checks them; `packaged.py` has those of a wheel.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime import cache_folder
from fxwrap.runtime.compiler_runs import count_finished_kernels
from fxwrap.runtime.native.compiler import Compiler, find_compiler, parallel_map, run_compiler
from fxwrap.runtime.native.packaged import find_packaged_entry, torch_identity
from fxwrap.runtime.native.prebuilt import find_prebuilt_bridge, find_prebuilt_kernel, register_prebuilt_kernels
from fxwrap.runtime.native.precompiled_headers import include_flags, precompile_headers
from fxwrap.runtime.native.progress import report_build

_SOURCE_FOLDER = Path(__file__).parent
_TORCH_FOLDER = Path(torch.__file__).parent
# Files that are compiled together: parsing torch's headers dominates the time of most of them.
_BRIDGE_UNITS = (
    ("bridge/typed_calls.cpp",),
    (
        *("bridge/values.cpp", "bridge/bridge.cpp", "bridge/checks.cpp", "bridge/execute.cpp"),
        *("bridge/ranges.cpp", "bridge/engine.cpp", "engine/checks.cpp"),
        *("graph_capture/capturer.cpp", "graph_capture/cuda_graphs.cpp"),
        *("graph_capture/functions.cpp", "graph_capture/replay.cpp"),
        *("cuda/streams.cpp", "cuda/stream_operators.cpp", "cuda/driver.cpp", "cuda/launch.cpp"),
        *("libraries/plans.cpp", "libraries/cublas.cpp", "libraries/matmuls.cpp"),
        *("libraries/cudnn.cpp", "libraries/convolutions.cpp", "libraries/attention.cpp", "libraries/cpu_addmm.cpp"),
        *("libraries/prepacked.cpp", "libraries/grouped_matmuls.cpp"),
    ),
)
_BINDING_UNITS = (("binding/binding.cpp",), ("binding/launcher.cpp", "binding/plain_inputs.cpp"))
_HEADERS = (
    *(
        "bridge/bridge.h",
        "bridge/frame.h",
        "bridge/functions.h",
        "bridge/values.h",
        "bridge/calls.h",
        "bridge/checks.h",
    ),
    "bridge/kernel_failure.h",
    *("graph_capture/capturer.h", "graph_capture/copies.h", "graph_capture/replay.h"),
    *("cuda/driver.h", "cuda/launch.h", "cuda/stream_operators.h", "binding/binding.h"),
    *("engine/engine.h", "engine/call.h", "engine/checks.h", "engine/dtypes.h", "engine/failure.h"),
    "engine/observer.h",
    "../../include/fxwrap/runtime.h",
    *("libraries/plans.h", "libraries/library.h", "libraries/cublas.h", "libraries/cudnn.h"),
    *("libraries/operators.h", "libraries/prepacked.h", "libraries/grouped_matmuls.h"),
)
_PROGRAM_HEADERS = _SOURCE_FOLDER / "bridge"
"""The folder of the headers that emitted programs and kernels include: `bridge.h` and `kernel.h`."""
BRIDGE_LIBRARIES = ("libfxwrap_bridge.so", "_fxwrap_binding.so")
"""The files of the bridge: its library and its Python binding."""

_BRIDGE, _BINDING = BRIDGE_LIBRARIES

_COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden")
_BRIDGE_FLAGS = ("-O2", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS")
# Programs are straight-line calls, which optimisation does not speed up (benchmarks/bridge_calls.py).
PROGRAM_FLAGS = ("-O0",)
# By default compilers use half of AVX-512's vector width; loops over whole rows are faster with all of it.
_WIDEST_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
# Kernels have eager's rounding (no contraction) and integer wrap-around; they use neither errno nor traps.
KERNEL_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv"),
    *_WIDEST_VECTORS,
)
_INTERFACE_HEADERS = ("bridge.h", "kernel_failure.h")
_KERNEL_HEADER = "kernel.h"
_KERNEL_HEADERS = ("kernel_failure.h", _KERNEL_HEADER, "contractions.h")
PLATFORM = (platform.system(), platform.machine())


@dataclass(frozen=True, slots=True)
class NativeSource:
    """An additional translation unit of a program: text, compiler flags (by default those of CPU kernels), files that
    it includes by name, and the number of kernels that it defines."""

    text: str
    flags: tuple[str, ...] = KERNEL_FLAGS
    files: tuple[tuple[str, bytes], ...] = ()
    kernels: int = 0


@dataclass(frozen=True, slots=True)
class BridgeBuild:
    """The built bridge: its folder and the seconds of the build in this process (0.0 if it was cached)."""

    folder: Path
    seconds: float


def compile_cpp(source_text: str, *, name: str, extra_sources: Iterable[NativeSource] = ()) -> Path:
    """Returns the path of an emitted program's shared library, compiled now unless it is in the cache.

    `source_text` is the emitted translation unit, which includes `bridge.h`; `extra_sources` (CPU kernels) are linked
    with it. The sources remain beside the library for debuggers. `CXX` selects the compiler (default: the first of g++,
    c++ and clang++). Raises NativeBuildError with the command and the compiler's output.
    """
    sources = (NativeSource(source_text, PROGRAM_FLAGS), *extra_sources)
    compiler = find_compiler()
    stem = re.sub(r"\W+", "_", name) or "program"
    key = native_digest(
        _toolchain_key(compiler),
        _interface_digest(),
        *(text for source in sources for text in (source.text, *source.flags)),
        *(f"{file} {hashlib.sha256(content).hexdigest()}" for source in sources for file, content in source.files),
        *[_kernel_header() for source in sources if _KERNEL_HEADER in source.text],
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
        linked = [*shared, *objects, *_standard_library(compiler)]
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

    name = f"standard-library-{native_digest(_toolchain_key(compiler))}"
    folder = cache_folder.find_or_build_entry(name, build)
    # Some compilers leave out libraries that define no symbol which the program uses.
    return ("-L", str(folder), "-Wl,--push-state,--no-as-needed", "-lstdc++", "-Wl,--pop-state")


_EMPTY_UNIT, _STANDARD_LIBRARY = "empty.cpp", "libstdc++.so"


def _compile_counted_unit(compiler: Compiler, source: NativeSource, path: Path) -> str:
    output = _compile_unit(compiler, source, path)
    count_finished_kernels(source.kernels)
    return output


def _compile_unit(compiler: Compiler, source: NativeSource, path: Path) -> str:
    """Compiles a translation unit to an object file beside it. Objects of CPU kernels are cached: the programs of all
    emitters link the same ones."""
    if source.flags != KERNEL_FLAGS or source.files:
        return run_compiler(_unit_command(compiler, source, path), path.parent)
    key = native_digest(_toolchain_key(compiler), source.text, *KERNEL_FLAGS, _kernel_header(), cpu_description())

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
    own = compiler.kernel_flags if source.flags == KERNEL_FLAGS else ()
    flags = (*_COMMON_FLAGS, *source.flags, *own, *include_flags(_headers_name(compiler), _PROGRAM_HEADERS))
    return [*compiler.command, *flags, "-c", path.name, "-o", path.with_suffix(".o").name]


def _headers_name(compiler: Compiler) -> str:
    flags = (*KERNEL_FLAGS, *PROGRAM_FLAGS)
    key = native_digest(_toolchain_key(compiler), _interface_digest(), _kernel_header(), *flags, cpu_description())
    return f"headers-{key}"


def precompile_program_headers(compiler: Compiler) -> None:
    """Precompiles the headers of programs and kernels into the cache, if the compiler is GCC."""
    kernel_flags = (*_COMMON_FLAGS, *KERNEL_FLAGS, *compiler.kernel_flags)
    flags = {_INTERFACE_HEADERS[0]: (*_COMMON_FLAGS, *PROGRAM_FLAGS), _KERNEL_HEADER: kernel_flags}
    texts = [_PROGRAM_HEADERS / name for name in {*_INTERFACE_HEADERS, *_KERNEL_HEADERS}]
    precompile_headers(compiler, _headers_name(compiler), texts, flags)


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
    return f"programs/ahead-{native_digest(_toolchain_key(compiler), _interface_digest(), source_text)}"


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
    common = native_digest(
        _toolchain_key(compiler), _interface_digest(), _kernel_header(), *KERNEL_FLAGS, cpu_description()
    )
    return [f"kernels/{native_digest(common, symbol)}" for symbol in symbols]


def bridge_source_names() -> list[str]:
    """Returns the source files and headers of the bridge without its binding, and those that programs include."""
    kernel_headers = [f"bridge/{name}" for name in _KERNEL_HEADERS[1:]]
    return [*[name for unit in _BRIDGE_UNITS for name in unit], *_HEADERS, *kernel_headers]


def find_bridge() -> Path | None:
    """Returns the folder of a bridge that need not be compiled: of a saved program, of the wheel, or in the cache."""
    folder = find_prebuilt_bridge() or find_packaged_entry(_packaged_bridge(), BRIDGE_LIBRARIES)
    if folder is not None:
        return folder
    try:
        return cache_folder.find_entry(_bridge_name(find_compiler()))
    except NativeBuildError:
        return None


def build_bridge(in_background: bool = False) -> BridgeBuild:
    """Returns the bridge and binding for this torch, Python and compiler: of the wheel, in the cache, or built now.

    `in_background` compiles one file after another. Raises NativeBuildError without a compiler, and where it fails;
    CacheError where no cache folder can be written.
    """
    packaged = find_packaged_entry(_packaged_bridge(), BRIDGE_LIBRARIES)
    if packaged is not None:
        return BridgeBuild(packaged, 0.0)
    compiler = find_compiler()
    start = time.perf_counter()
    existing = cache_folder.find_entry(_bridge_name(compiler))
    if existing is not None:
        return BridgeBuild(existing, 0.0)
    objects = _compile_bridge_units(compiler, in_background)

    def link(folder: Path) -> None:
        _link_bridge(compiler, objects, folder)

    folder = cache_folder.find_or_build_entry(_bridge_name(compiler), link)
    precompile_program_headers(compiler)
    return BridgeBuild(folder, time.perf_counter() - start)


def _bridge_name(compiler: Compiler) -> str:
    return f"bridge-{native_digest(_toolchain_key(compiler), _bridge_digest())}"


def _compile_bridge_units(compiler: Compiler, in_background: bool = False) -> list[Path]:
    """Returns the object files of `_BRIDGE_UNITS` and `_BINDING_UNITS`. Each is cached, so that a build that ends early
    is continued by the next one, and threads and processes that build the bridge at once share the work."""
    units = (*_BRIDGE_UNITS, *_BINDING_UNITS)
    subject = f"the C++ bridge for torch {torch.__version__}"
    with report_build(subject, len(units), on_terminal=not in_background) as finish_file:

        def compiled(unit: Sequence[str]) -> str:
            path = _compile_bridge_unit(compiler, unit)
            finish_file()
            return str(path)

        # Python waits for the threads of `parallel_map` when it exits.
        return [Path(path) for path in (map(compiled, units) if in_background else parallel_map(compiled, units))]


def _compile_bridge_unit(compiler: Compiler, unit: Sequence[str]) -> Path:
    include = ["-isystem", str(_TORCH_FOLDER / "include"), "-isystem", sysconfig.get_paths()["include"]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # Messages name source files by their path in the package.
    names = [f"-ffile-prefix-map={_SOURCE_FOLDER}=fxwrap", f"-ffile-prefix-map={_TORCH_FOLDER}=torch"]
    flags = [*_COMMON_FLAGS, *_BRIDGE_FLAGS, abi, *names, "-I", str(_SOURCE_FOLDER), *include]
    texts = [(_SOURCE_FOLDER / name).read_text(encoding="utf-8") for name in (*_HEADERS, *unit)]

    def build(folder: Path) -> None:
        source = folder / _UNIT
        source.write_text("".join([f'#include "{name}"\n' for name in unit]), encoding="utf-8")
        run_compiler([*compiler.command, *flags, "-c", source.name, "-o", _UNIT.with_suffix(".o").name], folder)
        source.unlink()

    key = native_digest(_toolchain_key(compiler), *_BRIDGE_FLAGS, *unit, *texts)
    return cache_folder.find_or_build_entry(f"units/{key}", build) / _UNIT.with_suffix(".o")


def _link_bridge(compiler: Compiler, objects: Sequence[Path], folder: Path, finds_torch: bool = True) -> None:
    """Links the bridge and its binding; `finds_torch` stores the folder of this torch for processes without Python."""
    libraries = str(_TORCH_FOLDER / "lib")
    bridge_objects, binding_objects = objects[: len(_BRIDGE_UNITS)], objects[len(_BRIDGE_UNITS) :]
    search = [f"-Wl,-rpath,{libraries}"] if finds_torch else []
    torch_flags = [f"-L{libraries}", "-ltorch_cpu", "-lc10", *search, *compiler.runtime]
    link = [*compiler.command, "-shared", *map(str, bridge_objects), *torch_flags]
    run_compiler([*link, f"-Wl,-soname,{_BRIDGE}", "-o", _BRIDGE], folder)
    binding = [*map(str, binding_objects), "-L.", "-lfxwrap_bridge", "-Wl,-rpath,$ORIGIN", "-ltorch_python"]
    run_compiler([*compiler.command, "-shared", *binding, *torch_flags, "-o", _BINDING], folder)


def package_bridge(target: Path) -> Path:
    """Compiles the bridge that a wheel carries for this torch and Python into a folder of `target`, and returns that.

    It refers to no path of this machine. Raises NativeBuildError without a compiler, and where it fails; OSError where
    `target` cannot be written.
    """
    compiler = find_compiler()
    objects = _compile_bridge_units(compiler)
    build = partial(_link_bridge, compiler, objects, finds_torch=False)
    return package_entry(target, _packaged_bridge(), build)


def package_entry(target: Path, name: str, build: Callable[[Path], object]) -> Path:
    """Builds a folder of a wheel's libraries with the table of their hashes, and returns it."""
    cache_folder.remove_path(target / name)
    (target / name).mkdir(parents=True)
    build(target / name)
    cache_folder.seal_entry(target / name, name)
    return target / name


def _packaged_bridge() -> str:
    return f"bridge-{native_digest(_bridge_digest(), *_COMMON_FLAGS, *torch_identity(), *PLATFORM)}"


def native_entry_key(compiler: Compiler, *parts: str) -> str:
    """Returns the key in the cache of something compiled against the bridge."""
    return native_digest(_toolchain_key(compiler), *parts)


def _toolchain_key(compiler: Compiler) -> str:
    return "\n".join(
        (
            *compiler.command,
            shutil.which(compiler.command[0]) or "",
            compiler.version,
            *compiler.runtime,
            *compiler.kernel_flags,
            torch.__version__,
            str(torch.__file__),
            str(sysconfig.get_config_var("SOABI")),
            *_COMMON_FLAGS,
        )
    )


@cache
def _bridge_digest() -> str:
    files = (*_HEADERS, *[file for unit in (*_BRIDGE_UNITS, *_BINDING_UNITS) for file in unit])
    return native_digest(*_BRIDGE_FLAGS, *((_SOURCE_FOLDER / name).read_text(encoding="utf-8") for name in files))


@cache
def _interface_digest() -> str:
    """Returns the hash of the headers of programs: by the first, they reach every version of the bridge."""
    return native_digest(*[(_PROGRAM_HEADERS / name).read_text(encoding="utf-8") for name in _INTERFACE_HEADERS])


@cache
def _kernel_header() -> str:
    return "".join([(_PROGRAM_HEADERS / name).read_text(encoding="utf-8") for name in _KERNEL_HEADERS])


@cache
def cpu_description() -> str:
    """Returns the processor's model and instruction sets, which -march=native depends on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = "".join(takewhile(str.strip, file))  # the first processor: reading all is slow
    except OSError:
        return platform.processor()
    lines = text.splitlines()
    return "\n".join(next((s for s in lines if s.startswith(key)), "") for key in ("model name", "flags", "Features"))


def native_digest(*parts: str) -> str:
    """Returns the hash of texts in keys of the cache and names of packaged libraries."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:32]


def binary_target() -> dict[str, str | list[str]]:
    """Returns the dependencies of a compiled program besides its source, as JSON data; see `incompatibility_reason`.

    These are the headers of programs and kernels, the machine, its C library, and the processor's instruction sets. A
    program reaches torch by a table of functions alone, so it is for every version of torch.
    """
    return {
        "interface": native_digest(
            _interface_digest(), _kernel_header(), *_COMMON_FLAGS, *PROGRAM_FLAGS, *KERNEL_FLAGS
        ),
        "machine": " ".join(PLATFORM),
        "libc": platform.libc_ver()[1],
        "instructions": _cpu_instruction_sets(),
    }


def bridge_target() -> dict[str, str]:
    """Returns the dependencies of a compiled bridge and its binding: its sources, torch, and Python."""
    return {
        "bridge": native_digest(_bridge_digest(), *_COMMON_FLAGS),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": str(sysconfig.get_config_var("SOABI")),
    }


def incompatibility_reason(target: Mapping[str, Any]) -> str:
    """Returns why a library for a `binary_target` cannot be used on this machine, or ""."""
    here = binary_target()
    for name in ("interface", "machine"):
        if target.get(name) != here[name]:
            return f"it is for {name} {target.get(name)!r}, not {here[name]!r}"
    if _version(target.get("libc", "")) > _version(here["libc"]):
        return f"it is for the C library {target.get('libc')}, not {here['libc']}"
    missing = set(target.get("instructions", [])) - set(here["instructions"])
    if missing:
        return f"it uses instructions that this processor lacks: {', '.join(sorted(missing))}"
    return ""


def _version(text: object) -> tuple[int, ...]:
    return tuple([int(part) for part in re.findall(r"\d+", str(text))])


def _cpu_instruction_sets() -> list[str]:
    line = next((s for s in cpu_description().splitlines() if s.startswith(("flags", "Features"))), "")
    return sorted(set(line.partition(":")[2].split()))

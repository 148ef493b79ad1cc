"""The build of the bridge, which emitted C++ calls, and of its Python binding: one per torch, Python and compiler."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime import cache_folder
from fxwrap.runtime.native.compiler import Compiler, find_compiler, parallel_map, run_compiler
from fxwrap.runtime.native.identity import COMMON_FLAGS, KERNEL_HEADERS, PLATFORM, native_digest, native_entry_key
from fxwrap.runtime.native.packaged import find_packaged_entry, torch_identity
from fxwrap.runtime.native.prebuilt import find_prebuilt_bridge
from fxwrap.runtime.native.precompiled_headers import precompile_program_headers
from fxwrap.runtime.native.progress import report_build

_SOURCE_FOLDER = Path(__file__).parent
_TORCH_FOLDER = Path(torch.__file__).parent
# Files that are compiled together: parsing torch's headers dominates the time of most of them.
_BRIDGE_UNITS = (
    ("bridge/typed_calls.cpp",),
    ("libraries/vector_kernels.cpp",),
    (
        *("bridge/values.cpp", "bridge/bridge.cpp", "bridge/checks.cpp", "bridge/execute.cpp"),
        *("bridge/ranges.cpp", "bridge/engine.cpp", "engine/checks.cpp"),
        *("graph_capture/capturer.cpp", "graph_capture/cuda_graphs.cpp"),
        *("graph_capture/functions.cpp", "graph_capture/replay.cpp"),
        *("cuda/streams.cpp", "cuda/stream_operators.cpp", "cuda/driver.cpp", "cuda/launch.cpp"),
        *("libraries/plans.cpp", "libraries/cublas.cpp", "libraries/matmuls.cpp"),
        *("libraries/cudnn.cpp", "libraries/convolutions.cpp", "libraries/attention.cpp", "libraries/cpu_addmm.cpp"),
        *("libraries/prepacked.cpp", "libraries/frozen_convolutions.cpp", "libraries/grouped_matmuls.cpp"),
    ),
)
_BINDING_UNITS = (
    ("binding/binding.cpp",),
    ("binding/launcher.cpp", "binding/plain_inputs.cpp", "binding/prepacked.cpp"),
)
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
    *("libraries/operators.h", "libraries/prepacked.h", "libraries/grouped_matmuls.h", "libraries/matmuls.h"),
    *("libraries/packed_weights.h", "libraries/frozen_convolutions.h"),
    *("libraries/vector_kernels.h", "libraries/vector_loops.h"),
)
BRIDGE_LIBRARIES = ("libfxwrap_bridge.so", "_fxwrap_binding.so")
"""The files of the bridge: its library and its Python binding."""

_BRIDGE, _BINDING = BRIDGE_LIBRARIES

_BRIDGE_FLAGS = ("-O2", "-fopenmp", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS")
_UNIT = Path("bridge.cpp")


@dataclass(frozen=True, slots=True)
class BridgeBuild:
    """The built bridge: its folder and the seconds of the build in this process (0.0 if it was cached)."""

    folder: Path
    seconds: float


def bridge_source_names() -> list[str]:
    """Returns the source files and headers of the bridge without its binding, and those that programs include."""
    kernel_headers = [f"bridge/{name}" for name in KERNEL_HEADERS[1:]]
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
    return f"bridge-{native_entry_key(compiler, _bridge_digest())}"


def _compile_bridge_units(compiler: Compiler, in_background: bool = False) -> list[Path]:
    """Returns the object files of `_BRIDGE_UNITS` and `_BINDING_UNITS`.

    Each is cached, so that a build that ends early is continued by the next one, and threads and processes that build
    the bridge at once share the work.
    """
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
    flags = [*COMMON_FLAGS, *_BRIDGE_FLAGS, abi, *names, "-I", str(_SOURCE_FOLDER), *include]
    texts = [(_SOURCE_FOLDER / name).read_text(encoding="utf-8") for name in (*_HEADERS, *unit)]

    def build(folder: Path) -> None:
        source = folder / _UNIT
        source.write_text("".join([f'#include "{name}"\n' for name in unit]), encoding="utf-8")
        run_compiler([*compiler.command, *flags, "-c", source.name, "-o", _UNIT.with_suffix(".o").name], folder)
        source.unlink()

    key = native_entry_key(compiler, _UNIT.name, *_BRIDGE_FLAGS, *unit, *texts)
    return cache_folder.find_or_build_entry(f"units/{key}", build) / _UNIT.with_suffix(".o")


def _link_bridge(compiler: Compiler, objects: Sequence[Path], folder: Path, finds_torch: bool = True) -> None:
    """Links the bridge and its binding; `finds_torch` stores the folder of this torch for processes without Python."""
    libraries = str(_TORCH_FOLDER / "lib")
    bridge_objects, binding_objects = objects[: len(_BRIDGE_UNITS)], objects[len(_BRIDGE_UNITS) :]
    search = [f"-Wl,-rpath,{libraries}"] if finds_torch else []
    torch_flags = [f"-L{libraries}", "-ltorch_cpu", "-lc10", *search, *compiler.runtime]
    link = [*compiler.command, "-shared", "-fopenmp", *map(str, bridge_objects), *torch_flags]
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
    return f"bridge-{native_digest(_bridge_digest(), *COMMON_FLAGS, *torch_identity(), *PLATFORM)}"


@cache
def _bridge_digest() -> str:
    files = (*_HEADERS, *[file for unit in (*_BRIDGE_UNITS, *_BINDING_UNITS) for file in unit])
    return native_digest(*_BRIDGE_FLAGS, *((_SOURCE_FOLDER / name).read_text(encoding="utf-8") for name in files))


def bridge_target() -> dict[str, str]:
    """Returns the dependencies of a compiled bridge and its binding: its sources, torch, and Python."""
    return {
        "bridge": native_digest(_bridge_digest(), *COMMON_FLAGS),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": str(sysconfig.get_config_var("SOABI")),
    }

"""`libfxwrap_runtime`, which runs saved programs in processes without Python: its build, and its files for CMake."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch

from fxwrap.runtime import cache_folder
from fxwrap.runtime.native.bridge_build import BRIDGE_LIBRARIES, bridge_source_names, build_bridge, package_entry
from fxwrap.runtime.native.compiler import Compiler, find_compiler, parallel_map, run_compiler
from fxwrap.runtime.native.identity import PLATFORM, binary_target, native_digest, native_entry_key
from fxwrap.runtime.native.packaged import find_packaged_entry

RUNTIME_LIBRARY = "libfxwrap_runtime.so"
RUNTIME_TARGET = "libfxwrap_runtime.target"
"""The file beside the library that names what programs must be compiled for, and the folder of libtorch."""

_SOURCE_FOLDER = Path(__file__).parent
_INCLUDE_FOLDER = _SOURCE_FOLDER.parents[1] / "include"
# Of about equal compile times; the source files of a unit share the headers of the standard library.
_UNITS = (
    ("host/sha256.cpp", "host/ed25519.cpp", "host/json.cpp", "host/archive.cpp"),
    ("host/constants.cpp", "host/code.cpp", "host/model.cpp", "host/api.cpp"),
    ("cpu/functions.cpp", "cpu/engine.cpp", "engine/checks.cpp"),
)
_SOURCES = tuple([name for unit in _UNITS for name in unit])
_HEADERS = (
    *[f"host/{name}.h" for name in ("sha256", "ed25519", "json", "archive", "constants", "code", "model")],
    *[f"engine/{name}.h" for name in ("engine", "call", "checks", "dtypes", "failure", "observer")],
    *("cpu/tensor.h", "cpu/engine.h", "bridge/bridge.h", "bridge/kernel_failure.h", "../../include/fxwrap/runtime.h"),
)
_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-O2", "-DNDEBUG", "-pthread")
_TEMPLATES = _SOURCE_FOLDER / "cmake"


def build_runtime() -> Path:
    """Returns the folder of the runtime: its library, the bridge, `include/`, and files for CMake and pkg-config.

    It is put together now unless it is in the cache, with the library of the wheel or one that is compiled now. Raises
    as `build_bridge`.
    """
    bridge, packaged = build_bridge().folder, find_packaged_entry(_packaged_runtime(), (RUNTIME_LIBRARY,))
    library = _build_library() if packaged is None else packaged / RUNTIME_LIBRARY
    key = native_digest(str(library), str(bridge), str(binary_target()), _torch_folder(), _sources_digest())

    def build(folder: Path) -> None:
        shutil.copyfile(library, folder / RUNTIME_LIBRARY)
        shutil.copyfile(bridge / BRIDGE_LIBRARIES[0], folder / BRIDGE_LIBRARIES[0])
        shutil.copytree(_INCLUDE_FOLDER, folder / "include")
        write_runtime_target(folder)
        _write_package_files(folder, folder, folder / "lib")

    return cache_folder.find_or_build_entry(f"runtime-{key}", build)


def package_runtime(target: Path) -> Path:
    """Compiles the library of a wheel into a folder of `target`, and returns that; see `package_bridge`."""
    library = _build_library()
    return package_entry(target, _packaged_runtime(), lambda folder: shutil.copy(library, folder))


def cmake_prefix_path() -> str:
    """Returns the folder for CMAKE_PREFIX_PATH, where `find_package(fxwrap)` finds the runtime. Raises as above."""
    return str(build_runtime())


def install_runtime(prefix: Path) -> list[Path]:
    """Copies the runtime to a prefix as `make install` would, and returns the files. Raises OSError."""
    source, copied = build_runtime(), []
    libraries = dict.fromkeys((RUNTIME_LIBRARY, RUNTIME_TARGET, BRIDGE_LIBRARIES[0]), "lib")
    places = {**libraries, "include/fxwrap": "include/fxwrap"}
    for name, target in places.items():
        files = [source / name] if (source / name).is_file() else sorted((source / name).iterdir())
        (prefix / target).mkdir(parents=True, exist_ok=True)
        copied += [Path(shutil.copy(file, prefix / target / file.name)) for file in files]
    return [*copied, *_write_package_files(prefix, prefix / "lib", prefix / "lib")]


def project_sources() -> dict[str, Path]:
    """Returns the files that a host without fxwrap compiles, by their path in the package, on which includes depend."""
    names = (*bridge_source_names(), *_SOURCES, *_HEADERS)
    paths = [*[(_SOURCE_FOLDER / name).resolve() for name in dict.fromkeys(names)], *_INCLUDE_FOLDER.rglob("*.h*")]
    return {path.relative_to(_INCLUDE_FOLDER.parent).as_posix(): path for path in sorted(set(paths))}


def runtime_sources() -> list[Path]:
    """Returns the source files of the runtime; their includes are relative to the folder of the native sources."""
    return [(_SOURCE_FOLDER / name).resolve() for name in _SOURCES]


def write_runtime_target(folder: Path) -> None:
    """Writes the file that the runtime reads in its folder.

    It has the headers and the machine that programs must be compiled for, and the folder of libtorch.
    """
    target = binary_target()
    lines = [*[str(target[name]) for name in ("interface", "machine")], f"{_torch_folder()}/lib"]
    (folder / RUNTIME_TARGET).write_text("".join([f"{line}\n" for line in lines]), encoding="utf-8")


def _build_library() -> Path:
    """Returns the library, which depends on no bridge, from the cache or compiled now."""
    compiler = find_compiler()
    name = f"runtime-library-{native_entry_key(compiler, _sources_digest())}"
    return cache_folder.find_or_build_entry(name, partial(_compile, compiler)) / RUNTIME_LIBRARY


def _compile(compiler: Compiler, folder: Path) -> None:
    flags = [*_FLAGS, f"-ffile-prefix-map={_SOURCE_FOLDER}=fxwrap", "-I", str(_SOURCE_FOLDER)]

    def compiled(unit: Sequence[str]) -> str:
        source = folder / f"{Path(unit[0]).stem}_unit.cpp"
        source.write_text("".join([f'#include "{name}"\n' for name in unit]), encoding="utf-8")
        run_compiler([*compiler.command, *flags, "-c", source.name, "-o", f"{source.name}.o"], folder)
        source.unlink()
        return f"{source.name}.o"

    objects = parallel_map(compiled, _UNITS)
    libraries = ["-ldl", f"-Wl,-soname,{RUNTIME_LIBRARY}", *compiler.runtime]
    run_compiler([*compiler.command, "-shared", "-pthread", *objects, *libraries, "-o", RUNTIME_LIBRARY], folder)
    for item in objects:
        (folder / item).unlink()


def _packaged_runtime() -> str:
    return f"runtime-{native_digest(_sources_digest(), *PLATFORM)}"


@cache
def _sources_digest() -> str:
    names = (*_SOURCES, *_HEADERS, *_shipped())
    return native_digest(*_FLAGS, *[(_SOURCE_FOLDER / name).read_text(encoding="utf-8") for name in names])


def _write_package_files(prefix: Path, libraries: Path, target: Path) -> list[Path]:
    """Writes the files for CMake and pkg-config below `target`; they find the others by their own path."""
    files = []
    names = {
        "fxwrap-config.cmake": "cmake/fxwrap",
        "fxwrap-config-version.cmake": "cmake/fxwrap",
        "fxwrap.pc": "pkgconfig",
    }
    for name, place in names.items():
        folder = target / place
        folder.mkdir(parents=True, exist_ok=True)
        up = "../" * len(folder.relative_to(prefix).parts)
        values = {"@UP@": up.rstrip("/"), "@LIB@": libraries.relative_to(prefix).as_posix(), "@TORCH@": _torch_folder()}
        text = (_TEMPLATES / f"{name}.in").read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(key, value)
        (folder / name).write_text(text, encoding="utf-8")
        files.append(folder / name)
    return files


@cache
def _torch_folder() -> str:
    return str(Path(torch.__file__).parent)


def _shipped() -> list[str]:
    """The files that determine the entry besides compiled code."""
    shipped = [*sorted(_INCLUDE_FOLDER.rglob("*.h*")), *sorted(_TEMPLATES.iterdir()), Path(__file__)]
    return [str(path) for path in shipped]

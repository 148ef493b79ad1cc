"""`libfxwrap_runtime`, which runs saved programs in processes without Python: its build, and its files for CMake."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import torch

from fxwrap.runtime import cache_folder
from fxwrap.runtime.native.build import (
    BRIDGE_LIBRARIES,
    binary_target,
    bridge_source_names,
    build_bridge,
    native_entry_key,
)
from fxwrap.runtime.native.compiler import Compiler, find_compiler, parallel_map, run_compiler

RUNTIME_LIBRARY = "libfxwrap_runtime.so"

_SOURCE_FOLDER = Path(__file__).parent
_INCLUDE_FOLDER = _SOURCE_FOLDER.parents[1] / "include"
_UNITS = ("sha256", "json", "archive", "constants", "code", "model", "api")
_HEADERS = (
    *[f"host/{name}.h" for name in ("sha256", "json", "archive", "constants", "dtypes", "code", "model")],
    *("engine/engine.h", "engine/failure.h", "bridge/bridge.h", "../../include/fxwrap/runtime.h"),
)
_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-O2", "-DNDEBUG", "-pthread")
_TEMPLATES = _SOURCE_FOLDER / "cmake"


def build_runtime() -> Path:
    """Returns the folder of the runtime: its library, the bridge, `include/`, and files for CMake and pkg-config.

    It is built now unless it is in the cache. Raises as `build_bridge`.
    """
    compiler, bridge = find_compiler(), build_bridge().folder
    texts = [(_SOURCE_FOLDER / name).read_text(encoding="utf-8") for name in (*_unit_files(), *_HEADERS, *_shipped())]
    key = native_entry_key(compiler, str(bridge), *_FLAGS, *runtime_definitions(), *texts)
    return cache_folder.find_or_build_entry(f"runtime-{key}", lambda folder: _build(compiler, bridge, folder))


def cmake_prefix_path() -> str:
    """Returns the folder for CMAKE_PREFIX_PATH, where `find_package(fxwrap)` finds the runtime. Raises as above."""
    return str(build_runtime())


def install_runtime(prefix: Path) -> list[Path]:
    """Copies the runtime to a prefix as `make install` would, and returns the files. Raises OSError."""
    source, copied = build_runtime(), []
    places = {RUNTIME_LIBRARY: "lib", BRIDGE_LIBRARIES[0]: "lib", "include/fxwrap": "include/fxwrap"}
    for name, target in places.items():
        files = [source / name] if (source / name).is_file() else sorted((source / name).iterdir())
        (prefix / target).mkdir(parents=True, exist_ok=True)
        copied += [Path(shutil.copy(file, prefix / target / file.name)) for file in files]
    return [*copied, *_write_package_files(prefix, prefix / "lib", prefix / "lib")]


def project_sources() -> dict[str, Path]:
    """Returns the files that a host without fxwrap compiles, by their path in the package, on which includes depend."""
    names = (*bridge_source_names(), *_unit_files(), *_HEADERS)
    paths = [*[(_SOURCE_FOLDER / name).resolve() for name in dict.fromkeys(names)], *_INCLUDE_FOLDER.rglob("*.h*")]
    return {path.relative_to(_INCLUDE_FOLDER.parent).as_posix(): path for path in sorted(set(paths))}


def runtime_sources() -> list[Path]:
    """Returns the source files of the runtime; their includes are relative to the folder of the native sources."""
    return [_SOURCE_FOLDER / name for name in _unit_files()]


def runtime_definitions() -> list[str]:
    """Returns the compiler flags that define the versions that compiled programs must be for."""
    target = binary_target()
    definitions = [f'-DFXWRAP_TARGET_{name.upper()}="{target[name]}"' for name in ("torch", "bridge", "machine")]
    return [*definitions, f'-DFXWRAP_TORCH_LIBRARIES="{_torch_folder()}/lib"']


def _build(compiler: Compiler, bridge: Path, folder: Path) -> None:
    definitions = runtime_definitions()

    def compiled(unit: str) -> str:
        source, result = _SOURCE_FOLDER / unit, f"{Path(unit).stem}.o"
        run_compiler(
            [*compiler.command, *_FLAGS, *definitions, "-I", str(_SOURCE_FOLDER), "-c", str(source), "-o", result],
            folder,
        )
        return result

    objects = parallel_map(compiled, _unit_files())
    libraries = ["-ldl", f"-Wl,-soname,{RUNTIME_LIBRARY}", *compiler.runtime]
    run_compiler([*compiler.command, "-shared", "-pthread", *objects, *libraries, "-o", RUNTIME_LIBRARY], folder)
    for item in objects:
        (folder / item).unlink()
    shutil.copyfile(bridge / BRIDGE_LIBRARIES[0], folder / BRIDGE_LIBRARIES[0])
    shutil.copytree(_INCLUDE_FOLDER, folder / "include")
    _write_package_files(folder, folder, folder / "lib")


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


def _unit_files() -> list[str]:
    return [f"host/{name}.cpp" for name in _UNITS]


def _shipped() -> list[str]:
    """The files that determine the entry besides compiled code."""
    shipped = [*sorted(_INCLUDE_FOLDER.rglob("*.h*")), *sorted(_TEMPLATES.iterdir()), Path(__file__)]
    return [str(path) for path in shipped]

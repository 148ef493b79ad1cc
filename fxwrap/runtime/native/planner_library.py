"""`libfxwrap_planner`, the search of memory planning, which needs no torch: its build."""

from __future__ import annotations

import shutil
from functools import cache, partial
from pathlib import Path

from fxwrap.runtime import cache_folder
from fxwrap.runtime.native.bridge_build import package_entry
from fxwrap.runtime.native.compiler import Compiler, find_compiler, run_compiler
from fxwrap.runtime.native.identity import PLATFORM, native_digest, native_entry_key
from fxwrap.runtime.native.packaged import find_packaged_entry
from fxwrap.runtime.native.progress import report_build

_SOURCE_FOLDER = Path(__file__).parent
_PARTS = ("placement", "explore", "blocks", "orders", "exchanges", "byte_flow", "sweep")
_UNITS = (*[f"planning/{part}.cpp" for part in _PARTS], "planning/planner.cpp")
_HEADERS = (*[f"planning/{part}.h" for part in _PARTS], "planning/values.h")
_LIBRARY = "libfxwrap_planner.so"
_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-O2", "-DNDEBUG", "-ffp-contract=off")


def find_planner() -> Path | None:
    """Returns the library of memory planning's search if it need not be compiled: of the wheel, or in the cache.

    Raises as `build_bridge`.
    """
    folder = find_packaged_entry(_packaged_planner(), (_LIBRARY,)) or cache_folder.find_entry(
        _planner_name(find_compiler())
    )
    return None if folder is None else folder / _LIBRARY


def build_planner() -> Path:
    """Returns the library of memory planning's search: of the wheel, in the cache, or built now.

    Raises as `build_bridge`.
    """
    library = find_planner()
    if library is not None:
        return library
    compiler = find_compiler()
    return cache_folder.find_or_build_entry(_planner_name(compiler), partial(_build, compiler)) / _LIBRARY


def package_planner(target: Path) -> Path:
    """Compiles the library of a wheel into a folder of `target`, and returns that; see `package_bridge`."""
    library = build_planner()
    return package_entry(target, _packaged_planner(), lambda folder: shutil.copy(library, folder))


def _build(compiler: Compiler, folder: Path) -> None:
    unit = folder / "planner.cpp"
    with report_build("the search of memory planning", 1) as finish_file:
        unit.write_text("".join([f'#include "{name}"\n' for name in _UNITS]), encoding="utf-8")
        command = [*compiler.command, *_FLAGS, "-I", str(_SOURCE_FOLDER), "-shared", unit.name]
        run_compiler([*command, *compiler.runtime, "-o", _LIBRARY], folder)
        finish_file()
    unit.unlink()


def _planner_name(compiler: Compiler) -> str:
    return f"planner-{native_entry_key(compiler, _sources_digest())}"


def _packaged_planner() -> str:
    return f"planner-{native_digest(_sources_digest(), *PLATFORM)}"


@cache
def _sources_digest() -> str:
    texts = [(_SOURCE_FOLDER / name).read_text(encoding="utf-8") for name in (*_HEADERS, *_UNITS)]
    return native_digest(*_FLAGS, *texts)

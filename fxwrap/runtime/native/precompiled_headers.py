"""Headers of programs and kernels that GCC has parsed: a small kernel then compiles in two thirds of the time."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fxwrap.errors import CacheError, NativeBuildError
from fxwrap.runtime import cache_folder
from fxwrap.runtime.native.compiler import Compiler, run_compiler

log = logging.getLogger("fxwrap.native")


def precompile_headers(
    compiler: Compiler, name: str, texts: Sequence[Path], flags: Mapping[str, Sequence[str]]
) -> None:
    """Writes precompiled headers to the entry `name` of the cache, by GCC alone: other compilers do not look for them.

    `flags` are those of the units that include each header first; `texts` are the headers and what they include, of
    which the entry has copies. For a unit with other flags, GCC reads the copy. A compiler that fails leaves no entry.
    """
    if "Free Software Foundation" not in compiler.version:
        return

    def build(folder: Path) -> None:
        for path in texts:
            shutil.copyfile(path, folder / path.name)
        for header, options in flags.items():
            run_compiler([*compiler.command, *options, "-x", "c++-header", header, "-o", f"{header}.gch"], folder)

    try:
        cache_folder.find_or_build_entry(name, build)
    except (NativeBuildError, CacheError) as error:
        log.info("the headers of programs are not precompiled: %s", error)


def include_flags(name: str, folder: Path) -> tuple[str, ...]:
    """Returns the flags by which a unit includes the headers of a folder, precompiled where the cache has the entry."""
    precompiled = cache_folder.find_entry(name)
    return (*(() if precompiled is None else ("-I", str(precompiled))), "-I", str(folder))

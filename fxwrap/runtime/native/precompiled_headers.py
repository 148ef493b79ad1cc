"""Precompiled headers of emitted programs and kernels: reading them takes most of the compile of a small one."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from fxwrap.errors import CacheError, NativeBuildError
from fxwrap.runtime import cache_folder
from fxwrap.runtime.native.compiler import Compiler, run_compiler, user_kernel_flags
from fxwrap.runtime.native.identity import (
    COMMON_FLAGS,
    INTERFACE_HEADERS,
    KERNEL_FLAGS,
    KERNEL_HEADER,
    KERNEL_HEADERS,
    PROGRAM_FLAGS,
    PROGRAM_HEADERS,
    cpu_description,
    interface_digest,
    kernel_header,
    native_entry_key,
)

log = logging.getLogger("fxwrap.native")


def precompile_program_headers(compiler: Compiler) -> None:
    """Writes the precompiled headers of programs and kernels to the cache, by GCC alone: others do not look for them.

    That of kernels has the flags of `FXWRAP_KERNEL_FLAGS`. The entry has copies of the headers, which GCC reads for a
    unit with other flags. A compiler that fails leaves no entry.
    """
    if "Free Software Foundation" not in compiler.version:
        return
    kernel_flags = (*COMMON_FLAGS, *KERNEL_FLAGS, *compiler.kernel_flags, *user_kernel_flags())
    flags = {INTERFACE_HEADERS[0]: (*COMMON_FLAGS, *PROGRAM_FLAGS), KERNEL_HEADER: kernel_flags}

    def build(folder: Path) -> None:
        for name in {*INTERFACE_HEADERS, *KERNEL_HEADERS}:
            shutil.copyfile(PROGRAM_HEADERS / name, folder / name)
        for header, options in flags.items():
            run_compiler([*compiler.command, *options, "-x", "c++-header", header, "-o", f"{header}.gch"], folder)

    try:
        cache_folder.find_or_build_entry(_entry_name(compiler, user_kernel_flags()), build)
    except (NativeBuildError, CacheError) as error:
        log.info("the headers of programs are not precompiled: %s", error)


def include_flags(compiler: Compiler) -> tuple[str, ...]:
    """Returns the flags by which a unit includes the headers of programs, precompiled where the cache has them.

    Where none have the flags of `FXWRAP_KERNEL_FLAGS`, those without are included: of them GCC reads what its flags
    allow.
    """
    names = [_entry_name(compiler, flags) for flags in (user_kernel_flags(), ())]
    precompiled = cache_folder.find_entry(names[0]) or cache_folder.find_entry(names[1])
    return (*(() if precompiled is None else ("-I", str(precompiled))), "-I", str(PROGRAM_HEADERS))


def _entry_name(compiler: Compiler, user_flags: tuple[str, ...]) -> str:
    flags = (*KERNEL_FLAGS, *user_flags, *PROGRAM_FLAGS)
    return f"headers-{native_entry_key(compiler, interface_digest(), kernel_header(), *flags, cpu_description())}"

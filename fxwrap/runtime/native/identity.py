"""What identifies compiled code: its flags, keys in the cache, and the machines that it runs on."""

from __future__ import annotations

import hashlib
import platform
import re
import sysconfig
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fxwrap.runtime.native.compiler import Compiler, find_executable

PROGRAM_HEADERS = Path(__file__).parent / "bridge"
"""The folder of the headers that emitted programs and kernels include: `bridge.h` and `kernel.h`."""

COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden")
# Programs are straight-line calls, which optimisation does not speed up (benchmarks/bridge_calls.py).
PROGRAM_FLAGS = ("-O0",)
# By default compilers use half of AVX-512's vector width; loops over whole rows are faster with all of it.
_WIDEST_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
# Kernels have eager's rounding (no contraction) and integer wrap-around; they use neither errno nor traps.
KERNEL_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv"),
    *_WIDEST_VECTORS,
)
INTERFACE_HEADERS = ("bridge.h", "kernel_failure.h")
KERNEL_HEADER = "kernel.h"
KERNEL_HEADERS = (
    *("kernel_failure.h", KERNEL_HEADER, "kernel_library.h", "kernel_types.h", "kernel_operations.h"),
    *("kernel_memory.h", "kernel_reductions.h", "kernel_tiles.h", "contractions.h", "factors.h"),
    *("matrices.h", "kernel_streaming.h", "vector_math.h", "half_blocks.h"),
)
PLATFORM = (platform.system(), platform.machine())


def native_digest(*parts: str) -> str:
    """Returns the hash of texts in keys of the cache and names of packaged libraries."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:32]


def native_entry_key(compiler: Compiler, *parts: str) -> str:
    """Returns the key in the cache of something compiled against the bridge."""
    return native_digest(_toolchain_key(compiler), *parts)


def _toolchain_key(compiler: Compiler) -> str:
    return "\n".join(
        (
            *compiler.command,
            find_executable(compiler.command[0]),
            compiler.version,
            *compiler.runtime,
            *compiler.kernel_flags,
            torch.__version__,
            str(torch.__file__),
            str(sysconfig.get_config_var("SOABI")),
            *COMMON_FLAGS,
        )
    )


@cache
def interface_digest() -> str:
    """Returns the hash of the headers of programs: by the first, they reach every version of the bridge."""
    return native_digest(*[(PROGRAM_HEADERS / name).read_text(encoding="utf-8") for name in INTERFACE_HEADERS])


@cache
def kernel_header() -> str:
    """Returns the text of the header of kernels, with those that it includes."""
    return "".join([(PROGRAM_HEADERS / name).read_text(encoding="utf-8") for name in KERNEL_HEADERS])


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


def binary_target() -> dict[str, str | list[str]]:
    """Returns the dependencies of a compiled program besides its source, as JSON data; see `incompatibility_reason`.

    These are the headers of programs and kernels, the machine, its C library, and the processor's instruction sets. A
    program reaches torch by a table of functions alone, so it is for every version of torch.
    """
    return {
        "interface": native_digest(interface_digest(), kernel_header(), *COMMON_FLAGS, *PROGRAM_FLAGS, *KERNEL_FLAGS),
        "machine": " ".join(PLATFORM),
        "libc": platform.libc_ver()[1],
        "instructions": _cpu_instruction_sets(),
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

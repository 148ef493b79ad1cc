"""What Triton has compiled a kernel to, in the form that fxwrap's own launches take: the one place that knows how.

Checked on Triton 3.6, 3.7 and 3.9. A compilation is for arguments of certain classes. Which, is read off the types and
attributes that it was compiled with, so that a version of Triton that tells arguments apart by something else gives no
variant here; such kernels, and those that need more of a launch than a grid, are left to Triton's own launches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DTYPE_CODES = {
    "u8": 0, "i8": 1, "i16": 2, "i32": 3, "i64": 4, "fp16": 5, "fp32": 6, "fp64": 7, "u1": 11, "i1": 11, "bf16": 15,
    "fp8e5": 23, "fp8e4nv": 24, "fp8e5b16": 25, "fp8e4b8": 26, "u16": 27, "u32": 28, "u64": 29,
}  # fmt: skip
"""The values of bridge.h's DType by Triton's names."""

# Classes of integers, as launch.h has them: 1, then those of 32 bits, then wider ones; divisible by 16 is one more.
_ONE, _NARROW, _WIDE = 0, 1, 3
_INTEGERS = {"i32": _NARROW, "i64": _WIDE}
_OTHERS = frozenset({"u1", "i1", "fp32", "fp64"})

# How a function takes a parameter, as launch.h has it.
_LEFT_OUT, _WHOLE, _SINGLE = 0, 1, 2

_DIVISIBLE = ["tt.divisibility", 16]
_SCRATCH_PARAMETERS = 2
"""Triton's kernels take the addresses of two scratch buffers after their own parameters, null where they use none."""

_ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
_TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)([a-z]?)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TritonVariant:
    """One compilation of a kernel, and the arguments it is for.

    Fields:
        name: of the function in the compiled code.
        cubin: the machine code.
        ptx: what a driver compiles for chips that are newer; "" where the kernel uses what only its own chip has.
        capability: of the chip it was compiled for: 90 for 9.0.
        threads: of a block.
        shared: bytes of shared memory of a block.
        classes: one byte for each parameter of the kernel, constants left out: the class its argument must be of.
        passed: one byte for each of these: how the function takes it.
    """

    name: str
    cubin: bytes
    ptx: str
    capability: int
    threads: int
    shared: int
    classes: bytes
    passed: bytes


def variant_of(compiled: Any, constants: Collection[str]) -> TritonVariant | None:
    """Returns a kernel that Triton compiled for an NVIDIA GPU as a variant; `constants` names its constant parameters.

    None where it can only be launched by Triton: it needs scratch memory, tensor descriptors, clusters of blocks or a
    special kind of launch, or something here is not known.
    """
    metadata, source = compiled.metadata, compiled.src
    ptx = compiled.asm.get("ptx", "")
    cubin = compiled.asm.get("cubin")
    target = _TARGET.search(ptx)
    if target is None or not isinstance(cubin, bytes) or not _is_plain(metadata) or not hasattr(source, "fn"):
        return None
    names = [name for name in source.fn.arg_names if name not in constants]
    positions = {name: place for place, name in enumerate(source.fn.arg_names)}
    found = [_parameter(source, name, positions[name]) for name in names]
    known = [item for item in found if item is not None]
    taken = sum(way != _LEFT_OUT for _, way in known)
    if len(known) != len(found) or _parameter_count(ptx) != taken + _SCRATCH_PARAMETERS:
        return None
    return TritonVariant(
        metadata.name, cubin, "" if target[2] else ptx, int(target[1]), 32 * metadata.num_warps, metadata.shared,
        bytes([kind for kind, _ in known]), bytes([way for _, way in known]),
    )  # fmt: skip


def _is_plain(metadata: Any) -> bool:
    """Says whether a launch needs nothing but a grid, a block, shared memory and a stream."""
    special = (
        *("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size", "tensordesc_meta"),
        "instrumentation_mode",
    )
    return metadata.target.backend == "cuda" and metadata.num_ctas == 1 and not any(
        getattr(metadata, name, None) for name in special
    )


def _parameter(source: Any, name: str, position: int) -> tuple[int, int] | None:
    """Returns the class of a parameter's argument and how the function takes it; None for what is not known."""
    kind = source.signature.get(name)
    attributes = _attributes(source.attrs, position)
    divisible = attributes == [_DIVISIBLE]
    if not isinstance(kind, str) or (attributes and not divisible):
        return None
    if kind == "constexpr":
        return (_ONE, _LEFT_OUT) if _constant(source, name, position) == 1 else None
    if kind.startswith("*"):
        code = _DTYPE_CODES.get(kind[1:])
        return None if code is None else (2 * code + divisible, _WHOLE)
    if kind in _INTEGERS:
        return _INTEGERS[kind] + divisible, _WHOLE
    if kind in _OTHERS and not attributes:
        return 0, _SINGLE if kind == "fp32" else _WHOLE
    return None


def _attributes(given: Mapping[Any, Any], position: int) -> Sequence[Any]:
    return [list(item) for item in given.get((position,), ())]


def _constant(source: Any, name: str, position: int) -> Any:
    """Returns the constant that a parameter was compiled for; a bool is none, since True is not the number 1."""
    found = source.constants.get((position,), source.constants.get(name))
    return None if isinstance(found, bool) else found


def _parameter_count(ptx: str) -> int:
    entry = _ENTRY.search(ptx)
    return entry[1].count(".param") if entry is not None else -1

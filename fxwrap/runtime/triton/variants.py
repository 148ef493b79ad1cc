"""Compiled Triton kernels in the form of fxwrap's own launches; the only code that depends on Triton's internals.

Tested on Triton 3.6, 3.7 and 3.9. A compilation serves arguments of certain classes, derived from the types and
attributes that it was compiled with. Triton launches kernels with unknown attributes, and those that need more than a
grid.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_DTYPE_CODES = {
    "u8": 0, "i8": 1, "i16": 2, "i32": 3, "i64": 4, "fp16": 5, "fp32": 6, "fp64": 7, "u1": 11, "i1": 11, "bf16": 15,
    "u16": 27, "u32": 28, "u64": 29,
}  # fmt: skip
"""The values of bridge.h's DType by Triton's names. Generated kernels access float8 as bytes, and so do launches."""

_TRITON_NAMES = {
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
}  # fmt: skip
"""Triton's names of the element types of kernels' parameters."""

# Classes of integers as in launch.h: 1, then 32-bit, then 64-bit ones; plus 1 if divisible by 16.
_ONE, _NARROW, _WIDE = 0, 1, 3
_INTEGERS = {"i32": _NARROW, "i64": _WIDE}
_OTHERS = frozenset({"u1", "i1", "fp32", "fp64"})

# Parameter passing as in launch.h.
_OMITTED, _BY_VALUE, _AS_FLOAT32 = 0, 1, 2

_DIVISIBLE = ["tt.divisibility", 16]
_SCRATCH_PARAMETERS = 2
"""Triton appends the addresses of two scratch buffers to the parameters, null if unused."""

_MAX_SCRATCH_ALIGNMENT = 512
"""The alignment of memory that torch allocates on GPUs."""

_ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
_TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)([a-z]?)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TritonVariant:
    """One compilation of a kernel and its argument classes.

    Fields:
        name: the function in the compiled code.
        cubin: machine code.
        ptx: PTX for newer GPUs; "" if the kernel uses features of its own architecture only.
        capability: compute capability, 90 for 9.0.
        threads: threads per block.
        shared: bytes of shared memory per block.
        scratch: bytes of scratch memory per block, which a launch allocates.
        classes: one byte per parameter except constants: the required class of its argument.
        parameter_passing: one byte per such parameter.
    """

    name: str
    cubin: bytes
    ptx: str
    capability: int
    threads: int
    shared: int
    scratch: int
    classes: bytes
    parameter_passing: bytes


def variant_of(compiled: Any, constants: Collection[str]) -> TritonVariant | None:
    """Returns the variant of a compiled kernel for an NVIDIA GPU; `constants` names its constant parameters.

    None where only Triton can launch it: it needs tensor descriptors as arguments, block clusters or a special launch,
    or has unknown properties.
    """
    metadata, source = compiled.metadata, compiled.src
    ptx = compiled.asm.get("ptx", "")
    cubin = compiled.asm.get("cubin")
    target = _TARGET.search(ptx)
    if target is None or not isinstance(cubin, bytes) or not _is_plain(metadata) or not hasattr(source, "fn"):
        return None
    names = [name for name in source.fn.arg_names if name not in constants]
    positions = {name: position for position, name in enumerate(source.fn.arg_names)}
    known = [item for name in names if (item := _parameter(source, name, positions[name])) is not None]
    passed = sum(passing != _OMITTED for _, passing in known)
    if len(known) != len(names) or _parameter_count(ptx) != passed + _SCRATCH_PARAMETERS:
        return None
    return TritonVariant(
        metadata.name, cubin, "" if target[2] else ptx, int(target[1]), 32 * metadata.num_warps, metadata.shared,
        metadata.global_scratch_size, bytes([kind for kind, _ in known]), bytes([passing for _, passing in known]),
    )  # fmt: skip


def make_source(
    function: Any, arguments: Sequence[torch.dtype | int | float | bool], constants: Mapping[str, object]
) -> Any:
    """Returns Triton's source of a kernel for arguments of these classes: dtypes of aligned tensors, and scalars."""
    names = [name for name in function.arg_names if name not in constants]
    declared = {parameter.name: parameter.annotation_type for parameter in function.params}
    kinds = {name: declared[name] or _kind(item) for name, item in zip(names, arguments, strict=True)}
    values = {name: item for name, item in zip(names, arguments) if kinds[name] == "constexpr"} | dict(constants)
    signature = {name: kinds.get(name, "constexpr") for name in function.arg_names}
    positions = {name: position for position, name in enumerate(function.arg_names)}
    constexprs = {(positions[name],): item for name, item in values.items()}
    attributes = {(positions[name],): [_DIVISIBLE] for name, item in zip(names, arguments)
                  if isinstance(item, torch.dtype) or (kinds[name] in _INTEGERS and item % 16 == 0)}  # fmt: skip
    source = importlib.import_module("triton.compiler").ASTSource
    return source(function, signature, constexprs, attributes)


def _kind(argument: torch.dtype | int | float | bool) -> str:
    """Returns Triton's type of an argument."""
    match argument:
        case bool():
            return "u1"
        case int():
            return "constexpr" if argument == 1 else "i32" if -(2**31) <= argument < 2**31 else "i64"
        case float():
            return "fp32"
        case _:
            return f"*{_TRITON_NAMES[argument]}"


def _is_plain(metadata: Any) -> bool:
    """Whether a launch only needs a grid, a block, shared and scratch memory, and a stream."""
    special = (
        "launch_cooperative_grid",
        "launch_pdl",
        "profile_scratch_size",
        "tensordesc_meta",
        "instrumentation_mode",
    )
    return (
        metadata.target.backend == "cuda"
        and metadata.num_ctas == 1
        and metadata.global_scratch_align <= _MAX_SCRATCH_ALIGNMENT
        and not any(getattr(metadata, name, None) for name in special)
    )


def _parameter(source: Any, name: str, position: int) -> tuple[int, int] | None:
    """Returns the argument class and passing of a parameter; None if unknown."""
    kind = source.signature.get(name)
    attributes = _attributes(source.attrs, position)
    divisible = attributes == [_DIVISIBLE]
    if not isinstance(kind, str) or (attributes and not divisible):
        return None
    if kind == "constexpr":
        return (_ONE, _OMITTED) if _constant(source, name, position) == 1 else None
    if kind.startswith("*"):
        code = _DTYPE_CODES.get(kind[1:])
        return None if code is None else (2 * code + divisible, _BY_VALUE)
    if kind in _INTEGERS:
        return _INTEGERS[kind] + divisible, _BY_VALUE
    if kind in _OTHERS and not attributes:
        return 0, _AS_FLOAT32 if kind == "fp32" else _BY_VALUE
    return None


def _attributes(attributes: Mapping[tuple[int, ...], Sequence[Sequence[object]]], position: int) -> list[list[object]]:
    return [list(item) for item in attributes.get((position,), ())]


def _constant(source: Any, name: str, position: int) -> object:
    """Returns the constant that a parameter was compiled for; None for bools, since True is not the number 1."""
    constant = source.constants.get((position,), source.constants.get(name))
    return None if isinstance(constant, bool) else constant


def _parameter_count(ptx: str) -> int:
    entry = _ENTRY.search(ptx)
    return entry[1].count(".param") if entry is not None else -1

"""Kernels as text in a kernel language, with their launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxwrap.loop_ir import FLOAT8
from fxwrap.symbolic import Size

SIGNATURE_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "i1",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    **dict.fromkeys(FLOAT8, "u8"),
}  # fmt: skip
"""The type of a tensor's elements in a kernel's signature; the entry of a tensor is "*" and its type.

Kernels access float8 as bytes: not all GPUs have the formats.
"""


@dataclass(frozen=True, slots=True)
class PrintedKernel:
    """A kernel in a kernel language.

    Fields: `source` defines one function, named as in `fxwrap/devices/kernel_names.py`, whose parameters are the
    kernel's inputs, outputs and scalars, in this order; `signature` has the type of each ("*f32", "i64"); `options` are
    launch metadata as sorted pairs; `grid` has the sizes of the launch grid; `scheduled` is the loop IR kernel with its
    schedule, in the printer's own form, where the language's `KernelCombiner` may combine it; for the language "fx" it
    is the region.
    """

    language: str
    source: str
    signature: tuple[str, ...]
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    grid: tuple[Size, ...] = (1, 1, 1)
    scheduled: object = field(default=None, compare=False, repr=False)

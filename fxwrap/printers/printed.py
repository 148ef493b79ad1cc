"""What every printer gives: a kernel as text, with what a launch of it needs."""

from __future__ import annotations

from dataclasses import dataclass

from fxwrap.symbolic import Size


@dataclass(frozen=True, slots=True)
class PrintedKernel:
    """A kernel in a kernel language.

    `source` names its function as `fxwrap/kernel_names.py` says; the function's parameters are the kernel's inputs,
    its outputs and its numbers, in this order. `signature` has an entry for each ("*f32", "i64"), `options` are launch
    metadata as sorted pairs, `grid` the sizes of the launch grid.
    """

    language: str
    source: str
    signature: tuple[str, ...]
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    grid: tuple[Size, ...] = (1, 1, 1)

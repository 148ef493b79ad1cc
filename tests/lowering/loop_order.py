"""A second meaning of kernels: each iteration by itself, as compiled loops run it, so that overwriting shows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from fxwrap.loop_ir import Kernel, Scan, Store, replace_axes
from fxwrap.loop_ir.evaluate import _Evaluator


def evaluate_in_loop_order(kernel: Kernel, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
    """Runs a kernel of whole-number sizes, one point of the parallel axes after another.

    Within one, a stage happens for all reduced elements before the next, which loads what varies again; values that do
    not vary, and scans, are computed once.
    """
    for point in itertools.product(*[range(int(axis.size)) for axis in kernel.axes]):
        fixed = replace_axes(kernel, (), kernel.reduced, dict(zip(kernel.axes, point, strict=True)))
        _Point(fixed, kernel, buffers, numbers).run_stages()


class _Point(_Evaluator):
    def __init__(
        self, kernel: Kernel, whole: Kernel, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
    ) -> None:
        super().__init__(kernel, buffers, numbers)
        self.whole = whole
        self.values = [None] * len(kernel.operations)

    def run_stages(self) -> None:
        stages, varying = self.whole.stages, self.whole.varying
        for stage in range(max(stages, default=0) + 1):
            for position, operation in enumerate(self.kernel.operations):
                again = varying[position] and not isinstance(operation, Store | Scan) and stages[position] < stage
                if stages[position] == stage or again:
                    self.values[position] = self._value(operation)

"""Scans along one dimension: running sums, products, extrema and their positions."""

from __future__ import annotations

from typing import Any

import torch

from fxwrap.loop_ir import POSITION_RESULTS, SCANS, Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Reader, Scanned, ScanSource, pointwise
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.lowering.rules.rows import kernel_rule


@kernel_rule("aten.cumsum.default")
def _cumsum(call: Call, x: Definition, dim: int, dtype: Any = None) -> Result | str:
    return _scan("cumsum", call, x, dim, call.fake)


@kernel_rule("aten.cumprod.default")
def _cumprod(call: Call, x: Definition, dim: int, dtype: Any = None) -> Result | str:
    return _scan("cumprod", call, x, dim, call.fake)


@kernel_rule("aten.logcumsumexp.default")
def _logcumsumexp(call: Call, x: Definition, dim: int) -> Result | str:
    return _scan("logcumsumexp", call, x, dim, call.fake)


@kernel_rule("aten.cummax.default")
def _cummax(call: Call, x: Definition, dim: int) -> Result | str:
    return _scan("cummax", call, x, dim, *call.fake)


@kernel_rule("aten.cummin.default")
def _cummin(call: Call, x: Definition, dim: int) -> Result | str:
    return _scan("cummin", call, x, dim, *call.fake)


def _scan(kind: str, call: Call, x: Definition, dim: int, *fakes: torch.Tensor) -> Result | str:
    """Returns the parts of a scan that happens in the dtype of the first result; bools are scanned as uint8."""
    computes = torch.uint8 if fakes[0].dtype is torch.bool else compute_dtype(fakes[0].dtype)
    if not SCANS[kind].domain.accepts(computes):
        return f"kernels have no {kind} of {computes}"

    def element(reader: Reader, indices: Indices) -> Scalar:
        return reader.load(x, indices).to(computes)

    if x.sizes:
        source = ScanSource(kind, x.sizes, dim % len(x.sizes), computes, element)
        parts = [_part(call, source, part, fake) for part, fake in enumerate(fakes)]
    else:  # the one element of a tensor without dimensions, at position 0
        bodies = [element, lambda reader, indices: reader.number(0, torch.int64)]
        parts = [pointwise((), fake.dtype, call.device, body) for fake, body in zip(fakes, bodies, strict=False)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _part(call: Call, source: ScanSource, part: int, fake: torch.Tensor) -> Definition:
    positions = (source.kind, part) in POSITION_RESULTS
    return Scanned(source.sizes, torch.int64 if positions else fake.dtype, call.device, source, part)

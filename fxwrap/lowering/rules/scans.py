"""Scans along one dimension: cumulative sums, products and extrema with their positions."""

from __future__ import annotations

import torch

from fxwrap.loop_ir import POSITION_RESULTS, SCANS, Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Scanned, ScanSource, pointwise
from fxwrap.lowering.rules.registry import Declined, ElementBody, LoweringResult, OperatorCall, lowering_rule


@lowering_rule(*[f"aten.{kind}.default" for kind in SCANS])
def _scan(call: OperatorCall, x: Definition, dim: int) -> LoweringResult:
    """Scans in the dtype of the first result; bools are scanned as uint8."""
    kind, dtypes = call.operator, [fake.dtype for fake in call.results]
    computes = torch.uint8 if dtypes[0] is torch.bool else compute_dtype(dtypes[0])
    if not SCANS[kind].domain.accepts(computes):
        raise Declined(f"kernels have no {kind} of {computes}")

    def element(reader: ElementReader, indices: Indices) -> Scalar:
        return reader.load(x, indices).to(computes)

    results: list[Definition] = []
    if x.sizes:
        source = ScanSource(kind, x.sizes, dim % len(x.sizes), computes, element)
        for part, dtype in enumerate(dtypes):
            dtype = torch.int64 if (kind, part) in POSITION_RESULTS else dtype
            results.append(Scanned(source.sizes, dtype, call.device, source, part))
    else:  # a tensor of rank 0 is one element at position 0
        bodies: list[ElementBody] = [element, lambda reader, indices: reader.number(0, torch.int64)]
        results += [pointwise((), dtype, call.device, body) for dtype, body in zip(dtypes, bodies, strict=False)]
    return results[0] if len(results) == 1 else tuple(results)

"""Scans in C++ kernels of several passes over a row."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, KernelBuilder, as_index
from tests.printers.test_cpp_printer_loops import check


@pytest.mark.parametrize("kind", ["cumsum", "cummax"])
def test_a_scan_reused_by_later_loops_is_restarted(kind: str) -> None:
    row, place = Axis("p0", 3), Axis("r0", 7)
    at = as_index(row) * 7 + place
    body = KernelBuilder()
    scanned = body.scan(kind, body.load("x", at, torch.float32))[0]
    mean, spread = body.reduce("welford", scanned)
    body.store("out0", row, spread)
    body.store("out1", at, scanned - mean)
    outputs = [Buffer("out0", torch.float32, 3), Buffer("out1", torch.float32, 21)]
    check(body.finish([row], [place], [Buffer("x", torch.float32, 21)], outputs))

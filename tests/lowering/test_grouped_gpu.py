"""Grouped matmuls as kernels on a GPU, whose operands tensor descriptors describe, beside float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from tests.lowering.test_grouped_matmuls import exact, gathered

pytestmark = pytest.mark.gpu

WIDTH, COLUMNS = 512, 768
SIZES = [300, 0, 257, 190, 13]


def operands(skipped: int = 0) -> tuple[Tensor, ...]:
    """Returns tokens, their order, the matrices of groups and the groups' ends; floats begin so many elements later."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        flat = torch.randn(
            torch.Size(sizes).numel() + skipped, generator=generator, device="cuda", dtype=torch.bfloat16
        )
        return flat[skipped:].view(sizes)

    tokens = torch.randperm(400, generator=generator, device="cuda").repeat(2)[: sum(SIZES)]
    ends = torch.tensor(SIZES, device="cuda").cumsum(0, dtype=torch.int32)
    return normal(400, WIDTH), tokens, normal(len(SIZES), COLUMNS, WIDTH), normal(len(SIZES), WIDTH, COLUMNS), ends


def both(x: Tensor, tokens: Tensor, into: Tensor, out: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    first = gathered(x, tokens, into, ends)
    return first, torch._grouped_mm(first, out.transpose(1, 2), ends)


def compiled(emitter: str) -> fxwrap.Compiled:
    inputs = operands()
    graph = make_fx(both, tracing_mode="fake")(*inputs)
    options = Options(matmul_kernels="generated", emitter=emitter, compile_cache=False)
    return fxwrap.compile_graph(graph, inputs, options=options)


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_descriptors_in_every_emitter(emitter: str, tmp_path: Path) -> None:
    """Results are right at any address, and of a saved program."""
    program = compiled(emitter)
    if torch.cuda.get_device_capability() >= (9, 0):
        assert [
            item.source.count("tl.make_tensor_descriptor(")
            for item in program.program.kernels
            if "tl.dot" in item.source
        ] == [3, 6]
    program.save(tmp_path / "program.fxw")
    for function in (program, fxwrap.load(tmp_path / "program.fxw")):
        for skipped in (0, 1, 6):
            check(function(*operands(skipped)), operands(skipped))


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
def test_descriptors_in_captured_graphs(emitter: str) -> None:
    inputs, program = operands(), compiled(emitter)
    program(*inputs)  # kernels compile in the first call
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = program(*inputs)
    for _ in range(2):
        for result in results:
            result.zero_()
        captured.replay()
        check(results, inputs)


def check(results: object, inputs: tuple[Tensor, ...]) -> None:
    """Checks both results beside float64."""
    assert isinstance(results, list | tuple)
    x, tokens, into, out, ends = inputs
    first = exact(x[tokens], into, ends.cpu())
    rows = results[0].double().tensor_split(ends[:-1].tolist())
    second = torch.cat([part @ matrix.double().t() for part, matrix in zip(rows, out, strict=True)])
    for result, want in zip(results, (first, second), strict=True):
        assert (result.double() - want).norm() <= 5e-3 * want.norm()

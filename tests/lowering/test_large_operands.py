"""Tensors whose offsets exceed 32 bits: strides on a CPU, elements on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options

STRIDE = 1 << 30
SHAPE = (5, 70)

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda x: (x.t() * 2,),
    "columns": lambda x: (x.sum(0), x.argmax(0), x.cumsum(0)),
    "rows": lambda x: (x.softmax(1), *torch.var_mean(x, 1)),
    "gathered": lambda x: (x[torch.arange(3) * 2 - 1] + x.roll(2, 0)[:3],),
    "padded": lambda x: (torch.cat([x.flip(0), torch.nn.functional.pad(x, (0, 0, 1, 2))]),),
    "matmul": lambda x: ((x @ x.t()).relu(),),
    "in_place": lambda x: (x[1:].mul_(3).sum(0),),
}


@pytest.mark.parametrize("kernels", ["triton", "cpp"])
@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_beyond_32_bits(name: str, mode: str, kernels: str, tmp_path: Path) -> None:
    function, elements = FUNCTIONS[name], torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    x = _sparse(tmp_path / "x")
    options = Options(cpu_kernels=kernels, matmul_kernels="generated", compile_cache=False, fallback="error")
    graph = make_fx(function, tracing_mode=mode)(x)
    compiled = fxwrap.compile_graph(graph, None if mode == "symbolic" else (x,), options=options)
    x.copy_(elements)
    x.copy_(elements)  # tracing may have written it
    expected_input = elements.clone()
    torch.testing.assert_close(tuple(compiled(x)), function(expected_input))
    torch.testing.assert_close(x.clone(), expected_input)


def _sparse(path: Path) -> Tensor:
    """Returns rows that are 4 GiB apart in a file without content, of which few pages are written."""
    count = (SHAPE[0] - 1) * STRIDE + SHAPE[1]
    with path.open("wb") as file:
        file.truncate(count * 4)
    return torch.from_file(str(path), shared=True, size=count).as_strided(SHAPE, (STRIDE, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_elements_beyond_32_bits_on_a_gpu(dynamic: bool) -> None:
    """3 GiB of int8: pointwise, rolled, gathered, and sums of rows and columns."""

    def function(x: Tensor, index: Tensor) -> Any:
        return x.roll(1_000_000_007)[-5:] + 1, x[index] * 2, x.view(-1, 1 << 16).sum(1)[-3:], (x + 1)[-7:]

    x = torch.randint(-9, 9, (3 << 30,), dtype=torch.int8, device="cuda")
    index = torch.tensor([0, -1, (1 << 31) + 5, (3 << 30) - 1], device="cuda")
    compiled = torch.compile(function, backend="fxwrap", dynamic=dynamic)
    torch.testing.assert_close(compiled(x, index), function(x, index))

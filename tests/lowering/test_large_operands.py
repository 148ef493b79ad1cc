"""Tensors whose offsets exceed 32 bits: strides on a CPU, elements on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU, CUDA

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
    x = _sparse(tmp_path / "x", SHAPE, (STRIDE, 1))
    options = Options(cpu_kernels=kernels, matmul_kernels="generated", compile_cache=False, fallback="error")
    graph = make_fx(function, tracing_mode=mode)(x)
    compiled = fxwrap.compile_graph(graph, None if mode == "symbolic" else (x,), options=options)
    x.copy_(elements)
    x.copy_(elements)  # tracing may have written it
    expected_input = elements.clone()
    torch.testing.assert_close(tuple(compiled(x)), function(expected_input))
    torch.testing.assert_close(x.clone(), expected_input)


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    attended = flex_attention(query, key, value, score_mod=lambda score, b, h, row, column: score + bias[row, column])
    assert isinstance(attended, Tensor)
    return attended


def _int4(x: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    numbers = torch.stack([weights & 15, weights >> 4], -1).flatten(-2).to(x.dtype)
    return x @ (numbers.unflatten(-1, (-1, 8)) * scales[..., None]).flatten(-2).t()


def _scatter(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    x.index_add_(0, index, values)
    x.index_put_((index,), values * 2, accumulate=True)
    return x.sum(0)


def _cache(cache: Tensor, entries: Tensor, index: Tensor) -> Tensor:
    cache.index_copy_(1, index, entries)
    return cache.sum(1)


FAR = (160, 80, STRIDE, 1)
"""Strides of (batch, head, position, element)."""

SEVERAL: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[Tensor, tuple[int, ...]]]]] = {
    "flex_attention": (_attention, [*[(torch.randn(2, 2, 5, 16), FAR)] * 3, (torch.randn(5, 5), (STRIDE, 1))]),
    "decoding": (_attention, [(torch.randn(1, 2, 1, 16), FAR), *[(torch.randn(1, 2, 5, 16), FAR)] * 2,
                              (torch.randn(1, 5), (5, 1))]),
    "int4": (_int4, [(torch.randn(1, 16).bfloat16(), (16, 1)),
                     (torch.randint(0, 256, (5, 8)).to(torch.uint8), (STRIDE, 1)),
                     (torch.rand(5, 2).bfloat16(), (STRIDE, 1))]),
    "grouped": (lambda x, w, ends: torch._grouped_mm(x, w, offs=ends).sin(),
                [(torch.randn(5, 16).bfloat16(), (STRIDE, 1)),
                 (torch.randn(3, 16, 16).bfloat16(), (STRIDE + 16, 16, 1)),
                 (torch.tensor([2, 3, 5], dtype=torch.int32), (1,))]),
    "scatter": (_scatter, [(torch.randn(5, 7), (STRIDE, 1)), (torch.tensor([4, 1, 4]), (1,)),
                           (torch.randn(3, 7), (STRIDE, 1))]),
    "cache": (_cache, [(torch.randn(2, 5, 8), (8, STRIDE, 1)), (torch.randn(2, 2, 8), (16, 8, 1)),
                       (torch.tensor([4, 1]), (1,))]),
}  # fmt: skip

PARALLEL = replace(
    CPU, massively_parallel=True, kernel_language="triton", multiprocessors=CUDA.multiprocessors,
    combo_kernel_bytes=CUDA.combo_kernel_bytes,
)  # fmt: skip
SPECS: Mapping[str, Any] = {"cpp": CPU, "triton": PARALLEL}


@pytest.mark.parametrize("kernels", SPECS)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_operands_beyond_32_bits(name: str, kernels: str, tmp_path: Path) -> None:
    function, operands = SEVERAL[name]
    inputs = [_sparse(tmp_path / str(n), item.shape, to, item.dtype) for n, (item, to) in enumerate(operands)]
    for x, (elements, _) in zip(inputs, operands):
        x.copy_(elements)
    options = {
        "devices": [SPECS[kernels]], "cpu_kernels": kernels, "matmul_kernels": "generated", "compile_cache": False,
        "fallback": "error",
    }  # fmt: skip
    torch.compiler.reset()
    with torch.no_grad():
        result = torch.compile(function, backend="fxwrap", options=options)(*inputs)
        expected_inputs = [item.clone() for item, _ in operands]
        expected = function(*expected_inputs)
    tolerance = 2e-2 if expected.dtype is torch.bfloat16 else 1e-5
    assert (result.double() - expected.double()).norm() <= tolerance * expected.double().norm()
    for x, wanted in zip(inputs, expected_inputs):
        torch.testing.assert_close(x.clone(), wanted)


def _sparse(path: Path, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns elements that are gigabytes apart in a file without content, of which few pages are written."""
    count = sum([(size - 1) * stride for size, stride in zip(shape, strides)]) + 1
    with path.open("wb") as file:
        file.truncate(count * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype).as_strided(shape, strides)


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

"""Matmuls of matrices that are cast to float32, as the library's matmuls with float32 results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU, CUDA
from fxwrap.fx_passes import prepare_graph

_aten = torch.ops.aten
HALF = frozenset({torch.bfloat16, torch.float16})
OPTIONS = fxwrap.Options(devices=(dataclasses.replace(CPU, widening_gemm_dtypes=HALF),))


class _Exact(Interpreter):
    """Runs matmuls with float32 results, which torch has on GPUs alone, as they are defined."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (_aten.mm.dtype, _aten.bmm.dtype):
            left, right, dtype = args
            assert left.dtype in HALF
            assert right.dtype == left.dtype
            return left.to(dtype) @ right.to(dtype)
        return super().call_function(target, args, kwargs)


def _linear(left: Tensor, right: Tensor) -> Tensor:
    return torch.nn.functional.linear(left[0, :, 0].float(), right[0, :, 0].float())


def _scores(left: Tensor, right: Tensor) -> Tensor:
    """As attention computes them; slices of a packed matmul are not dense."""
    return left.transpose(1, 2).float() @ right.transpose(1, 2).float().mT


def _cast_first(left: Tensor, right: Tensor) -> Tensor:
    left = left.float()
    return left.transpose(1, 2) @ right.float().permute(0, 2, 3, 1) + left.sum()


def _operands(dtype: torch.dtype = torch.bfloat16, length: int = 16) -> list[Tensor]:
    packed = torch.randn(2, length, 3, 2, 8).to(dtype)
    return [packed[:, :, 0], packed[:, :, 1]]


def _targets(function: Callable[..., Any], inputs: list[Tensor], options: fxwrap.Options = OPTIONS) -> list[Any]:
    graph = prepare_graph(make_fx(function)(*inputs), inputs, options)
    return [node.target for node in graph.nodes]


@pytest.mark.parametrize("dtype", sorted(HALF, key=str))
@pytest.mark.parametrize("function", [_linear, _scores, _cast_first])
def test_results(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    inputs = _operands(dtype)
    graph = prepare_graph(make_fx(function)(*inputs), inputs, OPTIONS)
    targets = [node.target for node in graph.nodes]
    assert targets.count(_aten.mm.dtype) + targets.count(_aten.bmm.dtype) == 1
    assert not {_aten.mm.default, _aten.bmm.default} & {*targets}
    result = _Exact(graph.graph_module).run(*inputs)
    (result,) = result if isinstance(result, tuple | list) else (result,)
    torch.testing.assert_close(result, function(*inputs))
    assert result.stride() == function(*inputs).stride()


def _one_cast(left: Tensor, right: Tensor) -> Tensor:
    return left[0, :, 0].float() @ torch.sin(right[0, :, 0].float()).mT


def _two_dtypes(left: Tensor, right: Tensor) -> Tensor:
    return left[0, :, 0].float() @ right[0, :, 0].half().float().mT


def _double(left: Tensor, right: Tensor) -> Tensor:
    return left[0, :, 0].double() @ right[0, :, 0].double().mT


@pytest.mark.parametrize("function", [_one_cast, _two_dtypes, _double])
def test_other_matmuls_stay(function: Callable[..., Tensor]) -> None:
    assert not {_aten.mm.dtype, _aten.bmm.dtype} & {*_targets(function, _operands())}


def test_unaligned_and_preserved_matmuls_stay() -> None:
    assert _aten.mm.dtype not in _targets(_linear, _operands(length=15))
    assert _aten.mm.dtype not in _targets(_linear, _operands(), OPTIONS.replace(preserve_ops=("aten.mm.default",)))
    assert _aten.mm.dtype not in _targets(_linear, _operands(), OPTIONS.replace(matmul_kernels="generated"))


@pytest.mark.parametrize("is_measured", [True, False])
def test_programs_for_gpus(is_measured: bool) -> None:
    """Off by default: no GPU has measured it."""
    assert not CUDA.widening_gemm_dtypes
    spec = dataclasses.replace(CUDA, widening_gemm_dtypes=HALF if is_measured else frozenset())
    with FakeTensorMode():
        inputs = [torch.empty(64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        graph = make_fx(lambda left, right: torch.ops.aten.mm(left.float(), right.float()))(*inputs)
    text = str(fxwrap.lower(graph, inputs, options=fxwrap.Options(devices=(spec,))))
    assert ("@aten.mm.dtype(%left_1, %right_1, dtype(f32)) : f32[64, 64]@cuda" in text) == is_measured

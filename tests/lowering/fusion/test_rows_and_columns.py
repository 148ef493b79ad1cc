"""On massively parallel devices, one kernel reads the operands of a norm's backward, for rows and for columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fxwrap.devices import CPU
from fxwrap.loop_ir import Load, Store, find_rows_and_columns
from tests.lowering.planned_programs import STRICT, check, plan

GPU = STRICT.replace(devices=[dataclasses.replace(CPU, massively_parallel=True, kernel_language="triton")])
ROWS, COLUMNS = 8192, 384


def gradients(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns the gradients of a function's operands, given that of its result."""

    def backward(grad: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        operands = tuple([item.detach().requires_grad_() for item in operands])
        with torch.enable_grad():
            return torch.autograd.grad(function(*operands), operands, grad)

    backward.__name__ = function.__name__
    return backward


def layer_norm(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """A backward by itself, with given statistics of rows, as AOTAutograd separates it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    statistics = [(wide[..., :1] / 8).to(x.dtype), (wide[..., 1:2].abs() + 0.5).to(x.dtype)]
    return torch.ops.aten.native_layer_norm_backward(grad, x, [COLUMNS], *statistics, weight, bias, [True, True, True])


@gradients
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight)


@gradients
def decomposed_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x.to(torch.promote_types(x.dtype, torch.float32))
    hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    return weight * hidden.to(x.dtype)


@gradients
def residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the bias before the norm sums elements that depend on sums of rows."""
    hidden = x + bias
    return functional.rms_norm(hidden, weight.shape, weight) * 0.5 + hidden


SUMS_OF_COLUMNS = {layer_norm: 2, rms_norm: 1, decomposed_rms_norm: 1, residual: 2}


def operands(columns: int, dtype: torch.dtype, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(rows // 4, 4, COLUMNS, generator=generator) for _ in range(2)]
    vectors = [torch.randn(COLUMNS, generator=generator) for _ in range(columns)]
    return [item.to(dtype) for item in (*whole, *vectors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", SUMS_OF_COLUMNS, ids=lambda item: item.__name__)
def test_backwards_read_whole_tensors_once(function: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype) -> None:
    columns = SUMS_OF_COLUMNS[function]
    inputs = operands(columns, dtype)
    planned = plan(make_fx(function)(*inputs), inputs, GPU)
    for want, got in zip(function(*[item.double() for item in inputs]), planned.run(inputs), strict=True):
        assert (got.double() - want).norm() <= 2 * torch.finfo(dtype).eps * want.norm()
    first, combining = planned.kernels.values()
    form = find_rows_and_columns(first)
    assert form is not None and form.row_reductions and len(form.column_reductions) == columns
    whole = [item for item in first.operations if isinstance(item, Load | Store) and len(item.index.axes()) == 3]
    assert len(whole) == len({item.buffer for item in whole}) == 3
    assert len(combining.outputs) == columns


def test_kernels_elsewhere_and_of_few_rows_are_as_before() -> None:
    items = operands(2, torch.float32)
    few = operands(2, torch.float32, rows=512)
    for inputs, options in ((items, STRICT), (few, GPU)):
        kernels = plan(make_fx(layer_norm)(*inputs), inputs, options).kernels.values()
        assert not any(map(find_rows_and_columns, kernels))


def test_the_bytes_of_a_tensor_decide_whether_a_cache_has_it_for_another_kernel() -> None:
    """As many elements are read twice in half precision, and once where they have twice the bytes."""
    for dtype, is_one in ((torch.float32, True), (torch.bfloat16, False)):
        inputs = operands(2, dtype, rows=(2 << 20) // COLUMNS)
        kernels = plan(make_fx(layer_norm)(*inputs), inputs, GPU).kernels.values()
        assert any(map(find_rows_and_columns, kernels)) == is_one, dtype


def test_elements_that_depend_on_columns_are_another_kernel() -> None:
    def centered(grad: Tensor, x: Tensor) -> Tensor:
        rows = (grad * x).sum(-1, keepdim=True)
        return grad - x * rows - (grad * x).sum(0)

    check(centered, torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), options=GPU)

"""Tensors that kernels of GPUs combine values into have the layout of the values; results keep theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.devices import CPU
from fxwrap.lines import Alloc

ROWS, COLUMNS = torch.tensor([[0], [2], [2], [1], [0]]), torch.tensor([1, 0, 1, 3])
DENSE, LAST = (384, 12, 4, 1), (384, 1, 128, 32)
NEW = (2, 32, 3, 4)


def added(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    image = values.new_zeros(NEW)
    return torch.ops.aten._unsafe_index_put(image, [None, None, rows, columns], values, True)


def read_by_a_kernel(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    return added(rows, columns, values).relu().sum(1)


def sum_of_two(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    return (added(rows, columns, values) + added(2 - rows, columns, values * 2)).sum(1)


def returned(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    return added(rows, columns, values)


def read_by_a_call(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    return torch.ops.aten.sort(added(rows, columns, values))[0]


def of_images(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """The indices differ between channels."""
    channels = (rows + torch.arange(32)[:, None, None]) % 32
    image = values.new_zeros(NEW)
    return torch.ops.aten._unsafe_index_put(image, [None, channels, rows, columns], values, True).relu().sum(1)


@pytest.mark.parametrize("is_last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize(
    ("function", "layout"),
    [(read_by_a_kernel, LAST), (sum_of_two, LAST), (returned, DENSE), (read_by_a_call, DENSE), (of_images, DENSE)],
)
def test_layouts_of_combined_values(function: Callable[..., Tensor], layout: tuple[int, ...], is_last: bool) -> None:
    values = torch.randn(2, 32, 5, 4)
    if is_last:
        values = values.contiguous(memory_format=torch.channels_last)
    inputs, is_tiled = [ROWS, COLUMNS, values], is_last or function is of_images
    spec = dataclasses.replace(CPU, massively_parallel=True, cpu_rounding=False)
    options = fxwrap.Options(devices=(spec,), cpu_kernels="triton")
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)
    types = [line.result.tensor_type for line in compiled.program.lines() if isinstance(line, Alloc)]
    expected = layout if is_tiled else DENSE  # rows of four values are no tile
    assert expected in [item.strides for item in types if item.sizes == NEW], str(compiled.program)
    (result,) = compiled(*inputs)
    torch.testing.assert_close(result, function(*inputs), rtol=1e-5, atol=1e-5)
    assert result.stride() == function(*inputs).stride()


def test_symbolic_sizes() -> None:
    """They add no guards."""
    values = torch.randn(2, 32, 5, 4).contiguous(memory_format=torch.channels_last)
    inputs = [ROWS, COLUMNS, values]

    def function(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        image = values.new_zeros(values.shape[0], 32, 3, 4)
        return torch.ops.aten._unsafe_index_put(image, [None, None, rows, columns], values, True).relu().sum(1)

    graph = make_fx(function, tracing_mode="symbolic")(*inputs)
    guards = graph.graph.find_nodes(op="placeholder")[2].meta["val"].fake_mode.shape_env.guards
    count = len(guards)
    spec = dataclasses.replace(CPU, massively_parallel=True, cpu_rounding=False)
    program = fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(devices=(spec,), cpu_kernels="triton"))
    torch.testing.assert_close(program(*inputs)[0], function(*inputs), rtol=1e-5, atol=1e-5)
    assert len(guards) == count, guards[count:]

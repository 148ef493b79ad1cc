"""Backwards of which only the shape of an operand is read do not save it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxwrap
from fxwrap.devices import CPU
from tests.fx_passes.test_separable_sums import gradient, trained
from tests.support.versions import is_before

GPU = fxwrap.Options(devices=(replace(CPU, massively_parallel=True, instructions_per_byte=4),))

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "average": partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1, count_include_pad=False),
    "adaptive": partial(F.adaptive_avg_pool2d, output_size=(4, 5)),
    "reflection": partial(F.pad, pad=(1, 2, 2, 1), mode="reflect"),
    "maximum": partial(F.max_pool2d, kernel_size=3, stride=2, padding=1),
}


def saved(graph: torch.fx.GraphModule) -> list[tuple[int, ...]]:
    """Returns the shapes of a backward's inputs that are as large as an image of 2 x 3 x 8 x 10 or larger."""
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    return [tuple(fake.shape) for fake in fakes if isinstance(fake, Tensor) and fake.numel() >= 480]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_operands_of_poolings_are_not_saved(name: str, layout: torch.memory_format) -> None:
    def function(x: Tensor) -> Tensor:
        return POOLS[name](x * 2 + 1)

    x = torch.randn(2, 3, 8, 10).to(memory_format=layout)
    graphs, programs, compiled = trained(function, GPU)
    torch.testing.assert_close(gradient(compiled, x), gradient(function, x))
    assert saved(graphs[1]) == []
    assert "extern" not in str(programs[1]).split("kernel", 1)[0]
    assert not any(kernel.name.startswith("full") for kernel in programs[1].kernels)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dims", [(0,), (2, 3), (0, 2, 3)], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_operands_of_symbolic_sizes_are_not_saved(name: str, dims: tuple[int, ...], layout: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return POOLS[name](x * 2 + 1)

    graphs, programs, compiled = trained(function, GPU)
    for more in (0, 3):
        sizes = [size + more * (dim in dims) for dim, size in enumerate((2, 3, 8, 10))]
        x = torch.randn(sizes).to(memory_format=layout)
        torch.testing.assert_close(gradient(compiled, x, dims), gradient(function, x))
    recompiles = is_before("2.13") and name in ("average", "maximum") and 2 in dims  # whatever the backend
    assert len(programs) == (4 if recompiles else 2)
    is_saved = name == "adaptive" and 2 in dims  # a library reads it
    assert (saved(graphs[1]) != []) == is_saved
    assert not any(kernel.name.startswith("full") for kernel in programs[1].kernels)


def test_operands_that_others_read_are_saved() -> None:
    x = torch.randn(2, 3, 8, 10)
    graphs, _, compiled = trained(lambda x: F.avg_pool2d(x.exp().square(), 2), GPU)
    torch.testing.assert_close(gradient(compiled, x), gradient(lambda x: F.avg_pool2d(x.exp().square(), 2), x))
    assert saved(graphs[1]) == [(2, 3, 8, 10)]


def test_a_library_reads_the_operand_of_a_maximum() -> None:
    """The backward of a CPU is a call: zeros for it would have to be written."""
    x = torch.randn(2, 3, 8, 10)
    graphs, _, compiled = trained(lambda x: F.max_pool2d(x * 2, 2))
    torch.testing.assert_close(gradient(compiled, x), gradient(lambda x: F.max_pool2d(x * 2, 2), x))
    assert (2, 3, 8, 10) in saved(graphs[1])


def test_preserved_operators_keep_their_operands() -> None:
    options = replace(GPU, preserve_ops=("aten.avg_pool2d_backward.default",))
    graphs, _, compiled = trained(lambda x: F.avg_pool2d(x * 2, 2), options)
    gradient(compiled, torch.randn(2, 3, 8, 10))
    assert (2, 3, 8, 10) in saved(graphs[1])

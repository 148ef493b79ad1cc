"""Parts of a concatenation that read the same elements share iterations, which load them once and store each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxwrap.loop_ir import Kernel, Load
from fxwrap.wrapper_ir import leaves
from tests.lowering.loop_order import evaluate_in_loop_order
from tests.lowering.planned_programs import Planned, check, check_graph, close

aten = torch.ops.aten


def packed_swiglu_gradient(packed: Tensor, gradient: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return torch.cat((aten.silu_backward(gradient * up, gate), gradient * aten.silu(gate)), -1)


def formula_of_packed_swiglu_gradient(packed: Tensor, gradient: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    return torch.cat((gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid), -1)


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def rotary_gradient(gradient: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = (gradient * sine).chunk(2, -1)
    return gradient * cosine + torch.cat((second, -first), -1)


def interleaved_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), -1).flatten(-2)


def gradient_of_gates(packed: Tensor, gradient: Tensor) -> Tensor:
    gate, up = packed[..., ::2], packed[..., 1::2]
    return (
        aten.slice_backward(gradient * up, packed.shape, 1, 0, packed.shape[1], 2)
        + aten.slice_backward(gradient * gate, packed.shape, 1, 1, packed.shape[1], 2)
    )  # fmt: skip


def gradient_of_thirds(x: Tensor, gradient: Tensor) -> Tensor:
    first, second, third = [x[:, start::3] for start in range(3)]
    slices = (gradient * second, gradient * first, gradient * third)
    return sum(aten.slice_backward(item, x.shape, 1, start, x.shape[1], 3) for start, item in enumerate(slices))


FUSED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int, int]] = {
    "the gradient of a packed SwiGLU": (packed_swiglu_gradient, [(3, 16), (3, 8)], 3, 2),
    "values of several parts": (formula_of_packed_swiglu_gradient, [(3, 16), (3, 8)], 3, 2),
    "costly parts": (
        lambda x, y: torch.cat((F.gelu(x + y), F.gelu(x - y), F.gelu(x * y), x), 1), [(3, 8), (3, 8)], 2, 4,
    ),
    "a rotary embedding": (rotary, [(2, 3, 5, 16), (5, 16), (5, 16)], 6, 2),
    "a rotary embedding of transposed heads": (
        lambda x, c, s: rotary(x.transpose(1, 2), c, s), [(2, 5, 3, 16), (5, 16), (5, 16)], 6, 2,
    ),
    "the gradient of a rotary embedding": (rotary_gradient, [(2, 3, 5, 16), (5, 16), (5, 16)], 6, 2),
    "an interleaved rotary embedding": (interleaved_rotary, [(2, 5, 3, 64), (5, 1, 32), (5, 1, 32)], 4, 2),
    "three parts": (lambda x, y: torch.cat((x + y, x - y, x * y)), [(3, 8), (3, 8)], 2, 3),
    "a stack": (lambda x, y: torch.stack((x + y, x - y, x * y), 1), [(3, 8), (3, 8)], 2, 3),
    "a stack in the last dimension": (
        lambda x, y: torch.stack((x.exp(), *([y] * 7)), -1), [(3, 32), (3, 32)], 2, 8,
    ),
    "an input beside a function of it": (lambda x, y: torch.cat((x, x.relu() * y), 1), [(3, 8), (3, 8)], 2, 2),
    "a function of a concatenation": (
        lambda x, y: F.gelu(torch.cat((x + y, x - y), 1)) * torch.cat((y, y), 1), [(3, 8), (3, 8)], 2, 2,
    ),
    "a view of a concatenation": (
        lambda x, y: torch.cat((x + y, x - y), 1).view(3, 2, 2, 8).permute(2, 0, 1, 3).exp(), [(3, 16), (3, 16)], 2, 2,
    ),
    "concatenations of concatenations": (
        lambda x, y: torch.cat((a := torch.cat((x + y, x - y), 0), a * a), 1), [(3, 8), (3, 8)], 2, 4,
    ),
    "parts of two dtypes": (lambda x, y: torch.cat((x.double() + y, x * y), 1), [(3, 8), (3, 8)], 2, 2),
    "sums of the rows of parts": (lambda x, y: torch.cat((x + y, x - y), 1).sum(-1), [(3, 16, 8), (3, 16, 8)], 2, 2),
    "separate parts of a stack": (lambda x, y: torch.stack((x.exp(), y), -1), [(3, 32), (3, 32)], 2, 2),
    "the gradient of strided slices": (gradient_of_gates, [(3, 16), (3, 8)], 3, 2),
    "the gradient of slices of every third": (gradient_of_thirds, [(3, 48), (3, 16)], 4, 3),
    "a bounds check": (
        lambda x, y: torch.cat((x.gather(0, y.abs().long()), y), 1), [(9, 8), (3, 8)], 2, 2,
    ),
    "rolled elements of a short dimension": (
        lambda x, y: x.roll(1, -1) * y.roll(2, -1) - x.roll(3, -1) * y, [(64, 4), (64, 4)], 8, 4,
    ),
    "elements that it overwrites": (
        lambda x, y: x.copy_(torch.cat((y + 1, y - 1), 1) * x), [(3, 16), (3, 8)], 3, 2,
    ),
}  # fmt: skip

UNCHANGED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "different lengths": (lambda x, y: torch.cat((x + y, (x - y)[:, :4]), 1), [(3, 8), (3, 8)]),
    "nothing is shared": (lambda x, y: torch.cat((x.exp(), y.sin()), 1), [(3, 8), (3, 8)]),
    "short runs cost more than they share": (
        lambda x, y: torch.cat((x.exp(), *([y] * 7)), -1), [(3, 3), (3, 3)],
    ),
    "reduced parts": (lambda x, y: torch.cat((x + y, x - y), 1).sum(1), [(3, 8), (3, 8)]),
    "sums of the columns of parts": (lambda x, y: torch.cat((x + y, x - y), 1).sum(0), [(3, 8), (3, 8)]),
}  # fmt: skip

DIVIDED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "a longer dimension": (lambda x, y: x.roll(1, -1) * y + x.roll(2, -1), [(64, 8), (64, 8)]),
    "rows of five": (lambda x, y: x.roll(1, -1) * y + x.roll(2, -1), [(64, 5), (64, 5)]),
}

NEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a cross product": lambda x, y: torch.linalg.cross(x, y.roll(1, 0)),
    "elements that are read twice": lambda x, y: x.roll(1, -1) * y + x.roll(2, -1),
    "elements that are read once": lambda x, y: x.roll(1, -1) * y,
}


SEPARATE: dict[str, Callable[..., Any]] = {
    "costly parts that share nothing": lambda x, y, z: torch.cat((F.gelu(x), F.gelu(y), F.gelu(z)), 1),
    "costly slices of one tensor": lambda x, y, z: torch.cat([F.gelu(item) for item in x.chunk(4, 1)], 1),
    "a part that is read elsewhere": lambda x, y, z: (a := F.gelu(x + y), torch.cat((a, F.gelu(x - y), a * y), 1)),
}


@pytest.mark.parametrize("case", SEPARATE)
def test_costly_values_are_not_computed_by_a_kernel_that_selects(case: str) -> None:
    """Each of its iterations would compute all of them."""
    planned = check(SEPARATE[case], *[torch.randn(3, 8) for _ in range(3)])
    assert len(planned.kernels) > 1


def run(function: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Kernel:
    """Compares a function's kernel with eager, also one iteration after another; returns it."""
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    planned = check(function, *inputs)
    results = planned.run([item.clone() for item in inputs], evaluate_in_loop_order)
    wanted = leaves(function(*[item.clone() for item in inputs]))
    assert all(close(got, want) for got, want in zip(results, wanted, strict=True))
    (kernel,) = planned.kernels.values()
    return kernel


def loads(kernel: Kernel) -> list[Load]:
    return [item for item in kernel.operations if isinstance(item, Load)]


@pytest.mark.parametrize("case", FUSED)
def test_shared_elements_are_loaded_once(case: str) -> None:
    function, shapes, read, stored = FUSED[case]
    kernel = run(function, shapes)
    assert (len(loads(kernel)), len(kernel.stores)) == (read, stored), str(kernel)
    assert "where" not in str(kernel) or case == "a bounds check"


@pytest.mark.parametrize("case", UNCHANGED)
def test_other_concatenations_select_their_elements(case: str) -> None:
    function, shapes = UNCHANGED[case]
    kernel = run(function, shapes)
    assert len(kernel.stores) == 1 and any(item.mask for item in loads(kernel)), str(kernel)


def test_a_cross_product_loads_each_element_once() -> None:
    """The three elements of a row are near each other: in half precision, rows are loaded and stored as a whole."""

    def cross(x: Tensor, y: Tensor) -> Tensor:
        return x.roll(2, -1) * y.roll(1, -1) - x.roll(1, -1) * y.roll(2, -1)

    kernel = run(cross, [(64, 3), (64, 3)], torch.bfloat16)
    assert (len(loads(kernel)), len(kernel.stores), len(kernel.axes)) == (6, 3, 1), str(kernel)
    kernel = run(lambda x: cross(x, x.roll(1, 0)), [(64, 3)], torch.bfloat16)
    assert (len(loads(kernel)), len(kernel.stores)) == (6, 3), str(kernel)


@pytest.mark.parametrize("case", NEAR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_stores_within_a_cache_line_of_a_cpu_are_as_one(case: str, dtype: torch.dtype) -> None:
    kernel = run(NEAR[case], [(64, 3), (64, 3)], dtype)
    assert len(kernel.stores) == 3, str(kernel)


@pytest.mark.parametrize("case", DIVIDED)
def test_other_divided_dimensions_are_not_unrolled(case: str) -> None:
    function, shapes = DIVIDED[case]
    kernel = run(function, shapes)
    assert len(kernel.stores) == 1, str(kernel)


def symbolic(function: Callable[..., Any], *inputs: Tensor) -> Planned:
    return check_graph(make_fx(function, tracing_mode="symbolic")(*inputs), inputs)


def test_symbolic_lengths_are_fused_if_they_are_provably_equal() -> None:
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    (kernel,) = symbolic(lambda x, y: torch.cat((x + y, x - y)), x, y).kernels.values()
    assert (len(loads(kernel)), len(kernel.stores)) == (2, 2), str(kernel)
    (kernel,) = symbolic(lambda x, y: torch.cat((x[:2] + y[:2], (x - y))), x, y).kernels.values()
    assert len(kernel.stores) == 1, str(kernel)


def test_a_concatenation_overwrites_a_dead_operand_of_its_size() -> None:
    x, y = torch.randn(3, 16), torch.randn(3, 8)
    planned = check(lambda x, y: (x @ x.t() @ x) * torch.cat((y + 1, y - 1), 1), x, y)
    (kernel,) = planned.kernels.values()
    assert not any(line.opcode == "memory.alloc" for line in planned.program.lines())
    assert [item.buffer for item in loads(kernel)].count(kernel.outputs[0].name) == 2

"""Reductions along rows of a matmul's results, computed by the matmul's kernel: norms, scales, cross entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import Alloc, ExternCall, Launch
from tests.devices.registration import on_abacus
from tests.lowering.planned_programs import STRICT, plan
from tests.lowering.test_matmul_fusion import GENERATED, lowered
from tests.support.agreement import assert_as_exact

ROWS, WIDTH, COLUMNS = 6, 40, 300


@dataclass(frozen=True)
class Inputs:
    """The operands of the functions below: rows, a weight, a bias, a residual and a class of each row."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor
    target: Tensor

    def real(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        return Inputs(*[item.to(dtype) for item in (self.x, self.weight, self.bias, self.residual)], self.target)

    def all(self) -> list[Tensor]:
        """The tensors in order."""
        return [self.x, self.weight, self.bias, self.residual, self.target]


def inputs(dtype: torch.dtype, seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, WIDTH), (columns, WIDTH), (columns,), (rows, columns))
    x, weight, bias, residual = [torch.randn(item, generator=generator).to(dtype) / 2 for item in sizes]
    target = torch.randint(0, columns, (rows,), generator=generator)
    target[1] = 7
    return Inputs(x, weight, bias, residual, target)


def wide(x: Tensor) -> Tensor:
    """What models compute statistics in."""
    return x if x.dtype is torch.float64 else x.float()


def rms_norm(at: Inputs) -> list[Tensor]:
    hidden = functional.linear(at.x, at.weight) + at.residual
    scale = torch.rsqrt(wide(hidden).square().mean(-1, keepdim=True) + 1e-5)
    return [hidden, (wide(hidden) * scale).to(hidden.dtype) * at.bias]


def float8_scale(at: Inputs) -> list[Tensor]:
    gate = functional.gelu(functional.linear(at.x, at.weight, at.bias))
    scale = wide(gate).abs().amax(-1, keepdim=True) / 448
    return [scale, wide(gate) / scale]


def cross_entropy(at: Inputs) -> list[Tensor]:
    return [functional.cross_entropy(wide(functional.linear(at.x, at.weight)), at.target)]


def capped_cross_entropy(at: Inputs) -> list[Tensor]:
    logits = wide(functional.linear(at.x.view(2, -1, WIDTH), at.weight, at.bias))
    logits = torch.tanh(logits / 3) * 3
    return [
        functional.cross_entropy(
            logits.view(-1, COLUMNS), at.target, weight=wide(at.bias), reduction="none", ignore_index=7
        )
    ]


def extremes(at: Inputs) -> list[Tensor]:
    product = functional.linear(at.x, at.weight) * at.bias
    return [product.amax(-1), product.amin(-1), wide(product).logsumexp(-1), (product > 0).any(-1)]


def head_norm(at: Inputs) -> list[Tensor]:
    heads = wide(functional.linear(at.x, at.weight)).view(ROWS, 3, 100)
    return [heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5)]


def router(at: Inputs) -> list[Tensor]:
    return [functional.linear(at.x, at.weight[:24]).softmax(-1)]


def two_matmuls(at: Inputs) -> list[Tensor]:
    gate = functional.silu(functional.linear(at.x, at.weight)) * functional.linear(at.x, at.weight * 2)
    return [gate, wide(gate).square().sum(-1), gate.abs().amax(-1)]


CASES: dict[Callable[[Inputs], list[Tensor]], tuple[int, int]] = {
    rms_norm: (3, 2), float8_scale: (3, 3), cross_entropy: (3, 1), capped_cross_entropy: (2, 1), extremes: (2, 4),
    head_norm: (1, 1), router: (1, 1), two_matmuls: (2, 3),
}  # fmt: skip
"""Each function with its launches (of products and parts, of their combination, of a last pass), and of allocated
tensors that are no parts."""


def launches(function: Callable[[Inputs], list[Tensor]], options: Options) -> tuple[int, int]:
    """The launches of a program, and its allocations of tensors in the graph; no matmul may be a call."""
    program = lowered(lambda *operands: function(Inputs(*operands)), inputs(torch.bfloat16).all(), options).program
    lines = list(program.lines())
    assert not [line.target for line in lines if isinstance(line, ExternCall)]
    names = [line.result.name for line in lines if isinstance(line, Alloc)]
    return len([line for line in lines if isinstance(line, Launch)]), len([n for n in names if "_parts" not in n])


@pytest.mark.parametrize("function", CASES, ids=lambda item: item.__name__)
def test_row_reductions_join_the_matmul(function: Callable[[Inputs], list[Tensor]]) -> None:
    for language in ("cpp", "triton"):
        assert launches(function, GENERATED.replace(cpu_kernels=language))[0] == CASES[function][0], language


def test_logits_of_a_cross_entropy_are_not_in_memory() -> None:
    program = lowered(lambda *operands: cross_entropy(Inputs(*operands)), inputs(torch.bfloat16).all(), GENERATED)
    sizes = [line.result.tensor_type.sizes for line in program.program.lines() if isinstance(line, Alloc)]
    assert all(len(item) < 2 and item in ((), (ROWS,), (3 * ROWS,)) for item in sizes), sizes


def test_matmuls_stay_without_their_row_reductions_unless_the_options_ask_for_kernels() -> None:
    operands = inputs(torch.float32).all()
    tuned = lowered(lambda *items: extremes(Inputs(*items)), operands, Options(), ("cpu",)).program
    assert len([line for line in tuned.lines() if isinstance(line, Launch)]) == 2
    assert not [line for line in tuned.lines() if isinstance(line, Alloc) and "_parts" in line.result.name]


@pytest.mark.parametrize(("rows", "width", "launches"), [(8, 40, 2), (20, 40, 2), (20, 4096, 1)])
def test_many_rows_of_short_sums_are_timed_with_their_row_reductions(rows: int, width: int, launches: int) -> None:
    """On massively parallel devices: few rows without them, and long sums not at all."""
    x, weight, target = torch.randn(rows, width), torch.randn(300, width), torch.randint(0, 300, (rows,))

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight), target, reduction="none")

    options = Options(devices=[dataclasses.replace(CPU, massively_parallel=True)])
    lines = list(lowered(loss, [x, weight, target], options, ("cpu",)).program.lines())
    logits = [line for line in lines if isinstance(line, Alloc) and line.result.tensor_type.sizes == (rows, 300)]
    calls = [line.target for line in lines if isinstance(line, ExternCall)]
    assert bool(logits) == (rows == 8) and calls == (["aten.mm.default"] if width == 4096 else [])
    assert len([line for line in lines if isinstance(line, Launch)]) == launches


def every(*operands: Tensor) -> list[Tensor]:
    return [result for function in CASES for result in function(Inputs(*operands))]


def assert_close(results: list[Tensor], operands: Inputs) -> None:
    """Errors beside float64 are at most 1.2 times eager's, but for the rounding of a result."""
    exact = every(*operands.real(torch.float64).all())
    for want, eager, result in zip(exact, every(*operands.all()), results, strict=True):
        if want.is_floating_point():
            assert_as_exact(result, eager, want, slack=torch.finfo(eager.dtype).eps)
        assert result.dtype is eager.dtype and result.shape == eager.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_evaluated_results_beside_float64(dtype: torch.dtype) -> None:
    operands = inputs(dtype, seed=1)
    planned = plan(make_fx(every)(*operands.all()), operands.all(), STRICT.replace(matmul_kernels="generated"))
    assert_close(planned.run(operands.all()), operands)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cpu_kernels", "dtype"), [("cpp", torch.float32), ("cpp", torch.bfloat16), ("triton", torch.bfloat16)], ids=str
)
def test_printed_results_beside_float64(cpu_kernels: str, dtype: torch.dtype) -> None:
    operands = inputs(dtype)
    options = GENERATED.replace(cpu_kernels=cpu_kernels, fallback="error")
    compiled = fxwrap.compile_graph(make_fx(every)(*operands.all()), operands.all(), options=options)
    assert_close(list(compiled(*operands.all())), operands)


def test_classes_out_of_range_raise() -> None:
    operands = inputs(torch.float32)
    function = make_fx(lambda *items: cross_entropy(Inputs(*items)))(*operands.all())
    compiled = fxwrap.compile_graph(function, operands.all(), options=GENERATED.replace(fallback="error"))
    operands.target[2] = COLUMNS
    with pytest.raises(IndexError):
        compiled(*operands.all())


SEVERAL_ELEMENTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda y: y - y[:, :1],
    lambda y: y + y.flip(-1) / 2,
    lambda y: y + y.roll(1, 0) / 2,
    lambda y: torch.cat([y[:, 150:] - y[:, :150], y[:, :150] + y[:, 150:]], -1),
)
"""Logits that depend on several elements of a matmul."""


@pytest.mark.parametrize("logits", SEVERAL_ELEMENTS)
def test_classes_whose_logit_depends_on_several_elements(logits: Callable[[Tensor], Tensor]) -> None:
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits(functional.linear(x, weight)), target, reduction="none")

    at = inputs(torch.float32)
    operands = [at.x, at.weight, at.target]
    planned = plan(make_fx(loss)(*operands), operands, STRICT.replace(matmul_kernels="generated"))
    torch.testing.assert_close(planned.run(operands)[0], loss(*operands))


def test_dynamic_rows_and_columns() -> None:
    def statistics(x: Tensor, weight: Tensor) -> list[Tensor]:
        product = functional.linear(x, weight)
        return [product.relu(), product.logsumexp(-1)]

    options = {"matmul_kernels": "generated", "fallback": "error"}
    compiled = torch.compile(statistics, backend="fxwrap", options=options, dynamic=True, fullgraph=True)
    for rows, columns in ((5, 200), (3, 300), (9, 1000)):
        x, weight = torch.randn(rows, WIDTH), torch.randn(columns, WIDTH)
        for want, result in zip(statistics(x, weight), compiled(x, weight), strict=True):
            torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)


def test_sums_of_one_element() -> None:
    """A reduction of rows of one element is not one over the axis that the matmul reduces."""

    def attention(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        scores = query @ key.mT * 0.25 - torch.arange(40)[:, None] * 0.125
        largest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest))
        total = torch.where(weights < 1e-38, 0.0, weights).sum(-1)
        return weights, total.log() + largest.view(total.shape)

    operands = torch.randn(2, 1, 40, 16), torch.randn(2, 1, 1, 16)
    with on_abacus():
        compiled = fxwrap.compile_graph(make_fx(attention)(*operands), operands, options=GENERATED)
        results = compiled(*operands)
    for want, result in zip(attention(*operands), results, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)

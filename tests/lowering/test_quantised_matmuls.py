"""Grouped matmuls and matmuls of quantised weights: what they compile to, and their results beside eager mode's."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.lines import ExternCall, Launch
from fxwrap.testing import assert_emitters_agree
from fxwrap.torch_compat import FakeTensorMode, multiplies_bfloat16_pairs
from tests.support.agreement import assert_as_exact
from tests.support.long_form import long_only
from tests.support.versions import fails_before, is_before

BF16 = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn
ROWS, WIDTH, COLUMNS, EXPERTS = 40, 64, 48, 5
OFFSETS = torch.tensor([7, 7, 20, 39, 40], dtype=torch.int32)


def random(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def int8_weight() -> Tensor:
    return torch.randint(-128, 128, (COLUMNS, WIDTH), dtype=torch.int8, generator=torch.Generator().manual_seed(1))


def int8_packed(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.relu(torch._weight_int8pack_mm(x, weight, scale))


def int8_formula(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.relu(functional.linear(x, weight.to(x.dtype) * scale[:, None]))


def int8_dynamic(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Quantises rows of activations too, as torchao does."""
    step = x.abs().amax(-1, keepdim=True) / 127
    rows = (x / step).round().clamp(-128, 127).to(torch.int8)
    return (torch._int_mm(rows, weight.t()).float() * step.float() * scale.float()).to(x.dtype)


def int4_grouped(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Two weights in a byte, with scales and zeros of groups of 32."""
    halves = torch.stack([weight & 15, weight >> 4], -1).reshape(*scale.shape, 32).to(x.dtype)
    return functional.linear(x, ((halves - zero[..., None]) * scale[..., None]).flatten(1))


def float8_weight(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.relu(functional.linear(x, weight.to(x.dtype) * scale[:, None]))


def float8_dynamic(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Rows of activations and of weights have scales."""
    step = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    rows = (x.float() / step).clamp(-448, 448).to(FLOAT8)
    return torch._scaled_mm(rows, weight.t(), step, scale.float()[None], out_dtype=x.dtype)


def quantised(
    x: Tensor, int8: Tensor, int4: Tensor, float8: Tensor, scale: Tensor, scales: Tensor, zeros: Tensor
) -> list[Tensor]:
    """Matmuls of every kind of quantised weight, in the forms that torchao writes."""
    results = [
        int8_packed(x, int8, scale), int8_formula(x, int8, scale), int8_dynamic(x, int8, scale),
        int4_grouped(x, int4, scales, zeros), float8_weight(x, float8, scale),
    ]  # fmt: skip
    return results if is_before("2.12") else [*results, float8_dynamic(x, float8, scale)]


def quantised_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    int4 = torch.randint(0, 256, (COLUMNS, WIDTH // 2), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (COLUMNS, WIDTH // 32), generator=generator).to(BF16)
    scale, scales = random(COLUMNS).abs(), random(COLUMNS, WIDTH // 32).abs()
    return [random(ROWS, WIDTH), int8_weight(), int4, random(COLUMNS, WIDTH).to(FLOAT8), scale, scales, zeros]


def called(compiled: fxwrap.Compiled) -> Counter[str]:
    return Counter([line.target.split(".")[1] for line in compiled.program.lines() if isinstance(line, ExternCall)])


def launched(compiled: fxwrap.Compiled) -> list[str]:
    return [line.kernel for line in compiled.program.lines() if isinstance(line, Launch)]


def compiled(function: Callable[..., Any], inputs: list[Tensor], **options: Any) -> fxwrap.Compiled:
    options = {"matmul_kernels": "generated", **options}
    return fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=Options(**options))


@pytest.mark.parametrize("matmul_kernels", ["auto", long_only("generated")])
def test_every_emitter_agrees_on_quantised_matmuls(matmul_kernels: str) -> None:
    assert_emitters_agree(quantised, quantised_inputs(), options={"matmul_kernels": matmul_kernels})


@pytest.mark.parametrize(
    ("function", "operands", "library", "generated"),
    [
        (int8_packed, (0, 1, 4), {"_weight_int8pack_mm": 1}, {}),
        (int8_formula, (0, 1, 4), {"mm": 1}, {}),
        (int8_dynamic, (0, 1, 4), {"_int_mm": 1}, {"_int_mm": 1}),
        (int4_grouped, (0, 2, 5, 6), {"mm": 1}, {}),
        (float8_weight, (0, 3, 4), {"mm": 1}, {}),
        pytest.param(
            float8_dynamic, (0, 3, 4), {"_scaled_mm": 1}, {},
            marks=fails_before("2.12", "_scaled_mm of CPUs has one scale for each operand", RuntimeError),
        ),
    ],
)  # fmt: skip
def test_dequantisation_is_part_of_generated_matmuls(
    function: Callable[..., Tensor], operands: tuple[int, ...], library: Mapping[str, int], generated: Mapping[str, int]
) -> None:
    inputs = [quantised_inputs()[position] for position in operands]
    for kind, calls in (("library", library), ("generated", generated)):
        program = compiled(function, inputs, matmul_kernels=kind, cpu_kernels="triton")
        assert called(program) == calls
        assert len(launched(program)) <= 2


@pytest.mark.parametrize(
    ("function", "operands", "rows", "calls"),
    [
        (int8_formula, (0, 1, 4), ROWS, {}),
        (float8_weight, (0, 3, 4), ROWS, {}),
        (int4_grouped, (0, 2, 5, 6), ROWS, {}),
        (int8_formula, (0, 1, 4), ROWS - 1, {"mm": 1}),
        (lambda x, w: functional.linear(x, w + 1), (0, 7), ROWS, {"mm": 1}),
    ],
    ids=["int8", "float8", "int4", "more_rows", "no_smaller_in_memory"],
)
def test_devices_say_for_how_many_rows_dequantisation_is_part_of_a_matmul(
    function: Callable[..., Tensor], operands: tuple[int, ...], rows: int, calls: Mapping[str, int]
) -> None:
    known = [*quantised_inputs(), random(COLUMNS, WIDTH)]
    inputs = [known[position] for position in operands]
    device = dataclasses.replace(
        CPU, matmuls=dataclasses.replace(CPU.matmuls, generated_dequantised_rows=((BF16, rows),))
    )
    assert called(compiled(function, inputs, matmul_kernels="auto", cpu_kernels="triton", devices=[device])) == calls


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("function", "operands"),
    [(int8_formula, (1, 4)), (float8_weight, (3, 4)), (int4_grouped, (2, 5, 6))],
    ids=["int8", "float8", "int4"],
)
def test_few_rows_of_quantised_weights_are_one_kernel_on_cpus(
    function: Callable[..., Tensor], operands: tuple[int, ...], dtype: torch.dtype
) -> None:
    weights = [quantised_inputs()[position] for position in operands]
    inputs = [item if item.dtype is not BF16 else item.to(dtype) for item in [random(8, WIDTH), *weights]]
    program = compiled(function, inputs, matmul_kernels="auto")
    assert called(program) == {} and len(launched(program)) == 1


def permuted_experts(x: Tensor, tokens: Tensor, offsets: Tensor, gates: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """Experts of tokens that are sorted by expert: gathered, multiplied, weighted."""
    hidden = functional.silu(torch._grouped_mm(x[tokens], into.transpose(1, 2), offsets))
    return torch._grouped_mm(hidden, out.transpose(1, 2), offsets) * gates[:, None]


def expert_inputs(dtype: torch.dtype) -> list[Tensor]:
    tokens = torch.randint(0, 16, (ROWS,), generator=torch.Generator().manual_seed(2))
    weights = random(EXPERTS, COLUMNS, WIDTH, dtype=dtype), random(EXPERTS, WIDTH, COLUMNS, dtype=dtype)
    return [random(16, WIDTH, dtype=dtype), tokens, OFFSETS, random(ROWS, dtype=dtype), *weights]


def exact_experts(x: Tensor, tokens: Tensor, offsets: Tensor, gates: Tensor, into: Tensor, out: Tensor) -> Tensor:
    groups = torch.searchsorted(offsets.long(), torch.arange(ROWS), right=True)
    hidden = functional.silu(torch.einsum("mk,mnk->mn", x[tokens].double(), into[groups].double()))
    return torch.einsum("mk,mnk->mn", hidden, out[groups].double()) * gates.double()[:, None]


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_permutation_and_weights_are_part_of_grouped_matmuls(dtype: torch.dtype, cpu_kernels: str) -> None:
    inputs = expert_inputs(dtype)
    program = compiled(permuted_experts, inputs, cpu_kernels=cpu_kernels)
    assert (called(program), len(launched(program))) == ({}, 3)  # the groups of rows, for both matmuls
    assert_as_exact(program(*inputs)[0], permuted_experts(*inputs), exact_experts(*inputs), slack=1e-6)


def gated_experts(x: Tensor, tokens: Tensor, offsets: Tensor, into: Tensor) -> Tensor:
    gate, up = torch._grouped_mm(x[tokens], into.transpose(1, 2), offsets).chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
def test_both_halves_of_a_grouped_matmul_are_one_kernel_with_their_reader(cpu_kernels: str) -> None:
    x, tokens, offsets, _, into, _ = expert_inputs(BF16)
    inputs = [x, tokens, offsets, into]
    program = compiled(gated_experts, inputs, cpu_kernels=cpu_kernels)
    assert (called(program), len(launched(program))) == ({}, 2)
    groups = torch.searchsorted(offsets.long(), torch.arange(ROWS), right=True)
    gate, up = torch.einsum("mk,mnk->mn", x[tokens].double(), into[groups].double()).chunk(2, -1)
    want = functional.silu(gate) * up
    assert (program(*inputs)[0].double() - want).norm() < 0.02 * want.norm()


def test_devices_say_for_how_many_rows_of_a_group_kernels_are_faster() -> None:
    x, tokens, offsets, _, into, _ = expert_inputs(BF16)
    inputs = [x, tokens, offsets, into]
    for rows, calls in ((ROWS / EXPERTS, {}), (ROWS / EXPERTS - 1, {"_grouped_mm": 1})):
        device = dataclasses.replace(
            CPU, matmuls=dataclasses.replace(CPU.matmuls, generated_grouped_rows=((BF16, rows),))
        )
        program = compiled(gated_experts, inputs, matmul_kernels="auto", devices=[device])
        assert called(program) == calls


@pytest.mark.parametrize(("rows", "calls"), [(ROWS, {"_grouped_mm": 1}), (20, {})])
def test_few_rows_of_a_group_multiply_matrices_whose_columns_are_not_contiguous(
    rows: int, calls: Mapping[str, int]
) -> None:
    """Eight rows of a group are too many, although the device has kernels of so many where columns are contiguous."""
    x, tokens, offsets, _, into, _ = expert_inputs(BF16)
    inputs = [x, tokens[:rows], offsets * rows // ROWS, into.transpose(1, 2).contiguous()]
    device = dataclasses.replace(CPU, matmuls=dataclasses.replace(CPU.matmuls, generated_grouped_rows=((BF16, 8),)))

    def gated(x: Tensor, tokens: Tensor, offsets: Tensor, matrices: Tensor) -> Tensor:
        return functional.silu(torch._grouped_mm(x[tokens], matrices, offsets))

    assert called(compiled(gated, inputs, matmul_kernels="auto", devices=[device])) == calls


@pytest.mark.parametrize("rows", [EXPERTS, 2 * EXPERTS])
def test_a_row_of_each_group_is_a_kernel_on_cpus_that_multiply_pairs(rows: int) -> None:
    x, tokens, offsets, _, into, _ = expert_inputs(BF16)
    inputs = [x, tokens[:rows], offsets * rows // ROWS, into]
    is_kernel = rows == EXPERTS and multiplies_bfloat16_pairs()
    program = compiled(gated_experts, inputs, matmul_kernels="auto")
    assert called(program) == ({} if is_kernel else {"_grouped_mm": 1})
    groups = torch.searchsorted(inputs[2].long(), torch.arange(rows), right=True)
    gate, up = torch.einsum("mk,mnk->mn", x[tokens[:rows]].double(), into[groups].double()).chunk(2, -1)
    want = functional.silu(gate) * up
    assert (program(*inputs)[0].double() - want).norm() < 0.02 * want.norm()


def test_every_emitter_agrees_on_experts() -> None:
    for matmul_kernels in ("auto", "generated"):
        options = {"matmul_kernels": matmul_kernels}
        assert_emitters_agree(permuted_experts, expert_inputs(BF16), options=options)


def batched_experts(x: Tensor, experts: Tensor, into: Tensor) -> Tensor:
    """Experts of tokens by batched matmuls, as transformers writes them."""
    gate, up = torch.bmm(into[experts], x[..., None])[..., 0].chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
def test_matrices_that_are_gathered_for_each_row_are_not_copied(cpu_kernels: str) -> None:
    experts = torch.randint(0, EXPERTS, (16,), generator=torch.Generator().manual_seed(3))
    inputs = [random(16, WIDTH), experts, random(EXPERTS, COLUMNS, WIDTH)]
    program = compiled(batched_experts, inputs, matmul_kernels="auto", cpu_kernels=cpu_kernels)
    assert called(program) == {}
    gate, up = torch.einsum("mk,mnk->mn", inputs[0].double(), inputs[2][experts].double()).chunk(2, -1)
    want = functional.silu(gate) * up
    assert (program(*inputs)[0].double() - want).norm() < 0.02 * want.norm()


def other_grouped(
    batch: Tensor, matrices: Tensor, left: Tensor, right: Tensor, offsets: Tensor, ends: Tensor
) -> list[Tensor]:
    """Batches, and groups of the reduced dimension or of columns: the gradients of grouped matmuls."""
    return [
        torch._grouped_mm(batch, matrices), torch._grouped_mm(left, right, offsets),
        torch._grouped_mm(batch, right, ends),
    ]  # fmt: skip


def test_other_grouped_matmuls_are_calls_that_agree() -> None:
    ends = torch.tensor([8, 8, 16, 32, WIDTH], dtype=torch.int32)
    batch, matrices = random(EXPERTS, 16, ROWS), random(EXPERTS, ROWS, WIDTH)
    inputs = [batch, matrices, random(16, ROWS), random(ROWS, WIDTH), OFFSETS, ends]
    program = compiled(other_grouped, inputs)
    assert called(program) == {"_grouped_mm": 3}
    torch.testing.assert_close([*program(*inputs)], other_grouped(*inputs))


def test_groups_of_symbolic_numbers_of_rows() -> None:
    into = random(EXPERTS, COLUMNS, WIDTH)

    def function(x: Tensor, into: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, into.transpose(1, 2), offsets)

    graph = make_fx(function, tracing_mode="symbolic")(random(ROWS, WIDTH), into, OFFSETS)
    program = fxwrap.compile_graph(graph, options=Options(matmul_kernels="generated"))
    for ends in ([0, 3, 3, 9, 30], [2, 2, 2, 2, 2]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        x = random(ends[-1], WIDTH)
        torch.testing.assert_close(program(x, into, offsets)[0], function(x, into, offsets), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_few_rows_of_int4_weights_are_one_kernel_on_gpus(rows: int) -> None:
    """No dequantised matrix is in memory."""
    width, columns = 1024, 8192
    with FakeTensorMode():
        inputs = [
            torch.empty(rows, width, dtype=BF16, device="cuda"),
            torch.empty(columns, width // 2, dtype=torch.uint8, device="cuda"),
            *[torch.empty(columns, width // 64, dtype=BF16, device="cuda") for _ in range(2)],
        ]
        graph = make_fx(int4_product, tracing_mode="fake")(*inputs)
        program = fxwrap.compile_graph(graph, inputs, options=Options(compile_cache=False)).program
    (kernel,) = program.kernels
    assert kernel.language == "triton" and not any(isinstance(line, ExternCall) for line in program.lines())


def int4_product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    halves = torch.stack([weight & 15, weight >> 4], -1).reshape(*scale.shape, 64).to(x.dtype)
    return functional.linear(x, ((halves - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1))


def int8_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return functional.linear(x, weight.to(x.dtype)) * scale


def quantised_matrix(name: str, columns: int, width: int) -> list[Tensor]:
    """The operands of a product besides the row, on a GPU: weights, scales and, of int4, zeros."""
    dtype, per_byte, scales = (torch.uint8, 2, (width // 64,)) if name == "int4" else (torch.int8, 1, ())
    weight = torch.empty(columns, width // per_byte, dtype=dtype, device="cuda")
    return [weight, *[torch.empty(columns, *scales, dtype=BF16, device="cuda") for _ in range(per_byte)]]


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_one_normalised_row_is_computed_once_and_its_quantised_products_share_a_launch_on_gpus(name: str) -> None:
    """Queries, keys and values: each matrix has too few columns to occupy a large GPU."""
    width, product = 4096, int4_product if name == "int4" else int8_product

    def function(x: Tensor, *weights: Tensor) -> list[Tensor]:
        y = (x.float() * x.float().square().sum(-1, keepdim=True)).to(x.dtype)
        size = len(weights) // 3
        return [product(y, *weights[at : at + size]) for at in range(0, len(weights), size)]

    with FakeTensorMode():
        inputs = [torch.empty(1, width, dtype=BF16, device="cuda")]
        for columns in (width, width // 4, width // 4):
            inputs += quantised_matrix(name, columns, width)
        graph = make_fx(function, tracing_mode="fake")(*inputs)
        program = fxwrap.compile_graph(graph, inputs, options=Options(compile_cache=False)).program
    first, products = [line for line in program.lines() if isinstance(line, Launch)]
    assert [len(line.outs) for line in (first, products)] == [1, 3]
    (row,) = first.outs
    assert row.tensor_type.dtype is BF16 and row in products.arguments

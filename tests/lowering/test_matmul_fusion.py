"""Matmuls that are kernels alone stay kernels among reductions, other matmuls and other readers of their operands."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.fx_passes import prepare_graph
from fxwrap.lines import ExternCall, Launch, PoolSlice
from fxwrap.lowering.program import Lowered, lower_prepared
from fxwrap.lowering.rules import RULES
from tests.lowering.planned_programs import STRICT, plan
from tests.support.agreement import assert_as_exact
from tests.support.long_form import LONG

GENERATED = Options(matmul_kernels="generated")
SURROUNDINGS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda x, weight, result: x.amax(-1),
    lambda x, weight, result: x.abs().amax(),
    lambda x, weight, result: x.sum(0),
    lambda x, weight, result: torch.sigmoid(x) * 2,
    lambda x, weight, result: x * (x * torch.sigmoid(x)).amax(-1, keepdim=True),
    lambda x, weight, result: weight.to(x.dtype).abs().amax(-1),
    lambda x, weight, result: weight.to(x.dtype).sum(0),
    lambda x, weight, result: weight.to(x.dtype) * 2,
    lambda x, weight, result: result.softmax(-1),
    lambda x, weight, result: result * torch.rsqrt((result * result).mean(-1, keepdim=True) + 1e-5),
    lambda x, weight, result: result.abs().amax(),
    lambda x, weight, result: result.sum(0),
    lambda x, weight, result: functional.gelu(result) + x.amax(-1, keepdim=True),
)
"""What reads the left operand, a weight as it is stored, and a result."""


@dataclass(frozen=True, eq=False)
class SharedInput:
    """Matmuls of one matrix, `operands[0]`; each kind has its operands from a position on."""

    operands: list[Tensor]
    matmuls: list[tuple[str, int]]
    surroundings: list[tuple[int, int]]
    """The surrounding, and the matmul whose weight and result it reads."""

    def matmul(self, operands: Sequence[Tensor], number: int) -> Tensor:
        """One of the matmuls: plain, transposed, with a bias, or of quantised weights."""
        x, (kind, at) = operands[0], self.matmuls[number]
        weight = operands[at]
        match kind:
            case "plain":
                return functional.linear(x, weight)
            case "transposed":
                return x @ weight
            case "bias":
                return functional.linear(x, weight, operands[at + 1])
            case "int8":
                return functional.linear(x, weight.to(x.dtype)) * operands[at + 1]
            case _:
                low, high = (weight & 15).to(x.dtype) - 8, (weight >> 4).to(x.dtype) - 8
                groups = torch.stack([low, high], -1).view(len(weight), -1, 16) * operands[at + 1][:, :, None]
                return functional.linear(x, groups.reshape(len(weight), -1))

    def results_of(self, number: int, *operands: Tensor) -> Tensor:
        """One of the matmuls, as a function of all operands."""
        return self.matmul(operands, number)

    def all(self, *operands: Tensor) -> list[Tensor]:
        """The matmuls and their surroundings."""
        results = [self.matmul(operands, number) for number in range(len(self.matmuls))]
        around = [
            SURROUNDINGS[item](operands[0], operands[self.matmuls[number][1]], results[number])
            for item, number in self.surroundings
        ]
        return [*around, *results]


def shared_input(seed: int, rows: int | None = None, dtype: torch.dtype | None = None) -> SharedInput:
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = drawn.choice([torch.float32, torch.bfloat16, torch.float16]) if dtype is None else dtype
    rows, width = drawn.choice([1, 1, 3, 16]) if rows is None else rows, drawn.choice([32, 64])

    def real(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype) / 4

    operands, matmuls = [real(rows, width)], []
    for _ in range(drawn.randint(2, 4)):
        kind, columns = drawn.choice(["plain", "transposed", "bias", "int8", "int4"]), drawn.choice([24, width, 1])
        matmuls.append((kind, len(operands)))
        match kind:
            case "int8":
                operands += [torch.randint(-9, 9, (columns, width), dtype=torch.int8, generator=generator)]
                operands += [real(columns)]
            case "int4":
                operands += [torch.randint(0, 255, (columns, width // 2), dtype=torch.uint8, generator=generator)]
                operands += [real(columns, width // 16)]
            case _:
                sizes = (width, columns) if kind == "transposed" else (columns, width)
                operands += [real(*sizes), *([real(columns)] if kind == "bias" else [])]
    kinds = drawn.sample(range(len(SURROUNDINGS)), drawn.randint(2, 5))
    return SharedInput(operands, matmuls, [(kind, drawn.randrange(len(matmuls))) for kind in kinds])


def lowered(
    function: Callable[..., object], operands: list[Tensor], options: Options, tuned: Sequence[str] = ()
) -> Lowered:
    prepared = prepare_graph(make_fx(function)(*operands), operands, options, "program", fused_operators=RULES)
    return lower_prepared(prepared, options, tuned_devices=frozenset(tuned))


def matmul_kinds(lowered: Lowered) -> list[str]:
    return [item.kind for item in lowered.coverage if item.operator in ("aten.mm.default", "aten.addmm.default")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "tuned", "seeds"),
    [
        (GENERATED, (), range(10)), (GENERATED.replace(cpu_kernels="triton"), (), range(10, 16)),
        (Options(), (), range(16, 20)), (Options(), ("cpu",), range(20, 26)),
    ],
    ids=["generated", "triton", "rule", "timed"],
)  # fmt: skip
def test_a_matmul_that_is_a_kernel_alone_is_one_among_others(
    options: Options, tuned: Sequence[str], seeds: Sequence[int]
) -> None:
    kernels = 0
    by_rule = options.matmul_kernels == "auto" and not tuned
    for seed in seeds:
        graph = shared_input(seed, *((1, torch.bfloat16) if by_rule else ()))
        alone = [
            matmul_kinds(lowered(partial(graph.results_of, at), graph.operands, options, tuned))
            for at in range(len(graph.matmuls))
        ]
        together = matmul_kinds(lowered(graph.all, graph.operands, options, tuned))
        assert together == [kind for (kind,) in alone], f"seed {seed}: {graph.matmuls}, {graph.surroundings}"
        kernels += together.count("fused")
    assert kernels >= len(seeds)


def assert_close(graph: SharedInput, results: Sequence[Tensor], operands: list[Tensor]) -> None:
    """Errors are at most eager's times 1.2, or a rounding of the result and one of its terms in float32.

    Where terms cancel, eager's error is luck: it depends on the order in which this processor's library adds them.
    """
    doubles = [item.double() if item.is_floating_point() else item for item in operands]
    exact, terms = graph.all(*doubles), graph.all(*map(torch.abs, doubles))
    for want, eager, result, sizes in zip(exact, graph.all(*operands), results, terms, strict=True):
        assert result.dtype is eager.dtype and result.shape == eager.shape
        rounding = torch.finfo(eager.dtype).eps * want.norm() + torch.finfo(torch.float32).eps / 2 * sizes.norm()
        allowed = 1.2 * (eager.double() - want).norm() + rounding
        assert (result.double() - want).norm() <= allowed


@pytest.mark.parametrize("seed", range(8))
def test_evaluated_results_beside_float64(seed: int) -> None:
    graph = shared_input(seed)
    planned = plan(make_fx(graph.all)(*graph.operands), graph.operands, STRICT.replace(matmul_kernels="generated"))
    assert_close(graph, planned.run(graph.operands), graph.operands)


@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
def test_printed_results_beside_float64(cpu_kernels: str) -> None:
    graphs = [shared_input(seed) for seed in (((0, 2, 7) if LONG else (2,)) if cpu_kernels == "cpp" else (5,))]
    starts = {graph: sum(len(item.operands) for item in graphs[:number]) for number, graph in enumerate(graphs)}

    def every(*operands: Tensor) -> list[Tensor]:
        return [result for graph in graphs for result in graph.all(*operands[starts[graph] :])]

    operands = [item for graph in graphs for item in graph.operands]
    options = GENERATED.replace(cpu_kernels=cpu_kernels, fallback="error")
    compiled = fxwrap.compile_graph(make_fx(every)(*operands), operands, options=options)
    results = compiled(*operands)
    for graph in graphs:
        count = len(graph.matmuls) + len(graph.surroundings)
        assert_close(graph, results[:count], graph.operands)
        results = results[count:]


@pytest.mark.parametrize(
    ("function", "columns", "kernels"),
    [
        (lambda x, w, b, columns: functional.linear(x, w, b).cumsum(-1), 64, 2),  # the bias is in another kernel
        (lambda x, w, b, columns: functional.linear(x, w[:, columns]), 64, 2),  # bounds of reduced indices are checked
        (lambda x, w, b, columns: functional.linear(torch.ones_like(x), w), 64, 2),  # nothing varies along the rows
        (lambda x, w, b, columns: functional.linear(x, w[columns]), 48, 1),
    ],
    ids=["bias", "gathered columns", "constant", "gathered rows"],
)
def test_operands_and_epilogues_that_do_not_fit_are_kernels_of_their_own(
    function: Callable[..., Tensor], columns: int, kernels: int
) -> None:
    x, weight, bias = torch.randn(4, 64), torch.randn(48, 64), torch.randn(48)
    for language in ("cpp", "triton"):
        options = GENERATED.replace(cpu_kernels=language)
        program = lowered(function, [x, weight, bias, torch.arange(columns)], options).program
        lines = list(program.lines())
        assert not [line.target for line in lines if isinstance(line, ExternCall)]
        assert len([line for line in lines if isinstance(line, Launch)]) == kernels


def swiglu(x: Tensor, packed: Tensor, *bias: Tensor) -> Tensor:
    gate, up = functional.linear(x, packed, *bias).chunk(2, -1)
    return functional.silu(gate) * up


def three_slices(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    result = functional.linear(x, packed)
    return result[..., :16].relu() + result[..., 16:32] * result[..., 80:]


def overlapping_slices(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    result = functional.linear(x, packed)
    return result[..., :64].relu() + result[..., 32:]


def returned_slice(x: Tensor, packed: Tensor, bias: Tensor) -> list[Tensor]:
    gate, up = functional.linear(x, packed).chunk(2, -1)
    return [gate, functional.silu(gate) * up]


def written_slice(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    gate, up = functional.linear(x, packed).chunk(2, -1)
    return gate.add_(up) * gate


def every_packed(x: Tensor, packed: Tensor, bias: Tensor) -> list[Tensor]:
    flat = x.reshape(-1, x.shape[-1])
    return [
        swiglu(x, packed), swiglu(flat, packed, bias), three_slices(x, packed, bias),
        overlapping_slices(x, packed, bias), *returned_slice(x, packed, bias), written_slice(x, packed, bias),
        swiglu(flat.repeat(9, 1), packed),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "kernels"), [(swiglu, 1), (three_slices, 1), (overlapping_slices, 2), (returned_slice, 2)]
)
def test_matmuls_that_are_read_in_slices_are_one_kernel_with_their_readers(
    function: Callable[..., object], kernels: int
) -> None:
    operands = [torch.randn(2, 3, 64), torch.randn(96, 64), torch.randn(96)]
    for language in ("cpp", "triton"):
        program = lowered(function, operands, GENERATED.replace(cpu_kernels=language)).program
        assert len([line for line in program.lines() if isinstance(line, Launch)]) == kernels
    lines = lowered(function, operands, Options()).program.lines()
    assert len([line for line in lines if isinstance(line, ExternCall)]) == 1, "a library computes all columns at once"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cpu_kernels", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_of_matmuls_beside_float64(dtype: torch.dtype, cpu_kernels: str) -> None:
    operands = [torch.randn(sizes).to(dtype) / 4 for sizes in ((2, 3, 64), (96, 64), (96,))]
    options = GENERATED.replace(cpu_kernels=cpu_kernels, fallback="error")
    compiled = fxwrap.compile_graph(make_fx(every_packed)(*operands), operands, options=options)
    exact = every_packed(*[item.double() for item in operands])
    for want, eager, result in zip(exact, every_packed(*operands), compiled(*operands), strict=True):
        assert result.stride() == eager.stride()
        assert_as_exact(result, eager, want, slack=torch.finfo(dtype).eps)


def concatenated(x: Tensor, weight: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
    parts = [functional.linear(x, weight).relu(), functional.linear(x, weight * 2), functional.linear(-x, weight)]
    return torch.cat(parts, 1)


def concatenated_rows(x: Tensor, weight: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([functional.linear(x, weight), functional.linear(cache[:, :32], weight * 2) + 1])


def sliced_cache(x: Tensor, weight: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
    cache[2:6, 8:48] = functional.gelu(functional.linear(x, weight[:40]))
    return rows + 1


def scattered_rows(x: Tensor, weight: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
    cache.index_copy_(0, rows, functional.linear(x, weight))
    return rows + 1


def masked(x: Tensor, weight: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
    return torch.ops.aten.native_dropout_backward(functional.linear(x, weight), cache[:4] > 0, 1.25)


@pytest.mark.parametrize(
    ("function", "kernels"),
    [(concatenated, 1), (concatenated_rows, 2), (sliced_cache, 2), (scattered_rows, 2), (masked, 1)],
)
def test_matmuls_store_into_parts_of_a_tensor(function: Callable[..., Tensor], kernels: int) -> None:
    generator = torch.Generator().manual_seed(5)
    operands = [torch.randn(sizes, generator=generator) for sizes in ((4, 32), (60, 32), (9, 60))]
    operands.append(torch.tensor([5, 0, 8, 2]))
    exact = [item.double() if item.is_floating_point() else item for item in operands]
    for language in ("cpp", "triton"):
        options = GENERATED.replace(cpu_kernels=language, fallback="error")
        graph = make_fx(torch.func.functionalize(function, remove="mutations"))(*operands)
        copies = [item.clone() for item in operands]
        compiled = fxwrap.compile_graph(graph, copies, options=options)
        lines = list(compiled.program.lines())
        assert len([line for line in lines if isinstance(line, Launch)]) == kernels, language
        (result,) = compiled(*copies)
        wanted = [item.clone() for item in exact]
        for actual, want in ((result, function(*wanted)), (copies[2], wanted[2])):
            torch.testing.assert_close(actual, want.to(actual.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_matmuls_store_into_pools(language: Literal["cpp", "triton"]) -> None:
    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = functional.gelu(functional.linear(x, weight))
        return x

    operands = [torch.randn(sizes) / 8 for sizes in ((4, 64), (96, 64), (128, 96), (48, 128))]
    options = GENERATED.replace(cpu_kernels=language, fallback="error", memory_planning="auto", memory_slack=1.0)
    compiled = fxwrap.compile_graph(make_fx(function)(*operands), operands, options=options)
    lines = list(compiled.program.lines())
    slices = {line.result.name for line in lines if isinstance(line, PoolSlice)}
    outs = [line.outs[0].name for line in lines if isinstance(line, Launch)]
    assert [name in slices for name in outs] == [True, True, False]
    assert_as_exact(compiled(*operands)[0], function(*operands), function(*map(Tensor.double, operands)), slack=1e-6)


def normalised(x: Tensor, scale: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * scale
    return [functional.silu(functional.linear(y, first)) * functional.linear(y, second)]


@pytest.mark.parametrize(
    ("rows", "is_parallel", "launches"), [(64, True, 1), (512, True, 2), (512, False, 1)], ids=["few", "many", "cpu"]
)
def test_operands_that_many_rows_read_are_cast_before(rows: int, is_parallel: bool, launches: int) -> None:
    """Each tile of the matmul would load and cast float32 weights again, as those of logits under autocast."""
    operands = [torch.randn(rows, 32).bfloat16(), torch.randn(600, 32)]
    options = GENERATED.replace(devices=[dataclasses.replace(CPU, massively_parallel=is_parallel)])
    planned = plan(make_fx(lambda x, w: functional.linear(x, w.bfloat16()))(*operands), operands, options)
    matmul = list(planned.kernels.values())[-1]
    assert len(planned.launches) == launches
    assert {item.dtype for item in matmul.inputs} == {torch.bfloat16, *([torch.float32] if launches == 1 else [])}


@pytest.mark.parametrize(("rows", "is_parallel"), [(1, True), (5, True), (5, False)])
def test_several_normalised_rows_are_computed_once(rows: int, is_parallel: bool) -> None:
    """By the kernel of their statistics, where each tile of columns would otherwise compute them again."""
    operands = [torch.randn(sizes) for sizes in ((rows, 64), (64,), (96, 64), (96, 64))]
    options = GENERATED.replace(devices=[dataclasses.replace(CPU, massively_parallel=is_parallel)])
    planned = plan(make_fx(normalised)(*operands), operands, options)
    first, second = [line for line in planned.program.lines() if isinstance(line, Launch)]
    is_materialised = is_parallel and rows > 1
    (written,) = [math.prod(item.tensor_type.sizes) for item in first.outs]
    assert written == (64 * rows if is_materialised else rows)
    assert len(second.arguments) == (3 if is_materialised else 5)
    (result,), (want,) = planned.run(operands), normalised(*[item.double() for item in operands])
    assert (result.double() - want).norm() <= 1e-6 * want.norm()


def projected(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
    gate, up = functional.linear(x, first), functional.linear(x, second)
    return [functional.silu(gate) * up, functional.linear(x, third).relu(), functional.linear(x, first).exp()]


@pytest.mark.parametrize(("rows", "is_parallel", "kernels"), [(1, True, 1), (5, True, 2), (5, False, 1)])
def test_independent_matmuls_of_several_rows_are_kernels_of_their_own(
    rows: int, is_parallel: bool, kernels: int
) -> None:
    """On massively parallel devices; those that one result needs stay together."""
    operands = [torch.randn(sizes) for sizes in ((rows, 64), (96, 64), (96, 64), (96, 64))]
    options = GENERATED.replace(devices=[dataclasses.replace(CPU, massively_parallel=is_parallel)])
    planned = plan(make_fx(projected)(*operands), operands, options)
    assert len(planned.launches) == kernels
    for result, want in zip(planned.run(operands), projected(*[item.double() for item in operands]), strict=True):
        torch.testing.assert_close(result.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("reader", "is_stored_scaled"),
    [
        (lambda y, plain, other: torch.stack([y, other]), True),
        (lambda y, plain, other: y * 2 + torch.cat([-y[:, 8:], y[:, :8]], 1), True),
        (lambda y, plain, other: y.relu() @ other.t(), True),
        (lambda y, plain, other: torch.cat([y + other, other]), True),
        (lambda y, plain, other: [torch.stack([y, other]), plain], False),
        (lambda y, plain, other: y.to(torch.float64).expand(3, *y.shape) * other, False),
    ],
    ids=["stack", "rotation", "matmul", "residual", "also_plain", "wider"],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 4])
def test_matmuls_store_what_their_results_are_mapped_to(
    reader: Callable[..., Any], is_stored_scaled: bool, rows: int
) -> None:
    """The kernels of scaled matmuls are equal, whatever reads their results; a single reader's kernel is theirs."""

    def function(x: Tensor, weight: Tensor, scale: Tensor, other: Tensor) -> Any:
        plain = functional.linear(x, weight)
        return reader(plain * scale, plain, other)

    operands = [torch.randn(sizes) for sizes in ((rows, 64), (16, 64), (16,), (rows, 16))]
    planned = plan(make_fx(function)(*operands), operands, GENERATED)
    first = next(line for line in planned.program.lines() if isinstance(line, Launch))
    assert ("scale" in str(first)) == is_stored_scaled and len(planned.launches) <= 2
    results, wanted = planned.run(operands), function(*[item.double() for item in operands])
    for result, want in zip(results, wanted if isinstance(wanted, list) else [wanted], strict=True):
        torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "is_kernel"), [(1, 8, True), (4, 16, True), (4, 8, False), (9, 16, False)])
def test_matmuls_of_several_rows_are_kernels_from_a_size_on(rows: int, columns: int, is_kernel: bool) -> None:
    spec = dataclasses.replace(
        CPU, matmuls=dataclasses.replace(CPU.matmuls, generated_rows=((torch.float32, 8),), generated_bytes=4 * 64 * 16)
    )
    operands = [torch.randn(rows, 64), torch.randn(columns, 64)]
    program = lowered(functional.linear, operands, Options(devices=[spec])).program
    assert ([line for line in program.lines() if isinstance(line, ExternCall)] == []) == is_kernel


@pytest.mark.parametrize(("columns", "combines", "is_kernel"), [(8, True, True), (8, False, False), (4, True, False)])
def test_matmuls_of_one_operand_count_together_where_launches_are_combined(
    columns: int, combines: bool, is_kernel: bool
) -> None:
    """Queries, keys and values are one launch."""
    spec = dataclasses.replace(
        CPU,
        matmuls=dataclasses.replace(CPU.matmuls, generated_rows=((torch.float32, 8),), generated_bytes=4 * 64 * 24),
        combo_kernel_bytes=1,
    )
    operands = [torch.randn(4, 64), *[torch.randn(count, 64) for count in (columns, 8, 8)]]
    graph = make_fx(lambda x, *weights: [functional.linear(x, weight) for weight in weights])(*operands)
    program = fxwrap.lower(graph, operands, options=Options(devices=[spec], combo_kernels=combines))
    assert ([line for line in program.lines() if isinstance(line, ExternCall)] == []) == is_kernel

"""Mixtures of experts and matmuls of quantised weights, beside Inductor and eager, interleaved in one run.

    python benchmarks/quantised.py --device cuda --record              # 8B shapes and experts of three models, bfloat16
    python benchmarks/quantised.py --cases int8 int4 --rows 1          # on a CPU: a fourth of the width
    python benchmarks/quantised.py --device cuda --record --resume --seconds 160   # the cases that a run left
    python benchmarks/quantised.py --device cuda --cases int4 --rows 1 8 --sizes 4096x11008 18944x3584 --record sizes

Experts: "NAME" has sorted tokens, "NAME-routed" all that transformers does after the choice of experts, "NAME-scored"
the choice by float32 scores, too, "NAME-batched" the form with a matrix for each row. "fxwrap" has the default options,
"generated" computes every matmul that it can as a kernel. Columns: milliseconds, medians of interleaved rounds; their
ratio to Inductor's; the bytes of the weights over the time, as a part of the bytes that a copy reads and writes in a
second; norm(difference) / norm of the result against float64.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import (
    Contender,
    compile_with,
    fresh_function,
    interleaved_times,
    relative_error,
    repeat,
)
from benchmarks.results import Report, Row, add_record_option, recorded_rows, result_path

SIDES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "inductor": ("inductor", {}),
    "fxwrap": ("fxwrap", {}),
    "generated": ("fxwrap", {"matmul_kernels": "generated"}),
}
"""The backend and the options of each side besides eager."""

EXPERTS = {"mixtral": (8, 2, 4096, 14336), "qwen3": (128, 8, 2048, 768), "deepseek": (64, 6, 2048, 1408)}
"""Experts, experts of a token, width and hidden width."""

GROUP = 64
"""Elements of a row of int4 weights that share a scale."""

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The formula of torchao's weight-only int8: rows of weights have scales."""
    return functional.linear(x, weight.to(x.dtype)) * scale


def int8_packed(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """ATen's operator of weight-only int8."""
    return torch._weight_int8pack_mm(x, weight, scale)


def int4_linear(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Two int4 weights in a byte, with scales and zeros of groups of a row."""
    halves = torch.stack([weight & 15, weight >> 4], -1).reshape(*scale.shape, GROUP).to(x.dtype)
    return functional.linear(x, ((halves - zero[..., None]) * scale[..., None]).flatten(1))


def float8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Weight-only float8: one scale for each row of weights."""
    return functional.linear(x, weight.to(x.dtype)) * scale


def float8_scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Float8 weights and dynamically quantised activations: one scale for each row of either."""
    step = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(weight.dtype).max
    rows = (x.float() / step).to(weight.dtype)
    return torch._scaled_mm(rows, weight.t(), step, scale.float()[None], out_dtype=x.dtype)


def int4_packed(x: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """ATen's operator of weight-only int4, whose weights are packed for tensor cores."""
    return torch._weight_int4pack_mm(x, packed, GROUP, scales_and_zeros)


def int4_packed_reference(halves: Tensor, x: Tensor, _: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """Returns the product of weights before they were packed: bytes of an even element and, in the low bits, an odd."""
    weight = torch.stack([halves >> 4, halves & 15], -1).flatten(1).to(x.dtype)
    scale, zero = scales_and_zeros.repeat_interleave(GROUP, 0).unbind(-1)
    return x @ ((weight.t() - 8) * scale + zero)


def reference_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Returns the grouped matmul, one group at a time."""
    parts = x.tensor_split(offsets.tolist()[:-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def experts(
    product: GroupedProduct, x: Tensor, tokens: Tensor, offsets: Tensor, gates: Tensor, into: Tensor, out: Tensor
) -> Tensor:
    """The experts of tokens that are sorted by expert, with SwiGLU, weighted and added."""
    gate, up = product(x[tokens], into.transpose(1, 2), offsets).chunk(2, -1)
    result = product(functional.silu(gate) * up, out.transpose(1, 2), offsets) * gates[:, None]
    return torch.zeros_like(x).index_add(0, tokens, result)


def routed_experts(
    product: GroupedProduct, x: Tensor, chosen: Tensor, gates: Tensor, into: Tensor, out: Tensor
) -> Tensor:
    """The experts of tokens as transformers computes them by grouped matmuls, from the choice of experts."""
    count = chosen.shape[1]
    numbers, order = chosen.reshape(-1).sort()
    numbers = numbers.float() if numbers.is_cpu else numbers.int()
    offsets = torch.histc(numbers, bins=len(into), min=0, max=len(into) - 1).cumsum(0, dtype=torch.int32)
    gate, up = product(x[order // count], into.transpose(1, 2), offsets).chunk(2, -1)
    result = product(functional.silu(gate) * up, out.transpose(1, 2), offsets) * gates.reshape(-1)[order][:, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=x.device)
    return result[inverse].view(len(x), count, -1).sum(1)


def scored_experts(
    product: GroupedProduct, of_token: int, x: Tensor, scores: Tensor, into: Tensor, out: Tensor
) -> Tensor:
    """The experts with the highest scores of each token, weighted by the softmax of these."""
    gates, chosen = scores.softmax(-1).topk(of_token)
    return routed_experts(product, x, chosen, (gates / gates.sum(-1, keepdim=True)).to(x.dtype), into, out)


def batched_experts(x: Tensor, chosen: Tensor, gates: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """The experts of tokens as transformers computes them by batched matmuls, with a copy of a matrix for each row."""
    count, numbers = chosen.shape[1], chosen.reshape(-1)
    rows = x.repeat_interleave(count, 0)[..., None]
    gate, up = torch.bmm(into[numbers], rows)[..., 0].chunk(2, -1)
    result = torch.bmm(out[numbers], (functional.silu(gate) * up)[..., None])[..., 0] * gates.reshape(-1)[:, None]
    return result.view(len(x), count, -1).sum(1)


@dataclass(frozen=True)
class Case:
    """A function, its arguments, the function in float64 and the bytes of the weights that it reads."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    reference: Callable[..., Tensor]
    weight_bytes: int


def linear_case(name: str, rows: int, columns: int, width: int, dtype: torch.dtype) -> Case:
    """Returns a matmul of rows and of quantised columns, both of `width` elements."""
    x = torch.randn(rows, width, dtype=dtype)
    scale = torch.rand(columns, dtype=dtype)
    if name == "int4":
        packed = torch.randint(0, 256, (columns, width // 2), dtype=torch.uint8)
        scales = torch.rand(columns, width // GROUP, dtype=dtype)
        zeros = torch.randint(0, 16, scales.shape).to(dtype)
        return Case(int4_linear, (x, packed, scales, zeros), int4_linear, packed.nbytes + 2 * scales.nbytes)
    if name == "int4-packed":
        halves = torch.randint(0, 256, (columns, width // 2), dtype=torch.uint8)
        packed, scales = (
            torch._convert_weight_to_int4pack(halves, 8),
            torch.randn(width // GROUP, columns, 2, dtype=dtype),
        )
        reference = partial(int4_packed_reference, halves)
        return Case(int4_packed, (x, packed, scales), reference, packed.nbytes + scales.nbytes)
    if name in ("float8", "float8-scaled"):
        weight = torch.randn(columns, width).to(torch.float8_e4m3fn)
        function = float8_linear if name == "float8" else float8_scaled
        return Case(function, (x, weight, scale), float8_linear, weight.nbytes)
    weight = torch.randint(-128, 128, (columns, width), dtype=torch.int8)
    return Case(int8_linear if name == "int8" else int8_packed, (x, weight, scale), int8_linear, weight.nbytes)


def expert_case(name: str, count: int, width_divisor: int, dtype: torch.dtype) -> Case:
    """Returns the experts of `count` tokens, each of random experts."""
    model, _, form = name.partition("-")
    number, of_token, width, hidden = EXPERTS[model]
    width, hidden = width // width_divisor, hidden // width_divisor
    chosen = torch.stack([torch.randperm(number)[:of_token] for _ in range(count)])
    picked = chosen.flatten()
    order = picked.argsort(stable=True)
    offsets = picked.bincount(minlength=number).cumsum(0).to(torch.int32)
    weights = [
        torch.randn(number, 2 * hidden, width, dtype=dtype) / width**0.5,
        torch.randn(number, width, hidden, dtype=dtype) / hidden**0.5,
    ]
    read = sum(weight[0].nbytes for weight in weights) * len(picked.unique())
    x, gates = torch.randn(count, width, dtype=dtype), torch.rand(len(order), dtype=dtype)
    if form == "scored":
        scores = torch.rand(count, number).scatter(1, chosen, 1 + torch.rand(chosen.shape))
        sides = [partial(scored_experts, product, of_token) for product in (torch._grouped_mm, reference_product)]
        return Case(sides[0], (x, scores, *weights), sides[1], read)
    if form:
        function = batched_experts if form == "batched" else partial(routed_experts, torch._grouped_mm)
        inputs = (x, chosen, gates.view(chosen.shape), *weights)
        return Case(function, inputs, partial(routed_experts, reference_product), read)
    inputs = (x, order // of_token, offsets, gates, *weights)
    return Case(partial(experts, torch._grouped_mm), inputs, partial(experts, reference_product), read)


CASES = (
    "int8", "int8-packed", "int4", "int4-packed", "float8", "float8-scaled", *EXPERTS,
    *[f"{name}-{form}" for form in ("routed", "scored", "batched") for name in EXPERTS],
)  # fmt: skip

GPU_CASES = ("int4-packed",)

MAX_BATCHED_TOKENS = 16
"""The largest number of tokens of which each row's matrices are copied."""


def parsed_size(text: str) -> tuple[int, int]:
    """Returns the columns and the products of a column of a matmul, as in "4096x11008"."""
    columns, _, products = text.partition("x")
    return int(columns), int(products)


def case_label(name: str, size: tuple[int, int] | None) -> str:
    """Returns the name of a case in tables, with its size."""
    return f"{name} {size[0]}x{size[1]}" if size else name


def measure(name: str, rows: int, size: tuple[int, int] | None, chosen: argparse.Namespace, report: Report) -> None:
    """Measures all sides of a case and adds their rows; `size` is that of a matmul other than the 8B model's."""
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    torch._dynamo.reset()
    dtype, divisor = getattr(torch, chosen.dtype), 1 if device.type == "cuda" else 4
    label = case_label(name, size)
    with device:
        case = (
            expert_case(name, rows, divisor, dtype)
            if name.partition("-")[0] in EXPERTS
            else linear_case(name, rows, *(size or (16384 // divisor, 4096 // divisor)), dtype)
        )  # fmt: skip
    wide = [item.double() if item.is_floating_point() and item.itemsize > 1 else item for item in case.inputs]
    expected = case.reference(*wide)
    del wide
    functions: dict[str, Callable[..., Tensor]] = {"eager": case.function}
    for side, (backend, options) in SIDES.items():
        functions[side] = compile_with(backend, fresh_function(lambda *items: case.function(*items)), options)
    errors: dict[str, float] = {}
    contenders: dict[str, Contender] = {}
    for side, function in functions.items():
        run = torch.no_grad()(partial(function, *case.inputs))
        try:
            errors[side] = relative_error(run(), expected)
        except Exception as error:  # noqa: BLE001 - a side that cannot run a case is a row of the table
            report.add({"case": label, "rows": rows, "side": side, "ms": None, "note": f"{type(error).__name__}"})
            continue
        contenders[side] = Contender(partial(repeat, run, chosen.calls), chosen.calls)
    source = torch.ones(min(max(case.weight_bytes, 1 << 20), 1 << 29), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    contenders["copy"] = Contender(lambda: target.copy_(source), 1)
    for contender in contenders.values():
        contender.run()
    times = interleaved_times(contenders, chosen.rounds, device)
    bandwidth = 2 * source.nbytes / times["copy"].median
    for side, distance in errors.items():
        median = times[side].median
        ratio = round(median / times["inductor"].median, 3) if "inductor" in errors else None
        row: Row = {
            "case": label, "rows": rows, "side": side, "ms": round(1e3 * median, 4), "/ inductor": ratio,
            "bandwidth": round(case.weight_bytes / median / bandwidth, 3), "error": distance,
        }  # fmt: skip
        report.add(row, {"seconds": times[side].samples, "copy": times["copy"].samples})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 1024], help="rows, or tokens of experts")
    parser.add_argument("--sizes", type=parsed_size, nargs="+", default=[None], help="COLUMNSxPRODUCTS of matmuls")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5, help="calls of a round")
    parser.add_argument("--resume", action="store_true", help="skip cases that the result file has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    add_record_option(parser)
    chosen = parser.parse_args()
    start, table = time.perf_counter(), f"quantised-{chosen.device}"
    earlier, raw = recorded_rows(result_path(table, chosen)) if chosen.resume else ([], [])
    measured = {(row["case"], row["rows"]) for row in earlier}
    report = Report(table, chosen, torch.device(chosen.device), earlier=earlier, earlier_raw=raw)
    for name in [item for item in chosen.cases if item not in GPU_CASES or chosen.device != "cpu"]:
        for size, rows in itertools.product(chosen.sizes, chosen.rows):
            is_large = name.endswith("-batched") and rows > MAX_BATCHED_TOKENS
            is_known = (case_label(name, size), rows) in measured
            if is_large or is_known or time.perf_counter() - start > chosen.seconds:
                continue
            measure(name, rows, size, chosen, report)


if __name__ == "__main__":
    main()

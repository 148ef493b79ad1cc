"""Matmuls of many rows with the operators after them, beside Inductor and eager, interleaved in one run.

    python benchmarks/epilogues.py --record                        # on a GPU, bfloat16
    python benchmarks/epilogues.py --cases cross-entropy --shapes 8192x50304x768
    python benchmarks/epilogues.py --device cpu --dtype float32 --shapes 64x1000x256

"fxwrap" has the default options: a library's matmul, and kernels of the other operators. "generated" computes matmuls
and what follows them in one kernel, "autotuned" chooses by timing; "max-autotune" is Inductor's mode. Columns:
milliseconds, medians of interleaved rounds; their ratio to those of "fxwrap"; the memory of a call in MiB, results
included; norm(difference) / norm of the results against float64.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping
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
    peak_of,
    relative_error,
    repeat,
    wide,
)
from benchmarks.results import Report, Row, add_record_option

SIDES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "fxwrap": ("fxwrap", {}),
    "generated": ("fxwrap", {"matmul_kernels": "generated"}),
    "autotuned": ("fxwrap", {"autotune": True}),
    "inductor": ("inductor", {}),
    "max-autotune": ("inductor", {"max_autotune": True}),
}
"""The backend and the options of each side besides eager."""

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Rows, a weight with a row for each column of the result, a residual, a vector and a class of each row."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def plain(x: Tensor, weight: Tensor, residual: Tensor, vector: Tensor, target: Tensor) -> Tensor:
    """The matmul alone."""
    return functional.linear(x, weight)


def gelu(x: Tensor, weight: Tensor, residual: Tensor, vector: Tensor, target: Tensor) -> Tensor:
    """A bias and an activation."""
    return functional.gelu(functional.linear(x, weight, vector))


def swiglu(x: Tensor, weight: Tensor, residual: Tensor, vector: Tensor, target: Tensor) -> Tensor:
    """Two halves of packed columns."""
    gate, up = functional.linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor, vector: Tensor, target: Tensor) -> list[Tensor]:
    """A residual, its sum, and the sum's norm."""
    hidden = functional.linear(x, weight) + residual
    scale = torch.rsqrt(_wide(hidden).square().mean(-1, keepdim=True) + 1e-5)
    return [hidden, (_wide(hidden) * scale).to(hidden.dtype) * vector]


def head_norm(x: Tensor, weight: Tensor, residual: Tensor, vector: Tensor, target: Tensor) -> Tensor:
    """The norm of each head of 128 columns."""
    heads = _wide(functional.linear(x, weight)).unflatten(-1, (-1, 128))
    return (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def cross_entropy(x: Tensor, weight: Tensor, residual: Tensor, vector: Tensor, target: Tensor) -> Tensor:
    """The loss of each row, whose logits are the columns."""
    return functional.cross_entropy(_wide(functional.linear(x, weight)), target, reduction="none")


CASES: dict[str, Callable[..., Any]] = {
    "plain": plain, "gelu": gelu, "swiglu": swiglu, "rms-norm": rms_norm, "head-norm": head_norm,
    "cross-entropy": cross_entropy,
}  # fmt: skip

SHAPES: Mapping[str, tuple[str, ...]] = {
    "plain": ("8192x4096x4096", "8192x3072x768"),
    "gelu": ("8192x3072x768", "8192x4096x1024"),
    "swiglu": ("4096x11264x2048", "4096x28672x4096"),
    "rms-norm": ("8192x768x768", "8192x4096x4096"),
    "head-norm": ("8192x2048x2048", "8192x4096x4096"),
    "cross-entropy": ("8192x50304x768", "8192x32000x2048", "8192x128256x4096"),
}
"""Rows, columns and products of a sum of the shapes that each case has by default."""


def random_shape(generator: random.Random) -> str:
    """Returns rows, columns and products, with columns for the heads and halves of all cases."""
    rows, columns = generator.choice((512, 1024, 3072, 4096, 8192, 12288)), 256 * generator.randint(3, 48)
    return f"{rows}x{columns}x{64 * generator.randint(4, 24)}"


def operands(shape: str, device: torch.device, dtype: torch.dtype) -> Operands:
    """Returns random operands: results of a matmul have about unit variance."""
    rows, columns, products = map(int, shape.split("x"))
    with device:
        x = torch.randn(rows, products, dtype=dtype)
        weight = torch.randn(columns, products, dtype=dtype) / products**0.5
        residual = torch.randn(rows, columns if columns <= 1 << 14 else 1, dtype=dtype)
        return x, weight, residual, torch.randn(columns, dtype=dtype), torch.randint(0, columns, (rows,))


def measure(name: str, shape: str, chosen: argparse.Namespace, report: Report) -> None:
    """Measures all sides of a case of one shape and adds their rows."""
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    torch.manual_seed(0)
    torch._dynamo.reset()
    arguments = operands(shape, device, dtype)
    few = tuple([item[: chosen.checked] if len(item) == len(arguments[0]) else item for item in arguments])
    expected = CASES[name](*wide(few))
    functions: dict[str, Callable[..., Any]] = {"eager": CASES[name]}
    for side in chosen.sides:
        backend, options = SIDES[side]
        functions[side] = compile_with(backend, fresh_function(lambda *items: CASES[name](*items)), options)
    errors, peaks, contenders = {}, {}, dict[str, Contender]()
    for side, function in functions.items():
        run = torch.no_grad()(partial(function, *arguments))
        try:
            result = run()
            results = result if isinstance(result, list | tuple) else [result]
            wanted = expected if isinstance(expected, list | tuple) else [expected]
            errors[side] = relative_error([item[: len(want)] for item, want in zip(results, wanted)], list(wanted))
            del result, results
            _, peaks[side] = peak_of(run, device)
        except Exception as error:  # noqa: BLE001 - a side that cannot run a case is a row of the table
            report.add({"case": name, "shape": shape, "side": side, "ms": None, "note": f"{type(error).__name__}"})
            continue
        contenders[side] = Contender(partial(repeat, run, chosen.calls), chosen.calls)
    times = interleaved_times(contenders, chosen.rounds, device)
    for side, distance in errors.items():
        median, peak = times[side].median, peaks[side]
        row: Row = {
            "case": name, "shape": shape, "side": side, "ms": round(1e3 * median, 4),
            "/ fxwrap": round(median / times["fxwrap"].median, 3) if "fxwrap" in errors else None,
            "MiB": round(peak / 2**20, 1), "error": distance,
        }  # fmt: skip
        report.add(row, {"seconds": times[side].samples})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shapes", nargs="+", help="ROWSxCOLUMNSxPRODUCTS, by default some for each case")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--random", type=int, default=0, help="so many random shapes for each case instead")
    parser.add_argument("--checked", type=int, default=512, help="rows that are compared with float64")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5, help="calls of a round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    add_record_option(parser)
    chosen = parser.parse_args()
    start = time.perf_counter()
    report = Report(f"epilogues-{chosen.device}", chosen, torch.device(chosen.device))
    generator = random.Random(0)
    drawn = [random_shape(generator) for _ in range(chosen.random)]
    for name in chosen.cases:
        for shape in drawn or chosen.shapes or SHAPES[name]:
            if time.perf_counter() - start <= chosen.seconds:
                measure(name, shape, chosen, report)


if __name__ == "__main__":
    main()

"""Fused operators: time and error of eager, Inductor and fxwrap, measured in one run on fresh random inputs.

On a CPU the time is that of a call of the compiled function. On CUDA it is the device's (CUDA graphs of many calls).
Times are compared with a `copy_` of the bytes that the operator must move. Each call uses another set of inputs;
together the sets exceed the cache. Errors are norm(difference) / norm(reference) against the same function in float64,
of the worst result. Run:

    python benchmarks/ops.py [--only softmax,pad] [--dtype bfloat16] [--device cuda] [--record]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.fused_operators import OPERATORS, Draw, FusedOperator
from benchmarks.measure_kernels import (
    BACKENDS,
    Contender,
    Timed,
    compile_with,
    disable_malloc_trimming,
    first_line,
    fresh_function,
    in_float64,
    interleaved_times,
    is_suspicious,
    relative_error,
    synchronize,
    wide,
)
from benchmarks.results import Cell, Report, add_record_option, display_name, geometric_mean, split_lists

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULTS: Mapping[str, tuple[str, int, int]] = {
    "cpu": ("float32,bfloat16", 1024, 1024),
    "cuda": ("bfloat16", 8192, 4096),
}
"""Element types, rows and columns by device type."""

ROTATED_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}
"""The total size of the rotating sets, larger than the caches."""

COPY_UNIT = 1 << 16
"""Copies are multiples of this unit, because unaligned copies are slower on GPUs."""

LEAST_SETS, MOST_SETS = 3, 64
CALLS_IN_GRAPH = 20
SECONDS_A_SAMPLE = 0.02

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Setting:
    """The conditions of a measurement."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    columns: int
    rounds: int
    backends: tuple[str, ...]
    options: Mapping[str, Any]

    def inputs(self, operator: FusedOperator, seed: int) -> Inputs:
        """Draws a set of inputs."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return operator.make_inputs(Draw(self.rows, self.columns, self.dtype, self.device, generator))

    def bytes_moved(self, operator: FusedOperator) -> int:
        """The bytes that the operator must move."""
        return operator.bytes_moved(self.rows, self.columns, self.dtype.itemsize)


@dataclass
class Row:
    """The measurements of one operator."""

    name: str
    dtype: str
    bytes_moved: int
    times: dict[str, Timed] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    suspicious: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)

    def ratio(self, above: str, below: str) -> float | None:
        """The ratio of two medians, None where one is missing."""
        if above not in self.times or below not in self.times:
            return None
        return self.times[above].median / self.times[below].median

    def micros(self, side: str) -> float | None:
        """The median in microseconds, None where it is missing."""
        return 1e6 * self.times[side].median if side in self.times else None

    def data(self) -> dict[str, Any]:
        """The row as data; times in seconds."""
        return {
            "operator": self.name,
            "dtype": self.dtype,
            "bytes": self.bytes_moved,
            "times": {name: {"samples": timed.samples, "method": timed.method} for name, timed in self.times.items()},
            "errors": self.errors,
            "suspicious": sorted(self.suspicious),
            "failures": self.failures,
        }


def copies(inputs: Inputs) -> Inputs:
    """Returns copies of a set of inputs."""
    return tuple([item.clone() for item in inputs])


def call_results(operator: FusedOperator, function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Any]:
    """Returns the results of a call, and the inputs that it writes."""
    return [function(*inputs), *[inputs[position] for position in operator.mutated]]


def checked(operator: FusedOperator, setting: Setting, row: Row) -> dict[str, Callable[..., Any]]:
    """Compiles the operator with each backend and measures its error; returns those that run."""
    fresh = setting.inputs(operator, seed=1)
    reference = call_results(operator, in_float64(operator.function, setting.dtype), wide(fresh))
    functions: dict[str, Callable[..., Any]] = {}
    for backend in setting.backends:
        function = compile_with(backend, fresh_function(operator.function), setting.options)
        try:
            function(*setting.inputs(operator, seed=0))
            row.errors[backend] = relative_error(call_results(operator, function, copies(fresh)), reference)
        except Exception as error:  # noqa: BLE001 - a backend's failure is reported
            row.failures[backend] = first_line(error)
            continue
        functions[backend] = function
        if is_suspicious(row.errors[backend], row.errors.get("eager", 0.0), setting.dtype):
            row.suspicious.add(backend)
    return functions


def rotation(setting: Setting, operator: FusedOperator) -> list[Inputs]:
    """Returns as many sets of random inputs as exceed the cache."""
    first = setting.inputs(operator, seed=2)
    size = sum(item.numel() * item.itemsize for item in first)
    count = min(MOST_SETS, max(LEAST_SETS, math.ceil(ROTATED_BYTES[setting.device.type] / size)))
    return [first, *[setting.inputs(operator, seed=3 + index) for index in range(count - 1)]]


def copy_rotation(setting: Setting, operator: FusedOperator, count: int) -> list[Inputs]:
    """Returns pairs of arrays whose copy moves the operator's bytes, one pair per set of inputs."""
    half = setting.bytes_moved(operator) // 2
    if half > COPY_UNIT:
        half -= half % COPY_UNIT
    generator = torch.Generator(setting.device).manual_seed(0)
    pairs: list[Inputs] = []
    for _ in range(count):
        source = torch.randn(half // 4, generator=generator, device=setting.device)
        pairs.append((torch.empty_like(source), source))
    return pairs


def copy_into(target: Tensor, source: Tensor) -> Tensor:
    """Copies `source`: the reference of the ratios."""
    return target.copy_(source)


def sweep(function: Callable[..., Any], sets: Sequence[Inputs], sweeps: int, keep: bool) -> None:
    """Calls the function on every set in turn.

    With `keep`, the results of a set stay alive until its next turn, so that results rotate through memory too.
    """
    results: list[Any] = [None] * len(sets)
    for _ in range(sweeps):
        for index, inputs in enumerate(sets):
            result = function(*inputs)
            if keep:
                results[index] = result


def contender(function: Callable[..., Any], sets: Sequence[Inputs], device: torch.device) -> Contender:
    """Returns a contender that calls the function on rotating sets, as often as a sample requires."""
    if device.type == "cuda":
        sweeps = math.ceil(CALLS_IN_GRAPH / len(sets))
        return Contender(partial(sweep, function, sets, sweeps, True), sweeps * len(sets))
    start = time.perf_counter()
    sweep(function, sets, 1, False)
    sweeps = max(1, math.ceil(SECONDS_A_SAMPLE / (time.perf_counter() - start)))
    return Contender(partial(sweep, function, sets, sweeps, False), sweeps * len(sets))


def measure(operator: FusedOperator, setting: Setting) -> Row:
    """Measures one operator with every backend."""
    torch._dynamo.reset()
    row = Row(operator.name, str(setting.dtype).removeprefix("torch."), setting.bytes_moved(operator))
    functions = checked(operator, setting, row)
    sets = rotation(setting, operator)
    contenders = {name: contender(function, sets, setting.device) for name, function in functions.items()}
    contenders["copy"] = contender(copy_into, copy_rotation(setting, operator, len(sets)), setting.device)
    row.times = interleaved_times(contenders, setting.rounds, setting.device)
    return row


def cells(row: Row, backends: Sequence[str]) -> dict[str, Cell]:
    """Returns the row of the table: microseconds, ratios to the copy, and errors by backend."""
    columns: dict[str, Cell] = {"operator": row.name, "MiB": row.bytes_moved / 2**20, "copy, us": row.micros("copy")}
    for backend in backends:
        name = display_name(backend)
        columns[f"{name}, us"] = row.micros(backend)
        columns[f"{name} / copy"] = row.ratio(backend, "copy")
        columns[f"{name} error"] = row.errors.get(backend)
    return {**columns, "fxwrap / Inductor": row.ratio("fxwrap", "inductor")}


def summary(rows: Sequence[Row], above: str, below: str, limit: float) -> str:
    """Returns the geometric mean and the worst of a ratio, and the operators above a limit."""
    ratios = {row.name: ratio for row in rows if (ratio := row.ratio(above, below)) is not None}
    if not ratios:
        return f"{above}/{below}: nothing to compare"
    worst = max(ratios, key=lambda name: ratios[name])
    beyond = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > limit)
    text = f"{above}/{below}: geometric mean {geometric_mean(ratios.values()):.3f} of {len(ratios)}, "
    return text + f"worst {ratios[worst]:.2f} ({worst}){f'; above {limit}: {beyond}' if beyond else ''}"


def print_summary(rows: Sequence[Row], setting: Setting) -> None:
    """Prints the summary of the table."""
    pairs = [("fxwrap", "inductor", 1.1), ("fxwrap", "eager", 1.1), ("inductor", "eager", 1.1)]
    if setting.device.type == "cuda":
        pairs = [("fxwrap", "inductor", 1.0), *[(backend, "copy", 1.3) for backend in setting.backends]]
    for above, below, limit in pairs:
        if {above, below} <= {*setting.backends, "copy"}:
            print(summary(rows, above, below, limit))
    flagged = [f"{row.name} ({', '.join(sorted(row.suspicious))})" for row in rows if row.suspicious]
    failed = [f"{row.name} ({', '.join(sorted(row.failures))})" for row in rows if row.failures]
    print(f"errors far above eager's: {', '.join(flagged) or 'none'}; failed: {', '.join(failed) or 'none'}")


def parsed_arguments() -> argparse.Namespace:
    """Returns the command line, with defaults that depend on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEFAULTS), default="cpu")
    parser.add_argument("--dtype", help=f"one or more of {', '.join(DTYPES)}, with commas")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--columns", type=int)
    parser.add_argument("--only", default=",".join(OPERATORS), help="names of operators, with commas")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"some of {', '.join(BACKENDS)}, with commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--options", type=json.loads, default={}, help="fxwrap's options, as JSON")
    add_record_option(parser)
    chosen = parser.parse_args()
    dtype, rows, columns = DEFAULTS[chosen.device]
    chosen.dtype, chosen.rows, chosen.columns = chosen.dtype or dtype, chosen.rows or rows, chosen.columns or columns
    split_lists(parser, chosen, {"only": OPERATORS, "backends": BACKENDS, "dtype": DTYPES})
    return chosen


@torch.no_grad()
def main() -> None:
    """Prints the tables."""
    chosen = parsed_arguments()
    torch.set_num_threads(chosen.threads)
    disable_malloc_trimming()
    device = torch.device(chosen.device)
    for name in chosen.dtype:
        setting = Setting(
            device, DTYPES[name], chosen.rows, chosen.columns, chosen.rounds, tuple(chosen.backends), chosen.options
        )
        note = f"{chosen.rows} x {chosen.columns}, medians of {chosen.rounds} rounds"
        report = Report(f"ops-{device.type}-{name}", chosen, device, note)
        rows: list[Row] = []
        for operator in chosen.only:
            rows.append(measure(OPERATORS[operator], setting))
            report.add(cells(rows[-1], setting.backends), rows[-1].data())
            for backend, text in rows[-1].failures.items():
                print(f"    {backend} failed: {text}", flush=True)
            gc.collect()
            synchronize(device)
        print_summary(rows, setting)


if __name__ == "__main__":
    main()

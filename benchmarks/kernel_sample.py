"""A sample of functions with random sizes: times and errors of fxwrap beside Inductor, forward and backward.

Processes compile a part of the functions each; when all have compiled, they measure one after another. On CUDA the time
is the device's (CUDA graphs of a few calls), on a CPU that of a call. Sides are measured in interleaved rounds on the
same inputs, so that small inputs stay in the cache for both. Errors are norm(difference) / norm(reference) against
float64, of the worst result or gradient. Run:

    python benchmarks/kernel_sample.py --device cuda --processes 14 [--seed 1] [--only max_pool,softmax_77] [--record]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import (
    Contender,
    compile_with,
    disable_malloc_trimming,
    first_line,
    fresh_function,
    in_float64,
    interleaved_times,
    leaves,
    relative_error,
    repeat,
    wide,
)
from benchmarks.results import Report, Row, add_record_option, geometric_mean, split_lists
from benchmarks.sampled_functions import FUNCTIONS, SampledFunction, SizedDraw

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SIDES = ("inductor", "fxwrap")
COMPILED = "compiled"
"""The line by which a process says that it has compiled its part."""

PART_OF_COMPILES = 0.7
"""The part of the time after which a process begins no further compile."""

MOST_CALLS, CALLED_BYTES, SECONDS_A_SAMPLE = 8, 200 << 20, 0.01
"""A sample has as many calls as move these bytes on a GPU, or take this time on a CPU."""


@dataclass(frozen=True)
class Case:
    """A function with an element type."""

    name: str
    dtype: str

    @property
    def function(self) -> SampledFunction:
        """The function."""
        return FUNCTIONS[self.name]

    @property
    def element(self) -> torch.dtype:
        """The element type."""
        return DTYPES[self.dtype]

    def inputs(self, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Draws the inputs of a seed: equal in every process."""
        own = f"{self.name} {self.dtype} {seed}"
        generator = torch.Generator(device).manual_seed(seed)
        return self.function.inputs(SizedDraw(self.element, device, random.Random(own), generator))


def cases(names: Sequence[str]) -> list[Case]:
    """Returns the cases of functions."""
    return [Case(name, dtype) for name in names for dtype in FUNCTIONS[name].dtypes]


def runner(function: Callable[..., Any], inputs: Sequence[Tensor], outer: Sequence[Tensor]) -> Callable[[], list[Any]]:
    """Returns a call that returns the results and, with outer gradients, the gradients of the inputs that have some."""
    wanted = [item for item in inputs if item.requires_grad]

    def forward() -> list[Any]:
        with torch.no_grad():
            return [*leaves(function(*inputs))]

    def both() -> list[Any]:
        results = [*leaves(function(*inputs))]
        differentiable = [item for item in results if item.requires_grad]
        return [item.detach() for item in results] + [*torch.autograd.grad(differentiable, wanted, outer)]

    return both if outer else forward


def outer_gradients(case: Case, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Draws a gradient for each differentiable result of a case that has gradients."""
    if not case.function.has_gradients:
        return []
    results = [item for item in leaves(case.function.function(*inputs)) if item.requires_grad]
    generator = torch.Generator(inputs[0].device).manual_seed(seed + 1)
    return [torch.randn(item.shape, generator=generator, device=item.device).to(item.dtype) for item in results]


def in_double(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies, floating-point ones in float64, which require gradients if the originals do."""
    return [copy.detach().requires_grad_(item.requires_grad) for copy, item in zip(wide(tensors), tensors)]


@dataclass
class Prepared:
    """A compiled case, or why it has none."""

    case: Case
    runs: dict[str, Callable[[], list[Any]]]
    facts: dict[str, Any]

    def measured(self, device: torch.device, rounds: int) -> dict[str, Any]:
        """Returns its facts with the samples of each side, in seconds a call."""
        if "failure" in self.facts:
            return self.facts
        if device.type == "cuda":
            calls = max(1, min(MOST_CALLS, CALLED_BYTES // self.facts["bytes"]))
        else:
            start = time.perf_counter()
            self.runs["inductor"]()
            calls = math.ceil(SECONDS_A_SAMPLE / (time.perf_counter() - start))
        contenders = {side: Contender(partial(repeat, run, calls), calls) for side, run in self.runs.items()}
        times = interleaved_times(contenders, rounds, device)
        samples = {side: {"samples": timed.samples, "method": timed.method} for side, timed in times.items()}
        return {**self.facts, "times": samples, "medians": {side: timed.median for side, timed in times.items()}}


def prepared(case: Case, device: torch.device, seed: int) -> Prepared:
    """Compiles a case with each side and measures its errors."""
    torch.compiler.reset()
    facts: dict[str, Any] = {"function": case.name, "dtype": case.dtype}
    runs: dict[str, Callable[[], list[Any]]] = {}
    try:
        inputs = case.inputs(device, seed)
        outer = outer_gradients(case, inputs, seed)
        reference = runner(in_float64(case.function.function, case.element), in_double(inputs), in_double(outer))()
        facts |= {"shapes": [list(item.shape) for item in inputs], "errors": {}}
        for side in SIDES:
            runs[side] = runner(compile_with(side, fresh_function(case.function.function), {}), inputs, outer)
            results = runs[side]()
            facts["errors"][side] = relative_error(results, reference)
        facts["bytes"] = max(sum(item.nbytes for item in [*inputs, *leaves(results)]), 1)
    except Exception as error:  # noqa: BLE001 - a side's failure is reported
        facts["failure"] = first_line(error)
    return Prepared(case, runs, facts)


def work(chosen: argparse.Namespace) -> None:
    """Compiles the part of this process, says so, waits for its turn, and prints the facts of each case."""
    device, part = torch.device(chosen.device), cases(chosen.only)[chosen.part :: chosen.processes]
    ready: list[Prepared] = []
    for case in part:
        if time.monotonic() < chosen.compile_until:
            ready.append(prepared(case, device, chosen.seed))
            free_unused(device)
    print(COMPILED, flush=True)
    sys.stdin.readline()
    for item in ready:
        if time.monotonic() < chosen.measure_until:
            print(json.dumps(item.measured(device, chosen.rounds)), flush=True)
        free_unused(device)


def free_unused(device: torch.device) -> None:
    """Returns memory that is not in use to a device that processes share."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def facts_of_processes(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the facts of each case that processes measure, one process at a time after all have compiled."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--device", chosen.device, "--only", ",".join(chosen.only)]
    command += ["--seed", str(chosen.seed), "--rounds", str(chosen.rounds), "--threads", str(chosen.threads)]
    command += ["--processes", str(chosen.processes), "--measure-until", str(start + chosen.seconds)]
    command += ["--compile-until", str(start + PART_OF_COMPILES * chosen.seconds)]
    # Each process compiles in itself: as many processes as cores are enough.
    variables = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "FXWRAP_COMPILE_WORKERS": "0"}
    processes = [
        subprocess.Popen(
            [*command, "--part", str(part)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        for part in range(chosen.processes)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line.strip() != COMPILED:
                pass
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            if process.poll() is None:
                process.stdin.write("\n")
                process.stdin.flush()
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
            if process.wait():
                print(f"a process ended with status {process.returncode}", flush=True)
    finally:
        for process in processes:
            process.kill()


def table_row(facts: dict[str, Any]) -> Row:
    """Returns the row of the table."""
    medians, errors = facts.get("medians", {}), facts.get("errors", {})
    has_both = set(SIDES) <= set(medians)
    return {
        "function": facts["function"],
        "dtype": facts["dtype"],
        "gradients": "yes" if FUNCTIONS[facts["function"]].has_gradients else "no",
        "Inductor, us": 1e6 * medians["inductor"] if has_both else None,
        "fxwrap, us": 1e6 * medians["fxwrap"] if has_both else None,
        "fxwrap / Inductor": medians["fxwrap"] / medians["inductor"] if has_both else None,
        "Inductor error": errors.get("inductor"),
        "fxwrap error": errors.get("fxwrap"),
    }


def parsed_arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default=",".join(FUNCTIONS), help="names of functions, with commas")
    parser.add_argument("--seed", type=int, default=1, help="of the sizes and inputs")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the run, about")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--part", type=int, help="of a process that another started: its number")
    parser.add_argument("--compile-until", type=float, default=math.inf, help="of such a process: when compiles end")
    parser.add_argument("--measure-until", type=float, default=math.inf, help="and when times end")
    add_record_option(parser)
    chosen = parser.parse_args()
    split_lists(parser, chosen, {"only": FUNCTIONS})
    return chosen


def main() -> None:
    """Prints the table and its geometric mean."""
    chosen = parsed_arguments()
    torch.set_num_threads(chosen.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    if chosen.part is not None:
        disable_malloc_trimming()
        work(chosen)
        return
    report = Report(f"kernel_sample-{chosen.device}", chosen, chosen.device, f"medians of {chosen.rounds} rounds")
    ratios: list[float] = []
    for facts in facts_of_processes(chosen):
        row = table_row(facts)
        report.add(row, facts)
        if "failure" in facts:
            print(f"    {facts['failure']}", flush=True)
        elif isinstance(ratio := row["fxwrap / Inductor"], float):
            ratios.append(ratio)
    left = len(cases(chosen.only)) - len(ratios)
    print(f"fxwrap/inductor: geometric mean {geometric_mean(ratios):.3f} of {len(ratios)}, {left} not measured")


if __name__ == "__main__":
    main()

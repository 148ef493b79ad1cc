"""Cost of a call: the same unfused program against eager on tiny tensors.

Programs are chains of 1 to 1000 operators, and one operator with 200 parameters. Eager is `torch.mul(x, y)`. Each row
shows the CPU time per operator and the ratio to eager, medians of interleaved rounds in one process. Two more tables
have the entries of a program of one operator, and functions of torch.compile whose graphs are in AOTAutograd's cache or
not.

With `--device cuda`: CPU time of a launch of a tiny Triton kernel, from programs of 1, 10 and 100 launches without
allocations, beside Triton's own call and `torch.mul(x, y, out=out)`; and of a call of a program of one kernel and one
allocation. The script synchronises between rounds only.
Run: `python benchmarks/call_overhead.py [--device cuda] [--record]`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.results import Cell, Report, add_record_option
from fxwrap.runtime.triton.compile import split_launch_options, triton_jit_function
from fxwrap.wrapper_ir import KernelDefinition, print_kernel

EMITTERS = ("python", "cpp", "fx")
LABELS = {"python": "Python", "cpp": "C++", "fx": "FX", "triton": "Triton"}
ROUNDS = 25


def chain(count: int) -> Callable[..., Any]:
    """Returns a function of two tensors that calls `count` operators."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for index in range(count):
            x = torch.mul(x, y) if index % 2 == 0 else torch.add(x, y)
        return x

    return run


def many_parameters(count: int) -> Callable[..., Any]:
    """Returns a function of `count` tensors that uses two of them."""

    def run(*parameters: torch.Tensor) -> torch.Tensor:
        return torch.mul(parameters[0], parameters[-1])

    return run


def per_call(function: Callable[..., Any], inputs: Sequence[Any], calls: int) -> float:
    """Returns the CPU seconds of a call over one round, which other work on the machine does not add to."""
    start = time.process_time()
    for _ in range(calls):
        function(*inputs)
    return (time.process_time() - start) / calls


def row(
    report: Report, name: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor], operators: int
) -> None:
    """Adds one row to the table."""
    graph = make_fx(function)(*inputs)
    contenders: dict[str, Callable[..., Any]] = {"eager": function}
    for emitter in EMITTERS:
        options = fxwrap.Options(check_inputs=False, fuse=False).replace(emitter=emitter)
        contenders[emitter] = fxwrap.compile_graph(graph, inputs, options=options).flat
    expected = function(*inputs)
    errors = [float((contenders[emitter](*inputs)[0] - expected).norm()) for emitter in EMITTERS]
    calls = max(20, 4000 // operators)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for side, contender in contenders.items():
            times[side].append(per_call(contender, inputs, calls))
    medians = {side: statistics.median(samples) for side, samples in times.items()}
    cells: dict[str, Cell] = {"program": name, "eager, us": 1e6 * medians["eager"] / operators}
    for emitter in EMITTERS:
        cells[f"{LABELS[emitter]}, us"] = 1e6 * medians[emitter] / operators
        cells[f"{LABELS[emitter]} / eager"] = medians[emitter] / medians["eager"]
    report.add({**cells, "largest difference": max(errors)}, times)


class Scaled(torch.nn.Module):
    """A model with a keyword and a result with a name."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the product."""
        return {"scaled": x * scale}


def entries_row(report: Report, emitter: str) -> None:
    """Adds the microseconds of a call of one operator, by the entry that is called."""
    x, y = torch.randn(4), torch.rand(4)
    options = fxwrap.Options().replace(emitter=emitter)
    model = fxwrap.compile_graph(torch.export.export(Scaled(), (x,), {"scale": y}), options=options)
    graph = fxwrap.compile_graph(make_fx(lambda x, y: (x * y,))(x, y), (x, y), options=options)
    first, second = graph.convention.arguments
    contenders: dict[str, Callable[..., Any]] = {
        "flat": graph.flat,
        "by position": graph,
        "by name": lambda x, y: graph(**{first: x, second: y}),
        "flat, exported": model.flat,
        "by position and name, a dict": lambda x, y: model(x, scale=y),
    }
    microseconds_row(report, emitter, contenders, (x, y))


def compiled_row(report: Report, emitter: str) -> None:
    """Adds the microseconds of a call of torch.compile's function of one operator."""
    contenders = {
        name: torch.compile(
            lambda x, y: x * y, backend="fxwrap", options={"emitter": emitter, "compile_cache": cached}, fullgraph=True
        )
        for name, cached in (("not cached", False), ("cached", True))
    }
    microseconds_row(report, emitter, contenders, (torch.randn(4), torch.rand(4)))


def microseconds_row(
    report: Report, emitter: str, contenders: dict[str, Callable[..., Any]], inputs: Sequence[torch.Tensor]
) -> None:
    """Adds the microseconds of each contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS + 1):
        for side, contender in contenders.items():
            seconds = per_call(contender, inputs, 1000)
            if number:  # the first round compiles
                times[side].append(seconds)
    cells = {f"{side}, us": 1e6 * statistics.median(samples) for side, samples in times.items()}
    report.add({"emitter": LABELS[emitter], **cells}, times)


# --- launches on a GPU ------------------------------------------------------------------------------------------------

KERNEL = KernelDefinition(
    "scale",
    "triton",
    """import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + index, mask=index < n), tl.load(y_ptr + index, mask=index < n)
    tl.store(out_ptr + index, x * y, mask=index < n)
""",
    ("*f32", "*f32", "*f32", "i64"),
    (("BLOCK", 128), ("num_warps", 1)),
)
LAUNCHES_PER_ROUND = 400  # fewer than the driver's queue holds


def launches(count: int) -> fxwrap.Program:
    """Returns a program of `count` launches into an input."""
    ownership = {"x": "borrowed", "y": "borrowed", "out": "mutable"}
    inputs = ", ".join([f"%{name}: {kind} f32[128]@cuda:0" for name, kind in ownership.items()])
    line = "  kernel.launch @scale(%x, %y, 128) outs=(%out) grid=(1, 1, 1)\n"
    return fxwrap.parse(f"program @launches({inputs}) {{\n{line * count}  control.return()\n}}\n{print_kernel(KERNEL)}")


def by_triton(count: int) -> Callable[..., None]:
    """Returns the same launches by Triton."""
    kernel = triton_jit_function(KERNEL.source, KERNEL.signature, KERNEL.options)
    constants, compile_options = split_launch_options(KERNEL.options)

    def run(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        for _ in range(count):
            kernel[(1,)](x, y, out, 128, **constants, **compile_options)

    return run


def by_eager(count: int) -> Callable[..., None]:
    """Returns the same multiplications by torch."""

    def run(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        for _ in range(count):
            torch.mul(x, y, out=out)

    return run


def gpu_row(
    report: Report, name: str, contenders: dict[str, Callable[..., Any]], inputs: Sequence[torch.Tensor], count: int
) -> None:
    """Adds the microseconds of each contender, divided by `count`."""
    calls = max(1, LAUNCHES_PER_ROUND // count)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS + 2):
        for side, contender in contenders.items():
            torch.cuda.synchronize()
            seconds = per_call(contender, inputs, calls)
            if number >= 2:  # the first rounds compile and load
                times[side].append(seconds)
    medians = {side: statistics.median(samples) for side, samples in times.items()}
    cells = {f"{LABELS.get(side, side)}, us": 1e6 * median / count for side, median in medians.items()}
    report.add({"program": name, **cells}, times)


def gpu_main(chosen: argparse.Namespace) -> None:
    """Prints the tables of launches and of whole calls."""
    x, y, out = torch.randn(128, device="cuda"), torch.rand(128, device="cuda"), torch.empty(128, device="cuda")
    report = Report("call_overhead-cuda", chosen, "cuda", f"CPU time per launch, medians of {ROUNDS} rounds")
    for count in (1, 10, 100):
        by_triton(1)(x, y, out)  # compiles the kernel before emitted C++ is built, as compile_graph does
        program = launches(count)
        emitted = {"python": fxwrap.to_python(program), "cpp": fxwrap.to_cpp(program), "fx": fxwrap.to_fx(program)}
        ready = {"eager": by_eager(count), "triton": by_triton(count)}
        ready |= {name: form.flat for name, form in emitted.items()}
        for name, run in ready.items():
            out.zero_()
            run(x, y, out)
            if not torch.equal(out, x * y):
                raise SystemExit(f"{name} returns wrong results")
        gpu_row(report, f"{count} launches", ready, (x, y, out), count)
    graph = make_fx(lambda x, y: (torch.mul(x, y) + 1,))(x, y)
    report = Report("call_overhead-calls-cuda", chosen, "cuda", f"CPU time per call, medians of {ROUNDS} rounds")
    calls: dict[str, Callable[..., Any]] = {"eager": lambda x, y: torch.mul(x, y) + 1}
    for emitter in EMITTERS:
        options = fxwrap.Options(check_inputs=False, fallback="error").replace(emitter=emitter)
        calls[emitter] = fxwrap.compile_graph(graph, (x, y), options=options).flat
    gpu_row(report, "one kernel, one output", calls, (x, y), 1)


def main() -> None:
    """Prints the tables of a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_record_option(parser)
    chosen = parser.parse_args()
    with torch.no_grad():
        (gpu_main if chosen.device == "cuda" else cpu_main)(chosen)


def cpu_main(chosen: argparse.Namespace) -> None:
    """Prints the table of operators on tiny tensors."""
    torch.set_num_threads(1)
    report = Report("call_overhead-cpu", chosen, note=f"CPU time per operator, medians of {ROUNDS} rounds")
    for count in (1, 10, 100, 1000):
        row(report, f"{count} operators", chain(count), [torch.randn(4), torch.rand(4)], count)
    row(report, "1 of 200 parameters", many_parameters(200), [torch.randn(4) for _ in range(200)], 1)
    report = Report("call_overhead-entries-cpu", chosen, note=f"CPU time per call, medians of {ROUNDS} rounds")
    for emitter in EMITTERS:
        entries_row(report, emitter)
    # Dynamo slows down Python once it is in a process, so its table is the last.
    report = Report("call_overhead-compiled-cpu", chosen, note=f"CPU time per call, medians of {ROUNDS} rounds")
    for emitter in EMITTERS:
        compiled_row(report, emitter)


if __name__ == "__main__":
    main()

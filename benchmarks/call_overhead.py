"""Cost of a call: the same unfused program against eager on tiny tensors.

Chains of 1 to 1000 operators, and one operator in a program with 200 parameters. Eager means what a person writes:
`torch.mul(x, y)`. Each row gives the time a call and the ratio to eager, medians of interleaved rounds in one process.

With `--device cuda`: what the host spends on a launch of a tiny Triton kernel, from programs of 1, 10 and 100 launches
that allocate nothing, beside Triton's own call and `torch.mul(x, y, out=out)`; and on a whole call of a program of one
kernel and one allocation. The GPU is waited for between rounds, never within.
Run: `python benchmarks/call_overhead.py [--device cuda]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.runtime.triton_compile import gpu_function, launch_keywords
from fxwrap.wrapper_ir import KernelDefinition, print_kernel

EMITTERS = ("python", "cpp", "fx")
ROUNDS = 25


def chain(count: int) -> Callable[..., Any]:
    """A function of two tensors that calls `count` operators."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for index in range(count):
            x = torch.mul(x, y) if index % 2 == 0 else torch.add(x, y)
        return x

    return run


def many_parameters(count: int) -> Callable[..., Any]:
    """A function of `count` tensors that uses two of them."""

    def run(*parameters: torch.Tensor) -> torch.Tensor:
        return torch.mul(parameters[0], parameters[-1])

    return run


def per_call(function: Callable[..., Any], inputs: Sequence[Any], calls: int) -> float:
    """Seconds a call, over one round."""
    start = time.perf_counter()
    for _ in range(calls):
        function(*inputs)
    return (time.perf_counter() - start) / calls


def row(name: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor], operators: int) -> None:
    """Prints one row of the table."""
    graph = make_fx(function)(*inputs)
    contenders: dict[str, Callable[..., Any]] = {"eager": function}
    for emitter in EMITTERS:
        options = fxwrap.Options(emitter=emitter, check_inputs=False, fuse=False)
        contenders[emitter] = fxwrap.compile_graph(graph, inputs, options=options).flat
    wanted = function(*inputs)
    errors = [float((contenders[emitter](*inputs)[0] - wanted).norm()) for emitter in EMITTERS]
    calls = max(20, 4000 // operators)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name_of, contender in contenders.items():
            times[name_of].append(per_call(contender, inputs, calls))
    medians = {name_of: statistics.median(taken) for name_of, taken in times.items()}
    eager, scale = medians["eager"], 1e6 / operators
    cells = "".join(f"{scale * medians[name_of]:>10.2f} {medians[name_of] / eager:>6.2f}" for name_of in EMITTERS)
    print(f"{name:<24}{scale * eager:>10.2f}{cells}   {max(errors):.1e}", flush=True)


# --- launches on a GPU ------------------------------------------------------------------------------------------------

KERNEL = KernelDefinition(
    "scale",
    "triton",
    """import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + place, mask=place < n), tl.load(y_ptr + place, mask=place < n)
    tl.store(out_ptr + place, x * y, mask=place < n)
""",
    ("*f32", "*f32", "*f32", "i64"),
    (("BLOCK", 128), ("num_warps", 1)),
)
LAUNCHES_A_ROUND = 400  # fewer than the driver queues before it makes the host wait


def launches(count: int) -> fxwrap.Program:
    """A program that launches the kernel so many times, into memory that it is given."""
    ownership = {"x": "borrowed", "y": "borrowed", "out": "mutable"}
    inputs = ", ".join([f"%{name}: {how} f32[128]@cuda:0" for name, how in ownership.items()])
    line = "  kernel.launch @scale(%x, %y, 128) outs=(%out) grid=(1, 1, 1)\n"
    return fxwrap.parse(f"program @launches({inputs}) {{\n{line * count}  control.return()\n}}\n{print_kernel(KERNEL)}")


def by_triton(count: int) -> Callable[..., None]:
    """The same launches as Triton's users write them."""
    kernel = gpu_function(KERNEL.source, KERNEL.signature, KERNEL.options)
    constants, choices = launch_keywords(KERNEL.options)

    def run(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        for _ in range(count):
            kernel[(1,)](x, y, out, 128, **constants, **choices)

    return run


def by_eager(count: int) -> Callable[..., None]:
    """The same products by torch."""

    def run(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        for _ in range(count):
            torch.mul(x, y, out=out)

    return run


def gpu_row(name: str, contenders: dict[str, Callable[..., Any]], inputs: Sequence[torch.Tensor], count: int) -> None:
    """Prints the microseconds of each contender, divided by `count`, medians of rounds in turns."""
    calls = max(1, LAUNCHES_A_ROUND // count)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS + 2):
        for name_of, contender in contenders.items():
            torch.cuda.synchronize()
            seconds = per_call(contender, inputs, calls)
            if number >= 2:  # what is compiled and loaded is so by then
                times[name_of].append(seconds)
    cells = "".join(f"{1e6 * statistics.median(taken) / count:>10.2f}" for taken in times.values())
    print(f"{name:<24}{cells}", flush=True)


def gpu_main() -> None:
    """Prints the tables of launches and of whole calls."""
    x, y, out = torch.randn(128, device="cuda"), torch.rand(128, device="cuda"), torch.empty(128, device="cuda")
    print(f"{'us a launch':<24}" + "".join(f"{name:>10}" for name in ("eager", "triton", *EMITTERS)))
    for count in (1, 10, 100):
        by_triton(1)(x, y, out)  # compiled before emitted C++ is built, as compile_graph does it
        program = launches(count)
        emitted = {"python": fxwrap.to_python(program), "cpp": fxwrap.to_cpp(program), "fx": fxwrap.to_fx(program)}
        ready = {"eager": by_eager(count), "triton": by_triton(count)}
        ready |= {name: form.flat for name, form in emitted.items()}
        for name, run in ready.items():
            out.zero_()
            run(x, y, out)
            if not torch.equal(out, x * y):
                raise SystemExit(f"{name} computes something else")
        gpu_row(f"{count} launches", ready, (x, y, out), count)
    graph = make_fx(lambda x, y: (torch.mul(x, y) + 1,))(x, y)
    print(f"{'us a call':<24}" + "".join(f"{name:>10}" for name in ("eager", *EMITTERS)))
    calls: dict[str, Callable[..., Any]] = {"eager": lambda x, y: torch.mul(x, y) + 1}
    for emitter in EMITTERS:
        options = fxwrap.Options(emitter=emitter, check_inputs=False, fallback="error")
        calls[emitter] = fxwrap.compile_graph(graph, (x, y), options=options).flat
    gpu_row("one kernel, one output", calls, (x, y), 1)


def main() -> None:
    """Prints the tables of the device that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    with torch.no_grad():
        if parser.parse_args().device == "cuda":
            gpu_main()
        else:
            cpu_main()


def cpu_main() -> None:
    """Prints the table of operators on tiny tensors."""
    torch.set_num_threads(1)
    heads = "".join(f"{name:>10} {'ratio':>6}" for name in EMITTERS)
    print(f"{'us an operator':<24}{'eager':>10}{heads}   difference")
    for count in (1, 10, 100, 1000):
        row(f"{count} operators", chain(count), [torch.randn(4), torch.rand(4)], count)
    row("1 of 200 parameters", many_parameters(200), [torch.randn(4) for _ in range(200)], 1)


if __name__ == "__main__":
    main()

"""Cost of a call: the same unfused program against eager on tiny tensors.

Chains of 1 to 1000 operators, and one operator in a program with 200 parameters. Eager means what a person writes:
`torch.mul(x, y)`. Each row gives the time a call and the ratio to eager, medians of interleaved rounds in one process.
Run: `python benchmarks/call_overhead.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap

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


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    heads = "".join(f"{name:>10} {'ratio':>6}" for name in EMITTERS)
    print(f"{'us an operator':<24}{'eager':>10}{heads}   difference")
    with torch.no_grad():
        for count in (1, 10, 100, 1000):
            row(f"{count} operators", chain(count), [torch.randn(4), torch.rand(4)], count)
        row("1 of 200 parameters", many_parameters(200), [torch.randn(4) for _ in range(200)], 1)


if __name__ == "__main__":
    main()

"""Compiled steps of torch.optim's optimizers for the parameters of real models: many small tensors, a few large ones.

All sides of a model and an optimizer are timed in one process in interleaved rounds, each on parameters and gradients
of its own. "eager" is torch's foreach implementation, "fused" its hand-written kernel, "apart" fxwrap without the
option `join_launches`. On a GPU optimizers are capturable: their step counts are on the device. Columns:

- us: median of a step with the device's work; "/ inductor" is its ratio to Inductor's (`+graphs` to `+graphs`).
- host us: median until a step returns, the device's queue empty before.
- device us, kernels: the sum of the kernels' times of a step, by the profiler, and how many they are.
- error: norm(difference) / norm(reference in float64) of the worst parameter's change over three steps.
- first s: the first step, which compiles.

    python benchmarks/optimizers.py [--device cuda] [--models gpt2,resnet] [--optimizers adamw,sgd] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.full_models import FULL, full_case
from benchmarks.measure_kernels import (
    Contender,
    compile_with,
    describe,
    environment,
    first_line,
    interleaved_host_times,
    relative_error,
    synchronize,
)

SIDES = ("eager", "fused", "inductor", "inductor:+graphs", "fxwrap:python", "fxwrap:cpp", "fxwrap:cpp apart",
         "fxwrap:cpp+graphs")  # fmt: skip
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda given, **_: torch.optim.SGD(given, lr=1e-2, momentum=0.9),
}
STEPS = 3


@dataclass
class Side:
    """An optimizer with parameters of its own, and its step through one backend."""

    name: str
    parameters: list[nn.Parameter]
    step: Callable[[], Any]
    found: dict[str, Any] = field(default_factory=dict)


def parameters(shapes: Sequence[torch.Size], device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters of these shapes with gradients; equal numbers at every call."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    made = [nn.Parameter(drawn(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = drawn(parameter.shape)
    return made


def side(name: str, optimizer: str, shapes: Sequence[torch.Size], device: torch.device, dtype: torch.dtype) -> Side:
    """A side with nothing compiled yet."""
    backend, _, apart = name.partition(" ")
    own = parameters(shapes, device, dtype)
    chosen: dict[str, Any] = {"capturable": device.type == "cuda"} if optimizer == "adamw" else {}
    chosen |= {"fused": True} if backend == "fused" else {}
    made = OPTIMIZERS[optimizer](own, **chosen)
    options = {"join_launches": False} if apart else {}
    step = made.step if backend in ("eager", "fused") else compile_with(backend, made.step, options)
    return Side(name, own, step)


def changes(of: Side, start: Sequence[Tensor]) -> Iterator[Tensor]:
    """What steps have changed each parameter by."""
    for parameter, before in zip(of.parameters, start, strict=True):
        yield parameter.detach().double() - before.double()


def prepare(of: Side, reference: Sequence[Tensor], device: torch.device) -> None:
    """Makes the first steps, and finds out their error."""
    start = [parameter.detach().clone() for parameter in of.parameters]
    before = time.perf_counter()
    of.step()
    synchronize(device)
    of.found["first"] = time.perf_counter() - before
    for _ in range(STEPS - 1):
        of.step()
    of.found["error"] = relative_error(list(changes(of, start)), reference)


def kernels(of: Side) -> None:
    """Finds out, by the profiler, how many kernels a step has on a GPU, and how long they take."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA], acc_events=True) as profile:
        of.step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or [] if event.device_type.name == "CUDA"]
    of.found["kernels"] = len(events)
    of.found["device"] = sum(event.time_range.elapsed_us() for event in events) / 1e6


def measure(model: str, optimizer: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """What was found out of each side."""
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    shapes = [item.shape for item in full_case(model, small=chosen.small).build(0).parameters()]
    exact = side("eager", optimizer, shapes, device, torch.float64)
    for double, single in zip(exact.parameters, parameters(shapes, device, dtype), strict=True):
        double.data.copy_(single.data)
        assert double.grad is not None and single.grad is not None
        double.grad.copy_(single.grad)
    start = [parameter.detach().clone() for parameter in exact.parameters]
    for _ in range(STEPS):
        exact.step()
    reference = list(changes(exact, start))
    ready: list[Side] = []
    rows: list[dict[str, Any]] = []
    for name in chosen.sides:
        if name == "fused" and optimizer != "adamw":
            continue
        torch._dynamo.reset()
        made = side(name, optimizer, shapes, device, dtype)
        try:
            prepare(made, reference, device)
        except Exception as error:  # noqa: BLE001 - one side's failure is a line of the table
            rows.append({"side": name, "failure": first_line(error)})
            continue
        ready.append(made)
    contenders = {made.name: Contender(_repeated(made.step, chosen.calls), chosen.calls) for made in ready}
    once = {made.name: Contender(made.step, 1) for made in ready}
    times = interleaved_host_times(contenders, chosen.rounds, device)
    host = interleaved_host_times(once, chosen.rounds, device, wait=False)
    for made in ready:
        if device.type == "cuda":
            kernels(made)
        seconds = {"time": times[made.name].median, "host": host[made.name].median}
        rows.append({"side": made.name, **seconds, **made.found})
    return rows


def _repeated(step: Callable[[], Any], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            step()

    return run


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a side."""
    heads = ("us", "/ inductor", "host us", "/ inductor", "device us", "kernels", "error", "first s")
    lines = [f"\n{title:<22}" + "".join(f"{head:>12}" for head in heads)]
    known = {row["side"]: row for row in rows}
    for row in rows:
        if "failure" in row:
            lines.append(f"{row['side']:<22}  {row['failure'][:160]}")
            continue
        other = known.get("inductor:+graphs" if row["side"].endswith("+graphs") else "inductor", {})
        ratios = [f"{row[name] / other[name]:.2f}" if name in other else "-" for name in ("time", "host")]
        device = [f"{row['device'] * 1e6:.0f}", str(row["kernels"])] if "device" in row else ["-", "-"]
        cells = (f"{row['time'] * 1e6:.0f}", ratios[0], f"{row['host'] * 1e6:.0f}", ratios[1], *device,
                 f"{row['error']:.1e}", f"{row['first']:.1f}")  # fmt: skip
        lines.append(f"{row['side']:<22}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--models", default="gpt2,resnet", help=f"some of {', '.join(FULL)}, with commas")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="with commas")
    parser.add_argument("--sides", default=",".join(SIDES), help="with commas")
    parser.add_argument("--small", action="store_true", help="tiny models: to try the script")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5, help="steps in a row that are timed together")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    chosen.sides = chosen.sides.split(",")
    if chosen.device == "cpu":
        chosen.sides = [name for name in chosen.sides if "graphs" not in name and "apart" not in name]
    facts = environment(torch.device(chosen.device), {})
    print(describe(facts), flush=True)
    results = []
    for model in chosen.models.split(","):
        for optimizer in chosen.optimizers.split(","):
            rows = measure(model, optimizer, chosen)
            print(table(f"{model}, {optimizer}", rows), flush=True)
            results.append({"model": model, "optimizer": optimizer, "sides": rows})
            if chosen.json is not None:
                chosen.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

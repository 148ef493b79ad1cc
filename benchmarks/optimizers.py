"""Compiled optimizer steps of torch.optim for the parameters of real models: many small tensors, a few large ones.

All sides of a model and an optimizer are timed in one process in interleaved rounds, each on its own parameters and
gradients. "eager" is torch's foreach implementation, "fused" its hand-written kernel, "separate" fxwrap without the
option `combo_kernels`. On a GPU optimizers are capturable: their step counts are on the device. Columns:

- time: median of a step with the device's work; "/ Inductor" is the ratio to Inductor's (`+graphs` to `+graphs`).
- host: median until a step returns, with an empty device queue before.
- device, kernels: sum of a step's kernel times, and number of kernels, by the profiler.
- error: norm(difference) / norm(reference in float64) of the worst parameter's change over three steps.
- first step: includes the compile.

    python benchmarks/optimizers.py [--device cuda] [--models gpt2,resnet] [--optimizers adamw,sgd] [--record]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.full_models import FULL, full_case
from benchmarks.measure_kernels import (
    Contender,
    compile_with,
    first_line,
    interleaved_host_times,
    relative_error,
    repeat,
    synchronize,
)
from benchmarks.results import Cell, Report, add_record_option, display_name

SIDES = ("eager", "fused", "inductor", "inductor:+graphs", "fxwrap:python", "fxwrap:cpp", "fxwrap:cpp separate",
         "fxwrap:cpp+graphs")  # fmt: skip
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters, **_: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
STEPS = 3


@dataclass
class Side:
    """An optimizer with its own parameters, and its step through one backend."""

    name: str
    parameters: list[nn.Parameter]
    step: Callable[[], Any]
    measurements: dict[str, Any] = field(default_factory=dict)


def parameters(shapes: Sequence[torch.Size], device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """Returns parameters of these shapes with gradients; the values are equal at every call."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    result = [nn.Parameter(random(shape)) for shape in shapes]
    for parameter in result:
        parameter.grad = random(parameter.shape)
    return result


def side(name: str, optimizer: str, shapes: Sequence[torch.Size], device: torch.device, dtype: torch.dtype) -> Side:
    """Returns a side that is not compiled yet."""
    backend, _, separate = name.partition(" ")
    side_parameters = parameters(shapes, device, dtype)
    chosen: dict[str, Any] = {"capturable": device.type == "cuda"} if optimizer == "adamw" else {}
    chosen |= {"fused": True} if backend == "fused" else {}
    instance = OPTIMIZERS[optimizer](side_parameters, **chosen)
    options = {"combo_kernels": False} if separate else {}
    step = instance.step if backend in ("eager", "fused") else compile_with(backend, instance.step, options)
    return Side(name, side_parameters, step)


def changes(of: Side, start: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the change of each parameter since `start`."""
    for parameter, before in zip(of.parameters, start, strict=True):
        yield parameter.detach().double() - before.double()


def prepare(of: Side, reference: Sequence[Tensor], device: torch.device) -> None:
    """Runs the first steps and measures their error."""
    start = [parameter.detach().clone() for parameter in of.parameters]
    before = time.perf_counter()
    of.step()
    synchronize(device)
    of.measurements["first"] = time.perf_counter() - before
    for _ in range(STEPS - 1):
        of.step()
    of.measurements["error"] = relative_error(list(changes(of, start)), reference)


def kernels(of: Side) -> None:
    """Measures, with the profiler, the number of kernels of a step and their total time."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA], acc_events=True) as profile:
        of.step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or [] if event.device_type.name == "CUDA"]
    of.measurements["kernels"] = len(events)
    of.measurements["device"] = sum(event.time_range.elapsed_us() for event in events) / 1e6


def measure(model: str, optimizer: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the measurements of each side."""
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
        item = side(name, optimizer, shapes, device, dtype)
        try:
            prepare(item, reference, device)
        except Exception as error:  # noqa: BLE001 - a side's failure is reported
            rows.append({"side": name, "failure": first_line(error)})
            continue
        ready.append(item)
    contenders = {item.name: Contender(partial(repeat, item.step, chosen.calls), chosen.calls) for item in ready}
    once = {item.name: Contender(item.step, 1) for item in ready}
    times = interleaved_host_times(contenders, chosen.rounds, device)
    host = interleaved_host_times(once, chosen.rounds, device, wait=False)
    for item in ready:
        if device.type == "cuda":
            kernels(item)
        seconds = {"time": times[item.name].median, "host": host[item.name].median}
        rows.append({"side": item.name, **seconds, **item.measurements})
    return rows


def cells(model: str, optimizer: str, row: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Cell]:
    """Returns a row of the table; `other` has Inductor's measurements."""

    def ratio(name: str) -> float | None:
        return row[name] / other[name] if name in row and name in other else None

    def micros(name: str) -> float | None:
        return row[name] * 1e6 if name in row else None

    return {
        "model": model,
        "step": optimizer,
        "side": display_name(row["side"]),
        "time, us": micros("time"),
        "time / Inductor": ratio("time"),
        "host, us": micros("host"),
        "host / Inductor": ratio("host"),
        "device, us": micros("device"),
        "kernels": row.get("kernels"),
        "error": row.get("error"),
        "first step, s": row.get("first"),
    }


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
    add_record_option(parser)
    chosen = parser.parse_args()
    chosen.sides = chosen.sides.split(",")
    if chosen.device == "cpu":
        chosen.sides = [name for name in chosen.sides if "graphs" not in name and "separate" not in name]
    report = Report(f"optimizers-{chosen.device}", chosen, chosen.device, f"medians of {chosen.rounds} rounds")
    for model in chosen.models.split(","):
        for optimizer in chosen.optimizers.split(","):
            rows = {row["side"]: row for row in measure(model, optimizer, chosen)}
            for name, row in rows.items():
                other = rows.get("inductor:+graphs" if name.endswith("+graphs") else "inductor", {})
                report.add(cells(model, optimizer, row, other), row)
                if "failure" in row:
                    print(f"    {name} failed: {row['failure']}", flush=True)


if __name__ == "__main__":
    main()

"""Training steps of GPT-2 and Llama as one program (`compile_step`), as separate programs, by Inductor and eager.

The separate programs are a compiled model (forward and backward) and a compiled optimizer step; gradients are clipped
in eager between them. All sides are timed in one process in interleaved rounds, each on its own model. Columns:

- time: median of a step with the device's work; host: until a step returns, with an empty device queue before. On a CPU
  both include the kernels, so that tiny models show the host's part.
- peak: memory that a step allocates beyond what was allocated before it.
- planned: the largest memory of a program by its plan, beside which the other state of the process lives; on CPUs only,
  since it needs one more compile of the separate programs.

    python benchmarks/training_steps.py --small --record      # tiny models: host time
    python benchmarks/training_steps.py --device cuda --record
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.full_models import full_case
from benchmarks.measure_kernels import Contender, interleaved_host_times
from benchmarks.results import Report, add_record_option, display_name
from fxwrap.comparison.measure import peak_bytes
from fxwrap.options import Options
from tests.support.planned_peaks import PlannedPeaks, planned_peak

SIDES = ("eager", "inductor", "separate", "step")
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Training:
    """A model with AdamW on one side."""

    def __init__(self, model: str, chosen: argparse.Namespace) -> None:
        case = full_case(model, small=chosen.small)
        self.device, self.case = torch.device(chosen.device), case
        self.model = case.build(0).to(self.device, getattr(torch, chosen.dtype)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), capturable=self.device.type == "cuda")
        self.inputs = {name: value.to(self.device) for name, value in case.inputs(0, training=True).items()}

    def step_with(self, forward: Callable[..., Any], update: Callable[[], Any]) -> Callable[..., Tensor]:
        """Returns the step with a forward and an update."""

        def step(inputs: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.case.loss(forward(**inputs))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            update()
            self.optimizer.zero_grad()
            return loss.detach()

        return step

    def separate(self, compile_: Compile) -> Callable[..., Tensor]:
        """Returns a step of separately compiled parts."""
        return self.step_with(compile_(self.model), compile_(self.optimizer.step))

    def state(self) -> list[Tensor]:
        """Returns the parameters and the optimizer's state."""
        values = [value for items in self.optimizer.state.values() for value in items.values()]
        return [*self.model.parameters(), *values]

    def side(self, name: str) -> Callable[..., Tensor]:
        """Returns the step of a side."""
        match name:
            case "eager":
                return self.step_with(self.model, self.optimizer.step)
            case "inductor" | "separate":
                backend = {"separate": "fxwrap"}.get(name, name)
                return self.separate(lambda target: torch.compile(target, backend=backend))
            case _:
                step = self.step_with(self.model, self.optimizer.step)
                return fxwrap.compile_step(step, (self.inputs,), options=Options())


def planned_peak_of_parts(model: str, chosen: argparse.Namespace) -> int:
    """Returns the planned peak of the separate programs in bytes."""
    torch._dynamo.reset()
    training = Training(model, chosen)
    peaks = PlannedPeaks(training.state)
    step = training.separate(lambda target: torch.compile(target, backend=peaks.backend()))
    for _ in range(2):
        step(training.inputs)
    return peaks.largest


def measure(model: str, report: Report, chosen: argparse.Namespace) -> None:
    """Measures all sides of a model."""
    device = torch.device(chosen.device)
    trainings, steps = {}, {}
    planned = {"separate": planned_peak_of_parts(model, chosen)} if device.type == "cpu" else {}
    for name in chosen.sides:
        torch._dynamo.reset()
        training = trainings[name] = Training(model, chosen)
        step = steps[name] = training.side(name)
        for _ in range(3):
            loss = step(training.inputs)
        if isinstance(step, fxwrap.CompiledStep) and planned:
            planned[name] = planned_peak(step.compiled)
        print(f"    {model}, {name}: third loss {loss.item():.5f}", flush=True)
    run = {name: (lambda step=step, name=name: step(trainings[name].inputs)) for name, step in steps.items()}
    contenders = {name: Contender(item, 1) for name, item in run.items()}
    times = interleaved_host_times(contenders, chosen.rounds, device)
    host = interleaved_host_times(contenders, chosen.rounds, device, wait=False)
    allocated = {name: peak_bytes(lambda: None, lambda _, item=item: item()) for name, item in run.items()}  # type: ignore[misc]
    for name in steps:
        row = {
            "model": model,
            "side": display_name(name) if name in ("eager", "inductor") else name,
            "time, us": times[name].median * 1e6,
            "host, us": host[name].median * 1e6,
            "host / separate": host[name].median / host["separate"].median,
            "peak, MiB": allocated[name] / 2**20,
            "peak / separate": allocated[name] / allocated["separate"] if allocated["separate"] else None,
            "planned, MiB": planned[name] / 2**20 if name in planned else None,
        }
        report.add(row, {"time": times[name].samples, "host": host[name].samples})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--models", default="gpt2,llama", help="with commas")
    parser.add_argument("--sides", default=",".join(SIDES), help="with commas; separate must be among them")
    parser.add_argument("--small", action="store_true", help="tiny models, whose steps are host time mostly")
    parser.add_argument("--rounds", type=int, default=30)
    add_record_option(parser)
    chosen = parser.parse_args()
    chosen.sides = chosen.sides.split(",")
    kind = f"{chosen.device}-small" if chosen.small else chosen.device
    report = Report(f"training_steps-{kind}", chosen, chosen.device, f"medians of {chosen.rounds} rounds")
    for model in chosen.models.split(","):
        measure(model, report, chosen)


if __name__ == "__main__":
    main()

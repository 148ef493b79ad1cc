"""Peaks of memory on a GPU: what a step of a model holds beside Inductor, and each program beside its plan.

GPT-2, a Llama and ResNet-50 at full size in bfloat16, inference and training, with eager, Inductor and fxwrap's Python
and C++, which has pools by default. A peak is `torch.cuda.max_memory_allocated` during a step less what was allocated
before it.

"Over plan" is the worst over the model's programs. "All": what is allocated while a program runs over the plan's peak,
inputs and parameters in both; "own": the same without what a program is given, for which scratch memory of operators,
which is in what is measured and in no plan, is a larger part; "asked for": the last by what was requested, since
torch's allocator gives up to 1 MiB more than that. Run:

    python benchmarks/gpu_memory.py [--models gpt2,llama,resnet] [--small]
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._dynamo

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import describe, environment, first_line
from benchmarks.model_jobs import Job, call
from fxwrap.backend import make_backend
from fxwrap.compiler import compile_graph
from fxwrap.lines import Return
from fxwrap.options import Options
from fxwrap.wrapper_ir import Block, live_bytes

MODELS = ("gpt2", "llama", "resnet")
SIDES: dict[str, Mapping[str, Any] | None] = {
    "eager": None,
    "inductor": None,
    "fxwrap, Python": {},
    "fxwrap, C++": {"emitter": "cpp"},
}


class OverPlan(NamedTuple):
    """What a program was seen to hold at most, over its plan's peak."""

    all: float
    own: float
    asked_for: float


class Watched:
    """Compiles graphs for fxwrap's backend, and while `on` measures the peak of each call of what it gives."""

    def __init__(self) -> None:
        self.on = False
        self.found: list[OverPlan] = []

    def compile(self, *arguments: Any, **keywords: Any) -> Any:
        """What `compile_graph` gives, as far as the backend uses it."""
        compiled = compile_graph(*arguments, **keywords)
        boxed = compiled.boxed
        planned = live_bytes(compiled.program).peak
        given = live_bytes(compiled.program.replace(body=Block((), (Return(()),)))).peak
        own = max(planned - given, 1)

        def run(inputs: list[Any]) -> Any:
            if not self.on:
                return boxed(inputs)
            with Peak() as peak:
                found = boxed(inputs)
            self.found.append(OverPlan((peak.bytes + given) / planned, peak.bytes / own, peak.requested / own))
            return found

        return SimpleNamespace(program=compiled.program, boxed=run)

    def worst(self) -> OverPlan:
        """The worst of each figure."""
        return OverPlan(*[max(figures) for figures in zip(*self.found)])


class Peak:
    """The most memory allocated between its beginning and its end, less what was there before, in `bytes`.

    `requested` is the same of what was asked for, which the allocator rounds up.
    """

    bytes = requested = 0

    def __enter__(self) -> Peak:
        self._before = self._now("current")
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes, self.requested = [peak - before for peak, before in zip(self._now("peak"), self._before)]

    def _now(self, which: str) -> list[int]:
        stats = torch.cuda.memory_stats()
        return [stats[f"{kind}_bytes.all.{which}"] for kind in ("allocated", "requested")]


def step_of(job: Job, side: str, watched: Watched) -> Callable[[int], None]:
    """A function that runs one step of the model through a side, on the inputs of a number."""
    torch._dynamo.reset()
    model, sets = job.build(), [job.inputs(seed) for seed in range(4)]
    options = SIDES[side]
    if options is not None:
        backend: Any = make_backend(Options(**options), watched.compile)
        function = torch.compile(model, backend=backend, fullgraph=True)
    else:
        function = model if side == "eager" else torch.compile(model, backend=side, fullgraph=True)

    def run(index: int) -> None:
        call(job, function, sets[index])
        if job.training:
            model.zero_grad(set_to_none=True)

    return run


def peak_of(job: Job, side: str) -> tuple[int, OverPlan | None]:
    """The peak of a step in bytes, and the worst of its programs over their plans."""
    watched = Watched()
    run = step_of(job, side, watched)
    for index in range(2):
        run(index)
    torch.cuda.synchronize()
    with Peak() as peak:
        run(2)
        torch.cuda.synchronize()
    watched.on = SIDES[side] is not None  # watching a program forgets the step's peak
    if watched.on:
        run(3)
    return peak.bytes, watched.worst() if watched.on else None


def show(models: Sequence[str], small: bool) -> None:
    """Prints a table for each model and kind of step."""
    for name in models:
        for training in (False, True):
            job = Job("", name, training, (), "cuda", size="small" if small else "full", dtype="bfloat16")
            print(f"\n{name}, {'training' if training else 'inference'}")
            print("side | peak MB | / inductor | over plan: all | own | asked for")
            peaks: dict[str, int] = {}
            for side in SIDES:
                try:
                    peaks[side], worst = peak_of(job, side)
                except Exception as problem:  # noqa: BLE001 - one side's failure is a cell of the table
                    print(f"{side} | {first_line(problem)}", flush=True)
                    continue
                finally:
                    torch._dynamo.reset()
                    gc.collect()
                    torch.cuda.empty_cache()
                beside = f"{peaks[side] / peaks['inductor']:.3f}" if peaks.get("inductor") else "-"
                plan = "-" if worst is None else " | ".join([f"{figure:.3f}" for figure in worst])
                print(f"{side} | {peaks[side] / 1e6:.1f} | {beside} | {plan}", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, with commas")
    parser.add_argument("--small", action="store_true", help="tiny models: to try the script")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: benchmarks/memory.py has the plans alone")
    print(describe(environment(torch.device("cuda"), {})), flush=True)
    show(chosen.models.split(","), chosen.small)


if __name__ == "__main__":
    main()

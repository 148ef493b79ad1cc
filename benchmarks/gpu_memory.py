"""Peaks of memory on a GPU: what a step of a model holds beside Inductor, and each program beside its plan.

GPT-2, a Llama and ResNet-50 at full size in bfloat16, inference and training, with eager, Inductor and fxwrap without
pools, with pools, and with pools that may exceed the peak by 2%. A peak is `torch.cuda.max_memory_allocated` during a
call less what was allocated before it. The plan's figure for a program is what its live ranges add up to at the worst
line, beyond the memory that it is given; "worst / plan" is the worst over the model's programs, first of what is
allocated, then of what is requested: torch's allocator gives up to 1 MiB more than was asked for. Scratch memory of
operators is in what is measured and in no plan. Run:

    python benchmarks/gpu_memory.py [--models gpt2,llama,resnet] [--small]
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import describe, environment, first_line
from benchmarks.model_jobs import Job, call
from fxwrap.backend import make_backend
from fxwrap.compiler import compile_graph
from fxwrap.lines import Return
from fxwrap.options import Options
from fxwrap.wrapper_ir import Block, Program, live_bytes

MODELS = ("gpt2", "llama", "resnet")
SIDES: dict[str, Mapping[str, Any] | None] = {
    "eager": None,
    "inductor": None,
    "fxwrap": {},
    "fxwrap, pools": {"memory_planning": "auto"},
    "fxwrap, pools, 2% slack": {"memory_planning": "auto", "memory_slack": 0.02},
}


class Watched:
    """Compiles graphs for fxwrap's backend, and measures the peak of each call of what it gives beside the plan."""

    def __init__(self) -> None:
        self.ratios: dict[int, tuple[float, float]] = {}

    def compile(self, *arguments: Any, **keywords: Any) -> Any:
        """What `compile_graph` gives, as far as the backend uses it."""
        compiled = compile_graph(*arguments, **keywords)
        planned, place = own_peak(compiled.program), len(self.ratios)
        boxed = compiled.boxed

        def run(inputs: list[Any]) -> Any:
            with Peak() as peak:
                found = boxed(inputs)
            self.ratios[place] = (peak.bytes / planned, peak.requested / planned) if planned else (1.0, 1.0)
            return found

        return SimpleNamespace(program=compiled.program, boxed=run)


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


def own_peak(program: Program) -> int:
    """Bytes that a program holds at its worst line beyond what it holds when it begins."""
    given = live_bytes(program.replace(body=Block((), (Return(()),)))).peak
    return max(live_bytes(program).peak - given, 0)


def step_of(job: Job, side: str, watched: Watched | None) -> Callable[[int], None]:
    """A function that runs one step of the model through a side, on the inputs of a number; programs may be watched."""
    torch._dynamo.reset()
    model, sets = job.build(), [job.inputs(seed) for seed in range(3)]
    options = SIDES[side]
    if options is not None:
        backend: Any = make_backend(Options(**options), compile_graph if watched is None else watched.compile)
        function = torch.compile(model, backend=backend, fullgraph=True)
    else:
        function = model if side == "eager" else torch.compile(model, backend=side, fullgraph=True)

    def run(index: int) -> None:
        call(job, function, sets[index])
        if job.training:
            model.zero_grad(set_to_none=True)

    return run


def peak_of(job: Job, side: str) -> tuple[int, tuple[float, float] | None]:
    """The peak of a step in bytes, and the worst of its programs' peaks over their plans."""
    watched = Watched()
    run = step_of(job, side, watched)
    for index in range(2):
        run(index)
    torch.cuda.synchronize()
    worst = max(watched.ratios.values(), default=None)
    if watched.ratios:  # watching a program forgets the step's peak: the step is measured without
        run = step_of(job, side, None)
        for index in range(2):
            run(index)
    with Peak() as peak:
        run(2)
        torch.cuda.synchronize()
    return peak.bytes, worst


def show(models: Sequence[str], small: bool) -> None:
    """Prints a table for each model and kind of step."""
    for name in models:
        for training in (False, True):
            job = Job("", name, training, (), "cuda", size="small" if small else "full", dtype="bfloat16")
            print(f"\n{name}, {'training' if training else 'inference'}: side | peak MB | / inductor | worst / plan")
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
                plan = "-" if worst is None else f"{worst[0]:.3f}, {worst[1]:.3f}"
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

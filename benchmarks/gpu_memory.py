"""Peak memory on a GPU: of a model's step beside Inductor, and of each program beside its plan.

GPT-2, a Llama and ResNet-50 at full size in bfloat16, inference and training, with eager, Inductor and fxwrap's Python
and C++ (with pools by default). A peak is `torch.cuda.max_memory_allocated` during a step less what was allocated
before it.

"Over plan" is the worst ratio of allocated memory to the plan's peak, over the model's programs. "All" includes inputs
and parameters in both; "own" excludes them, so that scratch memory of operators, which no plan contains, counts more;
"requested" is "own" by requested bytes, because torch's allocator rounds requests up. Run:

    python benchmarks/gpu_memory.py [--models gpt2,llama,resnet] [--small]
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._dynamo

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import first_line
from benchmarks.model_jobs import Job, call
from benchmarks.results import Cell, Report, add_record_option
from fxwrap.compile import compile_graph, make_backend
from fxwrap.lines import Return
from fxwrap.options import Options
from fxwrap.wrapper_ir import Block, live_bytes

MODELS = ("gpt2", "llama", "resnet")
SIDES: dict[str, Mapping[str, Any] | None] = {"eager": None, "Inductor": None, "Python": {}, "C++": {"emitter": "cpp"}}


class PeakOverPlan(NamedTuple):
    """A program's measured peak over its plan's peak."""

    all: float
    own: float
    requested: float


class PeakMeasuringCompiler:
    """Compiles graphs for fxwrap's backend, and measures the peak of each call while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.peaks: list[PeakOverPlan] = []

    def compile(self, *arguments: Any, **keywords: Any) -> Any:
        """Compiles a graph; returns the attributes of `Compiled` that the backend uses."""
        compiled = compile_graph(*arguments, **keywords)
        boxed = compiled.boxed
        planned = live_bytes(compiled.program).peak
        input_bytes = live_bytes(compiled.program.replace(body=Block((), (Return(()),)))).peak
        own = max(planned - input_bytes, 1)

        def run(inputs: list[Any]) -> Any:
            if not self.on:
                return boxed(inputs)
            with Peak() as peak:
                results = boxed(inputs)
            self.peaks.append(
                PeakOverPlan((peak.bytes + input_bytes) / planned, peak.bytes / own, peak.requested / own)
            )
            return results

        return SimpleNamespace(program=compiled.program, boxed=run)

    def worst(self) -> PeakOverPlan:
        """Returns the worst of each ratio."""
        return PeakOverPlan(*[max(figures) for figures in zip(*self.peaks)])


class Peak:
    """Measures the peak of allocated memory inside the block beyond that before it, in `bytes`.

    `requested` is the same for requested memory, which the allocator rounds up.
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


def step_of(job: Job, side: str, compiler: PeakMeasuringCompiler) -> Callable[[int], None]:
    """Returns a function that runs one step of the model through a side, on inputs by number."""
    torch._dynamo.reset()
    model, sets = job.build(), [job.inputs(seed) for seed in range(4)]
    options = SIDES[side]
    if options is not None:
        backend: Any = make_backend(Options(**options), compiler.compile)
        function = torch.compile(model, backend=backend, fullgraph=True)
    else:
        function = model if side == "eager" else torch.compile(model, backend="inductor", fullgraph=True)

    def run(index: int) -> None:
        call(job, function, sets[index])
        if job.training:
            model.zero_grad(set_to_none=True)

    return run


def peak_of(job: Job, side: str) -> tuple[int, PeakOverPlan | None]:
    """Returns the peak of a step in bytes, and the worst of its programs over their plans."""
    compiler = PeakMeasuringCompiler()
    run = step_of(job, side, compiler)
    for index in range(2):
        run(index)
    torch.cuda.synchronize()
    with Peak() as peak:
        run(2)
        torch.cuda.synchronize()
    compiler.on = SIDES[side] is not None  # measuring programs resets the step's peak
    if compiler.on:
        run(3)
    return peak.bytes, compiler.worst() if compiler.on else None


def measure(name: str, training: bool, small: bool, report: Report) -> None:
    """Adds the row of a model and a kind of step."""
    job = Job("", name, training, (), "cuda", size="small" if small else "full", dtype="bfloat16")
    peaks: dict[str, int] = {}
    cells: dict[str, Cell] = {"step": f"{name}, {'training' if training else 'inference'}"}
    for side in SIDES:
        try:
            peaks[side], worst = peak_of(job, side)
        except Exception as problem:  # noqa: BLE001 - a side's failure is reported
            print(f"    {side} failed: {first_line(problem)}", flush=True)
            continue
        finally:
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
        if worst is None:
            cells[f"{side}, MB"] = peaks[side] / 1e6
        else:
            cells[f"{side} / Inductor"] = peaks[side] / peaks["Inductor"] if "Inductor" in peaks else None
            cells |= {
                f"{side} over plan: all": worst.all,
                f"{side}: own": worst.own,
                f"{side}: requested": worst.requested,
            }
    report.add(cells, peaks)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, with commas")
    parser.add_argument("--small", action="store_true", help="tiny models: to try the script")
    add_record_option(parser)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU; benchmarks/memory.py measures plans without one")
    report = Report("gpu_memory", chosen, "cuda", "bfloat16")
    for name in chosen.models.split(","):
        for training in (False, True):
            measure(name, training, chosen.small, report)


if __name__ == "__main__":
    main()

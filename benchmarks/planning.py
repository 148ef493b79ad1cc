"""Waste, time and scaling of the algorithms of `assign_offsets`.

    python benchmarks/planning.py                  # MiniMalloc's problems in tests/data, then 1k, 10k and 50k buffers
    python benchmarks/planning.py --problems AF --skip-scale
    python benchmarks/planning.py --problems GHIJK --data FOLDER --skip-scale  # MiniMalloc's other five, from FOLDER
    python benchmarks/planning.py --auto           # only "auto" for 200 buffers of each kind
    python benchmarks/planning.py --packings 5     # only problems with a known optimum, five of each kind and size

Times are CPU seconds of one thread. The first table shows peak over lower bound without a capacity; its last columns
search for MiniMalloc's capacity. The second table has live ranges of deep models: `inference` has few live buffers,
`training` saves every fourth one to the end. The third table has whole programs, from live ranges to the planned
program. An empty loop of 20 million rounds is timed as a measure of the machine.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.packings import KINDS as KINDS_OF_PACKINGS
from benchmarks.packings import Problem, packed_problem
from benchmarks.results import Cell, Report, add_record_option
from fxwrap.errors import PlanningError
from fxwrap.lines import Alloc, ExternCall, Mutate, Return
from fxwrap.lines.frees import insert_frees
from fxwrap.memory_planning import Assignment, apply_plan, assign_offsets, plan_memory
from fxwrap.passes.reorder import reorder_for_peak_memory
from fxwrap.passes.reuse import reuse_memory
from fxwrap.wrapper_ir import Block, Input, LineBase, Program, TensorType, Value

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "minimalloc"
CAPACITY = 1048576
GREEDY = ("greedy_by_size", "greedy_by_duration", "squeaky_wheel", "best_fit")
KINDS = ("inference", "training")
SIZES = (1_000, 10_000, 50_000)

Buffer = tuple[int, int, int]


def read_problem(name: str, folder: Path = DATA) -> list[Buffer]:
    """Returns one of MiniMalloc's problems: (first, last_exclusive, size)."""
    with (folder / f"{name}.{CAPACITY}.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [(int(first), int(last), int(size)) for _, first, last, size in rows]


def model_buffers(count: int, kind: str) -> list[Buffer]:
    """Returns live ranges in the order of a deep model's operators, with few different sizes."""
    generator = random.Random(count)
    kinds = [generator.randrange(1, 4096) * 512 for _ in range(20)]
    buffers = []
    for step in range(count):
        saved = kind == "training" and step % 4 == 0
        last = count + 1 if saved else step + 1 + generator.choice((1, 1, 1, 2, 2, 3, 6))
        buffers.append((step, last, generator.choice(kinds)))
    return buffers


def timed(
    buffers: list[Buffer], algorithm: str, capacity: int | None = None, alignment: int = 1, limit: float = 60
) -> tuple[Assignment | None, float]:
    """Returns the assignment, or None if none fits the capacity, and its CPU seconds."""
    start = time.process_time()
    try:
        result = assign_offsets(
            buffers, alignment=alignment, algorithm=algorithm, capacity=capacity, time_limit_s=limit
        )
    except PlanningError:
        result = None
    return result, time.process_time() - start


def report_problems(chosen: argparse.Namespace) -> None:
    """Prints peak over lower bound, and seconds, of MiniMalloc's problems."""
    report = Report("planning-problems", chosen, note="peak / lower bound; CPU seconds; limits of 10 s of wall time")
    for name in chosen.problems:
        folder = chosen.data if chosen.data and not (DATA / f"{name}.{CAPACITY}.csv").exists() else DATA
        buffers = read_problem(name, folder)
        cells: dict[str, Cell] = {"problem": name, "buffers": len(buffers)}
        for algorithm in (*GREEDY, "auto"):
            result, seconds = timed(buffers, algorithm)
            assert result is not None
            cells |= {algorithm.replace("_", " "): result.peak / result.lower_bound, f"{algorithm}, s": seconds}
        start = time.perf_counter()
        result, seconds = timed(buffers, "search", CAPACITY, limit=10)
        wall = time.perf_counter() - start
        peak = None if result is None else result.peak
        report.add({**cells, "peak within capacity": peak, "search, s": seconds, "search, s of wall time": wall})


def report_packings(chosen: argparse.Namespace) -> None:
    """Prints how many problems with a known optimum are solved, and seconds."""
    last = chosen.first_seed + chosen.packings - 1
    note = f"CPU seconds; seeds {chosen.first_seed} to {last}, at most {chosen.limit:g} s of wall time each"
    report = Report("planning-packings", chosen, note=note)
    for name, kind in KINDS_OF_PACKINGS.items():
        if chosen.kinds and name not in chosen.kinds:
            continue
        for count in chosen.counts:
            solved, times = 0, []
            for seed in range(chosen.first_seed, chosen.first_seed + chosen.packings):
                problem = packed_problem(kind, count, seed)
                result, seconds = timed(problem.buffers, "search", problem.capacity, problem.alignment, chosen.limit)
                solved += result is not None
                times.append(seconds)
            cells: dict[str, Cell] = {"kind": name, "buffers": count, "problems": chosen.packings, "solved": solved}
            report.add({**cells, "mean, s": sum(times) / len(times), "max, s": max(times)}, raw=times)


def uniform_buffers(count: int, seed: int, is_long: bool) -> list[Buffer]:
    """Returns buffers of random sizes with random ends, or with random starts and at most a fifth of the range."""
    generator = random.Random(seed)
    buffers = []
    for _ in range(count):
        first, last = sorted((generator.randrange(count), generator.randrange(count)))
        last = last if is_long else first + generator.randrange(count // 5)
        buffers.append((first, last + 1, generator.randrange(1, 1 << 20)))
    return buffers


def report_auto(chosen: argparse.Namespace) -> None:
    """Prints seconds and waste of "auto" for 200 buffers of each kind."""
    report = Report("planning-auto", chosen, note="CPU seconds; 200 buffers, seeds 0 to 4")
    problems = {
        name: [packed_problem(kind, 200, seed) for seed in range(5)] for name, kind in KINDS_OF_PACKINGS.items()
    }
    for name, is_long in (("uniform", False), ("uniform, long", True)):
        problems[name] = [Problem(uniform_buffers(200, seed, is_long), 0, 64) for seed in range(5)]
    timed(problems["gaps"][0].buffers, "auto")  # builds the native search
    for name, items in problems.items():
        results = [timed(item.buffers, "auto", alignment=item.alignment) for item in items]
        ratios = [result.peak / result.lower_bound for result, _ in results if result is not None]
        seconds = [seconds for _, seconds in results]
        cells: dict[str, Cell] = {"kind": name, "mean, s": sum(seconds) / 5, "max, s": max(seconds)}
        report.add({**cells, "mean peak / lower bound": sum(ratios) / 5, "max": max(ratios)}, raw=seconds)


def report_scale(chosen: argparse.Namespace) -> None:
    """Prints seconds and waste of "auto", from 1000 to 50,000 buffers."""
    report = Report("planning-scale", chosen, note="CPU seconds")
    for kind in KINDS:
        for count in SIZES:
            result, seconds = timed(model_buffers(count, kind), "auto")
            assert result is not None
            ratio = result.peak / result.lower_bound
            cells: dict[str, Cell] = {"live ranges": kind, "buffers": count, "auto, s": seconds}
            cells |= {"us/buffer": seconds / count * 1e6, "peak / lower bound": ratio, "by": result.algorithm}
            report.add(cells)


def deep_program(lines: int, kind: str) -> Program:
    """Returns a program of about `lines` lines, whose steps allocate and read one of the last few results."""
    generator = random.Random(lines)
    device = torch.device("cpu")
    types = [TensorType.contiguous(torch.float32, (generator.randrange(1, 4096) * 128,), device) for _ in range(20)]
    x = Value("x", types[0])
    body: list[LineBase] = []
    values = [x] * 6
    saved = []
    for step in range(lines // 3):
        value = Value(f"v{step}", generator.choice(types))
        source = values[-generator.choice((1, 1, 1, 2, 2, 3, 6))]
        body += [Alloc(value), ExternCall((), "aten.sin.out", (source,), outs=(value,))]
        values.append(value)
        if kind == "training" and step % 4 == 0:
            saved.append(value)
    body += [Mutate((), "aten.add_.Scalar", (value, 1), writes=(value,)) for value in reversed(saved)]
    return Program("deep", (Input(x),), Block((), insert_frees([*body, Return(())], [x], [])))


def report_programs(chosen: argparse.Namespace) -> None:
    """Prints seconds of planning, applying, reordering and reuse, from 1000 to 50,000 lines."""
    start = time.process_time()
    for _ in range(20_000_000):
        pass
    note = f"CPU seconds; 20 million rounds of an empty loop: {time.process_time() - start:.2f}"
    report = Report("planning-programs", chosen, note=note)
    for kind in KINDS:
        for count in SIZES:
            program = deep_program(count, kind)
            plan = plan_memory(program, alignment=lambda device: 64)
            steps: dict[str, Callable[[], object]] = {
                "plan, s": partial(plan_memory, program, alignment=lambda device: 64),
                "apply, s": partial(apply_plan, program, plan),
                "reorder, s": partial(reorder_for_peak_memory, program),
                "reuse, s": partial(reuse_memory, program),
            }
            cells: dict[str, Cell] = {"program": kind, "lines": len(program.body.lines)}
            for name, step in steps.items():
                start = time.process_time()
                step()
                cells[name] = time.process_time() - start
            ratio = plan.body.peak / plan.body.lower_bound
            report.add({**cells, "pools": len(plan.body.pools), "peak / lower bound": ratio})


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="ABCDEF", help="some of MiniMalloc's problems, by letter")
    parser.add_argument("--data", type=Path, help="the folder of problems that the repository lacks")
    parser.add_argument("--skip-scale", action="store_true", help="only the first table")
    parser.add_argument("--auto", action="store_true", help="only the times of small problems")
    parser.add_argument("--packings", type=int, default=0, help="the number of problems of each kind and size")
    parser.add_argument("--counts", type=int, nargs="+", default=[500, 1_000, 2_000], help="their numbers of buffers")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS_OF_PACKINGS), help="only some of them")
    parser.add_argument("--limit", type=float, default=10, help="seconds of wall time for each of them")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first of them")
    add_record_option(parser)
    chosen = parser.parse_args()
    if chosen.auto:
        report_auto(chosen)
        return
    if chosen.packings:
        report_packings(chosen)
        return
    report_problems(chosen)
    if not chosen.skip_scale:
        report_scale(chosen)
        report_programs(chosen)


if __name__ == "__main__":
    main()

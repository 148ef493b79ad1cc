"""What do the algorithms behind `assign_offsets` waste, how long do they take, and how do they scale?

    python benchmarks/planning.py                  # MiniMalloc's six problems, then 1k, 10k and 50k buffers and lines
    python benchmarks/planning.py --problems AF --skip-scale

Times are CPU seconds of one thread. The first table is peak over lower bound without a capacity; its last column is
the search for MiniMalloc's capacity. The second is of live ranges as deep models make them: `inference` has few
buffers alive at once, `training` saves every fourth one to the end. The third is of whole programs, live ranges, pools
and the program that follows the plan included; of 20 million additions in a loop too, as a measure of the machine.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from itertools import pairwise
from pathlib import Path

import torch

from fxwrap.errors import PlanningError
from fxwrap.lines import Alloc, Call, Mutate, Return
from fxwrap.lines.frees import insert_frees
from fxwrap.memory_planning import Assignment, apply_plan, assign_offsets, plan_memory
from fxwrap.passes.order import reorder_for_peak_memory
from fxwrap.passes.reuse import reuse_memory
from fxwrap.wrapper_ir import Block, Input, LineBase, Program, TensorType, Value

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "minimalloc"
CAPACITY = 1048576
CHEAP = ("greedy_by_size", "greedy_by_duration", "best_fit")
KINDS = ("inference", "training")
SIZES = (1_000, 10_000, 50_000)

Buffer = tuple[int, int, int]


def read_problem(name: str) -> list[Buffer]:
    """One of MiniMalloc's problems: (first, last_exclusive, size)."""
    with (DATA / f"{name}.{CAPACITY}.csv").open(newline="") as file:
        return [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def model_buffers(count: int, kind: str) -> list[Buffer]:
    """Live ranges in the order of a deep model's operators, with sizes of few kinds."""
    generator = random.Random(count)
    kinds = [generator.randrange(1, 4096) * 512 for _ in range(20)]
    buffers = []
    for step in range(count):
        saved = kind == "training" and step % 4 == 0
        last = count + 1 if saved else step + 1 + generator.choice((1, 1, 1, 2, 2, 3, 6))
        buffers.append((step, last, generator.choice(kinds)))
    return buffers


def timed(buffers: list[Buffer], algorithm: str, capacity: int | None = None) -> tuple[Assignment | None, float]:
    """The assignment, None where nothing was found within the capacity, and its CPU seconds."""
    start = time.process_time()
    try:
        result = assign_offsets(buffers, algorithm=algorithm, capacity=capacity, time_limit_s=60)
    except PlanningError:
        result = None
    return result, time.process_time() - start


def show_problems(names: str) -> None:
    """Peak over lower bound and seconds, a row a problem."""
    print("| problem | buffers | " + " | ".join((*CHEAP, "auto")) + " | search, within capacity |")
    print("|---" * (len(CHEAP) + 4) + "|")
    for name in names:
        buffers = read_problem(name)
        cells = []
        for algorithm in (*CHEAP, "auto"):
            result, seconds = timed(buffers, algorithm)
            assert result is not None
            note = f" ({result.algorithm})" if algorithm == "auto" else ""
            cells.append(f"{result.peak / result.lower_bound:.3f}, {seconds:.2f} s{note}")
        result, seconds = timed(buffers, "search", CAPACITY)
        cells.append("not found" if result is None else f"peak {result.peak}, {seconds:.2f} s")
        print(f"| {name} | {len(buffers)} | " + " | ".join(cells) + " |", flush=True)


def show_scale() -> None:
    """Seconds of "auto", and what it wastes, from 1000 to 50,000 buffers."""
    print("\n| live ranges | buffers | seconds | us a buffer | peak / lower bound | by |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        for count in SIZES:
            result, seconds = timed(model_buffers(count, kind), "auto")
            assert result is not None
            ratio = result.peak / result.lower_bound
            each = seconds / count * 1e6
            print(f"| {kind} | {count} | {seconds:.2f} | {each:.1f} | {ratio:.3f} | {result.algorithm} |", flush=True)


def deep_program(lines: int, kind: str) -> Program:
    """A program of about so many lines: each step allocates, reads one of the last few results, and is freed."""
    generator = random.Random(lines)
    device = torch.device("cpu")
    types = [TensorType.contiguous(torch.float32, (generator.randrange(1, 4096) * 128,), device) for _ in range(20)]
    given = Value("x", types[0])
    found: list[LineBase] = []
    values = [given] * 6
    saved = []
    for step in range(lines // 3):
        value = Value(f"v{step}", generator.choice(types))
        source = values[-generator.choice((1, 1, 1, 2, 2, 3, 6))]
        found += [Alloc(value), Call((), "aten.sin.out", (source,), outs=(value,))]
        values.append(value)
        if kind == "training" and step % 4 == 0:
            saved.append(value)
    found += [Mutate((), "aten.add_.Scalar", (value, 1), writes=(value,)) for value in reversed(saved)]
    placed = insert_frees([*found, Return(())], [given], [])
    return Program("deep", (Input(given),), Block((), placed))


def show_programs() -> None:
    """Seconds of planning, of the planned program, of another order, and of reuse, from 1000 to 50,000 lines."""
    start = time.process_time()
    for _ in range(20_000_000):
        pass
    print(f"\n20 million rounds of an empty loop: {time.process_time() - start:.2f} s")
    print("| programs | lines | plan | apply | order | reuse | pools | peak / lower bound |")
    print("|---" * 8 + "|")
    for kind in KINDS:
        for count in SIZES:
            program = deep_program(count, kind)
            moments = [time.process_time()]
            plan = plan_memory(program, alignment=lambda device: 64)
            moments.append(time.process_time())
            for step in (lambda: apply_plan(program, plan), lambda: reorder_for_peak_memory(program),  # noqa: B023
                         lambda: reuse_memory(program)):  # noqa: B023  # fmt: skip
                step()
                moments.append(time.process_time())
            seconds = " | ".join(f"{end - begin:.2f}" for begin, end in pairwise(moments))
            ratio = plan.body.peak / plan.body.lower_bound
            lines = len(program.body.lines)
            print(f"| {kind} | {lines} | {seconds} | {len(plan.body.pools)} | {ratio:.4f} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="ABCDEF", help="which of MiniMalloc's problems, by letter")
    parser.add_argument("--skip-scale", action="store_true", help="leave the second and third table out")
    arguments = parser.parse_args()
    show_problems(arguments.problems)
    if not arguments.skip_scale:
        show_scale()
        show_programs()


if __name__ == "__main__":
    main()

"""Offset assignment by CP-SAT of OR-tools, for comparison: `pip install ortools`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ortools.sat.python import cp_model

from benchmarks.packings import Buffer


def solve(buffers: Sequence[Buffer], capacity: int, alignment: int, limit: float) -> tuple[bool, float]:
    """Returns whether CP-SAT assigns offsets within the capacity in `limit` of its deterministic time, and CPU seconds.

    A unit of deterministic time is about a second. Buffers are rectangles with fixed times that do not overlap. Across,
    durations at a byte add up to all times at most. One worker.
    """
    model = cp_model.CpModel()
    times, bytes_ = [], []
    for first, last, size in buffers:
        units = -(-size // alignment)
        offset = model.new_int_var(0, capacity // alignment - units, "")
        times.append(model.new_fixed_size_interval_var(first, last - first, ""))
        bytes_.append(model.new_fixed_size_interval_var(offset, units, ""))
    model.add_no_overlap_2d(times, bytes_)
    durations = [last - first for first, last, _ in buffers]
    model.add_cumulative(bytes_, durations, max(last for _, last, _ in buffers) - min(first for first, _, _ in buffers))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit
    solver.parameters.num_workers = 1
    solver.parameters.use_timetabling_in_no_overlap_2d = True
    start = time.process_time()
    status = solver.solve(model)
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE), time.process_time() - start

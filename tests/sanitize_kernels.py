"""Runs the suite's GPU tests of kernels under NVIDIA's compute-sanitizer: `make sanitize-kernels`.

    python -m tests.sanitize_kernels [--tools memcheck,racecheck] [--jobs 8] [--seconds 3000] [PATHS]

memcheck reports accesses outside of tensors, racecheck accesses to shared memory without a barrier between them, both
in the project's kernels only: those of cuDNN and cuBLAS have reports of their own (pairs read at the end of odd masks,
shared memory of asynchronous copies). Every file of tests is a process. memcheck runs without torch's caching
allocator, so that the end of each tensor is checked; CUDA graphs cannot be captured then. Backtraces would keep frames
of Python alive, in which tests count memory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

TOOLS = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "racecheck": {}}
"""The variables that are set for each tool."""

PATHS = (
    "tests/fx_passes/test_matmuls_gpu.py",
    "tests/lowering/test_quantised_gpu.py",
    "tests/fx_passes/test_flex_attention.py",
    "tests/fx_passes/test_decoding_attention.py",
    "tests/fx_passes/test_paged_attention.py",
    "tests/fx_passes/test_attention_masks.py",
    "tests/lowering/test_accuracy.py",
    "tests/lowering/test_scatter_lines.py",
    "tests/lowering/test_in_place_scatters.py",
    "tests/lowering/test_operator_results.py",
    "tests/compile/test_dependent_launches.py",
    "tests/passes/test_combo_kernels.py",
    "tests/runtime/launch",
)
"""The tests that run by default: those of contractions, attention, quantised weights, scatters and launches."""


@dataclass(frozen=True)
class Job:
    """A run of a tool over the tests of a path."""

    tool: str
    path: str


def run(deadline: float, job: Job) -> str:
    """Prints what the tool and pytest say of a job's tests; returns their output, or "" if all is well.

    deadline: seconds of `time.monotonic`, at which the run ends.
    """
    command = [
        "compute-sanitizer", "--tool", job.tool, "--target-processes", "application-only", "--show-backtrace", "no",
        "--launch-timeout", "0", "--max-connections", "100", "--kernel-name", "kernel_substring=fxwrap",
        sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist", "-p", "no:cacheprovider",
        "-k", "not captur and not graphs", job.path,
    ]  # fmt: skip
    begin = time.monotonic()
    with subprocess.Popen(
        command, env={**os.environ, **TOOLS[job.tool]}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=max(1.0, deadline - begin))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
    reports = re.findall(r"^=+ +((?:Invalid|Error|Race|Warning|Potential|Program hit)[^\n]*)", text, re.M)
    tests = re.search(r"^\d+ (?:passed|failed|skipped|deselected)[^\n]*", text, re.M)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: [^\n]*", text)
    words = [tests[0] if tests else "stopped before the end", summary[0] if summary else "", *sorted(set(reports))[:5]]
    print(f"{job.tool} {job.path}: {time.monotonic() - begin:.0f} s, {', '.join(filter(None, words))}", flush=True)
    return "" if process.returncode in (0, 5) and not reports else text


def main(arguments: list[str]) -> int:
    """Returns 0 if all tests ran without reports, 1 if not, 2 without the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PATHS, help="files and folders of tests")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=8, help="processes at the same time")
    parser.add_argument("--seconds", type=float, default=3000, help="the limit of all runs")
    parser.add_argument("--log", type=Path, help="a file for the output of runs with reports")
    chosen = parser.parse_args(arguments)
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH: it is in the bin folder of the CUDA toolkit", file=sys.stderr)
        return 2
    deadline = time.monotonic() + chosen.seconds
    jobs = [Job(tool, path) for tool in chosen.tools.split(",") for path in chosen.paths]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        failures = list(filter(None, pool.map(partial(run, deadline), jobs)))
    if chosen.log:
        chosen.log.write_text("\n".join(failures), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs the suite's GPU tests of kernels under NVIDIA's compute-sanitizer: `make sanitize-kernels`.

    python -m tests.sanitize_kernels [--tools memcheck,racecheck] [--jobs 8] [--seconds 3000] [--record] [PATHS]

memcheck reports accesses outside of tensors, racecheck accesses to shared memory without a barrier between them, both
in the project's kernels only: those of cuDNN and cuBLAS have reports of their own (pairs read at the end of odd masks,
shared memory of asynchronous copies). Every file of tests is a process. memcheck runs without torch's caching
allocator, so that the end of each tensor is checked; CUDA graphs cannot be captured then. Backtraces would keep frames
of Python alive, in which tests count memory. `--record` writes the rows to `benchmarks/results/`.
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Report, Row, add_record_option

TOOLS = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "racecheck": {}}
"""The variables that are set for each tool."""

PATHS = (
    "tests/fx_passes/test_matmuls_gpu.py",
    "tests/lowering/test_quantised_gpu.py",
    "tests/lowering/test_grouped_gpu.py",
    "tests/fx_passes/test_flex_attention.py",
    "tests/fx_passes/test_decoding_attention.py",
    "tests/fx_passes/test_paged_attention.py",
    "tests/fx_passes/test_attention_factors.py",
    "tests/fx_passes/test_attention_masks.py",
    "tests/fx_passes/test_sorts.py",
    "tests/lowering/test_accuracy.py",
    "tests/lowering/test_scatter_lines.py",
    "tests/lowering/test_in_place_scatters.py",
    "tests/lowering/test_operator_results.py",
    "tests/compile/test_dependent_launches.py",
    "tests/passes/test_combo_kernels.py",
    "tests/printers/test_streaming_masks.py",
    "tests/runtime/launch",
)
"""The tests that run by default: those of contractions, attention, quantised weights, scatters and launches."""

_INTERNAL = "Internal Sanitizer Error"
"""What the tool prints when it stops by itself; the CUDA calls after that fail."""


@dataclass(frozen=True)
class Run:
    """A run of a tool over the tests of a path: its row, the tool's reports, and the output."""

    row: Row
    reports: list[str]
    output: str
    failed: bool


def run(tool: str, path: str, deadline: float) -> Run:
    """Runs the tests of a path under a tool, until `deadline`, which is in seconds of `time.monotonic`."""
    command = [
        "compute-sanitizer", "--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no",
        "--launch-timeout", "0", "--max-connections", "100", "--kernel-name", "kernel_substring=fxwrap",
        sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist", "-p", "no:cacheprovider",
        "-k", "not captur and not graphs", path,
    ]  # fmt: skip
    begin = time.monotonic()
    with subprocess.Popen(
        command, env={**os.environ, **TOOLS[tool]}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=max(1.0, deadline - begin))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
    reports = sorted(set(re.findall(r"^=+ +((?:Invalid|Error|Race|Warning|Potential|Program hit)[^\n]*)", text, re.M)))
    tests = re.search(r"^\d+ (?:passed|failed|skipped|deselected)[^\n]*", text, re.M)
    result = tests[0] if tests else "stopped before the end"
    row = {
        "tool": tool, "tests of": path, "result": "an internal error of the tool" if _INTERNAL in text else result,
        "reports": len(reports), "s": round(time.monotonic() - begin),
    }  # fmt: skip
    return Run(row, reports, text, bool(reports) or process.returncode not in (0, 5))


def main(arguments: list[str]) -> int:
    """Returns 0 if all tests ran without reports, 1 if not, 2 without the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PATHS, help="files and folders of tests")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=8, help="processes at the same time")
    parser.add_argument("--seconds", type=float, default=3000, help="the limit of all runs")
    parser.add_argument("--log", type=Path, help="a file for the output of runs with reports")
    parser.add_argument("--device", default="cuda", help="the device whose name is recorded")
    add_record_option(parser)
    chosen = parser.parse_args(arguments)
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH: it is in the bin folder of the CUDA toolkit", file=sys.stderr)
        return 2
    deadline, failures = time.monotonic() + chosen.seconds, []
    report = Report("sanitize_kernels", chosen, chosen.device)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        jobs = [pool.submit(run, tool, path, deadline) for tool in chosen.tools.split(",") for path in chosen.paths]
        for done in as_completed(jobs):
            result = done.result()
            report.add(result.row, result.reports)
            failures += [result.output] if result.failed else []
    if chosen.log:
        chosen.log.write_text("\n".join(failures), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

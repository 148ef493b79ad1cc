"""Runs the benchmarks of the FX output one after another and records their tables.

Two lanes run at a time, each on half of the cores: first calls and times of whole models, and everything else. It takes
about ten minutes on 16 cores; a script that runs longer than the limit is ended, and keeps the rows that it recorded.
The result files are also copied to a folder. Run: `python benchmarks/record_fx.py [--copy-to FOLDER]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results"
FORMS = "fxwrap:fx,fxwrap:fx+functional,fxwrap:python,fxwrap:cpp"
MODELS = (
    *("fx_output.py", "--models", "gpt2,bert,t5,tiny_kernels", "--repeats", "2"),
    *("--backends", f"eager,{FORMS}", "--record"),
)
TWELVE_LAYERS = (
    *("fx_output.py", "--models", "gpt2", "--gpt2-layers", "12", "--repeats", "1"),
    *("--backends", f"eager,inductor,{FORMS}", "--record", "12-layers"),
)
LANES: tuple[Sequence[Sequence[str]], ...] = (
    (MODELS,),
    (
        TWELVE_LAYERS,
        ("call_overhead.py", "--record"),
        ("fx_module_code.py", "--record"),
        ("fx_output.py", "--models", "gpt2", "--cold", "--repeats", "1", "--record"),
    ),
)


def run_lane(scripts: Sequence[Sequence[str]], cores: Iterable[int], deadline: float) -> list[str]:
    """Runs scripts one after another on these cores until a time; returns the failures."""
    failures = []
    for script in scripts:
        start = time.monotonic()
        outcome = run(script, sorted(cores), deadline - start) if start < deadline else "not run"
        print(f"{' '.join(script)}: {time.monotonic() - start:.0f} s {outcome}", flush=True)
        if outcome:
            failures.append(f"{' '.join(script)}: {outcome}")
    return failures


def run(script: Sequence[str], cores: Sequence[int], seconds: float) -> str:
    """Runs a script, and ends it with its child processes after a time; returns how it failed, or nothing."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / script[0]), *script[1:]]
    process = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores), start_new_session=True)
    try:
        status = process.wait(seconds)
        return f"exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "out of time"


def main() -> int:
    """Runs the lanes and copies the new result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copy-to", type=Path, help="a folder for copies of the result files")
    parser.add_argument("--time-limit", type=float, default=560, help="seconds for everything")
    chosen = parser.parse_args()
    started, deadline = time.time(), time.monotonic() + chosen.time_limit
    cores = sorted(os.sched_getaffinity(0))
    halves = (cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :])
    with ThreadPoolExecutor(len(LANES)) as pool:
        failures = [
            failure
            for lane in pool.map(lambda lane, half: run_lane(lane, half, deadline), LANES, halves)
            for failure in lane
        ]
    recorded = [path for path in sorted(RESULTS.glob("*.json")) if path.stat().st_mtime >= started]
    for path in recorded if chosen.copy_to is not None else []:
        shutil.copy(path, chosen.copy_to / path.name)
    print("recorded:", *[path.name for path in recorded])
    print("\n".join(failures))
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())

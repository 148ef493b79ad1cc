"""The race of Gloo's workers with torch alone, and without it: `python -m tests.distributed.gloo_race [RUNS]`.

Two ranks keep collectives with a long and a short name in flight in one group. A preloaded library preempts a worker
that is about to copy the short name, as a busy machine does at times. With torch's two workers a rank ends with
"malloc(): unaligned tcache chunk detected" or the like within seconds, or waits for ever; with one worker both end
well. Needs Linux and a C++ compiler.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fxwrap.runtime.native import find_compiler
from tests.support.child_processes import child_environment
from tests.support.gloo import use_one_worker

PREEMPTS = r"""
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long copies;

extern "C" void* memcpy(void* target, const void* source, size_t size) {
    const char* text = static_cast<const char*>(source);
    const bool is_name = size == 9 && text[0] == 'A' && text[5] == 'D' && text[8] == 'E';  // ALLREDUCE
    if (is_name && syscall(SYS_gettid) != getpid() && __atomic_add_fetch(&copies, 1, __ATOMIC_RELAXED) % 4 == 0) {
        const struct timespec pause = {0, 500000};
        nanosleep(&pause, nullptr);
    }
    return memmove(target, source, size);
}
"""
"""A `memcpy` that sleeps 0.5 ms in every fourth copy of the name of an all_reduce by a thread beside the main one."""

SECONDS = 8
LIMIT_SECONDS = 40
_HEAP_ERROR = re.compile(r"\w+\(\): |corrupted |double free")


def communicate(rank: int, store: str) -> None:
    """Runs all_gathers and all_reduces of one group for some seconds as one rank."""
    file = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_SECONDS))
    operators, x, ends = torch.ops._c10d_functional, torch.rand(4, 4), torch.zeros(1)
    deadline = time.monotonic() + SECONDS
    while not ends.item():
        for _ in range(20):
            pending = [operators.all_gather_into_tensor(x, 2, "0"), operators.all_reduce(x, "sum", "0")]
            pending += [operators.all_gather_into_tensor(x, 2, "0"), operators.all_reduce(x, "sum", "0")]
            for item in pending:
                operators.wait_tensor(item)
        dist.all_reduce(ends.fill_(time.monotonic() > deadline))
    dist.destroy_process_group()


def run_ranks(folder: Path, workers: str) -> list[str]:
    """Returns how both ranks ended."""
    (folder / "preempts.cpp").write_text(PREEMPTS)
    library, store = folder / "libpreempts.so", folder / f"store{time.monotonic_ns()}"
    flags = ["-O2", "-fno-builtin", "-shared", "-fPIC", folder / "preempts.cpp", "-o", library]
    subprocess.run([*find_compiler().command, *flags], check=True)
    environment = child_environment(LD_PRELOAD=str(library))
    commands = [[sys.executable, "-m", "tests.distributed.gloo_race", workers, str(rank), store] for rank in range(2)]
    ranks = [subprocess.Popen(item, env=environment, stderr=subprocess.PIPE, text=True) for item in commands]
    endings = []
    for rank in ranks:
        try:
            _, errors = rank.communicate(timeout=LIMIT_SECONDS)
            message = next((line for line in errors.splitlines() if _HEAP_ERROR.match(line)), "")
            endings.append(f"exit code {rank.returncode} {message}".strip())
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
            endings.append("waits for ever")
    return endings


def main(arguments: Sequence[str]) -> int:
    """Prints how the ranks of each run end; returns whether a rank with one worker failed."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for run in range(int(arguments[0]) if arguments else 2):
            for workers in ("two", "one"):
                endings = run_ranks(Path(folder), workers)
                failed |= workers == "one" and endings != ["exit code 0"] * 2
                print(f"run {run}, {workers} workers: {'; '.join(endings)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        if sys.argv[1] == "one":
            use_one_worker()
        communicate(int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1:]))

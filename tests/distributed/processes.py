"""Runs a module as several ranks, each in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.cases import WORLD_SIZE
from tests.support.child_processes import forking_context
from tests.support.gloo import use_one_worker

TIMEOUT = 600
"""Seconds after which a rank has failed; a rank waits for the other one."""


def run_ranks(
    module: str, folder: Path, *arguments: str, world_size: int = WORLD_SIZE, timeout: int = TIMEOUT
) -> list[dict[str, str]]:
    """Runs `main` of a module with RANK STORE ARGUMENTS... as all ranks; returns each rank's error of each case, "" for
    none.

    A rank prints one line of JSON with the keys "case" and "error" for each case. Raises AssertionError for ranks that
    a signal ended, such as the abort of a corrupt heap, and for ranks that have not finished in time. Each Gloo group
    has one worker; see `tests/support/gloo.py`.
    """
    context = forking_context()
    outputs = [folder / f"rank_{rank}" for rank in range(world_size)]
    ranks = [
        context.Process(
            target=_run_rank, args=(module, output, (str(rank), str(folder / "store"), *arguments), dict(os.environ))
        )
        for rank, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(deadline - time.monotonic(), 0))
        assert not any(rank.is_alive() for rank in ranks), f"ranks have not finished after {timeout} s"
        signals = {number: -rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode and rank.exitcode < 0}
        assert not signals, f"ranks ended by signals: {signals}"
    finally:
        for rank in ranks:
            rank.kill()
    lines = [map(json.loads, output.read_text().splitlines()) for output in outputs]
    return [{line["case"]: line["error"] for line in rank} for rank in lines]


def run_checks(
    arguments: Sequence[str],
    checks: Mapping[str, Callable[[], object]],
    world_size: int = WORLD_SIZE,
    *,
    backend: str = "gloo",
    timeout_s: int = 120,
) -> None:
    """Runs checks as one rank of a default process group; prints a line of JSON with the error of each.

    Args:
        arguments: RANK STORE..., those of `main`.
        checks: by the name of their case. One that raises does not keep others from running.
        world_size: the number of ranks.
        backend: of the process group.
        timeout_s: of its collectives: a rank that failed does not take part in them.
    """
    rank, store, timeout = int(arguments[0]), dist.FileStore(arguments[1], world_size), timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    for name, check in checks.items():
        error = ""
        torch.manual_seed(0)
        try:
            check()
        except Exception:  # noqa: BLE001  # the parent reports it
            error = traceback.format_exc()
        print(json.dumps({"case": name, "error": error}), flush=True)
    dist.destroy_process_group()


def _run_rank(module: str, output: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs one rank, whose output goes to a file."""
    os.environ |= environment
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
    use_one_worker()
    importlib.import_module(module).main(arguments)

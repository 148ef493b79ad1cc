"""Runs a module as several ranks, each in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.distributed.cases import WORLD_SIZE
from tests.support.child_processes import forking_context

TIMEOUT = 600
"""Seconds after which a rank has failed; a rank waits for the other one."""


def run_ranks(
    module: str, folder: Path, *arguments: str, world_size: int = WORLD_SIZE, timeout: int = TIMEOUT
) -> list[dict[str, str]]:
    """Runs `main` of a module with RANK STORE ARGUMENTS... as all ranks; returns each rank's error of each case, "" for
    none.

    A rank prints one line of JSON with the keys "case" and "error" for each case.
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
    finally:
        for rank in ranks:
            rank.kill()
    lines = [map(json.loads, output.read_text().splitlines()) for output in outputs]
    return [{line["case"]: line["error"] for line in rank} for rank in lines]


def _run_rank(module: str, output: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs one rank, whose output goes to a file."""
    os.environ |= environment
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
    importlib.import_module(module).main(arguments)

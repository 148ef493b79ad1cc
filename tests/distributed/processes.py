"""Runs a module as several ranks, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.distributed.cases import WORLD_SIZE

TIMEOUT = 600
"""Seconds after which a rank has failed; a rank waits for the other one."""


def run_ranks(
    module: str, folder: Path, *arguments: str, world_size: int = WORLD_SIZE, timeout: int = TIMEOUT
) -> list[dict[str, str]]:
    """Runs `module RANK STORE ARGUMENTS...` as all ranks; returns the error of each case of each rank, "" for none.

    A rank prints one line of JSON with the keys "case" and "error" for each case.
    """
    command = [sys.executable, "-m", module]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder / "store"), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [{line["case"]: line["error"] for line in map(json.loads, output.splitlines())} for output in outputs]

"""Two processes with Gloo: each case of `cases.py`, in every emitter, has the results and gradients of eager."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.distributed.cases import CASES, WORLD_SIZE

TIMEOUT = 300
"""Seconds after which a rank has failed; a rank waits for the other one."""


def test_two_ranks_agree_with_eager_in_every_emitter(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, output in enumerate(outputs):
        results = {line["case"]: line["error"] for line in map(json.loads, output.splitlines())}
        assert results == dict.fromkeys(CASES, ""), f"rank {number}:\n" + "\n".join(results.values())

"""Two processes with Gloo: bucketed and overlapped collectives return the bits of the program's own order."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.overlap_rank import CHECKS
from tests.distributed.processes import run_ranks


def test_buckets_and_overlap_return_the_same_bits(tmp_path: Path) -> None:
    for number, results in enumerate(run_ranks("tests.distributed.overlap_rank", tmp_path)):
        assert results == dict.fromkeys(CHECKS, ""), f"rank {number}:\n" + "\n".join(results.values())

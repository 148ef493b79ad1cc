"""Four ranks measure the groups of a mesh together, although they compile at different times."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import run_ranks


def test_four_ranks(tmp_path: Path) -> None:
    for number, results in enumerate(run_ranks("tests.distributed.speed_rank", tmp_path, world_size=4)):
        assert results == {"speeds": ""}, f"rank {number}:\n{results['speeds']}"

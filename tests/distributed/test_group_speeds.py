"""Four ranks measure the groups of a mesh together, although they compile at different times."""

from __future__ import annotations

from pathlib import Path

from fxwrap.devices import collective_bucket_bytes
from fxwrap.runtime.group_speeds import speed_of
from tests.distributed.processes import run_ranks


def test_four_ranks(tmp_path: Path) -> None:
    for number, results in enumerate(run_ranks("tests.distributed.speed_rank", tmp_path, world_size=4)):
        assert results == {"speeds": ""}, f"rank {number}:\n{results['speeds']}"


def test_a_latency_near_the_time_of_a_large_collective_gives_no_huge_buckets() -> None:
    speed = speed_of(20e-6, 220e-6, 64_000_000)
    assert (speed.latency_s, speed.bytes_per_s) == (2e-5, 3.2e11)
    for small in (199e-6, 200e-6, 300e-6):  # launches take as long as the large collective
        speed = speed_of(small, 200e-6, 64_000_000)
        assert speed.bytes_per_s == 6.4e11
        assert collective_bucket_bytes(200e-6, speed.bytes_per_s) <= 2 * 10 * 64_000_000

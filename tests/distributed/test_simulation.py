"""Simulated training steps of Llama 70B layers: overlap reaches the lower bound without more memory."""

from __future__ import annotations

import pytest

from benchmarks.schedule_simulation import Cluster, Comparison, Shape, compare


@pytest.mark.long  # of a simulation, not of fxwrap
@pytest.mark.parametrize("ranks", [8, 4096])
def test_a_step_takes_at_most_a_tenth_more_than_its_lower_bound(ranks: int) -> None:
    cluster = Cluster(ranks)
    result: Comparison = compare(cluster, Shape(), layers=4, tokens=4096)
    assert result.bound <= result.after.total <= 1.1 * result.bound < result.before.total
    assert result.after.collectives < result.before.collectives
    assert result.peak_after <= result.peak_before + cluster.spec().collective_bucket_bytes

"""Simulated training steps: overlap reaches the lower bound without more memory; what remains is named."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import pytest

from benchmarks.schedule_costs import Cluster
from benchmarks.schedule_simulation import Comparison, Shape, compare, exposed_text, model_graph, training_graph
from tests.support.long_form import long_only


@pytest.mark.parametrize("ranks", [long_only(8), 4096])
def test_a_step_takes_at_most_a_tenth_more_than_its_lower_bound(ranks: int) -> None:
    cluster = Cluster(ranks)
    result: Comparison = compare(cluster, partial(training_graph, Shape(), layers=4, tokens=4096))
    assert result.bound <= result.after.total <= 1.1 * result.bound < result.before.total
    assert result.after.collectives < result.before.collectives
    assert result.peak_after <= result.peak_before + cluster.spec().collectives.bucket_bytes


def test_a_whole_step_with_two_meshes_names_the_waits_that_remain() -> None:
    sizes = Namespace(layers=1, width=256, hidden=512, heads=4, key_heads=4, vocabulary=128, batch=1)
    result = compare(Cluster(4), partial(model_graph, "FSDP+TP", sizes))
    assert result.after.collectives < result.before.collectives
    assert result.after.total < result.before.total and result.peak_after <= result.peak_before
    waited = sum(item.waited for item in result.after.exposed)
    assert waited <= result.after.total - result.after.compute + 1e-12
    texts = [exposed_text(item) for item in result.after.exposed]
    assert any("all_reduce -> all_reduce, beside nothing" in text for text in texts), texts

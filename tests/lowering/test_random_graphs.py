"""Random graphs: planned kernels have eager's results, and each printer those of the loop IR's evaluator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.lowering.loop_order import evaluate_in_loop_order
from tests.lowering.planned_programs import STRICT, Planned, check_graph, compared_with_evaluator, plan, printed_launch
from tests.support.long_form import sample_size
from tests.support.strategies.graphs import NORMS, PLACING, POINTWISE, VIEWS, RandomGraph, graphs

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

FLOAT_NORMS = graphs((NORMS,), steps=12, writes=3, sizes=(3, 4), dtypes=(torch.float32,))
MIXED = st.one_of(graphs(), FLOAT_NORMS)
PLACES = graphs((PLACING, PLACING, POINTWISE, VIEWS), writes=5, sizes=(3, 4), dtypes=(torch.int64,))
CALLED = STRICT.replace(
    preserve_ops=frozenset(["aten.scatter_reduce.two", "aten.scatter_add.default", "aten.index_put.default"])
)  # fmt: skip


@given(MIXED)
@settings(max_examples=sample_size(120), suppress_health_check=QUIET)
def test_planned_kernels_match_eager(graph: RandomGraph) -> None:
    check_graph(graph.module, graph.inputs)


@given(PLACES)
@settings(max_examples=sample_size(60), suppress_health_check=QUIET)
def test_indirect_writes_match_eager(graph: RandomGraph) -> None:
    """As lines of their own, which take over bases that die, and as kernels, which do too."""
    check_graph(graph.module, graph.inputs, CALLED)
    check_graph(graph.module, graph.inputs)


@given(FLOAT_NORMS)
@settings(max_examples=sample_size(60), suppress_health_check=QUIET)
def test_kernels_are_equivalent_in_loop_order(graph: RandomGraph) -> None:
    """Each iteration by itself, varying values loaded again in each stage: overwritten elements must not be read."""
    planned = plan(graph.module, list(graph.inputs))
    planned.run([item.clone() for item in graph.inputs], compared_with_evaluator(evaluate_in_loop_order))


@pytest.mark.parametrize(("language", "count"), [("cpp", 24), ("triton", 40)])
def test_printed_kernels_match_the_evaluator(language: str, count: int) -> None:
    drawn = _drawn(count)
    launch = printed_launch([planned for _, planned in drawn], language)
    for graph, planned in drawn:
        planned.run([item.clone() for item in graph.inputs], compared_with_evaluator(launch))


def _drawn(count: int) -> list[tuple[RandomGraph, Planned]]:
    """Draws graphs and plans them, outside of a property: expensive steps run once for all of them."""
    planned: list[tuple[RandomGraph, Planned]] = []

    @given(MIXED)
    @settings(max_examples=sample_size(count), phases=[Phase.generate], database=None, suppress_health_check=QUIET)
    def draw(graph: RandomGraph) -> None:
        planned.append((graph, plan(graph.module, list(graph.inputs))))

    draw()
    return planned

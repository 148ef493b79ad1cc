"""The parts of a sweep: exchanges of free leaves for started buffers, and the flow of bytes through them."""

from __future__ import annotations

from fxwrap.memory_planning.byte_flow import ByteFlow, Takeover
from fxwrap.memory_planning.exchanges import TOLERANCE_UNIT, Exchange, ExchangeQuery, find_exchanges


def exchanges(free: tuple[int, ...], pending: tuple[int, ...], tolerance: int = 0, spare: int = -1) -> list[Exchange]:
    return find_exchanges(ExchangeQuery(free, pending, tolerance, spare))


def choices(items: list[Exchange]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(item.ended, item.started) for item in items}


def test_exchanges_have_equal_sizes_and_the_first_pending_buffer() -> None:
    assert choices(exchanges((5, 7, 12), (12, 5))) == {((0, 1), (0,)), ((2,), (0,)), ((0, 2), (0, 1))}


def test_exchanges_of_few_leaves_come_first() -> None:
    costs = {item.ended: item.cost for item in exchanges((50, 70, 120, 11), (120, 13))}
    assert costs[2,] < costs[0, 1]


def test_coincidences_among_small_sizes_cost_more() -> None:
    small, large = exchanges((5, 7), (5,)), exchanges((5000, 7000), (5000,))
    assert small[0].cost > large[0].cost


def test_tolerance_admits_similar_sizes() -> None:
    assert exchanges((100,), (98,)) == []
    assert choices(exchanges((100,), (98,), tolerance=TOLERANCE_UNIT // 32)) == {((0,), (0,))}


def test_exchanges_leave_a_gap_only_where_bytes_are_free() -> None:
    assert [(item.ended, item.left) for item in exchanges((100,), (60,), spare=50)] == [((0,), 40)]
    assert exchanges((100,), (60,), spare=30) == []


def test_all_that_ended_may_leave_a_gap() -> None:
    items = exchanges((10, 20, 30, 40, 50), (100, 40), spare=20)
    assert ((0, 1, 2, 3, 4), (0, 1), 10) in {(item.ended, item.started, item.left) for item in items}


def test_gaps_after_all_that_ended_cost_less_than_after_other_leaves() -> None:
    costs = {item.ended: item.cost for item in exchanges((60, 40, -40), (60, 30), spare=20) if item.left == 10}
    assert costs[0, 1] < costs[0, 2]


def test_leaves_that_were_free_before_cost_more() -> None:
    new, old = exchanges((60,), (60,), spare=0), exchanges((-60,), (60,), spare=0)
    assert new[0].cost < old[0].cost


def test_flow_ends_where_the_capacity_does() -> None:
    flow = ByteFlow([50, 10, 11], [0, 3], 10)
    assert flow.with_takeover(Takeover((3,), (1,))) is not None
    assert flow.with_takeover(Takeover((3,), (2,))) is None  # buffer 0 is live


def test_flow_changes_earlier_takeovers() -> None:
    # 1 took over 90 of the 100 bytes of 0 and 2 the rest; 3 takes over 2 and needs 10 more, which 1 can do without
    flow = ByteFlow([100, 80, 10, 20], [0], 0)
    first = flow.with_takeover(Takeover((0,), (2, 1)))
    assert first is not None
    assert first.with_takeover(Takeover((2,), (3,))) is not None
    assert first.with_takeover(Takeover((2,), (0,))) is None

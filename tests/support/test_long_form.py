"""Of combinations of parameters, `make test` runs few in which each value of each parameter, or each pair, occurs."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

from tests.support.long_form import axes, covering


def test_a_product_needs_as_many_combinations_as_its_longest_list_has_values() -> None:
    cases = [{"case": case, "emitter": emitter} for case, emitter in product(range(7), "abcd")]
    chosen = [cases[position] for position in covering(cases)]
    assert len(chosen) == 7
    assert {item["case"] for item in chosen} == {*range(7)} and {item["emitter"] for item in chosen} == {*"abcd"}


def test_combinations_with_values_of_their_own_remain() -> None:
    cases = [{"case": 1, "dtype": "f32"}, {"case": 2, "dtype": "f32"}, {"case": 2, "dtype": "f16"}, {"case": 3}]
    assert covering(cases) == [0, 2, 3]
    assert covering([]) == [] and covering([{"case": 1}] * 2) == [0]


def test_values_occur_about_equally_often() -> None:
    """Not each remaining case with the first emitter."""
    cases = [{"case": case, "emitter": emitter} for case, emitter in product(range(11), "abcd")]
    counts = Counter(cases[position]["emitter"] for position in covering(cases))
    assert sorted(counts.values()) == [2, 3, 3, 3]


def test_turns_choose_others_and_together_cover_all() -> None:
    cases = [{"case": case, "emitter": emitter} for case, emitter in product(range(5), "abcd")]
    chosen = [covering(cases, turn) for turn in range(len(cases))]
    assert len({*map(tuple, chosen)}) > 3
    assert {position for positions in chosen for position in positions} == {*range(len(cases))}


def test_each_pair_of_values_occurs() -> None:
    lists = {"kind": range(5), "dtype": "fb", "shape": range(4)}
    cases = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    chosen = [cases[position] for position in covering(cases, together=2)]
    assert len(chosen) < len(cases) // 1.5
    for one, other in combinations(lists, 2):
        assert {(case[one], case[other]) for case in chosen} == {*product(lists[one], lists[other])}


def test_axes_are_decorators_and_the_parameters_of_a_product() -> None:
    table = [{"text": "x", "error": "a"}, {"text": "y", "error": "a"}, {"text": "z", "error": "b"}]
    assert [len(case) for case in axes(table, [["text", "error"]])] == [1, 1, 1]
    emitted = [row | {"emitter": emitter} for row, emitter in product(table, "cp")]
    by_axis = axes(emitted, [["emitter"], ["text", "error"]])
    assert [{*case} for case in by_axis] == [{"emitter", "text,error"}] * 6
    assert len(covering(by_axis)) == 3
    rows = [{"kind": kind, "dtype": dtype} for kind, dtype in product("st", "fb")]
    assert [{*case} for case in axes(rows, [["kind", "dtype"]])] == [{"kind", "dtype"}] * 4
    assert axes([{"device": "cpu", "emitter": "fx"}], [["device"], ["emitter"]]) == [{}]

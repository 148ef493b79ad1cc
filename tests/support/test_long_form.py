"""Of combinations of parameters, `make test` runs few in which each value of each parameter, or each pair, occurs."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

from tests.support.long_form import axes, covering, short_form


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


def test_the_short_form_covers_the_axes() -> None:
    one = [{"case": case} for case in range(7)]
    assert [*short_form(one, [["case"]])] == [*range(7)]
    two = [{"case": case, "emitter": emitter} for case, emitter in product(range(7), "abcd")]
    assert len(short_form(two, [["case"], ["emitter"]])) == 7
    three = [case | {"dynamic": dynamic} for case, dynamic in product(two, (False, True))]
    assert len(short_form(three, [["case"], ["emitter"], ["dynamic"]])) == 28


def test_a_part_leaves_out_values_of_the_longest_axis_only() -> None:
    two = [{"case": case, "emitter": emitter} for case, emitter in product(range(8), "abcd")]
    for part, count in ((2, 4), (8, 4)):
        for turn in range(9):
            chosen = [two[position] for position in short_form(two, [["case"], ["emitter"]], turn, part)]
            assert len(chosen) == len({item["case"] for item in chosen}) == count
            assert {item["emitter"] for item in chosen} == {*"abcd"}


def test_a_part_of_a_table_has_each_value_in_its_rows() -> None:
    """Of rows (name, tool), of which not each combination is one."""
    rows = [{"name": name, "tool": tool} for name, tool in product(range(6), "abcde") if (name, tool) != (2, "b")]
    for turn in range(len(rows)):
        chosen = [rows[position] for position in short_form(rows, [["name", "tool"]], turn, part=4)]
        assert 7 <= len(chosen) <= 8
        assert {item["name"] for item in chosen} == {*range(6)} and {item["tool"] for item in chosen} == {*"abcde"}


def test_parts_of_a_list_are_spread_over_it_and_together_cover_it() -> None:
    cases = [{"case": case} for case in range(9)]
    chosen = [short_form(cases, [["case"]], turn, part=3) for turn in range(9)]
    assert chosen[0] == [0, 3, 6]
    assert {position for positions in chosen for position in positions} == {*range(9)}
    assert [*short_form(cases[:1], [["case"]], turn=5, part=3)] == [0]


def test_a_part_has_all_pairs_of_the_short_axes() -> None:
    """Not each training with static sizes, and each inference with dynamic ones."""
    cases = [
        {"case": case, "training": training, "dynamic": dynamic}
        for case, training, dynamic in product(range(42), (False, True), (False, True))
    ]
    lists = [["case"], ["training"], ["dynamic"]]
    for turn in range(0, len(cases), 7):
        chosen = [cases[position] for position in short_form(cases, lists, turn, part=2)]
        assert len(chosen) == 42 == len({item["case"] for item in chosen})
        counts = Counter((item["training"], item["dynamic"]) for item in chosen)
        assert sorted(counts.values()) == [10, 10, 11, 11]

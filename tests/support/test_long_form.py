"""Of combinations of parameters, `make test` runs few in which each value of each parameter occurs."""

from __future__ import annotations

from itertools import product

from tests.support.long_form import covering


def test_a_product_needs_as_many_combinations_as_its_longest_list_has_values() -> None:
    cases = [{"case": case, "emitter": emitter} for case, emitter in product(range(7), "abcd")]
    chosen = [cases[position] for position in covering(cases)]
    assert len(chosen) == 7
    assert {item["case"] for item in chosen} == {*range(7)} and {item["emitter"] for item in chosen} == {*"abcd"}


def test_combinations_with_values_of_their_own_remain() -> None:
    cases = [{"case": 1, "dtype": "f32"}, {"case": 2, "dtype": "f32"}, {"case": 2, "dtype": "f16"}, {"case": 3}]
    assert covering(cases) == [0, 2, 3]
    assert covering([]) == [] and covering([{"case": 1}] * 2) == [0]

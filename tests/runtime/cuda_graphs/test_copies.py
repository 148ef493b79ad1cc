"""Copies of captured inputs: layouts whose elements may overlap are told by sizes and strides."""

from __future__ import annotations

import itertools
import random

from fxwrap.torch_compat import has_distinct_elements


def test_layouts_of_distinct_elements() -> None:
    generator = random.Random(3)
    for _ in range(500):
        count = generator.randint(0, 4)
        sizes = [generator.choice((0, 1, 2, 3)) for _ in range(count)]
        strides = [generator.choice((0, 1, 2, 3, 6, 9)) for _ in range(count)]
        offsets = [
            sum(index * stride for index, stride in zip(indices, strides, strict=True))
            for indices in itertools.product(*map(range, sizes))
        ]
        if has_distinct_elements(sizes, strides):
            assert len({*offsets}) == len(offsets), (sizes, strides)


def test_slices_and_permutations_are_distinct_and_windows_are_not() -> None:
    assert has_distinct_elements((2, 3, 4), (24, 4, 1))
    assert has_distinct_elements((4, 3, 2), (1, 4, 24))
    assert has_distinct_elements((2, 3), (40, 5))
    assert has_distinct_elements((1, 3), (0, 1))
    assert has_distinct_elements((3, 0), (0, 0))
    assert not has_distinct_elements((3, 2), (0, 1))
    assert not has_distinct_elements((4, 3), (2, 1))

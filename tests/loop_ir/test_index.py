"""Index expressions: simplified ones equal their definition at every value of every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxwrap.loop_ir import (
    ONE,
    ZERO,
    Axis,
    FloorDivide,
    Index,
    IndirectIndex,
    Modulo,
    SizeAtom,
    as_index,
    delinearize_index,
    evaluate_index,
    linearize_index,
    strided_index,
)
from fxwrap.symbolic import Size, evaluate, floor_divide, make_symbol, maximum, total

S0, S1 = make_symbol("s0"), make_symbol("s1")
NUMBERS = [{"s0": first, "s1": second} for first in (1, 2, 5) for second in (1, 3)]
SIZES: tuple[Size, ...] = (1, 2, 3, 4, 6, S0, S1, 2 * S0, S0 * S1, S0 + 1)


def number(size: Size, numbers: Mapping[str, int]) -> int:
    """Returns a size's value."""
    return int(evaluate(size, numbers))


def value(index: Index, point: Mapping[Any, int], numbers: Mapping[str, int]) -> int:
    """Returns an index's value for values of its axes and symbols."""

    def of(atom: Any) -> int:
        return number(atom.expression, numbers) if isinstance(atom, SizeAtom) else point[atom]

    return evaluate_index(index, of)  # type: ignore[return-value]


def points(axes: tuple[Axis, ...], numbers: Mapping[str, int]) -> Iterator[dict[Any, int]]:
    """Yields every combination of values of the axes."""
    ranges = [range(number(axis.size, numbers)) for axis in axes]
    for values in itertools.product(*ranges):
        yield dict(zip(axes, values, strict=True))


# --- random expressions, with their meaning ---------------------------------------------------------------------------

Meaning = Callable[[Mapping[Any, int], Mapping[str, int]], int]
Case = tuple[Index, Meaning]


@st.composite
def spaces(draw: st.DrawFn, symbolic: bool) -> tuple[Axis, ...]:
    """Draws one to three axes."""
    sizes = SIZES if symbolic else SIZES[:5]
    return tuple([Axis(f"p{n}", draw(st.sampled_from(sizes))) for n in range(draw(st.integers(1, 3)))])


@st.composite
def cases(draw: st.DrawFn, axes: tuple[Axis, ...], symbolic: bool, depth: int = 4) -> Case:
    """Draws an expression over axes: its index, built by operators, and its meaning."""
    if not depth or draw(st.integers(0, 4)) == 0:
        return draw(leaves(axes, symbolic))
    left, left_of = draw(cases(axes, symbolic, depth - 1))
    operation = draw(st.sampled_from("+-*/%"))
    if operation in "/%":
        divisor = draw(st.sampled_from(SIZES if symbolic else SIZES[:5]))
        if operation == "/":
            return left // divisor, lambda point, numbers: left_of(point, numbers) // number(divisor, numbers)
        return left % divisor, lambda point, numbers: left_of(point, numbers) % number(divisor, numbers)
    if operation == "*":
        factor = draw(st.sampled_from((-2, -1, 0, 1, 2, 3, 4, *((S0, S1) if symbolic else ()))))
        return left * factor, lambda point, numbers: left_of(point, numbers) * number(factor, numbers)
    right, right_of = draw(cases(axes, symbolic, depth - 1))
    if operation == "+":
        return left + right, lambda point, numbers: left_of(point, numbers) + right_of(point, numbers)
    return left - right, lambda point, numbers: left_of(point, numbers) - right_of(point, numbers)


@st.composite
def leaves(draw: st.DrawFn, axes: tuple[Axis, ...], symbolic: bool) -> Case:
    """Draws an axis or a size."""
    if draw(st.booleans()):
        axis = draw(st.sampled_from(axes))
        return as_index(axis), lambda point, numbers: point[axis]
    size = draw(st.sampled_from((0, 1, 2, 3, 5, *((S0, S1, S0 * S1) if symbolic else ()))))
    return as_index(size), lambda point, numbers: number(size, numbers)


@st.composite
def expressions(draw: st.DrawFn) -> tuple[tuple[Axis, ...], Index, Meaning]:
    """Draws axes and an expression over them, static or symbolic."""
    symbolic = draw(st.booleans())
    axes = draw(spaces(symbolic))
    index, meaning = draw(cases(axes, symbolic))
    return axes, index, meaning


@given(expressions())
def test_simplification_keeps_the_meaning(drawn: Any) -> None:
    axes, index, meaning = drawn
    for numbers in NUMBERS:
        for point in points(axes, numbers):
            assert value(index, point, numbers) == meaning(point, numbers), (index, point, numbers)


@given(expressions())
def test_bounds_hold(drawn: Any) -> None:
    axes, index, _ = drawn
    limits = index.bounds()
    for numbers in NUMBERS:
        values = [value(index, point, numbers) for point in points(axes, numbers)]
        if limits is not None:
            low, high = [value(limit, {}, numbers) for limit in limits]
            assert low <= min(values) and max(values) <= high
        assert not index.is_nonnegative() or min(values) >= 0


@given(expressions())
def test_a_stride_is_the_difference_of_one_step(drawn: Any) -> None:
    axes, index, _ = drawn
    for axis in axes:
        stride = index.stride(axis)
        if stride is None:
            continue
        for numbers in NUMBERS:
            for point in points(axes, numbers):
                if point[axis] + 1 < number(axis.size, numbers):
                    step = value(index, point | {axis: point[axis] + 1}, numbers) - value(index, point, numbers)
                    assert step == value(stride, point, numbers), (index, axis, stride)


@given(expressions(), st.data())
def test_substitution_is_evaluation_at_other_values(drawn: Any, data: st.DataObject) -> None:
    """An axis is reversed, set to its first value, or split in two."""
    axes, index, meaning = drawn
    old = data.draw(st.sampled_from(axes))
    other, half, pair = Axis("q", old.size), Axis("q0", floor_divide(old.size, 2)), Axis("q1", 2)
    choices = [(as_index(old.size) - 1 - other, (other,)), (ZERO, ())]
    if old.size in (2, 4, 6, 2 * S0):
        choices.append((as_index(half) * 2 + pair, (half, pair)))
    replacement, new = data.draw(st.sampled_from(choices))
    result = index.substitute({old: replacement})
    others = tuple([axis for axis in axes if axis != old])
    for numbers in NUMBERS:
        for point in points((*others, *new), numbers):
            whole = {**point, old: value(replacement, point, numbers)}
            assert value(result, point, numbers) == meaning(whole, numbers)


@given(expressions())
def test_equal_polynomials_are_equal_however_they_were_built(drawn: Any) -> None:
    _, index, _ = drawn
    again = sum([Index((term,)) for term in reversed(index.terms)], ZERO)
    assert again == index and hash(again) == hash(index) and index - index == ZERO
    assert index + 1 - 1 == index and index * 2 == index + index and index * -1 == -index


# --- shapes ----------------------------------------------------------------------------------------------------------

shapes = st.lists(st.sampled_from((2, 3, 5, S0, S1, 2 * S0)), min_size=1, max_size=4)


@given(shapes)
def test_unflattening_undoes_flattening(sizes: list[Size]) -> None:
    """Not only in meaning: each axis is restored exactly, for symbolic sizes too."""
    axes = [Axis(f"p{n}", size) for n, size in enumerate(sizes)]
    back = delinearize_index(linearize_index(axes, sizes), sizes)
    assert list(back) == [as_index(axis) for axis in axes]


@given(shapes)
def test_flattening_undoes_unflattening(sizes: list[Size]) -> None:
    position = Axis("p", math.prod(sizes))
    assert linearize_index(delinearize_index(as_index(position), sizes), sizes) == as_index(position)


@given(st.permutations([2, 3, 4]), st.permutations([2, 3, 4]))
def test_a_reshape_reads_every_element_in_order(old: list[int], new: list[int]) -> None:
    axes = tuple([Axis(f"p{n}", size) for n, size in enumerate(new)])
    at = delinearize_index(linearize_index(axes, new), old)
    flat = strided_index(at, [old[1] * old[2], old[2], 1])
    assert [value(flat, point, {}) for point in points(axes, {})] == list(range(24))


# --- single simplifications ------------------------------------------------------------------------------------------

FOUR, SIX, MANY = Axis("i", 4), Axis("j", 6), Axis("k", S0)


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (as_index(0), "0"),
        (as_index(FOUR) + SIX - FOUR, "j"),
        (as_index(FOUR) * 2 - SIX - 3, "2*i - j - 3"),
        (as_index(S0 * S1 + 2), "s0*s1 + 2"),
        (as_index(S0) * S0, "s0*s0"),
        (as_index(FOUR) // 4, "0"),
        (as_index(FOUR) % 4, "i"),
        (as_index(FOUR) % 8, "i"),
        (as_index(SIX) // 4, "(j)//4"),
        ((as_index(FOUR) * 6 + SIX) // 6, "i"),
        ((as_index(FOUR) * 6 + SIX) % 6, "j"),
        ((as_index(FOUR) * 6 + SIX) // 12, "(i)//2"),
        ((as_index(FOUR) * 6 + SIX) % 12, "6*((i)%2) + j"),
        ((as_index(SIX) * 4 + FOUR) // 2, "(i)//2 + 2*j"),
        ((as_index(FOUR) + 8) // 8, "1"),
        ((as_index(FOUR) + 8) % 8, "i"),
        ((as_index(FOUR) - 1) // 4, "(i + 3)//4 - 1"),
        (as_index(SIX) // 2 // 2, "(j)//4"),
        (as_index(SIX) % 6 % 3, "(j)%3"),
        (as_index(Axis("a", 48)) % 12 % 4, "(a)%4"),
        (as_index(MANY) % S0, "k"),
        (as_index(MANY) // S0, "0"),
        ((as_index(FOUR) * S0 + MANY) // S0, "i"),
        ((as_index(FOUR) * S0 + MANY) % S0, "k"),
        ((as_index(MANY) * 2 + as_index(Axis("m", 2))) // (2 * S0), "0"),
        (as_index(MANY) % (S0 * S1), "k"),
        (as_index(FOUR) % S0, "(i)%s0"),
        ((as_index(SIX) // 2) * 2 + as_index(SIX) % 2, "j"),
        ((as_index(SIX) // 4) * 4 * S1 + as_index(SIX) % 4 * S1, "j*s1"),
    ],
    ids=str,
)
def test_simplified(index: Index, wanted: str) -> None:
    assert str(index) == wanted


def test_a_part_of_a_size_may_be_zero() -> None:
    """`s0//2` is 0 for s0 = 1, where `s0//2 + 1` is still a size: a position below 2 is not known to be below it."""
    half = floor_divide(S0, 2)
    axis = Axis("p", total((half, 1)))
    assert (as_index(half)).is_nonnegative() and not (as_index(half) - 1).is_nonnegative()
    assert as_index(axis) % total((half, 1)) == as_index(axis)
    assert (as_index(axis) % total((half, half))).atoms() > {axis}
    assert not (as_index(maximum(0, S0 - 3)) - 1).is_nonnegative()
    assert (as_index(S0 * S1) - S0).is_nonnegative() and not (as_index(S0) - S1).is_nonnegative()


def test_quotients_may_be_rounded_up() -> None:
    """Their sizes are products of -1 and a quotient that is negative."""
    for size in (-floor_divide(-S0, 3), 2 * -floor_divide(-S0 * S1, S0 + 1)):
        p = Axis("p", size)
        for position in range(7):
            index = as_index(p) // 2 + (as_index(p) * S1) % 3
            numbers = {"s0": 20, "s1": 9}
            assert position < number(size, numbers)
            assert value(index, {p: position}, numbers) == position // 2 + position * 9 % 3
        assert linearize_index([p, Axis("q", 4)], [size, 4]) // 4 == as_index(p)


def test_divisors_are_positive() -> None:
    for divisor in (0, -2):
        with pytest.raises(ValueError, match="must be positive"):
            as_index(FOUR) // divisor


def test_predicates() -> None:
    indirect = as_index(IndirectIndex(3, 7))
    assert as_index(5).constant == 5 and ZERO.constant == 0 and ONE.constant == 1 and as_index(FOUR).constant is None
    assert (
        as_index(FOUR).single_axis == FOUR
        and (as_index(FOUR) * 2).single_axis is None
        and as_index(S0).single_axis is None
    )
    assert [str(limit) for limit in indirect.bounds() or ()] == ["0", "6"]
    assert indirect.axes() == set() and ((as_index(FOUR) + SIX) // 4).axes() == {FOUR, SIX}
    assert ((as_index(FOUR) + SIX) // 4).stride(FOUR) is None and (as_index(FOUR) * SIX).stride(FOUR) == as_index(SIX)
    assert {type(atom) for atom in (as_index(SIX) // 4 + as_index(SIX) % 4 * 8).atoms()} == {Axis, FloorDivide, Modulo}
    assert (as_index(SIX) // 4 * 8).stride(FOUR) == ZERO and (as_index(FOUR) * FOUR).stride(FOUR) is None


def test_indices_above_two_to_the_31() -> None:
    rows, columns = Axis("r", 2**34), Axis("c", 2**20 + 7)
    position = linearize_index([rows, columns], [rows.size, columns.size])
    point = {rows: 2**34 - 1, columns: 2**20 + 6}
    assert value(position, point, {}) == (2**34) * (2**20 + 7) - 1
    assert delinearize_index(position, [rows.size, columns.size]) == (as_index(rows), as_index(columns))
    flat = Axis("p", (2**34) * (2**20 + 7))
    back = delinearize_index(as_index(flat), [rows.size, columns.size])
    assert [value(index, {flat: 2**53 + 11}, {}) for index in back] == list(divmod(2**53 + 11, 2**20 + 7))

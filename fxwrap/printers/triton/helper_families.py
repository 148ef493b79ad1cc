"""Helper functions of generated kernels that differ by a word or an operator, as their texts."""

from __future__ import annotations

_EXTREME = '''
def {place}_{extreme}(a, a_position, b, b_position):
    """The {comparative} of two, NaN counting as the {extreme}; the {place} of equals."""
    better = (a {sign} b) | ((a != a) & (b == b))
    same = (a == b) | ((a != a) & (b != b))
    chosen = better | (same & (a_position {order} b_position))
    return tl.where(chosen, a, b), tl.where(chosen, a_position, b_position)


'''

_ATOMIC = '''
def atomic_{kind}_float(pointer, value, mask, INTEGER: tl.constexpr, UNSIGNED: tl.constexpr, NAN: tl.constexpr):
    """The {comparative} of a float in memory and another: as integers they are in order, but those below zero in reverse.

    NaN is {nan}, as long as its sign is as here, in memory too.
    """
    bits = tl.where(value != value, NAN, value.to(INTEGER, bitcast=True))
    integers = pointer.to(tl.pointer_type(INTEGER), bitcast=True)
    tl.atomic_{kind}(integers, bits, mask=mask & (bits >= 0), sem="relaxed")
    naturals = pointer.to(tl.pointer_type(UNSIGNED), bitcast=True)
    tl.atomic_{opposite}(naturals, bits.to(UNSIGNED, bitcast=True), mask=mask & (bits < 0), sem="relaxed")


'''  # noqa: E501

HELPER_FAMILIES = [
    *[
        _EXTREME.format(place=place, extreme=extreme, comparative=comparative, sign=sign, order=order)
        for place, order in (("first", "<"), ("last", ">"))
        for extreme, comparative, sign in (("largest", "larger", ">"), ("smallest", "smaller", "<"))
    ],
    _ATOMIC.format(kind="max", opposite="min", comparative="larger", nan="larger than infinity"),
    _ATOMIC.format(kind="min", opposite="max", comparative="smaller", nan="smaller than minus infinity"),
]

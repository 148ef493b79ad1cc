"""Loops of emitted Python. A block is a function from its boxed arguments, which it empties, to what it yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxwrap.runtime.tensors import copy

Body = Callable[[list[Any]], tuple[Any, ...]]


def while_loop(
    cond: Body, body: Body, carried: Sequence[Any], extra: Sequence[Any], stacked: bool = False
) -> tuple[Any, ...]:
    """Repeats `body([*carried, *extra])` while `cond` of the same yields true; returns the last carried values.

    They are copies when no round runs. With `stacked`, returns the carried values of all rounds, each stacked along a
    new first dimension: rounds are kept as they are until their number is known, and copied once.
    """
    history: list[tuple[Any, ...]] = []
    current = tuple(carried)
    rounds = 0
    while cond([*current, *extra])[0]:
        current = body([*current, *extra])
        rounds += 1
        if stacked:
            history.append(current)
    if not stacked:
        return current if rounds else tuple([copy(item) for item in current])
    if not rounds:
        return tuple([item.new_empty((0, *item.shape)) for item in current])
    return tuple([torch.stack(column) for column in zip(*history, strict=True)])


def scan(
    body: Body,
    carried: Sequence[Any],
    over: Sequence[torch.Tensor],
    extra: Sequence[Any],
    stacked: Sequence[torch.Tensor],
    reverse: bool = False,
) -> tuple[Any, ...]:
    """Runs `body([*carried, *slices, *extra])` along the first dimension of `over`; returns the last carried values.

    They are copies when there is no slice. What else each round yields is written into its slices of `stacked`.
    """
    current = tuple(carried)
    count = len(current)
    slices = list(zip(*[tensor.unbind(0) for tensor in over], strict=True))
    places = list(zip(*[tensor.unbind(0) for tensor in stacked], strict=True)) if stacked else [()] * len(slices)
    for position in reversed(range(len(slices))) if reverse else range(len(slices)):
        given = body([*current, *slices[position], *extra])
        current = given[:count]
        for place, item in zip(places[position], given[count:], strict=True):
            place.copy_(item)
        del given  # so that nothing but `current` holds what is carried while the next round runs
    return current if slices else tuple([copy(item) for item in current])

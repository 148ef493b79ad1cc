"""Loops of emitted Python. A block is a function from its boxed arguments to the tuple of what it yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxwrap.runtime.tensors import copy

Body = Callable[..., Any]


def while_loop(
    cond: Body, body: Body, carried: Sequence[Any], extra: Sequence[Any], stacked: bool = False
) -> tuple[Any, ...]:
    """Repeats `body(*carried, *extra)` while `cond` of the same yields true; returns the last carried values.

    They are copies when no round runs. With `stacked`, returns the carried values of all rounds, stacked.
    """
    history: list[Any] = []
    current = tuple(carried)
    rounds = 0
    while bool(cond(*current, *extra)[0]):
        current = body(*current, *extra)
        rounds += 1
        if stacked:
            history.append(current)
    if stacked:
        return tuple(torch.stack(list(column)) for column in zip(*history, strict=True))
    return current if rounds else tuple(copy(item) for item in current)


def scan(
    body: Body, carried: Sequence[Any], over: Sequence[torch.Tensor], extra: Sequence[Any], reverse: bool = False
) -> tuple[Any, ...]:
    """Runs `body(*carried, *slices, *extra)` along the first dimension of `over`; returns the last carried values, then
    the other results of all rounds, stacked in the order of the slices."""
    current = tuple(carried)
    rows: list[tuple[Any, ...]] = []
    indices = range(over[0].shape[0])
    for index in reversed(indices) if reverse else indices:
        given = body(*current, *[tensor[index] for tensor in over], *extra)
        current = tuple(given[: len(current)])
        rows.append(tuple(given[len(current) :]))
    if reverse:
        rows.reverse()
    return (*current, *[torch.stack(list(column)) for column in zip(*rows, strict=True)])


def map_over(body: Body, over: Sequence[torch.Tensor], extra: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Runs `body(*slices, *extra)` along the first dimension of `over` and stacks the results."""
    rows = [body(*[tensor[index] for tensor in over], *extra) for index in range(over[0].shape[0])]
    return tuple(torch.stack(list(column)) for column in zip(*rows, strict=True))

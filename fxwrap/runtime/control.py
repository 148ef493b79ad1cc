"""Loops of emitted Python. A block is a function of a list of arguments, which it empties; it returns its yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxwrap.runtime.tensors import copy

BoxedBlock = Callable[[list[object]], tuple[object, ...]]


def while_loop(
    cond: BoxedBlock, body: BoxedBlock, carried: Sequence[Any], extra: Sequence[object], stacked: bool = False
) -> tuple[object, ...]:
    """Repeats `body([*carried, *extra])` while `cond` of the same returns true; returns the last carried values.

    They are copies if no iteration runs. With `stacked`, returns the carried values of all iterations, stacked along a
    new first dimension by one copy at the end.
    """
    history: list[tuple[Any, ...]] = []
    current = tuple(carried)
    iterations = 0
    while cond([*current, *extra])[0]:
        current = body([*current, *extra])
        iterations += 1
        if stacked:
            history.append(current)
    if not stacked:
        return current if iterations else tuple([copy(item) for item in current])
    if not iterations:
        return tuple([item.new_empty((0, *item.shape)) for item in current])
    return tuple([torch.stack(column) for column in zip(*history, strict=True)])


def scan(
    body: BoxedBlock,
    carried: Sequence[object],
    over: Sequence[torch.Tensor],
    extra: Sequence[object],
    stacked: Sequence[torch.Tensor],
    reverse: bool = False,
) -> tuple[object, ...]:
    """Runs `body([*carried, *slices, *extra])` along the first dimension of `over`; returns the last carried values.

    They are copies if there is no slice. The other yields of each iteration are written into its slices of `stacked`.
    """
    current = tuple(carried)
    count = len(current)
    slices = list(zip(*[tensor.unbind(0) for tensor in over], strict=True))
    outputs = list(zip(*[tensor.unbind(0) for tensor in stacked], strict=True)) if stacked else [()] * len(slices)
    for position in reversed(range(len(slices))) if reverse else range(len(slices)):
        yields = body([*current, *slices[position], *extra])
        current = yields[:count]
        for output, item in zip(outputs[position], yields[count:], strict=True):
            output.copy_(item)
        del yields  # only `current` may own the carried values during the next iteration
    return current if slices else tuple([copy(item) for item in current])

"""Equality of a program's results, bit by bit."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(one: Any, other: Any) -> None:
    """Values and strides are equal, but for strides of dimensions of size 1, which no access depends on."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        strides = [[step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1] for x in (one, other)]
        assert strides[0] == strides[1]
    else:
        assert one == other

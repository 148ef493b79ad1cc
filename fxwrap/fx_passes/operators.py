"""Families of operators that schemas do not describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

_aten = torch.ops.aten

EMPTY_OPERATORS = (
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
)  # fmt: skip
"""Operators with uninitialised results."""

_INDIRECT_WRITES = (
    "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_reduce.two",
    "scatter_add.default", "index_put.default", "index_put.hacked_twin", "_index_put_impl.default",
    "index_add.default", "index_copy.default", "index_fill.int_Scalar", "index_fill.int_Tensor",
    "index_reduce.default", "masked_scatter.default", "put.default",
)  # fmt: skip

IN_PLACE_VARIANTS: Mapping[str, str] = {
    **{f"aten.{name}": f"aten.{name.replace('.', '_.')}" for name in _INDIRECT_WRITES},
    "aten._unsafe_index_put.default": "aten.index_put_.default",
    "aten._unsafe_index_put.hacked_twin": "aten.index_put_.hacked_twin",
}
"""Operators that write at indirect indices of a copy of their first argument, with their in-place variants."""


def expand_to_rank(option: int | Sequence[int], rank: int) -> list[int]:
    """Returns an option of a convolution or pooling for each of `rank` dimensions; one number applies to all."""
    values = [*option] if isinstance(option, Sequence) else [option]
    return values * rank if len(values) == 1 else values

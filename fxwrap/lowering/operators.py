"""What lowering needs to know of operators beside their schemas."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_aten = torch.ops.aten

EMPTY = (
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
)  # fmt: skip
"""Operators whose results hold nothing yet."""

_PLACING = (
    "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_reduce.two",
    "scatter_add.default", "index_put.default", "index_put.hacked_twin", "_index_put_impl.default",
    "index_add.default", "index_copy.default", "index_fill.int_Scalar", "index_fill.int_Tensor",
    "index_reduce.default", "masked_scatter.default", "put.default",
)  # fmt: skip

IN_PLACE_FORMS: Mapping[str, str] = {
    **{f"aten.{name}": f"aten.{name.replace('.', '_.')}" for name in _PLACING},
    "aten._unsafe_index_put.default": "aten.index_put_.default",
    "aten._unsafe_index_put.hacked_twin": "aten.index_put_.hacked_twin",
}
"""Operators that write at computed places of a copy of their first argument, each with the one that writes in place."""

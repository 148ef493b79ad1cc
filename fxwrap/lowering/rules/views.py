"""Views, and what rearranges elements: index arithmetic, never a kernel of its own."""

from __future__ import annotations

from typing import Any

from fxwrap.loop_ir import linear_index, unflattened
from fxwrap.lowering.definitions import Definition, Indices, Viewed, broadcast_indices, view
from fxwrap.lowering.rules.registry import Call, rule


@rule("aten.permute.default")
def _permute(call: Call, base: Definition, dims: Any) -> Viewed:
    order = [dim % len(dims) for dim in dims]

    def index_map(indices: Indices) -> Indices:
        return [indices[order.index(dim)] for dim in range(len(order))]

    return view(base, call.sizes, index_map)


@rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
def _reshape(call: Call, base: Definition, _: Any) -> Viewed:
    sizes = call.sizes
    return view(base, sizes, lambda indices: unflattened(linear_index(indices, sizes), base.sizes))


@rule("aten.expand.default")
def _expand(call: Call, base: Definition, *_: Any, **__: Any) -> Viewed:
    return view(base, call.sizes, lambda indices: broadcast_indices(base.sizes, indices))

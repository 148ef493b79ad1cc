"""Simplification of attention masks while a step is traced: torch selects attention kernels in that trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fxwrap.fx_passes.attention.masks import MaskRewrite, arguments_by_name, classify_masks, has_plain_mask
from fxwrap.options import Options
from fxwrap.torch_compat import traced_node


class SimplifiedMasks(TorchFunctionMode):
    """Calls attention without masks that mask nothing, and with `is_causal` in place of lower triangles.

    It does for a step what the pass `simplify_attention_masks` does for graphs that still have composite operators.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._enabled = options.fuse and "aten.scaled_dot_product_attention.default" not in options.preserve_ops
        self._rewrite_of: dict[Node, MaskRewrite | None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        keywords = kwargs or {}
        if func is not scaled_dot_product_attention or not self._enabled:
            return func(*args, **keywords)
        arguments = arguments_by_name(args, keywords)
        mask = arguments.get("attn_mask")
        rewrite = self._rewrite(mask) if isinstance(mask, Tensor) and has_plain_mask(arguments) else None
        if rewrite in ("all_true", "causal"):
            arguments |= {"attn_mask": None, "is_causal": rewrite == "causal"}
        return func(**arguments)

    def _rewrite(self, mask: Tensor) -> MaskRewrite | None:
        node = traced_node(mask)
        if node is None:
            return None
        if node not in self._rewrite_of:
            self._rewrite_of |= classify_masks(node.graph, [node])
        return self._rewrite_of[node]

"""Random calls of FlexAttention: trees of scores and masks over captured tensors, grouped heads, any lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.support.strategies.graphs import RandomGraph

Position: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Batch, head, row and key."""
Mask: TypeAlias = Callable[[Position], Tensor]
Score: TypeAlias = Callable[[Tensor, Position, "tuple[Tensor, ...]"], Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float64)
ROWS = (16, 1, 33, 5, 40, 8, 72, 2)
KEYS = (32, 40, 16, 97, 1, 72, 8)
WIDTHS = (16, 8, 32, 12)
BLOCKS = (32, (16, 32), 64, (128, 16), 17)
FLEX = torch.ops.higher_order.flex_attention


class _Draw:
    """The sizes of a call, its captured tensors, and random trees over its positions."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.choice = lambda options: draw(st.sampled_from(options))
        self.batch, self.key_heads, self.group = self.choice((2, 1)), self.choice((1, 2)), self.choice((1, 2, 3))
        self.heads = self.key_heads * self.group
        self.rows, self.keys = self.choice(ROWS), self.choice(KEYS)
        self.span = max(self.rows, self.keys)
        self.dtype = self.choice(DTYPES)

    def mask(self, depth: int) -> Mask:
        """Draws a condition on positions; a captured tensor in it is a constant, as block masks are."""
        kind = self.choice(("causal", "window", "lengths", "documents", "modulo", "heads", "table"))
        if depth:
            kind = self.choice(("and", "or", "not", kind, kind))
        number = int(self.choice((0, 1, -3, 7, 20)))
        match kind:
            case "and" | "or":
                left, right = self.mask(depth - 1), self.mask(depth - 1)
                return (lambda at: left(at) & right(at)) if kind == "and" else (lambda at: left(at) | right(at))
            case "not":
                inner = self.mask(depth - 1)
                return lambda at: ~inner(at)
            case "causal":
                return lambda at: at[2] + number >= at[3]
            case "window":
                return lambda at: (at[2] - at[3]).abs() <= abs(number)
            case "lengths":
                lengths = torch.randint(0, self.keys + 1, (self.batch,))
                return lambda at: at[3] < lengths[at[0]]
            case "documents":
                documents = (torch.rand(self.batch, self.span) < 0.1).cumsum(-1)
                return lambda at: documents[at[0], at[2]] == documents[at[0], at[3]]
            case "modulo":
                return lambda at: (at[2] * 3 + at[3]) % (abs(number) + 2) != 1
            case "heads":
                return lambda at: at[3] >= at[1] * abs(number)
            case _:
                table = torch.rand(self.heads, self.keys) < 0.7
                return lambda at: table[at[1], at[3]]

    def score(self, depth: int, captured: list[Tensor]) -> Score:
        """Draws a function of a score; the tensors that it reads are added to `captured`, as inputs of the graph."""
        kind = self.choice(("slopes", "relative", "bias", "distance", "cap", "scale"))
        kind = self.choice(("sum", "where", "product", kind, kind)) if depth else kind
        number, position = float(self.choice((0.5, -1.25, 2.0, 0.1))), len(captured)
        match kind:
            case "sum" | "product":
                left, right = self.score(depth - 1, captured), self.score(depth - 1, captured)
                if kind == "sum":
                    return lambda s, at, held: left(s, at, held) + right(s, at, held) * number
                return lambda s, at, held: left(s, at, held) * torch.tanh(right(s, at, held))
            case "where":
                mask, inner = self.mask(1), self.score(depth - 1, captured)
                other = float(self.choice((-float("inf"), -10.0, 0.25)))
                return lambda s, at, held: torch.where(mask(at), inner(s, at, held), other)
            case "slopes":
                captured.append(torch.randn(self.heads).to(self.dtype))
                return lambda s, at, held: s + held[position][at[1]] * (at[3] - at[2]) * 0.05
            case "relative":
                captured.append(torch.randn(2 * self.span).to(self.dtype))
                return lambda s, at, held: s + held[position][at[2] - at[3] + self.span]
            case "bias":
                captured.append(torch.randn(self.batch, self.rows, self.keys).to(self.dtype))
                return lambda s, at, held: s * number + held[position][at[0], at[2], at[3]]
            case "distance":
                return lambda s, at, held: s - (at[2] - at[3]).abs() * 0.125
            case "cap":
                return lambda s, at, held: torch.tanh(s / 2) * number
            case _:
                return lambda s, at, held: s * number

    def block_mask(self, mask: Mask | None) -> BlockMask:
        """Draws blocks: exact ones of each batch and head, lists that all share, or one block without a mask."""
        if mask is None:
            one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
            return BlockMask.from_kv_blocks(*one, BLOCK_SIZE=1 << 30, seq_lengths=(1, 1))
        size = self.choice(BLOCKS)
        if self.choice((True, True, False)):
            visible: Any = lambda b, h, q, k: mask((b, h, q, k))  # noqa: E731  create_block_mask counts its arguments
            return create_block_mask(visible, self.batch, self.heads, self.rows, self.keys, "cpu", size)
        rows, keys = size if isinstance(size, tuple) else (size, size)
        counts = (1, 1, -(-self.rows // rows), -(-self.keys // keys))
        visited = torch.arange(counts[3], dtype=torch.int32).expand(counts).contiguous()
        number = torch.full(counts[:3], counts[3], dtype=torch.int32)
        lengths = (self.rows, self.keys)
        return BlockMask.from_kv_blocks(number, visited, BLOCK_SIZE=(rows, keys), seq_lengths=lengths)


@st.composite
def attention(draw: st.DrawFn) -> RandomGraph:
    """Draws a graph of one call of FlexAttention; its inputs are queries, keys, values and what scores read."""
    own = _Draw(draw)
    width, value_width = own.choice(WIDTHS), own.choice(WIDTHS)
    sizes = [
        (own.batch, own.heads, own.rows, width), (own.batch, own.key_heads, own.keys, width),
        (own.batch, own.key_heads, own.keys, value_width),
    ]  # fmt: skip
    operands = [torch.randn(size).to(own.dtype) for size in sizes]
    if own.choice((False, True)):  # heads after rows, as projections have them
        operands = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in operands]
    captured: list[Tensor] = []
    score = own.score(own.choice((0, 1, 2)), captured) if own.choice((True, True, False)) else None
    mask = own.mask(own.choice((0, 1, 2))) if own.choice((True, True, False)) else None
    blocks = own.block_mask(mask).as_tuple()[:-1]
    scale = own.choice((width**-0.5, 0.5))

    def call(query: Tensor, key: Tensor, value: Tensor, *held: Tensor) -> Any:
        def scored(value_: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *read: Tensor) -> Tensor:
            return value_ if score is None else score(value_, (b, h, q, k), read).to(value_.dtype)

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.ones_like(q, dtype=torch.bool) if mask is None else mask((b, h, q, k))

        out, log_sum, *_ = FLEX(query, key, value, scored, (*blocks, visible), scale, {}, held, ())
        # torch's fake rule has a log-sum of float32, where eager mode's has the dtype of scores
        return (out, log_sum) if own.dtype is torch.float32 else (out,)

    inputs = (*operands, *captured)
    return RandomGraph(make_fx(call)(*inputs), inputs)

"""Random calls of FlexAttention: trees of scores and masks over captured tensors, grouped heads, any lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.support.strategies.functions import RandomFunction
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

    def score(self, depth: int, captured: list[Tensor], is_part: bool = False) -> Score:
        """Draws a function of a score; the tensors that it reads are added to `captured`, as inputs of the graph.

        A part of another score has no negative infinities, which a factor might make positive ones.
        """
        kind = self.choice(("slopes", "relative", "bias", "distance", "cap", "scale"))
        kind = self.choice(("sum", "where", "product", kind, kind)) if depth else kind
        number, position = float(self.choice((0.5, -1.25, 2.0, 0.1))), len(captured)
        match kind:
            case "sum" | "product":
                left, right = self.score(depth - 1, captured, True), self.score(depth - 1, captured, True)
                if kind == "sum":
                    return lambda s, at, held: left(s, at, held) + right(s, at, held) * number
                return lambda s, at, held: left(s, at, held) * torch.tanh(right(s, at, held))
            case "where":
                mask, inner = self.mask(1), self.score(depth - 1, captured, is_part)
                other = float(self.choice((-10.0, 0.25) if is_part else (-math.inf, -10.0, 0.25)))
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


LENGTHS = (16, 33, 1, 40, 5, 64)


def _formula(
    query: Tensor, key: Tensor, value: Tensor, score: Callable[..., Tensor], mask: Mask | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of attention in float32 at least; the output of fully masked rows is 0."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    keys, values = [item.repeat_interleave(group, 1).to(wide) for item in (key, value)]
    b, h, m, n = [torch.arange(size) for size in (*query.shape[:3], key.shape[2])]
    at = b[:, None, None, None], h[:, None, None], m[:, None], n
    scores = score(query.to(wide) @ keys.mT * scale, at)
    scores = scores.expand(*query.shape[:3], key.shape[2])
    if mask is not None:
        scores = torch.where(mask(at), scores, -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    shift = torch.where(total == -math.inf, 0.0, total)
    return (torch.exp(scores - shift) @ values).to(query.dtype), total.squeeze(-1)


class _FunctionDraw(_Draw):
    """Scores and masks that hold for any length: their captured tensors have those of the longest run."""

    def __init__(self, draw: st.DrawFn) -> None:
        super().__init__(draw)
        self.runs = draw(
            st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS)), min_size=1, max_size=3)
        )
        self.rows = max([rows for rows, _ in self.runs] + [1])
        self.keys = max([keys for _, keys in self.runs] + [1])
        self.span = max(self.rows, self.keys)


@st.composite
def attention_functions(draw: st.DrawFn) -> RandomFunction:
    """Draws a function that calls FlexAttention, whose lengths differ from run to run, and its gradients.

    The log-sum-exp may be a result, and its gradient differs from zero then. Captured tensors have gradients.
    """
    own = _FunctionDraw(draw)
    width, value_width = own.choice(WIDTHS), own.choice(WIDTHS)
    captured: list[Tensor] = []
    score = own.score(own.choice((0, 1, 2)), captured) if own.choice((True, True, False)) else None
    mask = own.mask(own.choice((0, 1, 2))) if own.choice((True, True, False)) else None
    scale, size, returns_lse = own.choice((width**-0.5, 0.5)), own.choice(BLOCKS), own.choice((True, False))
    returns_lse = returns_lse and own.dtype is not torch.float64  # whose log-sum torch's fake rule has in float32
    is_fixed = own.choice((True, False)) and len({*own.runs}) == 1

    def blocks(rows: int, keys: int) -> BlockMask | None:
        if mask is None:
            return None
        visible: Any = lambda b, h, q, k: mask((b, h, q, k))  # noqa: E731  create_block_mask counts its arguments
        return create_block_mask(visible, own.batch, own.heads, rows, keys, "cpu", size)

    def lists(rows: int, keys: int) -> Any:
        block_mask = blocks(rows, keys)
        if block_mask is None:
            one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
            block_mask = BlockMask.from_kv_blocks(*one, BLOCK_SIZE=1 << 30, seq_lengths=(rows, keys))
        return block_mask.as_tuple()[2:-3]

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        held, blocks_ = rest[: len(captured)], rest[len(captured) :]

        def scored(value_: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return value_ if score is None else score(value_, (b, h, q, k), held)

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.ones_like(q, dtype=torch.bool) if mask is None else mask((b, h, q, k))

        settings = (query.shape[2], key.shape[2], *blocks_, *_sizes(size, mask), visible)
        out, log_sum, *_ = FLEX(query, key, value, scored, settings, scale, {})
        return (out, log_sum * math.log(2)) if returns_lse else (out,)

    def reference(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        held = rest[: len(captured)]

        def scored(value_: Tensor, at: Position) -> Tensor:
            return value_ if score is None else score(value_, at, held)

        out, log_sum = _formula(query, key, value, scored, mask, scale)
        return (out, log_sum) if returns_lse else (out,)

    runs = []
    for rows, keys in [own.runs[0]] if is_fixed else own.runs:
        sizes = [(own.batch, own.heads, rows, width), (own.batch, own.key_heads, keys, width),
                 (own.batch, own.key_heads, keys, value_width)]  # fmt: skip
        operands = [torch.randn(item).to(own.dtype) for item in sizes]
        runs.append((*operands, *captured, *lists(rows, keys)))
    sizes_ = {name: value for name, value in vars(own).items() if name != "choice"}
    text = f"attention of {sizes_}, scores {score is not None}, mask {mask is not None}, blocks {size}"
    return RandomFunction(run, runs, text, reference)


def _sizes(size: int | tuple[int, int], mask: Mask | None) -> tuple[int, int]:
    if mask is None:
        return 1 << 30, 1 << 30
    return size if isinstance(size, tuple) else (size, size)

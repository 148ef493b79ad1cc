"""The formulas of FlexAttention and its gradients, on tensors; `flex.py` traces them.

Scores have dimensions (batch, head, query row, *keys). Keys have one dimension, or two (block, key of the block) where
a query block visits some key blocks only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxwrap.fx_passes.vectorised_calls import VectorisedCalls
from fxwrap.torch_compat import FLEX_DEFAULT_BLOCK, FakeTensor, bounded_item, in_fake_mode, is_flex_default_block

Size: TypeAlias = Any
"""An int or a torch.SymInt, which torch's annotations do not accept."""

ScalarFunction: TypeAlias = Callable[..., Any]
"""A function of scalars: a score and its indices, which `torch.vmap` vectorises."""

RELATIVE_LOGSUMEXP = "FXWRAP_RELATIVE_LOGSUMEXP"
"""The kernel option with which the log-sum-exp of a row has no maximum.

Where a row's scores are all the lowest number, their log-sum-exp is rounded to that number, which hides how many there
are. A gradient that reads maxima too has exact weights.
"""

WEIGHT_MOD = "FXWRAP_WEIGHT_MOD"
"""The kernel option with a function that returns the factor of a weight: dropout. Its operands are a weight's indices,
and the buffers of `score_mod`."""

SINK_MOD = "FXWRAP_SINK_MOD"
"""The kernel option with a function that returns the logit of a row's sink: an element of the softmax without a value.
Its operands are the indices of the row's first weight, and the buffers of `score_mod`. Log-sum-exp and maxima count
it."""


def single_block(mask_mod: object) -> tuple[object, ...]:
    """Returns the block mask of a call that visits all rows and keys, of which `mask_mod` masks some."""
    return (*[None] * 10, FLEX_DEFAULT_BLOCK, FLEX_DEFAULT_BLOCK, mask_mod)


def result_fakes(output: FakeTensor) -> tuple[torch.Tensor, ...]:
    """Returns output, log-sum-exp and maxima of a call with an output of (batch, heads, rows, width)."""
    dtype = torch.float64 if output.dtype is torch.float64 else torch.float32
    with in_fake_mode(output.fake_mode):
        statistics = [output.new_empty(output.shape[:3], dtype=dtype) for _ in range(2)]
    return (output, *statistics)


@dataclass(frozen=True)
class Indices:
    """The elements of a part of the score matrix.

    Fields:
        batch, head, row: int32 vectors of indices.
        key: an int32 tensor of key positions, of one or two dimensions.
        visible: a mask that broadcasts to the scores, or None where every element counts if `mask_mod` says so.
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    key: Tensor
    visible: Tensor | None = None

    @property
    def key_dims(self) -> list[int]:
        """The dimensions of keys in the scores."""
        return list(range(-self.key.dim(), 0))

    def vectorise(
        self, function: ScalarFunction, prefix: int, suffix: tuple[int | None, ...], out_dims: Any = 0
    ) -> ScalarFunction:
        """Returns a function over all elements of a function of scalars and these indices.

        `prefix` is the number of scores before the indices; `suffix` has the dimensions of the operands after them.
        A result whose `out_dims` is None is not computed for each element.
        """
        vectors: list[tuple[int | None, ...]] = [(None, None, None, 0)] * self.key.dim()
        vectors += [(None, None, 0, None), (None, 0, None, None), (0, None, None, None)]
        for dims in vectors:
            function = torch.vmap(function, in_dims=(0,) * prefix + dims + suffix, out_dims=out_dims)

        def vectorised(*operands: Any) -> Any:
            with VectorisedCalls():
                return function(*operands[:prefix], self.batch, self.head, self.row, self.key, *operands[prefix:])

        return vectorised


@dataclass(frozen=True)
class BlockStructure:
    """The key blocks that each block of query rows visits.

    Fields:
        kv_num_blocks, kv_indices: counts and lists of visited blocks, with dimensions (batch or 1, head or 1, query
            block[, block]).
        full_kv_num_blocks, full_kv_indices: the same for blocks without masked elements, or None.
        q_block_size, kv_block_size: rows and keys of a block.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_block_size: int
    kv_block_size: int

    @property
    def is_trivial(self) -> bool:
        """Whether one block has all elements: torch's default without a block mask."""
        return is_flex_default_block(self.q_block_size) and is_flex_default_block(self.kv_block_size)

    @property
    def counts(self) -> Tensor:
        """The number of visited blocks, full ones included."""
        full = self.full_kv_num_blocks
        return self.kv_num_blocks if full is None else self.kv_num_blocks + full

    def visited(self) -> Tensor:
        """Returns the visited blocks in one list: partial ones, full ones, then zeros."""
        partial, full = self.kv_indices, self.full_kv_indices
        width = partial.shape[-1] + (0 if full is None else full.shape[-1])
        position = torch.arange(width, dtype=torch.int32, device=partial.device)
        blocks = _entries(partial, position.expand(*partial.shape[:-1], width))
        if full is not None:
            start = self.kv_num_blocks[..., None]
            blocks = torch.where(position < start, blocks, _entries(full, position - start))
        return torch.where(position < self.counts[..., None], blocks, 0)

    def visible(self, indices: Indices, keys: Size) -> Tensor | None:
        """Returns whether each element of (batch or 1, head or 1, row, key) is in a visited block."""
        if self.is_trivial:
            return None
        visited = self.visited()[..., None, :]
        width, device = visited.shape[-1], visited.device
        block = torch.arange((keys + self.kv_block_size - 1) // self.kv_block_size, device=device)
        listed = torch.arange(width, device=device) < self.counts[..., None, None]
        table = ((visited == block[:, None]) & listed).any(-1)
        shape = self.kv_num_blocks.shape
        batch = indices.batch * 0 if is_one(shape[0]) else indices.batch
        head = indices.head * 0 if is_one(shape[1]) else indices.head
        row, key = indices.row // self.q_block_size, indices.key // self.kv_block_size
        return table[batch[:, None, None, None], head[:, None, None], row[:, None], key]


def _entries(lists: Tensor, position: Tensor) -> Tensor:
    """Returns entries of lists along the last dimension; positions outside get any entry."""
    return lists.gather(-1, position.clamp(0, lists.shape[-1] - 1).long())


def is_one(size: Size) -> bool:
    """Whether a size is the constant one. Installs no guard."""
    return type(size) is int and size == 1


@dataclass(frozen=True)
class FlexAttention:
    """The operands of `flex_attention`, and of its backward.

    Fields:
        query: (batch, heads, rows, width).
        key, value: (batch or 1, heads / groups, keys, width).
        score_mod, mask_mod: functions of scalars: score, batch, head, row, key, *buffers; the mask takes no score.
        blocks: the block mask.
        scale: the factor of the scores.
        stats_unit: what log-sum-exp and maxima are divided by.
        score_buffers, mask_buffers: further operands of the functions.
        zeroes_fully_masked_rows: whether the output is 0, not NaN, where all scores of a row are minus infinity.
        has_relative_logsumexp: whether maxima are subtracted from the log-sum-exp.
        weight_mod: a function of indices and `score_buffers`, whose results weights of values are multiplied by.
        sink_mod: a function of indices and `score_buffers`, which returns the logit of a row's sink.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScalarFunction
    mask_mod: ScalarFunction
    blocks: BlockStructure
    scale: float
    stats_unit: float
    score_buffers: tuple[object, ...] = ()
    mask_buffers: tuple[object, ...] = ()
    zeroes_fully_masked_rows: bool = True
    has_relative_logsumexp: bool = False
    weight_mod: ScalarFunction | None = None
    sink_mod: ScalarFunction | None = None

    @classmethod
    def from_arguments(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScalarFunction,
        block_mask: Sequence[Any],
        scale: float,
        kernel_options: dict[str, Any],
        score_buffers: Sequence[object] = (),
        mask_buffers: Sequence[object] = (),
    ) -> FlexAttention:
        """Returns the operands of a call of `flex_attention`."""
        *_, q_block_size, kv_block_size, mask_mod = block_mask
        _, _, counts, indices, full_counts, full_indices, *_ = block_mask
        if counts is None:  # without lists, all blocks are visited
            q_block_size = kv_block_size = FLEX_DEFAULT_BLOCK
        blocks = BlockStructure(counts, indices, full_counts, full_indices, q_block_size, kv_block_size)
        unit = 1.0 if kernel_options.get("BACKEND") == "FLASH" else math.log(2)
        buffers = tuple(score_buffers), tuple(mask_buffers)
        zeroes = not kernel_options.get("ROWS_GUARANTEED_SAFE", False)
        is_relative = kernel_options.get(RELATIVE_LOGSUMEXP, False)
        return cls(
            query, key, value, score_mod, mask_mod, blocks, scale, unit, *buffers, zeroes, is_relative,
            kernel_options.get(WEIGHT_MOD), kernel_options.get(SINK_MOD),
        )  # fmt: skip

    @property
    def groups(self) -> int:
        """The number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def arange(self, count: Size) -> Tensor:
        """Returns indices, int32 as those with which the functions were traced."""
        return torch.arange(count, dtype=torch.int32, device=self.query.device)

    def everything(self) -> Indices:
        """Returns the indices of the whole score matrix."""
        sizes = (*self.query.shape[:3], self.key.shape[2])
        indices = Indices(*[self.arange(size) for size in sizes])
        visible = self.blocks.visible(indices, self.key.shape[2])
        return Indices(indices.batch, indices.head, indices.row, indices.key, visible)

    def scores(self, query: Tensor, key: Tensor, indices: Indices) -> tuple[Tensor, Tensor]:
        """Returns the scaled products of queries and keys, and whether each element is visible."""
        products = _matmul(_grouped(query, key, self.dtype), _heads(key, query, self.dtype).mT)
        scores = products.view(*query.shape[:3], *indices.key.shape) * self.scale
        mask = indices.vectorise(self.mask_mod, 0, (None,) * len(self.mask_buffers))(*self.mask_buffers)
        return scores, mask if indices.visible is None else mask & indices.visible

    def modified(self, scores: Tensor, mask: Tensor, indices: Indices) -> Tensor:
        """Returns the scores after `score_mod`; masked ones are minus infinity. Raises TypeError for complex scores."""
        modify = indices.vectorise(self.score_mod, 1, (None,) * len(self.score_buffers))
        modified = modify(scores, *self.score_buffers)
        if modified.is_complex():
            raise TypeError(f"its scores have the dtype {modified.dtype}")
        return torch.where(mask, modified.to(self.dtype), -math.inf)

    def factored(self, values: Tensor, indices: Indices) -> Tensor:
        """Returns values of weights, or of their gradients, times the factors of these."""
        if self.weight_mod is None:
            return values
        factors = indices.vectorise(self.weight_mod, 0, (None,) * len(self.score_buffers))(*self.score_buffers)
        result: Tensor = values * factors.to(self.dtype)
        return result

    def sinks(self, indices: Indices) -> Tensor | None:
        """Returns the logits of sinks, (batch, head, row); None for no sinks."""
        if self.sink_mod is None:
            return None
        first = Indices(indices.batch, indices.head, indices.row, self.arange(1))
        logits = first.vectorise(self.sink_mod, 0, (None,) * len(self.score_buffers))(*self.score_buffers)
        result: Tensor = logits.to(self.dtype).squeeze(-1)
        return result

    def attend(self, query: Tensor, key: Tensor, value: Tensor, indices: Indices) -> tuple[Tensor, Tensor, Tensor]:
        """Returns output, log-sum-exp and maxima for some of the rows, heads and keys.

        Fully masked rows have output 0 or NaN, log-sum-exp and maximum minus infinity.
        """
        scores = self.modified(*self.scores(query, key, indices), indices)
        largest = scores.amax(indices.key_dims, keepdim=True)
        shift = torch.where(largest == -math.inf, 0.0, largest)
        weights = torch.exp(scores - shift)  # the largest is 1, so subnormal ones change nothing but slow matmuls down
        weights = torch.where(weights < torch.finfo(self.dtype).tiny, 0.0, weights)
        total = weights.sum(indices.key_dims)
        weights = self.factored(weights, indices)
        products = _matmul(weights.view(*_grouped_shape(query, key), -1), _heads(value, query, self.dtype))
        products = products.view(*query.shape[:3], value.shape[3])
        largest, shift, sinks = largest.view(total.shape), shift.view(total.shape), self.sinks(indices)
        if sinks is not None:
            scores_maximum, largest = largest, torch.maximum(largest, sinks)
            factor, shift = torch.exp(scores_maximum - largest), largest
            total, products = total * factor + torch.exp(sinks - largest), products * factor[..., None]
        divisor = torch.where(total == 0, 1.0, total) if self.zeroes_fully_masked_rows else total
        out = products / divisor[..., None]
        logsumexp = torch.log(total)
        if not self.has_relative_logsumexp:
            logsumexp = logsumexp + shift
        return out.to(self.query.dtype), logsumexp / self.stats_unit, largest / self.stats_unit

    def gradients(
        self,
        out: Tensor,
        logsumexp: Tensor,
        grad_out: Tensor | None,
        grad_logsumexp: Tensor | None,
        joint: ScalarFunction,
        captured: int,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """Returns the gradients of query, key, value and the sums over scores that `joint` returns.

        `joint` is a function of a score, its indices, the gradient of the modified score and the buffers. It returns
        the gradient of the score, those of the indices and `captured` sums over scores: gradients of the buffers.
        """
        query, key, value, dtype, indices = self.query, self.key, self.value, self.dtype, self.everything()
        scores, mask = self.scores(query, key, indices)
        total = logsumexp.to(dtype)[..., None] * self.stats_unit
        weights = torch.exp(self.modified(scores, mask, indices) - torch.where(total == -math.inf, 0.0, total))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_outs = _grouped(grad_out, key, dtype)
        grad_weights = _matmul(grad_outs, _heads(value, query, dtype).mT).view(scores.shape)
        grad_total = -(out.to(dtype) * grad_out.to(dtype)).sum(-1)
        if grad_logsumexp is not None:
            grad_total = grad_total + grad_logsumexp.to(dtype) / self.stats_unit
        grad_modified = weights * (self.factored(grad_weights, indices) + grad_total[..., None])
        grad_scores, grad_buffers = self._joint(joint, scores, grad_modified, indices, captured)
        grad_products = _grouped(torch.where(mask, grad_scores.to(dtype), 0.0) * self.scale, key, dtype)
        grad_query = _matmul(grad_products, _heads(key, query, dtype)).view(query.shape)
        grad_key = _matmul(grad_products.mT, _grouped(query, key, dtype))
        grad_value = _matmul(_grouped(self.factored(weights, indices), key, dtype).mT, grad_outs)
        return grad_query, _as_batches(grad_key, key, query), _as_batches(grad_value, value, query), grad_buffers

    def _joint(
        self, joint: ScalarFunction, scores: Tensor, grads: Tensor, indices: Indices, captured: int
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the gradients of scores and buffers from those of modified scores."""
        suffix = (0, *[None] * len(self.score_buffers))
        out_dims = [0, *[None] * (4 + captured)]
        function = indices.vectorise(lambda *operands: [*joint(*operands)], 1, suffix, out_dims)
        grad_scores, _, _, _, _, *grad_buffers = function(scores, grads, *self.score_buffers)
        return grad_scores, grad_buffers


def _as_batches(grads: Tensor, like: Tensor, query: Tensor) -> Tensor:
    """Returns gradients of keys or values, one matrix for each batch and head, in the sizes of these."""
    grads = grads.view(query.shape[0], *like.shape[1:])
    return grads.sum(0, keepdim=True) if is_one(like.shape[0]) and not is_one(query.shape[0]) else grads


def _heads(tensor: Tensor, query: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns keys or values as one matrix for each batch and key head; a batch of one is shared."""
    batch = query.shape[0]
    return tensor.to(dtype).expand(batch, *tensor.shape[1:]).reshape(batch * tensor.shape[1], *tensor.shape[2:])


def _grouped_shape(query: Tensor, key: Tensor) -> tuple[Size, Size]:
    """Returns the number of matrices, and of rows of each: those of all query heads that share a key head."""
    batch, heads, rows, _ = query.shape
    return batch * key.shape[1], heads // key.shape[1] * rows


def _grouped(tensor: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of query rows as one matrix for each batch and key head."""
    return tensor.to(dtype).reshape(*_grouped_shape(tensor, key), tensor.shape[3])


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right)


@dataclass(frozen=True)
class RowLoop:
    """The loop over blocks of query rows. A block mask with several batches or heads adds them to the loop.

    Fields:
        attention: the operands.
        rows: the rows of an iteration; those of the last one beyond the end repeat the last row.
    """

    attention: FlexAttention
    rows: int

    @property
    def _counts(self) -> tuple[Size, Size, Size]:
        """The batches, heads and row blocks that the loop runs over."""
        blocks, length = self.attention.blocks, self.attention.query.shape[2]
        if blocks.is_trivial:
            return 1, 1, (length + self.rows - 1) // self.rows
        batches, heads, row_blocks = blocks.kv_num_blocks.shape
        return batches, heads, row_blocks

    def _position(self, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns batch, head and row block of iterations."""
        _, heads, row_blocks = self._counts
        return number // row_blocks // heads, number // row_blocks % heads, number % row_blocks

    def iterations(self) -> list[Tensor]:
        """Returns the operands of an iteration: its number and, with a block mask, its count and list of key blocks."""
        blocks, (batches, heads, row_blocks) = self.attention.blocks, self._counts
        number = self.attention.arange(batches * heads * row_blocks)
        if blocks.is_trivial:
            return [number]
        position = self._position(number)  # an index, because a view would install guards on symbolic sizes
        return [number, blocks.counts[position], blocks.visited()[position]]

    def attend(self, number: Tensor, count: Tensor | None = None, visited: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns output, log-sum-exp and maxima of one iteration."""
        attention, (batches, heads, _) = self.attention, self._counts
        query, key, value = attention.query, attention.key, attention.value
        batch_number, head_number, row_block = self._position(number)
        row = row_block * self.rows + attention.arange(_minimum(self.rows, query.shape[2]))
        if not _divides(self.rows, query.shape[2]):
            row = row.clamp(max=query.shape[2] - 1)
        batch, head = attention.arange(query.shape[0]), attention.arange(query.shape[1])
        query = _select(query, 2, row)
        if not is_one(heads):
            head = head_number[None]
            query = _select(query, 1, head)
            key, value = [_select(item, 1, head // attention.groups) for item in (key, value)]
        if not is_one(batches):
            batch = batch_number[None]
            query = _select(query, 0, batch)
            key, value = [item if is_one(item.shape[0]) else _select(item, 0, batch) for item in (key, value)]
        position, visible = attention.arange(key.shape[2]), None
        if count is not None and visited is not None:
            position, visible = self._visited_keys(count, visited)
            key, value = [_select(item, 2, position.reshape(-1)) for item in (key, value)]
        return attention.attend(query, key, value, Indices(batch, head, row, position, visible))

    def _visited_keys(self, count: Tensor, visited: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the positions of visited keys, at least one block of them, and which ones count."""
        attention, width = self.attention, visited.shape[0]
        keys, block_size = attention.key.shape[2], attention.blocks.kv_block_size
        extent = _minimum(block_size, keys)
        number = bounded_item(count.clamp(1, width), 1, width)
        position = visited[:number, None] * block_size + attention.arange(extent)
        visible = (attention.arange(number) < count)[:, None]
        if _divides(extent, keys):
            return position, visible
        return position.clamp(max=keys - 1), visible & (position < keys)

    def assemble(self, stacked: Tensor) -> Tensor:
        """Returns the stacked results of all iterations as (batch, head, row, ...)."""
        attention, (batches, heads, row_blocks) = self.attention, self._counts
        batch, head, row = [attention.arange(size) for size in attention.query.shape[:3]]
        batch, head = batch[:, None, None], head[:, None]
        in_batches, in_heads = not is_one(batches), not is_one(heads)
        iteration = (batch * in_batches * heads + head * in_heads) * row_blocks + row // self.rows
        return stacked[iteration, batch * (not in_batches), head * (not in_heads), row % self.rows]


def _minimum(block: int, size: Size) -> Size:
    """Returns the elements of a block of a dimension. Installs no guard."""
    return torch.sym_min(block, size)  # type: ignore[no-untyped-call]


def _divides(divisor: Size, size: Size) -> bool:
    """Whether a number provably divides a size."""
    return type(divisor) is int and type(size) is int and size % divisor == 0


def _select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns the elements of a tensor at indices of one dimension."""
    return torch.ops.aten.index.Tensor(tensor, [*[None] * dim, index])  # type: ignore[no-any-return]

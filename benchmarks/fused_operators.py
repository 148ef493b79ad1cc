"""The fused operators that `ops.py` measures: functions of tensors as users write them, with their inputs.

Training is written as formulas (a backward, an optimiser's step), so that the compiled function contains only the fused
operator. Every operator works on an array of `rows` x `columns`, or on a few of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

EPSILON = 1e-5
GROUPS = 32
GROUP_NORM_CHANNELS = 256
HEAD = 128
LABEL_BYTES = 8
"""Bytes of a class label or an index: int64."""

LEARNING_RATE, BETA_AVERAGE, BETA_SQUARE, ADAM_STEP = 1e-3, 0.9, 0.999, 10


@dataclass(frozen=True)
class Draw:
    """Draws fresh random inputs of the size, element type and device that are being measured."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers; `rows` x `columns` unless sizes are given."""
        drawn = torch.randn(sizes or (self.rows, self.columns), generator=self.generator, device=self.device)
        return drawn.to(dtype or self.dtype)

    def uniform(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers from 0 to 1; `rows` x `columns` unless sizes are given."""
        drawn = torch.rand(sizes or (self.rows, self.columns), generator=self.generator, device=self.device)
        return drawn.to(dtype or self.dtype)

    def integers(self, high: int, *sizes: int) -> Tensor:
        """int64 numbers from 0 to `high`, exclusive."""
        return torch.randint(high, sizes, generator=self.generator, device=self.device)


@dataclass(frozen=True)
class FusedOperator:
    """One operator.

    Fields:
        function: from tensors to a tensor, several, or None if it only writes its inputs.
        make_inputs: draws its inputs.
        bytes_moved: (rows, columns, bytes an element) -> the bytes that the algorithm must read and write in memory.
        mutated: positions of the written inputs.
    """

    function: Callable[..., Any]
    make_inputs: Callable[[Draw], tuple[Tensor, ...]]
    bytes_moved: Callable[[int, int, int], int]
    mutated: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.function.__name__


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def layer_norm_residual(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, EPSILON), total


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * scaled.to(x.dtype)


def swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def packed_swiglu_backward(gate_and_up: Tensor, gradient: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return torch.cat((aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)), dim=-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def adam_step(parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor) -> None:
    average.lerp_(gradient, 1 - BETA_AVERAGE)
    square.mul_(BETA_SQUARE).addcmul_(gradient, gradient, value=1 - BETA_SQUARE)
    denominator = (square.sqrt() / math.sqrt(1 - BETA_SQUARE**ADAM_STEP)).add_(1e-8)
    parameter.addcdiv_(average, denominator, value=-LEARNING_RATE / (1 - BETA_AVERAGE**ADAM_STEP))


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def full_sum(x: Tensor) -> Tensor:
    return x.sum()


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


def cumsum(x: Tensor) -> Tensor:
    return torch.cumsum(x, dim=-1)


def gather_multiply(x: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    return x.gather(1, index) * scale


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, training=True, momentum=0.1, eps=EPSILON)


def rotary_embedding(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores / math.sqrt(HEAD)).masked_fill(mask, float("-inf")), dim=-1)


def log_softmax_backward(gradient: Tensor, output: Tensor) -> Tensor:
    return aten._log_softmax_backward_data(gradient, output, 1, output.dtype)


def layer_norm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return aten.native_layer_norm_backward(gradient, x, x.shape[-1:], mean, rstd, weight, bias, [True, True, True])


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, min(GROUPS, x.shape[1]), weight, bias, EPSILON)


def cat_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.cat((x * 2, torch.relu(y), z), dim=-1)


def pad(x: Tensor) -> Tensor:
    return F.pad(torch.relu(x), (1, 1, 1, 1), value=-1.0)


def one_hot_loss(logits: Tensor, labels: Tensor) -> Tensor:
    target = F.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    return -(target * torch.log_softmax(logits, dim=-1)).sum(-1).mean()


def _logits(draw: Draw) -> tuple[Tensor, ...]:
    return draw.normal(), draw.integers(draw.columns, draw.rows)


def _batch_norm_inputs(draw: Draw) -> tuple[Tensor, ...]:
    """Statistics and weights stay in float32, as under automatic mixed precision."""
    wide, columns = torch.float32, draw.columns
    statistics = draw.normal(columns, dtype=wide), draw.uniform(columns, dtype=wide) + 0.5
    return draw.normal(), *statistics, draw.normal(columns, dtype=wide), draw.normal(columns, dtype=wide)


def _head(columns: int) -> int:
    return math.gcd(columns, HEAD)


def _rotary_inputs(draw: Draw) -> tuple[Tensor, ...]:
    """Heads of each row share its angles."""
    head = _head(draw.columns)
    angles = 3 * draw.normal(draw.rows, 1, head // 2, dtype=torch.float32).repeat(1, 1, 2)
    heads = draw.normal(draw.rows, draw.columns // head, head)
    return heads, angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)


def _layer_norm_backward_inputs(draw: Draw) -> tuple[Tensor, ...]:
    """The statistics come from the forward, in the element type that this device saves them in."""
    x, weight, bias = draw.normal(), draw.normal(draw.columns), draw.normal(draw.columns)
    _, mean, rstd = aten.native_layer_norm(x, [draw.columns], weight, bias, EPSILON)
    return draw.normal(), x, mean, rstd, weight, bias


def _group_norm_inputs(draw: Draw) -> tuple[Tensor, ...]:
    """Images of `columns` points; rows are samples times channels."""
    channels = math.gcd(draw.rows, GROUP_NORM_CHANNELS)
    x = draw.normal(draw.rows // channels, channels, draw.columns)
    return x, draw.normal(channels), draw.normal(channels)


def _arrays(count: int, vectors: int = 0) -> Callable[[int, int, int], int]:
    """Bytes of `count` passes over an array and of `vectors` over one row."""
    return lambda rows, columns, itemsize: (count * rows * columns + vectors * columns) * itemsize


OPERATORS: dict[str, FusedOperator] = {
    operator.name: operator
    for operator in (
        FusedOperator(bias_gelu, lambda d: (d.normal(), d.normal(d.columns)), _arrays(2, 1)),
        # A row stays on chip between its maximum, its sum and the quotient: one read, one write.
        FusedOperator(softmax, lambda d: (d.normal(),), _arrays(2)),
        FusedOperator(
            layer_norm_residual,
            lambda d: (d.normal(), d.normal(), d.normal(d.columns), d.normal(d.columns)),
            _arrays(4, 2),
        ),
        FusedOperator(rms_norm, lambda d: (d.normal(), d.normal(d.columns)), _arrays(2, 1)),
        FusedOperator(swiglu, lambda d: (d.normal(d.rows, 2 * d.columns),), _arrays(3)),
        FusedOperator(packed_swiglu_backward, lambda d: (d.normal(d.rows, 2 * d.columns), d.normal()), _arrays(5)),
        FusedOperator(cross_entropy, _logits, lambda r, c, b: r * c * b + r * LABEL_BYTES),
        # Four reads; the parameter and both averages are written.
        FusedOperator(
            adam_step, lambda d: (d.normal(), d.normal(), d.normal(), d.uniform()), _arrays(7), mutated=(0, 2, 3)
        ),
        # Uniform numbers: the sums are far from zero, so that the relative error is meaningful.
        FusedOperator(column_sum, lambda d: (d.uniform(),), _arrays(1, 1)),
        FusedOperator(full_sum, lambda d: (d.uniform(),), lambda r, c, b: (r * c + 1) * b),
        # One pass: a square tile is transposed on chip.
        FusedOperator(transpose_add, lambda d: (d.normal(), d.normal(d.columns, d.rows)), _arrays(3)),
        FusedOperator(cumsum, lambda d: (d.normal(),), _arrays(2)),
        # The gathered row stays on chip, so that it is read once; the indices are most of the bytes.
        FusedOperator(
            gather_multiply,
            lambda d: (d.normal(), d.integers(d.columns, d.rows, d.columns), d.normal()),
            lambda r, c, b: r * c * (3 * b + LABEL_BYTES),
        ),
        # A column is known only after its last row: one read for the statistics, another to normalise, one write.
        # Running statistics are read and written, weight and bias read, in float32.
        FusedOperator(batch_norm, _batch_norm_inputs, lambda r, c, b: 3 * r * c * b + 6 * c * 4, mutated=(1, 2)),
        FusedOperator(rotary_embedding, _rotary_inputs, lambda r, c, b: (2 * r * c + 2 * r * _head(c)) * b),
        # The mask has one byte an element.
        FusedOperator(
            masked_softmax,
            lambda d: (d.normal(), d.uniform(dtype=torch.float32) < 0.5),
            lambda r, c, b: r * c * (2 * b + 1),
        ),
        FusedOperator(log_softmax_backward, lambda d: (d.normal(), torch.log_softmax(d.normal(), dim=-1)), _arrays(3)),
        # Two passes: rows for the gradient of x (two reads, one write), columns for those of weight and bias (two
        # reads). A kernel that keeps partial column sums on chip in its row pass moves 3 arrays and can beat this.
        FusedOperator(
            layer_norm_backward, _layer_norm_backward_inputs, lambda r, c, b: (5 * r * c + 3 * c + 2 * r) * b
        ),
        # A group (8 channels of one sample) stays in a cache between its statistics and its normalisation.
        FusedOperator(
            group_norm, _group_norm_inputs, lambda r, c, b: (2 * r * c + 2 * math.gcd(r, GROUP_NORM_CHANNELS)) * b
        ),
        FusedOperator(cat_three, lambda d: (d.normal(), d.normal(), d.normal()), _arrays(6)),
        FusedOperator(pad, lambda d: (d.normal(),), lambda r, c, b: (r * c + (r + 2) * (c + 2)) * b),
        FusedOperator(one_hot_loss, _logits, lambda r, c, b: r * c * b + r * LABEL_BYTES),
    )
}

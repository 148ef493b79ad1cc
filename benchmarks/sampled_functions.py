"""The functions of `kernel_sample.py`: operators and small fusions that models contain, with inputs of random sizes.

Sizes are drawn around a typical one, so that they are rarely multiples of vectors or tiles; a GPU's are larger than a
CPU's. Most functions have gradients, whose kernels are part of the sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]


@dataclass(frozen=True)
class SizedDraw:
    """Draws sizes and inputs of an element type on a device."""

    dtype: torch.dtype
    device: torch.device
    sizes: random.Random
    generator: torch.Generator

    def size(self, cpu: int, gpu: int) -> int:
        """A size within 15% of the one for this kind of device."""
        return int((gpu if self.device.type == "cuda" else cpu) * self.sizes.uniform(0.85, 1.15))

    def normal(self, *sizes: int, gradient: bool = True, channels_last: bool = False) -> Tensor:
        """Normal numbers."""
        drawn = torch.randn(sizes, generator=self.generator, device=self.device).to(self.dtype)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return drawn.to(memory_format=layout).requires_grad_(gradient)

    def constant(self, *sizes: int) -> Tensor:
        """Normal numbers without gradients."""
        return self.normal(*sizes, gradient=False)

    def integers(self, high: int, *sizes: int) -> Tensor:
        """int64 numbers from 0 to `high`, exclusive."""
        return torch.randint(high, sizes, generator=self.generator, device=self.device)


@dataclass(frozen=True)
class SampledFunction:
    """One function.

    Fields:
        function: from tensors to a tensor or several.
        inputs: draws its inputs.
        has_gradients: whether the gradients of its floating-point inputs are measured too.
        dtypes: names of element types.
    """

    function: Function
    inputs: Callable[[SizedDraw], tuple[Tensor, ...]]
    has_gradients: bool
    dtypes: tuple[str, ...]


FUNCTIONS: dict[str, SampledFunction] = {}
"""All functions by name."""

BOTH, FULL = ("bfloat16", "float32"), ("float32",)


def sampled(
    inputs: Callable[[SizedDraw], tuple[Tensor, ...]], gradients: bool = True, dtypes: tuple[str, ...] = BOTH
) -> Callable[[Function], Function]:
    """Adds the decorated function to `FUNCTIONS`."""

    def add(function: Function) -> Function:
        FUNCTIONS[function.__name__] = SampledFunction(function, inputs, gradients, dtypes)
        return function

    return add


# --- norms ------------------------------------------------------------------------------------------------------------


@sampled(lambda d: (d.normal(d.size(1024, 8192), 1600), d.normal(1600), d.normal(1600)))
def layer_norm_1600(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@sampled(lambda d: (d.normal(d.size(4096, 65536), 197), d.normal(197), d.normal(197)))
def layer_norm_197(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@sampled(lambda d: (d.normal(d.size(128, 2048), 12289), d.normal(12289), d.normal(12289)))
def layer_norm_12289(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@sampled(lambda d: (d.normal(d.size(512, 8192), 5120), d.normal(5120)))
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


@sampled(lambda d: (d.normal(n := d.size(512, 8192), 3072), d.normal(n, 3072), d.normal(3072)))
def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.rms_norm(total, total.shape[-1:], weight)


@sampled(lambda d: (d.normal(d.size(512, 4096), 24, 128), d.normal(128)))
def head_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


@sampled(lambda d: (d.normal(d.size(2, 16), 320, 61, 61), d.normal(320), d.normal(320)))
def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


@sampled(lambda d: (d.normal(d.size(2, 16), 96, 75, 75), d.normal(96), d.normal(96)))
def instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias)


@sampled(lambda d: (d.normal(d.size(8, 64), 128, 28, 28), d.normal(128), d.normal(128)))
def batch_norm_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


@sampled(lambda d: (d.normal(d.size(8, 64), 128, 28, 28, channels_last=True), d.normal(128), d.normal(128)))
def batch_norm_relu_channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


@sampled(lambda d: (d.normal(d.size(4, 32), 64, 56, 56), *[d.constant(64) for _ in range(4)]), gradients=False)
def frozen_batch_norm_residual(x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, scale.abs() + 1, weight, bias) + x)


@sampled(lambda d: (d.normal(d.size(8, 48), 96, 56, 56, channels_last=True), d.normal(96), d.normal(96)))
def channel_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), (96,), weight, bias).permute(0, 3, 1, 2)


@sampled(lambda d: (d.normal(d.size(8, 64), 96, 27, 27),), gradients=False)
def local_response_norm(x: Tensor) -> Tensor:
    return F.local_response_norm(x, 5)


@sampled(lambda d: (d.normal(d.size(8, 64), 192, 27, 27, channels_last=True),), gradients=False)
def local_response_norm_channels_last(x: Tensor) -> Tensor:
    return F.local_response_norm(x, 5)


@sampled(lambda d: (d.normal(d.size(256, 4096), 2048),), gradients=False)
def normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@sampled(lambda d: (d.normal(d.size(256, 768), d.size(128, 512), 3, 3),))
def weight_standardization(weight: Tensor) -> Tensor:
    variance, mean = torch.var_mean(weight, (1, 2, 3), keepdim=True, correction=0)
    return (weight - mean) * torch.rsqrt(variance + 1e-5)


# --- softmax and losses -----------------------------------------------------------------------------------------------


@sampled(lambda d: (d.normal(d.size(1024, 16384), 1023),))
def softmax_1023(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@sampled(lambda d: (d.normal(d.size(32768, 524288), 77),), gradients=False)
def softmax_77(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1)


@sampled(lambda d: (d.normal(d.size(2, 16), 21, 257, 257),))
def softmax_of_channels(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


@sampled(lambda d: (d.normal(d.size(8, 32), 12, 384, 384), d.constant(384, 384)))
def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.where(mask > 1, float("-inf"), x * 0.125), -1)


@sampled(lambda d: (d.normal(d.size(32, 1024), 32001),), gradients=False)
def log_softmax_32001(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


@sampled(lambda d: (d.normal(n := d.size(2, 16), 21, 257, 257), d.integers(21, n, 257, 257)))
def segmentation_loss(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels)


@sampled(lambda d: (d.normal(n := d.size(16, 256), 128256), d.integers(128256, n)))
def cross_entropy_128256(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), labels)


@sampled(lambda d: (d.normal(n := d.size(64, 2048), 50257), d.integers(50257, n)))
def smoothed_cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels, label_smoothing=0.1)


@sampled(lambda d: (d.normal(n := d.size(256, 4096), 4097), d.constant(n, 4097)))
def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(torch.log_softmax(student, -1), torch.softmax(teacher, -1), reduction="batchmean")


@sampled(lambda d: (d.normal(n := d.size(512, 16384), 1000), d.constant(n, 1000)))
def binary_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, torch.sigmoid(target))


@sampled(lambda d: (d.normal(n := d.size(1000, 16384), 1001), d.constant(n, 1001)))
def smooth_l1_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(x, target)


# --- pooling and images -----------------------------------------------------------------------------------------------


@sampled(lambda d: (d.normal(d.size(4, 64), 64, 113, 113),))
def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


@sampled(lambda d: (d.normal(d.size(4, 64), 64, 112, 112, channels_last=True),))
def max_pool_channels_last(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


@sampled(lambda d: (d.normal(d.size(4, 64), 192, 35, 35),))
def average_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1)


@sampled(lambda d: (d.normal(d.size(16, 128), 256, 31, 29),))
def adaptive_pool(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 7)


@sampled(lambda d: (d.normal(d.size(32, 256), 1280, 7, 7),))
def hardswish_mean(x: Tensor) -> Tensor:
    return F.hardswish(x).mean((2, 3))


@sampled(lambda d: (d.normal(d.size(4, 16), 64, 45, 45),))
def upsample_bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


@sampled(lambda d: (d.normal(d.size(4, 16), 128, 45, 45),))
def upsample_nearest(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0)


@sampled(lambda d: (d.normal(d.size(2, 16), 32, 61, 61),))
def upsample_bicubic(x: Tensor) -> Tensor:
    return F.interpolate(x, size=(97, 97), mode="bicubic")


@sampled(lambda d: (d.normal(d.size(2, 16), 64, 99, 99),))
def reflection_pad(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="reflect") * 2


@sampled(lambda d: (d.normal(d.size(4, 32), 96, 33, 33),))
def pixel_shuffle(x: Tensor) -> Tensor:
    return F.relu(F.pixel_shuffle(x, 2))


@sampled(lambda d: (d.normal(d.size(32, 128), 64, 64, 3),), gradients=False)
def image_to_channels_first(x: Tensor) -> Tensor:
    return (x.permute(0, 3, 1, 2) * 0.5 + 1).contiguous()


@sampled(lambda d: (d.normal(d.size(4, 32), 56, 56, 128),))
def window_partition(x: Tensor) -> Tensor:
    batch, _, _, channels = x.shape
    windows = x.roll((-3, -3), (1, 2)).view(batch, 8, 7, 8, 7, channels).permute(0, 1, 3, 2, 4, 5)
    return windows.reshape(-1, 49, channels)


@sampled(lambda d: (d.normal(n := d.size(4, 16), 32, 64, 64), d.constant(n, 65, 63, 2)), gradients=False)
def grid_sample(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, torch.tanh(grid), align_corners=False)


@sampled(lambda d: (d.normal(n := d.size(8, 64), 240, 28, 28), d.normal(n, 240, 1, 1)))
def squeeze_and_excite(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return x * torch.sigmoid(gate), F.silu(x).mean((2, 3), keepdim=True)


# --- reductions, scans and selections ---------------------------------------------------------------------------------


@sampled(lambda d: (d.normal(d.size(512, 8192), 2047),))
def cumsum_of_rows(x: Tensor) -> Tensor:
    return x.cumsum(-1)


@sampled(lambda d: (d.normal(d.size(16, 64), 1021, 255),))
def cumsum_of_columns(x: Tensor) -> Tensor:
    return x.cumsum(1)


@sampled(lambda d: (d.normal(d.size(512, 4096), 1531),), gradients=False)
def logcumsumexp(x: Tensor) -> Tensor:
    return torch.logcumsumexp(x.float(), -1)


@sampled(lambda d: (d.normal(d.size(64, 1024), 32000),), gradients=False)
def argmax_of_vocabulary(x: Tensor) -> Tensor:
    return x.argmax(-1)


@sampled(lambda d: (d.normal(d.size(32, 128), 511, 255),))
def max_of_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.max(1)
    return values, indices


@sampled(lambda d: (d.normal(d.size(512, 8192), 999),), gradients=False)
def sort(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.sort(-1)
    return values, indices


@sampled(lambda d: (d.normal(d.size(4096, 65536), 64),), gradients=False)
def route_to_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(torch.softmax(x.float(), -1), 8, -1)
    return weights / weights.sum(-1, keepdim=True), experts


@sampled(lambda d: (d.normal(d.size(1024, 16384), 1025),))
def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, -1)
    return variance, mean


@sampled(lambda d: (d.normal(d.size(2048, 16384), 1025),))
def sum_of_squares_of_columns(x: Tensor) -> Tensor:
    return x.float().square().sum(0)


@sampled(lambda d: (d.normal(d.size(200, 2000), 10007),))
def std_of_columns(x: Tensor) -> Tensor:
    return x.std(0)


@sampled(lambda d: (d.normal(d.size(64, 512), 127, 511),))
def gelu_sum_of_middle(x: Tensor) -> Tensor:
    return F.gelu(x).sum(1)


@sampled(lambda d: (d.normal(d.size(3_000_000, 50_000_000)),), gradients=False)
def global_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.float())


@sampled(lambda d: (d.normal(d.size(1000, 30000), 777),), gradients=False)
def amax_and_amin(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(), x.amin()


@sampled(lambda d: (d.normal(d.size(2048, 16384), 2048),), gradients=False)
def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scale).round().to(torch.int8), scale


@sampled(lambda d: (d.normal(d.size(512, 8192), 2048),), gradients=False)
def any_and_all(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x > 3).any(-1), x.isfinite().all()


@sampled(lambda d: (d.normal(d.size(128, 1024), 8191),))
def fourth_moment(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).pow(4).mean(-1)


# --- indices ----------------------------------------------------------------------------------------------------------


@sampled(lambda d: (d.normal(n := d.size(8000, 50000), 768), d.integers(n, d.size(2048, 16384))))
def embedding(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table) * 2


@sampled(lambda d: (d.normal(1000, 255), d.integers(1000, d.size(2048, 65536))))
def narrow_embedding(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table)


@sampled(lambda d: (d.normal(d.size(4000, 40000), 512), d.integers(3000, n := d.size(1024, 16384)), d.normal(n, 512)))
def index_put_add(x: Tensor, index: Tensor, update: Tensor) -> Tensor:
    return x.index_put((index,), update, accumulate=True)


@sampled(lambda d: (d.normal(n := d.size(1024, 16384), 255), d.integers(4000, n)))
def scatter_add(x: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(4000, 255).scatter_add(0, index[:, None].expand(-1, 255), x)


@sampled(lambda d: (d.normal(n := d.size(2048, 32768), 511), d.integers(511, n, 64)))
def gather(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index)


@sampled(lambda d: (d.normal(d.size(512, 8192), 1024), d.integers(400, d.size(1024, 16384))))
def index_silu(x: Tensor, index: Tensor) -> Tensor:
    return F.silu(x[index])


@sampled(lambda d: (d.integers(200, d.size(2000, 20000)),), gradients=False, dtypes=FULL)
def one_hot_counts(index: Tensor) -> Tensor:
    return F.one_hot(index, 200).sum(0)


# --- pointwise functions and data movement ----------------------------------------------------------------------------


@sampled(lambda d: (d.normal(n := d.size(1000, 12288), 4096), d.normal(n, 4096)))
def geglu(x: Tensor, gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * x


@sampled(lambda d: (d.normal(d.size(1000, 8192), 2 * 5504),))
def packed_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@sampled(lambda d: (d.normal(d.size(2, 8), 16, 1024, 64), d.constant(1024, 64), d.constant(1024, 64)))
def rotary_embedding(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


@sampled(lambda d: (d.normal(d.size(2, 8), 1024, 16, 80), d.constant(1024, 1, 80), d.constant(1024, 1, 80)))
def transposed_rotary_embedding(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cosine + torch.cat((-second, first), -1) * sine).transpose(1, 2)


@sampled(lambda d: (d.normal(d.size(512, 8192), 1536), d.normal(1536)))
def bias_mish(x: Tensor, bias: Tensor) -> Tensor:
    return F.mish(x + bias)


@sampled(lambda d: (d.normal(d.size(500, 4000), 3001), d.normal(3001)))
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@sampled(lambda d: (d.normal(n := d.size(700, 7000), 1030), d.normal(1030, n)))
def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x.t() * 2 + y


@sampled(lambda d: (d.normal(d.size(8, 64), 512, 12, 64),))
def heads_first(x: Tensor) -> Tensor:
    return F.relu(x).permute(0, 2, 1, 3).contiguous()


@sampled(lambda d: (d.normal(d.size(8, 64), 12, 64, 257),))
def heads_first_of_257(x: Tensor) -> Tensor:
    return F.relu(x).permute(0, 3, 1, 2).contiguous()


@sampled(lambda d: (d.normal(n := d.size(500, 4000), 1024), d.normal(n, 768), d.normal(n, 80)))
def concatenate(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.cat((x * 2, y, F.relu(z)), -1)


@sampled(lambda d: (d.normal(d.size(100_000, 5_000_000)),), gradients=False, dtypes=FULL)
def transcendental_functions(x: Tensor) -> Tensor:
    return torch.erf(x) + torch.sin(x) * torch.atan2(x, x + 1) + torch.log1p(x.abs()) + torch.expm1(x)


@sampled(lambda d: (d.normal(d.size(3_000_000, 30_000_000)), d.normal(1)), gradients=False)
def clamp_and_lerp(x: Tensor, scale: Tensor) -> Tensor:
    return torch.lerp(x.clamp(-1, 1), x * scale, 0.3)


@sampled(lambda d: (d.constant(n := d.size(500_000, 20_000_000)), d.constant(n), d.constant(n)), gradients=False)
def momentum_step(parameter: Tensor, gradient: Tensor, average: Tensor) -> tuple[Tensor, Tensor]:
    average = average * 0.9 + gradient * 0.1
    return parameter - 1e-3 * average / (average.abs().sqrt() + 1e-3), average


@sampled(lambda d: (d.normal(d.size(300_000, 8_000_000), 3),), gradients=False)
def cross_product(x: Tensor) -> Tensor:
    return torch.linalg.cross(x, x.roll(1, 0))


@sampled(lambda d: (d.constant(d.size(200_000, 5_000_000), 4),), gradients=False)
def box_area(boxes: Tensor) -> Tensor:
    sizes = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0)
    return sizes[:, 0] * sizes[:, 1]


@sampled(lambda d: (d.constant(d.size(200, 1500), 4), d.constant(d.size(200, 1500), 4)), gradients=False)
def pairwise_intersection(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    sizes = (high - low).clamp(min=0)
    return sizes[..., 0] * sizes[..., 1]


@sampled(lambda d: (d.constant(d.size(500, 3000), 257), d.constant(77, 257)), gradients=False, dtypes=FULL)
def pairwise_distance(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y).abs().sum(-1)


@sampled(lambda d: (d.constant(d.size(4, 16), 8, 511, 511),), gradients=False)
def triangles(x: Tensor) -> Tensor:
    return torch.tril(x) + torch.triu(x, 1) * 2


# --- with a matmul or a convolution -----------------------------------------------------------------------------------


@sampled(lambda d: (d.normal(d.size(4, 32), 64, 56, 56), d.normal(64, 64, 3, 3), d.normal(64)))
def convolution_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.conv2d(x, weight, bias, padding=1))


@sampled(lambda d: (d.normal(d.size(8, 64), 96, 28, 28), d.normal(96, 1, 7, 7), d.normal(96)))
def depthwise_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.conv2d(x, weight, bias, padding=3, groups=96))


@sampled(lambda d: (d.normal(d.size(64, 1024), 1024), d.normal(2048, 1024), d.normal(2048)))
def linear_squared_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, weight, bias)).square()

"""The cases of the conformance suite: small programs over what a device's printer, runtime and torch half must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxwrap.testing.conformance.case import ConformanceCase, case


def random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a function that returns tensors of standard normal numbers, the same in each call."""

    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple([torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes])

    return inputs


def integers(*shapes: tuple[int, ...], low: int = -9, high: int = 10) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a function that returns tensors of integers, the same in each call."""

    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple([torch.randint(low, high, shape, generator=generator) for shape in shapes])

    return inputs


def with_positions() -> tuple[Tensor, Tensor]:
    """Returns a table and positions of its rows."""
    return random((11, 6))()[0], integers((7,), low=0, high=11)()[0]


# --- kernels: each kind of loop -------------------------------------------------------------------------------------


@case("kernels", random((5, 7), (7,)))
def pointwise_floats(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.sigmoid(x) * y + x.exp().log1p(), F.gelu(x) / (y.abs() + 1), torch.where(x > y, x, -y), x.clamp(-1, 1)


@case("kernels", integers((5, 7), (7,)))
def pointwise_integers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    divisor = torch.where(y == 0, 3, y)
    return x * y - 2, x // divisor, x % divisor, x & y, x << 2, (x > y) & (y != 3), x.abs().to(torch.uint8)


@case("kernels", random((6, 8), (6, 8), dtype=torch.float16))
def half_precision(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x) * y + 1, (x.float() * 2).half()


@case("kernels", random((6, 8), (6, 8), dtype=torch.bfloat16))
def brain_floats(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x) * y, F.silu(x)


@case("kernels", random((4, 9), dtype=torch.float64))
def double_precision(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x) * torch.cos(x), x.sum(1)


@case("kernels", lambda: (torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e30]),))
def special_values(x: Tensor) -> tuple[Tensor, ...]:
    return torch.exp(x), torch.sqrt(x), x / 0.0, torch.maximum(x, torch.zeros_like(x)), torch.isnan(x), x.clamp(min=0)


@case("kernels", random((6, 33)))
def reductions(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), x.mean(1), x.amax(0), x.var(1), (x > 0).any(1), x.abs().prod(1), x.argmax(1), x.max(1).values


@case("kernels", random((3, 5000)))
def long_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(1), torch.softmax(x, 1).amax(1)


@case("kernels", random((4, 33), (33,), (33,)))
def softmax_and_norms(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(x, -1), F.log_softmax(x, 0), F.layer_norm(x, (33,), weight, bias), F.rms_norm(x, (33,), weight)


@case("kernels", random((4, 33)))
def scans(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.cumsum(1), x.cumsum(0)


@case("kernels", with_positions)
def gathers(table: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    return F.embedding(positions, table), table[positions, 2], table.gather(0, positions[:6].expand(2, 6)), table[-1]


@case("kernels", with_positions, requires="supports_all_atomics")
def scatters(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.arange(42, device=table.device).view(7, 6).to(table.dtype)
    summed = torch.zeros_like(table).index_add(0, positions, rows)
    return summed, table.scatter_add(0, positions[:, None].expand(7, 6), rows)


@case("kernels", random((3, 4), (2, 4)))
def concatenations(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.cat([x, y]), torch.stack([x[:2], y], 1), F.pad(x, (1, 2), value=3.0), torch.roll(x, 1, 0)


@case("kernels", random((2, 3, 8, 8)))
def pooling(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.avg_pool2d(x, 2), F.max_pool2d(x, 2)


@case("kernels", lambda: (torch.empty(0, 4), torch.ones(4)))
def empty_tensors(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x * y, x.sum(0), torch.cat([x, y[None]])


@case("kernels", lambda: (torch.tensor(2.0), torch.tensor(3)))
def scalars_as_tensors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y + 1, y * 2


# --- operators that are called ---------------------------------------------------------------------------------------


@case("operators", random((4, 8), (8, 6), (6,)))
def matmuls(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x @ w + b), torch.bmm(x[None], w[None])


@case("operators", random((2, 3, 8, 8), (4, 3, 3, 3)))
def convolutions(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.conv2d(x, w, padding=1))


@case("operators", random((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)))
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@case("operators", random((5, 7)))
def sorting(x: Tensor) -> tuple[Tensor, ...]:
    values, positions = torch.sort(x, dim=1, stable=True)
    return values, positions, torch.topk(x, 3).values


# --- views ----------------------------------------------------------------------------------------------------------


@case("views", random((4, 6, 2)))
def views_of_results(x: Tensor) -> tuple[Tensor, ...]:
    doubled = x * 2
    return doubled.t() if doubled.dim() == 2 else doubled.permute(2, 0, 1), doubled[1:, ::2], doubled.view(-1), doubled


@case("views", random((4, 6, 2)))
def views_of_inputs(x: Tensor) -> tuple[Tensor, ...]:
    return x.transpose(0, 1), x[2], x.unsqueeze(1).expand(4, 3, 6, 2), x.reshape(24, 2)


@case("views", lambda: (random((6, 4))()[0].t(), random((8, 6))()[0][::2]))
def strided_inputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y, (x + y).sum(0)


# --- mutation -------------------------------------------------------------------------------------------------------


@case("mutation", random((4, 6), (4, 6)))
def writes_to_inputs(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2).add_(y)
    return x.sum(1)


@case("mutation", random((4, 6), (4, 2)))
def writes_to_slices(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:3] = y
    x[0].zero_()
    return x * 2


@case("mutation", with_positions)
def indexed_writes(x: Tensor, positions: Tensor) -> Tensor:
    x[positions[:1]] = 0
    x[x < 0] = 1
    return x + 1


@case("mutation", random((4, 6)))
def returned_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(1)
    return x, x[1:]


# --- symbols --------------------------------------------------------------------------------------------------------


@case("symbols", random((4, 6)), later_inputs=(random((7, 6)), random((9, 6))))
def dynamic_sizes(x: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(x, 0) * x.shape[0], x.view(-1, 3).sum(0), torch.arange(x.shape[0], device=x.device) + 1


@case("symbols", lambda: (random((4, 6))()[0], 3), later_inputs=(lambda: (random((5, 6))()[0], 4),))
def dynamic_numbers(x: Tensor, count: int) -> Tensor:
    return x * count + count


# --- control flow ---------------------------------------------------------------------------------------------------


@case("control flow", random((4, 6)))
def branches(x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > 0, lambda x: x * 2 + 1, lambda x: torch.sin(x), (x,))
    return result


@case("control flow", random((4, 6)))
def while_loop(x: Tensor) -> Tensor:
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    loop: Any = torch.while_loop
    total: Tensor = loop(lambda n, x: n < 3, lambda n, x: (n + 1, torch.sin(x) + 1), (count, x))[1]
    return total


# --- training -------------------------------------------------------------------------------------------------------


@case("training", random((4, 8), (8, 6), (6,)), training=True)
def perceptron(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w + b), (6,))


@case("training", random((4, 8), (8,)), training=True)
def losses(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x * w, torch.arange(4, device=x.device)) + F.mse_loss(x, w.expand_as(x))


@case("training", with_positions, training=True)
def embeddings(table: Tensor, positions: Tensor) -> Tensor:
    return torch.tanh(F.embedding(positions, table)).sum(0)


# --- streams and capture --------------------------------------------------------------------------------------------


def _without_streams(x: Tensor) -> Tensor:
    return x * 2 + (x + 1).sin()


@case("streams", random((64, 64)), requires="supports_streams", reference=_without_streams)
def two_streams(x: Tensor) -> Tensor:
    module: Any = torch.get_device_module(x.device)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        beside = (x + 1).sin()
    doubled = x * 2
    module.current_stream().wait_stream(side)
    return doubled + beside


@case("capture", random((16, 16)), requires="supports_graph_capture", options={"cuda_graphs": True})
def captured_work(x: Tensor) -> Tensor:
    return torch.softmax(x @ x, -1)


CASES: tuple[ConformanceCase, ...] = tuple([item for item in globals().values() if isinstance(item, ConformanceCase)])
"""All cases, in the order of this file."""

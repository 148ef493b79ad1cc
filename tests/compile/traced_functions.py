"""Functions of two matrices whose traces `test_known_results.py` compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

Function = Callable[..., object]


@torch.library.custom_op("known_results::scale", mutates_args=())
def _scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


@_scale.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("known_results::double_", mutates_args=("x",))
def _double_(x: Tensor) -> None:
    x.mul_(2)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone() ** 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class _SameMemory(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def pure(x: Tensor, w: Tensor) -> Tensor:
    return functional.layer_norm(functional.gelu(x @ w).softmax(-1) + x, (x.shape[-1],))


def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = (x @ w).relu()
    return y, y.t(), y[1:], y.reshape(-1), x.t(), w[0], y.t().contiguous()


def _view_without_base(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).t()[1]


def _several_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x @ w).split(2), (x * 2).unbind(0)  # type: ignore[return-value]


def _duplicates(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return y, y, x, y.detach(), w, x.view_as(x)


def write_input(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin()
    x.mul_(2)
    x[1] = 3
    return y @ w + x


def _write_input_by_result(x: Tensor, w: Tensor) -> Tensor:
    x.copy_(w @ w)
    return x.exp()


def _write_view_of_input(x: Tensor, w: Tensor) -> Tensor:
    x.t()[0].add_(w[0].detach())
    return x @ w


def _write_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        x.add_(1)
    x.detach().mul_(2)
    return x @ w


def write_result(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    z = y[0]
    y.add_(1)
    functional.relu(y, inplace=True)
    z.mul_(3)
    return y.exp(), z


def _write_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    torch.mul(x, 3, out=y)
    z = torch.zeros(3)
    z += x.detach().sum()
    return y, z


def write_by_operand(x: Tensor, w: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z.copy_(x @ w)
    return z


def _transposed_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.t_()
    y.unsqueeze_(0)
    return y * 2


def _metadata_of_input(x: Tensor, w: Tensor) -> Tensor:
    x.transpose_(0, 1)
    return x @ w


def _modes(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = x @ w
    with torch.no_grad():
        u = x @ w
    return y, z + y, u


def _ends_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    torch.set_grad_enabled(False)
    return y * 2


def _needs_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.ones(3, requires_grad=False)
    return y + 1, (x @ w).detach() * 2


def _random(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return functional.dropout(x @ w, 0.5), torch.rand_like(x) * torch.randn(4)


def _sizes(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    rows = x.shape[0]
    y = x.new_zeros(rows * 2, rows + 1)
    return y.view(rows, -1).sum() + (x @ w), rows * 3


def _data(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    positive = x[x > 0]
    return positive * 2, (x @ w).nonzero()


def _item(x: Tensor, w: Tensor) -> Tensor:
    return x @ w * w.abs().sum().long().item()


def _constants(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.tensor([2.0, 3.0]).sum()
    return x @ w * scale + torch.arange(x.shape[-1])


def _without_inputs(_x: Tensor, _w: Tensor) -> tuple[Tensor, ...]:
    return torch.ones(3) * 2, torch.arange(4).float().sin(), torch.ones(3) * 2


def _complex(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    z = torch.complex(x, w)
    return z.conj(), z.real, z.abs(), torch.view_as_real(z), z.conj().imag


def _sparse(x: Tensor, w: Tensor) -> Tensor:
    return torch.sparse.mm(x.detach().to_sparse(), w)


def _tuples(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    values, indices = (x @ w).topk(2)
    return values, indices, *torch.max(x, 0), x.sort().values.t()


def _custom(x: Tensor, w: Tensor) -> Tensor:
    y = torch.ops.known_results.scale(x @ w, 2.0)
    torch.ops.known_results.double_(y)
    return y.sin()


def _autograd_function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return _Cube.apply(x @ w), _SameMemory.apply(x)  # type: ignore[no-untyped-call]


def _checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(pure, x, w, use_reentrant=False)  # type: ignore[return-value]


def _conditional(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: a + b, (x * 2, w))


def _attention(x: Tensor, w: Tensor) -> Tensor:
    query = (x @ w).expand(1, 1, -1, -1)
    y = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    return y + flex_attention(query, query, query)  # type: ignore[operator]


def _transforms(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    gradient = torch.func.grad(lambda a: (a @ w).sin().sum())(x)
    return torch.vmap(lambda a: a @ w + a.exp())(x), gradient.t()


def _checked(x: Tensor, w: Tensor) -> Tensor:
    torch._check(x.shape[0] > 1)
    torch._assert_async((x.exp() > 0).all())
    return x @ w


def _embedding(x: Tensor, w: Tensor) -> Tensor:
    return functional.embedding(torch.tensor([0, 1]), w.detach(), max_norm=0.5) + x[:2]


def _foreach(x: Tensor, w: Tensor) -> Tensor:
    parts = [x.detach(), (x @ w).detach()]
    torch._foreach_add_(parts, 1)
    torch._foreach_mul_(parts, [w.detach(), w.detach()])
    return parts[1].exp()


def _data_attribute(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.data.add_(1)
    return y * 2


def layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    results = []
    for _ in range(3):
        query, key = (x @ w).unflatten(-1, (2, -1)).transpose(0, 1).chunk(2, -1)
        scores = torch.softmax(torch.einsum("hnk,hmk->hnm", query, key), -1)
        rotated = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
        x = functional.layer_norm(x + rotated * scores.mean((0, -1), keepdim=True)[0], (x.shape[-1],))
        results += [x.view(-1)[: x.shape[0]], functional.dropout(scores, 0.0)]
    return *results, x


def _layers_in_autocast(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(x, w) + y
    with torch.autocast("cpu", torch.float16):
        y = functional.linear(x, w) + y
    return functional.linear(x, w) + y


def _operands_of_one_storage(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, z = x @ w, x @ w
    pairs = [(y, z), (y, y.view_as(y)), (y.view_as(y), y), (z, z), (y[:2], y[2:]), (y[:2], z[2:])]
    return (
        *[torch.add(*pair) for pair in pairs],
        *torch.broadcast_tensors(y, y.view_as(y)),
        *torch.broadcast_tensors(y, z),
    )


def _numbers(x: Tensor, w: Tensor) -> Tensor:
    for factor in (1, True, 1.0, -0.0, 0.0, 1, 1.0):
        x = torch.add(x, w, alpha=factor) * factor
    return x.sum(0, False) + x.sum(0, 1)


def _repeated_writes(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(2):
        y = x @ w
        z = functional.relu(y.t(), inplace=True)
        x.add_(1)
        x = x + functional.embedding(torch.tensor([0, 1, 2, 3]), y)
    return x, z


def _repeated_tuples(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        values, indices = (x @ w).topk(2)
        deviation, mean = torch.std_mean(x, -1, keepdim=True)
        x = x * values.sum() + indices.sum() + deviation - mean + torch.var(x) + x.max(0).values
    return x


def _blocks(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        y = functional.dropout(functional.gelu(functional.linear(x, w)), 0.5)
        x = functional.layer_norm(x + functional.linear(y, w.t()), (x.shape[-1],), x[0], w[0])
    return x


def _read_several_times(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        y = x @ w
        x = torch.einsum("ij,kj->ik", y, y) + y * y + functional.cosine_similarity(x[None], y[:, None], -1)
    return x


def _passed_operands(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    results = []
    for _ in range(3):
        y = (x @ w).contiguous().to(x.dtype)
        results += torch.broadcast_tensors(functional.dropout(y, 0.0), y, y[0])
        x = functional.dropout(y.expand(4, 4), 0.5, False).float()
    return (*results, x)


def _partial_gradients(x: Tensor, w: Tensor) -> Tensor:
    for index in range(4):
        values, indices = (x @ w).sort()
        first, second, *_ = values.split(1)
        deviation, mean = torch.std_mean(x @ w, -1)
        used = (first, second, deviation, mean)[index]
        x = (x + used if index < 3 else x.detach() * used) + indices.float()
    return x


def _gradients_of_other_layouts(x: Tensor, w: Tensor) -> Tensor:
    y, z, u = (torch.tanh(functional.linear(x, w)) for _ in range(3))
    return y.sum() + (z.t().contiguous() @ w).sum() + (u.t() * x).mean(0).sum()


def _mixed_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    frozen = w.detach()
    items = [functional.linear(a, b) for a, b in ((x, frozen), (x, w), (x, frozen), (x, w), (x.detach(), w))]
    masks = [(item > 0).float() for item in items]
    return (*items, *masks, torch.stack([torch.where(mask > 0, item, 0.0) for item, mask in zip(items, masks)]))


def _custom_between(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(_Cube.apply(torch.tanh(x @ w)) + x.view(4, 4))  # type: ignore[no-untyped-call]
        x = checkpoint(pure, x, w, use_reentrant=False)  # type: ignore[assignment]
    return x


def _attention_layers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        query, key, value = ((x @ w).view(1, 4, 2, 2).transpose(1, 2) for _ in range(3))
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + y.transpose(1, 2).reshape(4, 4)
    return functional.cross_entropy(x, torch.arange(4))


def namespaces(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = torch.fft.fftn(x).abs() + torch.linalg.vector_norm(x, dim=-1, keepdim=True) * torch.special.erfcx(w)
    return x


def modules_in_layers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.nn.Tanh()(pure(x, w))
    return x


FUNCTIONS: tuple[Function, ...] = (
    pure, views, _view_without_base, _several_views, _duplicates, write_input, _write_input_by_result,
    _write_view_of_input, _write_without_gradients, write_result, _write_returned, write_by_operand,
    _transposed_in_place, _metadata_of_input, _modes, _ends_without_gradients, _needs_gradients, _random, _sizes, _data,
    _item, _constants, _complex, _sparse, _tuples, _custom, _autograd_function, _checkpointed, _conditional, _attention,
    _transforms, _checked, _embedding, _foreach, _data_attribute, layers, _layers_in_autocast,
    _operands_of_one_storage, _without_inputs, _numbers, _repeated_writes, _repeated_tuples, _blocks,
    _read_several_times, _passed_operands, _partial_gradients, _gradients_of_other_layouts, _mixed_gradients,
    _custom_between, _attention_layers, modules_in_layers, namespaces,
)  # fmt: skip

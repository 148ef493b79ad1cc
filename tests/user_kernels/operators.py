"""Operators as a model's author registers them: new and old, functional and writing, with Triton kernels inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from tests.user_kernels import kernels

# --- torch.library.custom_op ----------------------------------------------------------------------------------------


@custom_op("user_code::scaled", mutates_args=())
def scaled(x: Tensor, factor: float = 2.0, bias: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 - read at run time
    return x * factor if bias is None else x * factor + bias


@scaled.register_fake
def _(x: Tensor, factor: float = 2.0, bias: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


def _save_factor(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor, ctx.has_bias = inputs[1], inputs[2] is not None


def _scaled_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
    return scaled(gradient, ctx.factor), None, gradient if ctx.has_bias else None


scaled.register_autograd(_scaled_backward, setup_context=_save_factor)


@custom_op("user_code::shift_", mutates_args=("x",))
def shift_(x: Tensor, by: float) -> None:
    x.add_(by)


@custom_op("user_code::double_and_sum", mutates_args=("x", "count"))
def double_and_sum(x: Tensor, count: Optional[Tensor]) -> Tensor:  # noqa: UP045 - read at run time
    x.mul_(2)
    if count is not None:
        count.add_(1)
    return x.sum(0)


@double_and_sum.register_fake
def _(x: Tensor, count: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[1:])


@custom_op("user_code::sums_and_size", mutates_args=())
def sums_and_size(x: Tensor) -> tuple[Tensor, Tensor, int]:
    return x + 1, x.sum(1), 2 * x.shape[0]


@sums_and_size.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, int]:
    return torch.empty_like(x), x.new_empty(x.shape[0]), 2 * x.shape[0]


@custom_op("user_code::repeats", mutates_args=())
def repeats(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    return [x.repeat(count) for x, count in zip(tensors, counts, strict=True)]


@repeats.register_fake
def _(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    return [x.new_empty(x.shape[0] * count) for x, count in zip(tensors, counts, strict=True)]


@custom_op("user_code::triple_all_", mutates_args=("tensors",))
def triple_all_(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        x.mul_(3)


@custom_op("user_code::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@custom_op("user_code::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x + 1


# --- torch.library.define and impl ----------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("user_code_old", "DEF")


def _define(schema: str, function: Any, key: str, fake: Any = None) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, key)
    if fake is not None:
        torch.library.register_fake(f"user_code_old::{name}", fake, lib=_LIBRARY)


def _halves(x: Tensor, first: bool = True) -> tuple[Tensor, Tensor]:
    middle = x.shape[0] // 2
    halves = x[:middle].clone(), x[middle:].clone()
    return halves if first else halves[::-1]


def _fake_halves(x: Tensor, first: bool = True) -> tuple[Tensor, Tensor]:
    return tuple([torch.empty_like(part) for part in _halves(x, first)])  # type: ignore[return-value]


def _into(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x + 1)


_EXPLICIT = "CompositeExplicitAutograd"
_define("scale(Tensor x, Scalar by) -> Tensor", lambda x, by: x * by, _EXPLICIT, lambda x, by: torch.empty_like(x))
_define("halves(Tensor x, *, bool first=True) -> (Tensor, Tensor)", _halves, _EXPLICIT, _fake_halves)
_define("into(Tensor x, *, Tensor(a!) out) -> ()", _into, _EXPLICIT, lambda x, *, out: None)
_define("recipe(Tensor x) -> Tensor", lambda x: x.sin() * 2, "CompositeImplicitAutograd")
_define("without_fake(Tensor x) -> Tensor", lambda x: x + 1, "CPU")


# --- torch.library.triton_op ----------------------------------------------------------------------------------------


@triton_op("user_code::add", mutates_args={})
def add(x: Tensor, y: Tensor) -> Tensor:
    out, n = torch.empty_like(x), x.numel()
    wrap_triton(kernels.add)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, 64)
    return out


def _add_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient * 3  # the kernel adds three times its second operand


add.register_autograd(_add_backward)


@triton_op("user_code::double_", mutates_args={"x"})
def double_(x: Tensor) -> None:
    wrap_triton(kernels.double_in_place)[[4]](x, x.numel(), BLOCK=64, num_warps=2)


@triton_op("user_code::plus_one", mutates_args={})
def plus_one(x: Tensor) -> Tensor:
    out, n = torch.empty_like(x), x.numel()
    wrap_triton(kernels.tuned)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out

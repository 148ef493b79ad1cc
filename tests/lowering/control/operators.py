"""A library of operators for tests: some write their operands, some have ordered effects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NAMESPACE = "fxwrap_control"
LOG: list[str] = []
"""The arguments of the calls of the effectful operator, in order."""


@torch.library.custom_op(f"{NAMESPACE}::add_into", mutates_args=("out",))
def add_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x + out)


@torch.library.custom_op(f"{NAMESPACE}::add_and_triple", mutates_args=("out",))
def add_and_triple(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x + 1)
    return x * 3


@add_and_triple.register_fake
def _(x: Tensor, out: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{NAMESPACE}::fill_all", mutates_args=("outs",))
def fill_all(outs: Sequence[Tensor], number: float) -> None:
    for position, out in enumerate(outs):
        out.fill_(number + position)


@torch.library.custom_op(f"{NAMESPACE}::add_into_optional", mutates_args=("first", "second"))
def add_into_optional(x: Tensor, first: Tensor | None, second: Tensor | None = None) -> None:
    for out in (first, second):
        if out is not None:
            out.add_(x)


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("add_by_name(Tensor x, *, Tensor(a!) total) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def _add_keyword_only(x: Tensor, *, total: Tensor) -> None:
    total.add_(x)


_LIBRARY.impl("add_by_name", _add_keyword_only, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::add_by_name", lambda x, *, total: None, lib=_LIBRARY)


_LIBRARY.define(
    "scale_all_by_name(Tensor x, *, Tensor(a!)[] outs, Tensor(b!)? last=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _scale_all_by_name(x: Tensor, *, outs: Sequence[Tensor], last: Tensor | None = None) -> None:
    content = x.clone()  # x may be among the outs
    for factor, out in enumerate([*outs, *([] if last is None else [last])], 2):
        out.copy_(content * factor)


_LIBRARY.impl("scale_all_by_name", _scale_all_by_name, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::scale_all_by_name", lambda x, *, outs, last=None: None, lib=_LIBRARY)


@torch.library.custom_op(f"{NAMESPACE}::note", mutates_args=())
def note(text: str, x: Tensor) -> Tensor:
    LOG.append(f"{text} {int(x.sum())}")
    return x.clone()


@note.register_fake
def _(text: str, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def register_effects() -> None:
    """Makes calls of `note` keep their order."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(torch.ops.fxwrap_control.note.default, _EffectType.ORDERED)


register_effects()

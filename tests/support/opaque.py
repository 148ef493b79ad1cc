"""A class that is opaque to torch, and operators that take, return and change its objects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._library.fake_class_registry import maybe_to_fake_obj
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase


@dataclass(eq=True)
class Counter(OpaqueBase):
    """Counts the calls that took it."""

    count: int

    __hash__ = object.__hash__


register_opaque_type(Counter, typ="reference")
COUNTER = f"{Counter.__module__}.{Counter.__qualname__}"
"""The name of the class in schemas and in types."""

_library = torch.library.Library("fxwrap_tests", "FRAGMENT")


def _add_count(counter: Counter, x: torch.Tensor) -> torch.Tensor:
    counter.count += 1
    return x + counter.count


def _define(schema: str, run: object, fake: object) -> None:
    name = _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxwrap_tests::{name}", fake, lib=_library)


_define(f"add_count({COUNTER} counter, Tensor x) -> Tensor", _add_count, lambda _counter, x: torch.empty_like(x))
_define(
    f"next_counter({COUNTER} counter) -> {COUNTER}",
    lambda counter: Counter(counter.count + 10),
    lambda _counter: maybe_to_fake_obj(None, Counter(0)),
)
_define(
    f"sum_counts({COUNTER}[] counters, Tensor x) -> Tensor",
    lambda counters, x: x + sum(counter.count for counter in counters),
    lambda _counters, x: torch.empty_like(x),
)


@dataclass(frozen=True)
class Shift(OpaqueBase):
    """A distance: an object that torch treats as a constant by its content. Torch 2.11 demands the base class."""

    distance: int

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Shift({self.distance})", {"Shift": Shift}


register_opaque_type(Shift, typ="value")
_define(
    f"shift({Shift.__module__}.{Shift.__qualname__} by, Tensor x) -> Tensor",
    lambda by, x: x + by.distance,
    lambda _by, x: torch.empty_like(x),
)

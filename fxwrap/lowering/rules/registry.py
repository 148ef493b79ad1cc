"""The table of lowering rules: overload name -> rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fxwrap.device_spec import DeviceSpec
from fxwrap.lowering.definitions import Definition


@dataclass(frozen=True)
class Call:
    """A call that a rule is asked to define.

    `arguments` and `keywords` are the node's, with definitions for tensors and numbers for the rest (ints, floats,
    bools, sympy expressions, dtypes, None, tuples). `fake` is what it gives: a fake tensor, or a tuple of them. `spec`
    has the facts about the type of `device`.
    """

    name: str
    arguments: Sequence[Any]
    keywords: dict[str, Any]
    fake: Any
    device: torch.device
    sizes_of: Callable[[torch.Tensor], tuple[Any, ...]] = field(repr=False)
    spec: DeviceSpec

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The sizes of the one result."""
        return self.sizes_of(self.fake)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the one result."""
        return self.fake.dtype  # type: ignore[no-any-return]


Result: TypeAlias = Definition | tuple[Definition | None, ...]
Rule: TypeAlias = Callable[[Call], "Result | str"]
"""Returns the definitions of a call's results, or the reason why it stays an operator call."""

RULES: dict[str, Rule] = {}
"""Every rule by overload name ("aten.add.Tensor"). Filled by the modules of this package, read through `rule_for`."""


def rule(*names: str) -> Callable[[Callable[..., Result | str]], Callable[..., Result | str]]:
    """Registers a function `(call, *arguments, **keywords)` as the rule of these overloads."""

    def register(function: Callable[..., Result | str]) -> Callable[..., Result | str]:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = lambda call: function(call, *call.arguments, **call.keywords)
        return function

    return register

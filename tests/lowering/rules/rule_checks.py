"""Helpers that compare a rule with eager mode and with float64 on samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fxwrap.lowering.rules import RULES
from fxwrap.torch_compat import operator_overload
from tests.lowering.evaluate_definitions import call_rule, fuses

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.uint8)
EVERY = (*NUMBERS, torch.bool)


@dataclass(frozen=True)
class Sample:
    """Arguments of a call."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)


def sample(*arguments: Any, **keywords: Any) -> Sample:
    return Sample(arguments, keywords)


def operand(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Returns a random tensor; floats have few ties, integers many."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype is torch.uint8 else -9, 10, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def special_values_matrix(dtype: torch.dtype, *values: float) -> torch.Tensor:
    """Returns rows with each of the values, and each pair of them, among ordinary numbers."""
    rows = [[1.0, first, -2.0, second, 0.5] for first in (0.25, *values) for second in (0.75, *values)]
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


def all_of(dtype: torch.dtype, value: float) -> torch.Tensor:
    return torch.full((2, 3), value, dtype=dtype)


class OperatorWithReference:
    """An operator whose eager result another function computes, where the real one would raise."""

    def __init__(self, overload: Any, function: Callable[..., Any]) -> None:
        self._schema, self._overloadname, self.function = overload._schema, overload._overloadname, function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def check(name: str, item: Sample, overload: Any = None) -> bool:
    """Compares a sample's results by its rule, by eager and in float64. Returns False where eager raises."""
    overload = overload or operator_overload(name)
    try:
        eager = _results(overload(*item.arguments, **item.keywords))
    except (RuntimeError, IndexError, ValueError) as error:
        undefined = "tensor does not have a device" in str(error)  # a gradient that nothing asks for
        fused = (
            not undefined
            and isinstance(overload, torch._ops.OpOverload)
            and fuses(overload, *item.arguments, **item.keywords)
        )
        assert not fused, f"{name}: eager raises for {item}"
        return False
    computed = call_rule(overload, *item.arguments, **item.keywords)
    assert not isinstance(computed, str), f"{name} declines {item}: {computed}"
    exact = _results(overload(*_doubled(item.arguments), **_doubled(item.keywords)))
    results = _results(computed)
    assert len(results) == len(eager)
    for number, (result, expected, reference) in enumerate(zip(results, eager, exact, strict=True)):
        compare(result, expected, reference, lambda: f"{name}, result {number} of {_short(item)}")  # noqa: B023
    return True


def _short(item: Sample) -> str:
    def text(leaf: Any) -> Any:
        return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) and leaf.numel() > 16 else leaf

    return f"{tree_map(text, item.arguments)} {item.keywords}"


def compare(result: Any, eager: Any, exact: Any, label: Callable[[], str]) -> None:
    """Asserts that a result equals eager's, and is as near to the float64 result. `label` names it in an error."""
    if result is None or eager is None:
        assert result is None and eager is None, label()
        return
    assert result.dtype is eager.dtype and result.shape == eager.shape, f"{label()}: {result} is not like {eager}"
    if not eager.dtype.is_floating_point:
        assert torch.equal(result, eager), f"{label()}: {result} is not {eager}"
        return
    finite = torch.isfinite(eager) & torch.isfinite(exact)
    same = (result == eager) | (result.isnan() & eager.isnan())
    assert (same | finite).all(), f"{label()}: {result} is not {eager}"
    errors = [_distance(item[finite], exact[finite]) for item in (result, eager)]
    # Sums are in another order than eager's, some of which are in float64, where eager is the exact result itself.
    allowed = {torch.float64: 1024, torch.float32: 16}.get(eager.dtype, 2) * torch.finfo(eager.dtype).eps
    assert errors[0] <= 2 * errors[1] + allowed, f"{label()}: error {errors[0]}, eager's {errors[1]}"


def _distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the relative distance of two tensors, absolute near zero: operands are of magnitude 1."""
    size = exact.double().norm().item()
    return (value.double() - exact.double()).norm().item() / max(size, 1.0)


def _results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _doubled(items: Any) -> Any:
    def double(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.double() if item.dtype.is_floating_point else item
        return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item

    return tree_map(double, items)


def check_all(name: str, samples: Iterable[Sample]) -> None:
    """Checks samples; eager must accept at least one."""
    checked = [check(name, item) for item in samples]
    assert any(checked), f"eager accepts no sample of {name}"


def rules_of(*modules: str) -> set[str]:
    """Returns the overloads whose rules these modules of `fxwrap.lowering.rules` define."""
    return {name for name, rule in RULES.items() if rule.__module__.removeprefix("fxwrap.lowering.rules.") in modules}

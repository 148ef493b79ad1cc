"""Rules against eager mode and against float64: what a sample is, how it is run, and what has to agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fxwrap.lowering.rules import RULES
from fxwrap.torch_compat import operator_overload
from tests.lowering.evaluate_definitions import call_rule

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
    """Returns a tensor of numbers with few ties among floats and many among integers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype is torch.uint8 else -9, 10, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def unusual(dtype: torch.dtype, *values: float) -> torch.Tensor:
    """Returns rows in which each of the values, and each pair of them, stands among ordinary numbers."""
    rows = [[1.0, first, -2.0, second, 0.5] for first in (0.25, *values) for second in (0.75, *values)]
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


def all_of(dtype: torch.dtype, value: float) -> torch.Tensor:
    return torch.full((2, 3), value, dtype=dtype)


class Instead:
    """An operator of which another function says what it gives, where the real one would raise."""

    def __init__(self, overload: Any, function: Callable[..., Any]) -> None:
        self._schema, self._overloadname, self.function = overload._schema, overload._overloadname, function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def check(name: str, item: Sample, overload: Any = None) -> bool:
    """Runs a sample by its rule, by eager and in float64, and compares. Returns False where eager refuses it."""
    overload = overload or operator_overload(name)
    try:
        eager = _results(overload(*item.arguments, **item.keywords))
    except (RuntimeError, IndexError, ValueError):
        return False
    found = call_rule(overload, *item.arguments, **item.keywords)
    assert not isinstance(found, str), f"{name} refuses {item}: {found}"
    exact = _results(overload(*_doubled(item.arguments), **_doubled(item.keywords)))
    results = _results(found)
    assert len(results) == len(eager)
    for number, (result, expected, reference) in enumerate(zip(results, eager, exact, strict=True)):
        compare(result, expected, reference, f"{name}, result {number} of {_short(item)}")
    return True


def _short(item: Sample) -> str:
    def text(leaf: Any) -> Any:
        return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) and leaf.numel() > 16 else leaf

    return f"{tree_map(text, item.arguments)} {item.keywords}"


def compare(result: Any, eager: Any, exact: Any, what: str) -> None:
    """Fails unless a result is what eager gives, and near the float64 result as eager's is."""
    if result is None or eager is None:
        assert result is None and eager is None, what
        return
    assert result.dtype is eager.dtype and result.shape == eager.shape, f"{what}: {result} is not like {eager}"
    if not eager.dtype.is_floating_point:
        assert torch.equal(result, eager), f"{what}: {result} is not {eager}"
        return
    finite = torch.isfinite(eager) & torch.isfinite(exact)
    same = (result == eager) | (result.isnan() & eager.isnan())
    assert (same | finite).all(), f"{what}: {result} is not {eager}"
    errors = [_distance(item[finite], exact[finite]) for item in (result, eager)]
    # Sums are in another order than eager's, some of which are in float64, where eager is the exact result itself.
    allowed = {torch.float64: 1024, torch.float32: 16}.get(eager.dtype, 2) * torch.finfo(eager.dtype).eps
    assert errors[0] <= 2 * errors[1] + allowed, f"{what}: error {errors[0]}, eager's {errors[1]}"


def _distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns how far two tensors are apart: relative, and absolute near zero, for operands are about 1 in size."""
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
    """Checks samples, of which eager has to take one at least."""
    checked = [check(name, item) for item in samples]
    assert any(checked), f"eager takes no sample of {name}"


def rules_of(*modules: str) -> set[str]:
    """Returns the overloads whose rules are functions of these modules of `fxwrap.lowering.rules`."""
    wanted = {f"fxwrap.lowering.rules.{module}" for module in modules}
    return {name for name, rule in RULES.items() if _function(rule).__module__ in wanted}


def _function(rule: Any) -> Callable[..., Any]:
    return inspect.getclosurevars(rule).nonlocals.get("function", rule)  # type: ignore[no-any-return]

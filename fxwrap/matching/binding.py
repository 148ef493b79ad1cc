"""The state of one attempt to match a pattern, and the binding of an operation's operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch

from fxwrap.matching.dataflow import CalledOperator
from fxwrap.matching.patterns import Operation
from fxwrap.wrapper_ir import CallResult, LaunchOperand, TensorType, UnreadOperand, Value


@dataclass(slots=True)
class PartialMatch:
    """The bindings so far; copied to try alternatives.

    `calls` are the operations that a kernel computes, each with the position of its launch and that of the call in it;
    `results` are the outputs of a launch in the order of its pattern.
    """

    positions: dict[int, int] = field(default_factory=dict)
    captured: dict[str, object] = field(default_factory=dict)
    read_positions: dict[str, int] = field(default_factory=dict)
    calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    results: dict[int, tuple[Value | None, ...]] = field(default_factory=dict)

    def copy(self) -> PartialMatch:
        return PartialMatch(
            dict(self.positions), dict(self.captured), dict(self.read_positions), dict(self.calls), dict(self.results)
        )

    def assign(self, other: PartialMatch) -> None:
        self.positions, self.captured, self.read_positions = other.positions, other.captured, other.read_positions
        self.calls, self.results = other.calls, other.results


class MatchFailed(Exception):
    """The reason why lines do not match."""


class Binder(Protocol):
    """Binds a pattern to an operand, or raises MatchFailed."""

    def __call__(self, pattern: object, item: object, *, attempt: PartialMatch) -> None: ...


def bind_pairs(operation: Operation, pairs: list[tuple[object, object]], bind: Binder, attempt: PartialMatch) -> None:
    """Binds the patterns of an operation's operands, the first two of a commutative one in either order."""
    if operation.commutative and len(pairs) > 1:
        trial = attempt.copy()
        try:
            bind_all(operation, pairs, bind, trial)
        except MatchFailed:
            (first, one), (second, other) = pairs[:2]
            pairs = [(first, other), (second, one), *pairs[2:]]
        else:
            attempt.assign(trial)
            return
    bind_all(operation, pairs, bind, attempt)


def bind_all(operation: Operation, pairs: Sequence[tuple[object, object]], bind: Binder, attempt: PartialMatch) -> None:
    """Binds each pattern to its operand."""
    for number, (pattern, item) in enumerate(pairs):
        try:
            bind(pattern, item, attempt=attempt)
        except MatchFailed as reason:
            fail(f"operand {number} of {operation}: {reason}")


def by_schema(operation: Operation, call: CalledOperator, named: Mapping[str, object]) -> list[tuple[object, object]]:
    """Returns each pattern of an argument with the argument of a call, whose operator has these defaults by name."""
    arguments = {**dict(zip(named, call.arguments)), **dict(call.keywords)}
    patterns = {**dict(zip(named, operation.operands)), **dict(operation.keywords)}
    if len(operation.operands) > len(named):
        fail(f"{operation} takes {len(named)} arguments, not {len(operation.operands)}")
    pairs = []
    for name, pattern in patterns.items():
        if name not in named:
            fail(f"{operation} has no argument '{name}'")
        pairs.append((pattern, arguments[name] if name in arguments else named[name]))
    for name, item in arguments.items():
        if name in patterns or operation.allow_more_operands or equal_literals(item, named.get(name)):
            continue
        fail(f"argument '{name}' of {operation} is {format_operand(item)}, and the pattern omits it")
    return pairs


def by_position(operation: Operation, items: Sequence[object]) -> list[tuple[object, object]]:
    """Returns each pattern of an operand with the operand at its position."""
    count = len(operation.operands)
    if len(items) < count or (len(items) > count and not operation.allow_more_operands):
        fail(f"{operation} has {len(items)} operands here, the pattern {count}")
    if operation.keywords:
        fail(f"{operation} has no keyword arguments")
    return list(zip(operation.operands, items))


def equal_literals(item: object, default: object) -> bool:
    """Whether two literals are the same; 1 and 1.0 are, 1 and True are not, and a list is a tuple."""
    if isinstance(item, tuple | list) and isinstance(default, tuple | list):
        return len(item) == len(default) and all(map(equal_literals, item, default))
    if isinstance(item, torch.dtype | torch.device | Value) or isinstance(default, Value):
        return bool(item == default)
    same_kind = type(item) is type(default) or {type(item), type(default)} <= {int, float}
    return same_kind and bool(item == default)


def format_operand(item: object) -> str:
    """Returns an operand as text, for reasons."""
    match item:
        case Value():
            return f"%{item.name}" + ("" if isinstance(item.type, TensorType) else " (no tensor)")
        case LaunchOperand():
            return "a tensor"
        case CallResult():
            return "a result that the kernel computes"
        case UnreadOperand():
            return "a tensor that the kernel does not read"
        case _:
            return repr(item)


def fail(reason: str) -> NoReturn:
    """Raises MatchFailed."""
    raise MatchFailed(reason)

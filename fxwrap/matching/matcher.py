"""Finding the matches of a pattern in a block, and why a line that looks like one is none."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sympy
import torch

from fxwrap.lines import Call, Launch, Mutate, View
from fxwrap.matching.dataflow import Content, DataFlow, outputs_of
from fxwrap.matching.patterns import Computes, OneOf, Operation, Output, Pattern, Wildcard, operations_of
from fxwrap.torch_compat import operator_arguments
from fxwrap.wrapper_ir import KernelDefinition, LineBase, TensorType, Value, reads

_LOOKED_AT = 64
"""How many readers of a value are tried for a further output of a pattern, those nearest to the lines found so far."""


@dataclass(frozen=True, slots=True)
class Found:
    """A match: the positions of lines by operation (`id`), what wildcards captured, and the values it gives.

    `outputs` are the results that the pattern names, with the position of the line that gives each; None stands for one
    that the line does not have.
    """

    positions: Mapping[int, int]
    captured: Mapping[str, Any]
    read_at: Mapping[str, int]
    outputs: tuple[tuple[Value | None, int], ...]
    anchor: int


@dataclass(slots=True)
class _Attempt:
    """What is bound so far. Copied where there are alternatives."""

    positions: dict[int, int] = field(default_factory=dict)
    captured: dict[str, Any] = field(default_factory=dict)
    read_at: dict[str, int] = field(default_factory=dict)

    def copy(self) -> _Attempt:
        return _Attempt(dict(self.positions), dict(self.captured), dict(self.read_at))

    def take(self, other: _Attempt) -> None:
        self.positions, self.captured, self.read_at = other.positions, other.captured, other.read_at


class _NoMatch(Exception):
    """Why lines are not as the pattern says."""


class Matcher:
    """Matches one pattern against the lines of a block."""

    def __init__(self, pattern: tuple[Pattern, ...], flow: DataFlow, kernels: Mapping[str, KernelDefinition]) -> None:
        self.outputs = pattern
        self.flow = flow
        self.kernels = kernels
        self.operations = operations_of(pattern)

    def anchors(self) -> Iterator[int]:
        """Yields the positions of the lines that the pattern's first output may be."""
        first = _operation(self.outputs[0])
        for position, line in enumerate(self.flow.lines):
            if self._is_meant(first, line) is None:
                yield position

    def match_at(self, position: int) -> Found | str:
        """Returns the match whose first output is the line at a position, or why there is none."""
        attempt = _Attempt()
        try:
            self._operation(_operation(self.outputs[0]), position, position, attempt)
            for pattern in self.outputs[1:]:
                self._further(_operation(pattern), attempt)
        except _NoMatch as reason:
            return str(reason)
        given = tuple([value for pattern in self.outputs for value in self._given(pattern, attempt)])
        return Found(attempt.positions, attempt.captured, attempt.read_at, given, position)

    def _given(self, pattern: Pattern, attempt: _Attempt) -> list[tuple[Value | None, int]]:
        position = attempt.positions[id(_operation(pattern))]
        results = outputs_of(self.flow.lines[position])
        wanted = (results[pattern.index],) if isinstance(pattern, Output) else results
        return [(value, position) for value in wanted]

    # --- further outputs --------------------------------------------------------------------------------------------

    def _further(self, operation: Operation, attempt: _Attempt) -> None:
        """Binds another output: a line that reads something that is bound already."""
        if id(operation) in attempt.positions:
            return
        tried = "nothing that is matched so far is read by it"
        for position in self._candidates(operation, attempt):
            trial = attempt.copy()
            try:
                self._operation(operation, position, position, trial)
            except _NoMatch as reason:
                tried = str(reason)
                continue
            attempt.take(trial)
            return
        _fail(f"there is no {operation} beside it: {tried}")

    def _candidates(self, operation: Operation, attempt: _Attempt) -> list[int]:
        flow, near = self.flow, max(attempt.positions.values())
        taken = set(attempt.positions.values())
        shared = [item for item in operations_of(operation) if id(item) in attempt.positions]
        values = [value for item in shared for value in outputs_of(flow.lines[attempt.positions[id(item)]]) if value]
        names = {item.name for item in wildcards_of(operation)}
        values += [value for name, value in attempt.captured.items() if name in names and isinstance(value, Value)]
        found: set[int] = set()
        for value in values:
            users = flow.users(value.name)
            middle = bisect_left(users, near)
            found.update(users[max(0, middle - _LOOKED_AT) : middle + _LOOKED_AT])
        deep = [position for place in found for position in self._reach(operation, place)]
        meant = [place for place in dict.fromkeys(deep) if place not in taken]
        fitting = [place for place in meant if self._is_meant(operation, flow.lines[place]) is None]
        return sorted(fitting, key=lambda place: (abs(place - near), place))[:_LOOKED_AT]

    def _reach(self, operation: Operation, position: int) -> Iterable[int]:
        """Returns a line, and where the operation has others among its operands, the lines that read its results."""
        yield position
        depth = len(operations_of(operation)) - 1
        level = [position]
        for _ in range(depth):
            level = [user for place in level for value in outputs_of(self.flow.lines[place]) if value
                     for user in self.flow.users(value.name)[:_LOOKED_AT] if user > place]  # fmt: skip
            yield from level[:_LOOKED_AT]

    # --- one operation ----------------------------------------------------------------------------------------------

    def _is_meant(self, operation: Operation, line: LineBase) -> str | None:
        """Returns why a line is not of the operation's kind and target, or None."""
        target = operation.target
        match operation.kind:
            case "call":
                if not isinstance(line, Call | Mutate):
                    return f"{line.opcode} is no operator call"
                meant = line.target in target if isinstance(target, frozenset) else _asked(target, line)
                return None if meant else f"it is {line.target}"
            case "launch":
                if not isinstance(line, Launch):
                    return f"{line.opcode} is no launch"
                if isinstance(target, frozenset):
                    return None if line.kernel in target else f"it launches @{line.kernel}"
                kernel = self.kernels[line.kernel]
                return None if _asked(target, kernel, line) else f"it launches @{line.kernel}{_computed(target, line)}"
            case "view":
                return None if isinstance(line, View) else f"{line.opcode} is no view"
            case _:
                meant = isinstance(line, target) if isinstance(target, type) else _asked(target, line)
                return None if meant else f"it is {line.opcode}"

    def _operation(self, operation: Operation, position: int, at: int, attempt: _Attempt) -> None:
        """Binds an operation to a line. `at` is where its result is read, for one that only shows other memory."""
        known = attempt.positions.get(id(operation))
        if known is not None:
            if known != position:
                _fail(f"{operation} is two different lines")
            return
        line = self.flow.lines[position]
        reason = self._is_meant(operation, line)
        if reason is not None:
            _fail(f"{operation} is wanted where {reason}")
        self._check_result(operation, line)
        if operation.condition is not None and not operation.condition(line):
            _fail(f"the condition of {operation} does not hold")
        reader = at if isinstance(line, View) else position
        self._operands(operation, line, position, reader, attempt)
        if position in attempt.positions.values():
            _fail(f"one line would be two operations of the pattern: {operation} and another")
        attempt.positions[id(operation)] = position

    def _check_result(self, operation: Operation, line: LineBase) -> None:
        if operation.type is None:
            return
        results = [value for value in outputs_of(line) if value is not None]
        wrong = operation.type.mismatch(results[0].type) if results else "it has no result"
        if wrong is not None:
            _fail(f"the result of {operation} is not as wanted: {wrong}")

    def _operands(self, operation: Operation, line: LineBase, position: int, reader: int, attempt: _Attempt) -> None:
        if operation.anywhere:
            self._anywhere(operation, self._listed(line, position), reader, attempt)
            return
        pairs = self._pairs(operation, line, position)
        if operation.either_order and len(pairs) > 1:
            trial = attempt.copy()
            try:
                self._bind_all(operation, pairs, reader, trial)
            except _NoMatch:
                (first, one), (second, other) = pairs[:2]
                pairs = [(first, other), (second, one), *pairs[2:]]
            else:
                attempt.take(trial)
                return
        self._bind_all(operation, pairs, reader, attempt)

    def _bind_all(self, operation: Operation, pairs: Sequence[tuple[Any, Any]], reader: int, attempt: _Attempt) -> None:
        for number, (pattern, item) in enumerate(pairs):
            try:
                self._bind(pattern, item, reader, attempt)
            except _NoMatch as reason:
                _fail(f"operand {number} of {operation}: {reason}")

    def _anywhere(self, operation: Operation, items: Sequence[Any], reader: int, attempt: _Attempt) -> None:
        left = list(items)
        for pattern in operation.operands:
            reasons = []
            for item in left:
                reason = self._tried(pattern, item, reader, attempt)
                if reason is None:
                    left.remove(item)
                    break
                reasons.append(reason)
            else:
                _fail(f"no operand of {operation} fits: {'; '.join(dict.fromkeys(reasons)) or 'there is none'}")

    def _pairs(self, operation: Operation, line: LineBase, position: int) -> list[tuple[Any, Any]]:
        """Returns each pattern of an operand with what stands there."""
        named = operator_arguments(line.target) if isinstance(line, Call | Mutate) else None
        if named is None or (operation.rest and not operation.keywords and not _has_keywords(line)):
            return self._by_position(operation, self._listed(line, position))
        assert isinstance(line, Call | Mutate)
        given = {**dict(zip(named, line.arguments)), **dict(line.keywords)}
        wanted = {**dict(zip(named, operation.operands)), **dict(operation.keywords)}
        if len(operation.operands) > len(named):
            _fail(f"{operation} takes {len(named)} arguments, not {len(operation.operands)}")
        pairs = []
        for name, pattern in wanted.items():
            if name not in named:
                _fail(f"{operation} has no argument '{name}'")
            pairs.append((pattern, given[name] if name in given else named[name]))
        others = [name for name in given if name not in wanted and not _is_default(given[name], named.get(name))]
        if others and not operation.rest:
            _fail(f"argument '{others[0]}' of {operation} is {_shown(given[others[0]])}, which the pattern leaves out")
        return pairs

    def _by_position(self, operation: Operation, items: Sequence[Any]) -> list[tuple[Any, Any]]:
        count = len(operation.operands)
        if len(items) < count or (len(items) > count and not operation.rest):
            _fail(f"{operation} has {len(items)} operands here, the pattern {count}")
        if operation.keywords:
            _fail(f"{operation} has no arguments by name")
        return list(zip(operation.operands, items))

    def _listed(self, line: LineBase, position: int) -> list[Any]:
        match line:
            case Call() | Mutate():
                return [*line.arguments, *[item for _, item in line.keywords]]
            case Launch():
                return [*line.arguments, *[out for out in line.outs if self.flow.held_before(out, position)]]
            case View():
                return [line.base]
            case _:
                return list(reads(line))

    # --- one operand ------------------------------------------------------------------------------------------------

    def _bind(self, pattern: Any, item: Any, reader: int, attempt: _Attempt) -> None:
        match pattern:
            case Wildcard():
                self._capture(pattern, item, reader, attempt)
            case Operation():
                self._result(pattern, 0, item, reader, attempt)
            case Output():
                self._result(pattern.operation, pattern.index, item, reader, attempt)
            case OneOf():
                self._choice(pattern, item, reader, attempt)
            case tuple() | list():
                if not isinstance(item, tuple) or len(item) != len(pattern):
                    _fail(f"a list of {len(pattern)} is wanted, not {_shown(item)}")
                for inner, part in zip(pattern, item):
                    self._bind(inner, part, reader, attempt)
            case _:
                if not _is_default(item, pattern):
                    _fail(f"{_shown(pattern)} is wanted, not {_shown(item)}")

    def _choice(self, pattern: OneOf, item: Any, reader: int, attempt: _Attempt) -> None:
        reasons = []
        for choice in pattern.choices:
            reason = self._tried(choice, item, reader, attempt)
            if reason is None:
                return
            reasons.append(reason)
        _fail(" and ".join(reasons))

    def _tried(self, pattern: Any, item: Any, reader: int, attempt: _Attempt) -> str | None:
        """Binds a pattern to an item, or leaves the attempt as it is and returns why that does not fit."""
        trial = attempt.copy()
        try:
            self._bind(pattern, item, reader, trial)
        except _NoMatch as reason:
            return str(reason)
        attempt.take(trial)
        return None

    def _capture(self, wildcard: Wildcard, item: Any, reader: int, attempt: _Attempt) -> None:
        name = wildcard.name
        if wildcard.kind == "tensor" and not isinstance(item, Value):
            _fail(f"'{name}' is a tensor, not {_shown(item)}")
        if wildcard.kind == "number" and not _is_number(item):
            _fail(f"'{name}' is a number, not {_shown(item)}")
        if wildcard.type is not None:
            wrong = wildcard.type.mismatch(item.type) if isinstance(item, Value) else "it is no tensor"
            if wrong is not None:
                _fail(f"'{name}' is not as wanted: {wrong}")
        if wildcard.condition is not None and not wildcard.condition(item):
            _fail(f"the condition on '{name}' does not hold")
        if name not in attempt.captured:
            attempt.captured[name] = item
            if isinstance(item, Value):
                attempt.read_at[name] = reader
            return
        known = attempt.captured[name]
        if not _is_default(item, known) or self._held(item, reader) != self._held(known, attempt.read_at.get(name, 0)):
            _fail(f"'{name}' is {_shown(known)} and {_shown(item)}")

    def _held(self, item: Any, reader: int) -> Content | None:
        return self.flow.content(item, reader) if isinstance(item, Value) else None

    def _result(self, operation: Operation, index: int, item: Any, reader: int, attempt: _Attempt) -> None:
        """Binds an operation to the line that made what is read here."""
        if not isinstance(item, Value):
            _fail(f"{operation} is wanted, not {_shown(item)}")
        definer = self.flow.definer[item.name]
        shows = definer >= 0 and self.flow.lines[definer].alias_of(item) is not None
        if operation.kind == "view":
            if shows and isinstance(self.flow.lines[definer], View):
                self._operation(operation, definer, reader, attempt)
            elif operation.optional:
                self._bind(operation.operands[0], item, reader, attempt)
            else:
                _fail(f"%{item.name} is no view")
            return
        made = self.flow.maker(item, reader)
        position = made.position if made is not None else definer if shows else -1
        if position < 0:
            where = "given to the block" if definer < 0 else "made by no line alone"
            _fail(f"{operation} is wanted, and %{item.name} is {where}")
        results = outputs_of(self.flow.lines[position])
        value = item if made is None else made.value
        given = results[index] if 0 <= index < len(results) else None
        if given is None or given.name != value.name:
            if self._is_meant(operation, self.flow.lines[position]) is None:
                _fail(f"%{item.name} is not result {index} of {operation}")
        self._operation(operation, position, reader, attempt)


def _operation(pattern: Pattern) -> Operation:
    match pattern:
        case Operation():
            return pattern
        case Output():
            return pattern.operation
        case _:
            raise TypeError(f"an output of a pattern is an operation or one of its results, not {pattern}")


def wildcards_of(pattern: Any) -> list[Wildcard]:
    """Returns the wildcards of a pattern; one that stands twice comes twice."""
    match pattern:
        case Wildcard():
            return [pattern]
        case Operation():
            inner: Sequence[Any] = (*pattern.operands, *[given for _, given in pattern.keywords])
        case Output():
            inner = (pattern.operation,)
        case OneOf():
            inner = pattern.choices
        case tuple() | list():
            inner = pattern
        case _:
            inner = ()
    return [found for item in inner for found in wildcards_of(item)]


def _asked(predicate: Any, *given: Any) -> bool:
    return True if predicate is None else bool(predicate(*given))


def _computed(target: Any, line: LineBase) -> str:
    if not isinstance(target, Computes):
        return ""
    operators = line.origin.operators if line.origin is not None else ()
    return f", which computes {', '.join(operators) or 'what no origin says'}"


def _has_keywords(line: LineBase) -> bool:
    return isinstance(line, Call | Mutate) and bool(line.keywords)


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float | complex | sympy.Basic) and not isinstance(item, bool)


def _is_default(item: Any, default: Any) -> bool:
    """Whether two literals are the same; 1 and 1.0 are, 1 and True are not, and a list is a tuple."""
    if isinstance(item, tuple | list) and isinstance(default, tuple | list):
        return len(item) == len(default) and all(map(_is_default, item, default))
    if isinstance(item, torch.dtype | torch.device | Value) or isinstance(default, Value):
        return bool(item == default)
    same_kind = type(item) is type(default) or {type(item), type(default)} <= {int, float}
    return same_kind and bool(item == default)


def _shown(item: Any) -> str:
    if isinstance(item, Value):
        return f"%{item.name}" + ("" if isinstance(item.type, TensorType) else " (no tensor)")
    return repr(item)


def _fail(reason: str) -> NoReturn:
    raise _NoMatch(reason)

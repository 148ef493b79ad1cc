"""Matches of a pattern in a block, and the reasons why candidates do not match."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
from typing_extensions import assert_never

from fxwrap.lines import ExternCall, Launch, Mutate, View
from fxwrap.matching.binding import (
    MatchFailed,
    PartialMatch,
    bind_pairs,
    by_position,
    by_schema,
    equal_literals,
    fail,
    format_operand,
)
from fxwrap.matching.dataflow import DataFlow, MemoryVersion, operator_call, outputs_of, view_base
from fxwrap.matching.launches import LaunchMatcher, launch_mismatch
from fxwrap.matching.patterns import Computes, OneOf, Operation, Output, Pattern, Wildcard, operations_of, wildcards_of
from fxwrap.torch_compat import operator_arguments
from fxwrap.wrapper_ir import KernelDefinition, LineBase, Value, reads

_MAX_CANDIDATES = 64
"""The number of readers of a value that are tried for a further output, nearest to the matched lines first."""


@dataclass(frozen=True, slots=True)
class MatchBindings:
    """A match: the positions of lines by operation (`id`), captured operands by name, and outputs.

    `read_positions` are those of the lines that read captured values. `outputs` are the results that the pattern names,
    each with the position of its line; an undefined result is None. `anchor` is the line of the first output.
    """

    positions: Mapping[int, int]
    captured: Mapping[str, object]
    read_positions: Mapping[str, int]
    outputs: tuple[tuple[Value | None, int], ...]
    anchor: int


class Matcher:
    """Matches one pattern against the lines of a block."""

    def __init__(self, pattern: tuple[Pattern, ...], flow: DataFlow, kernels: Mapping[str, KernelDefinition]) -> None:
        self.outputs = pattern
        self.flow = flow
        self.kernels = kernels
        self.operations = operations_of(pattern)

    def anchors(self) -> Iterator[int]:
        """Yields the positions of the candidates for the pattern's first output."""
        first = _operation(self.outputs[0])
        for position, line in enumerate(self.flow.lines):
            if self._target_mismatch(first, line) is None:
                yield position

    def match_at(self, position: int) -> MatchBindings | str:
        """Returns the match whose first output is the line at a position, or why there is none."""
        attempt = PartialMatch()
        try:
            self._operation(_operation(self.outputs[0]), position, position, attempt)
            for pattern in self.outputs[1:]:
                self._match_further_output(_operation(pattern), attempt)
        except MatchFailed as reason:
            return str(reason)
        outputs = tuple([value for pattern in self.outputs for value in self._output_values(pattern, attempt)])
        return MatchBindings(attempt.positions, attempt.captured, attempt.read_positions, outputs, position)

    def _output_values(self, pattern: Pattern, attempt: PartialMatch) -> list[tuple[Value | None, int]]:
        operation = _operation(pattern)
        position = attempt.positions[id(operation)]
        results = self._results(operation, position, attempt)
        outputs = (results[pattern.index],) if isinstance(pattern, Output) else results
        return [(value, position) for value in outputs]

    def _results(self, operation: Operation, position: int, attempt: PartialMatch) -> tuple[Value | None, ...]:
        """Returns the outputs of an operation's line, those of a kernel by its operators in the pattern's order."""
        known = attempt.results.get(id(operation))
        return outputs_of(self.flow.lines[position]) if known is None else known

    # --- further outputs --------------------------------------------------------------------------------------------

    def _match_further_output(self, operation: Operation, attempt: PartialMatch) -> None:
        """Binds another output: a line that reads a value of the match."""
        if id(operation) in attempt.positions:
            return
        last_reason = "no line of the match so far feeds it"
        for position in self._candidates(operation, attempt):
            trial = attempt.copy()
            try:
                self._operation(operation, position, position, trial)
            except MatchFailed as reason:
                last_reason = str(reason)
                continue
            attempt.assign(trial)
            return
        fail(f"there is no {operation} beside it: {last_reason}")

    def _candidates(self, operation: Operation, attempt: PartialMatch) -> list[int]:
        flow, near = self.flow, max(attempt.positions.values())
        matched = set(attempt.positions.values())
        shared = [item for item in operations_of(operation) if id(item) in attempt.positions]
        values = [value for item in shared for value in outputs_of(flow.lines[attempt.positions[id(item)]]) if value]
        names = {item.name for item in wildcards_of(operation)}
        values += [value for name, value in attempt.captured.items() if name in names and isinstance(value, Value)]
        users: set[int] = set()
        for value in values:
            positions = flow.users(value.name)
            middle = bisect_left(positions, near)
            users.update(positions[max(0, middle - _MAX_CANDIDATES) : middle + _MAX_CANDIDATES])
        reachable = dict.fromkeys([position for user in users for position in self._transitive_users(operation, user)])
        candidates = [
            position
            for position in reachable
            if position not in matched and self._target_mismatch(operation, flow.lines[position]) is None
        ]
        return sorted(candidates, key=lambda position: (abs(position - near), position))[:_MAX_CANDIDATES]

    def _transitive_users(self, operation: Operation, position: int) -> Iterable[int]:
        """Yields a line and its transitive readers, as deep as the operation's operands are nested."""
        yield position
        depth = len(operations_of(operation)) - 1
        level = [position]
        for _ in range(depth):
            level = [user for start in level for value in outputs_of(self.flow.lines[start]) if value
                     for user in self.flow.users(value.name)[:_MAX_CANDIDATES] if user > start]  # fmt: skip
            yield from level[:_MAX_CANDIDATES]

    # --- one operation ----------------------------------------------------------------------------------------------

    def _target_mismatch(self, operation: Operation, line: LineBase) -> str | None:
        """Returns why a line is not of the operation's kind and target, or None."""
        target = operation.target
        match operation.kind:
            case "call":
                call = operator_call(line)
                if call is None:
                    return f"{line.opcode} is no operator call"
                if isinstance(target, frozenset):
                    return None if call.target in target else f"it is {call.target}"
                matches = isinstance(line, ExternCall | Mutate) and _holds(target, line)
                return None if matches else f"it is {call.target}"
            case "launch":
                if not isinstance(line, Launch):
                    return f"{line.opcode} is no launch"
                if isinstance(target, frozenset):
                    return None if line.kernel in target else f"it launches @{line.kernel}"
                if isinstance(target, Computes):
                    return launch_mismatch(target, line)
                return None if _holds(target, self.kernels[line.kernel], line) else f"it launches @{line.kernel}"
            case "computed":
                assert isinstance(target, Computes)
                if isinstance(line, Launch):
                    return launch_mismatch(target, line)
                return self._target_mismatch(_operation(target.roots[0]), line)
            case "view":
                return None if view_base(line) is not None else f"{line.opcode} is no view"
            case "line":
                matches = isinstance(line, target) if isinstance(target, type) else _holds(target, line)
                return None if matches else f"it is {line.opcode}"
            case _:
                assert_never(operation.kind)

    def _operation(self, operation: Operation, position: int, at: int, attempt: PartialMatch) -> None:
        """Binds an operation to a line. `at` is the position that reads its result, which matters for a view."""
        known = attempt.positions.get(id(operation))
        if known is not None:
            if known != position:
                fail(f"{operation} is two different lines")
            return
        line = self.flow.lines[position]
        reason = self._target_mismatch(operation, line)
        if reason is not None:
            fail(f"{operation} is expected, but {reason}")
        self._check_result(operation, line)
        if operation.condition is not None and not operation.condition(line):
            fail(f"the condition of {operation} does not hold")
        reader = at if isinstance(line, View) or operation.kind == "view" else position
        self._operands(operation, line, position, reader, attempt)
        if position in attempt.positions.values():
            fail(f"one line would be two operations of the pattern: {operation} and another")
        attempt.positions[id(operation)] = position

    def _check_result(self, operation: Operation, line: LineBase) -> None:
        if operation.type is None:
            return
        results = [value for value in outputs_of(line) if value is not None]
        mismatch = operation.type.mismatch(results[0].type) if results else "it has no result"
        if mismatch is not None:
            fail(f"the result of {operation} does not match: {mismatch}")

    def _operands(
        self, operation: Operation, line: LineBase, position: int, reader: int, attempt: PartialMatch
    ) -> None:
        target = operation.target
        if isinstance(target, Computes):
            if isinstance(line, Launch):
                LaunchMatcher(
                    target, operation, line, position, self._view_base, partial(self._bind, reader=position)
                ).match(attempt)
            else:
                self._operands(_operation(target.roots[0]), line, position, reader, attempt)
            return
        if operation.any_position:
            self._bind_in_any_position(operation, self._operand_list(line, position), reader, attempt)
            return
        bind_pairs(
            operation, self._operand_pairs(operation, line, position), partial(self._bind, reader=reader), attempt
        )

    def _bind_in_any_position(
        self, operation: Operation, items: Sequence[object], reader: int, attempt: PartialMatch
    ) -> None:
        remaining = list(items)
        for pattern in operation.operands:
            reasons = []
            for item in remaining:
                reason = self._try_bind(pattern, item, reader, attempt)
                if reason is None:
                    remaining.remove(item)
                    break
                reasons.append(reason)
            else:
                fail(f"no operand of {operation} matches: {'; '.join(dict.fromkeys(reasons)) or 'there is none'}")

    def _operand_pairs(self, operation: Operation, line: LineBase, position: int) -> list[tuple[object, object]]:
        """Returns each pattern of an operand with the operand."""
        if operation.kind == "view":
            return [(operation.operands[0], view_base(line))]
        call = operator_call(line)
        named = None if call is None else operator_arguments(call.target)
        is_prefix = operation.allow_more_operands and not operation.keywords
        if call is None or named is None or (is_prefix and not call.keywords):
            return by_position(operation, self._operand_list(line, position))
        return by_schema(operation, call, named)

    def _operand_list(self, line: LineBase, position: int) -> list[object]:
        call = operator_call(line)
        if call is not None:
            return [*call.arguments, *[item for _, item in call.keywords]]
        match line:
            case Launch():
                return [*line.arguments, *[out for out in line.outs if self.flow.is_initialized_before(out, position)]]
            case View():
                return [line.base]
            case _:
                return list(reads(line))

    def _view_base(self, value: Value) -> Value | None:
        """Returns the tensor of which a value is a view."""
        position = self.flow.def_position[value.name]
        return view_base(self.flow.lines[position]) if position >= 0 else None

    # --- one operand ------------------------------------------------------------------------------------------------

    def _bind(self, pattern: object, item: object, reader: int, attempt: PartialMatch) -> None:
        match pattern:
            case Wildcard():
                self._capture(pattern, item, reader, attempt)
            case Operation():
                self._bind_result(pattern, 0, item, reader, attempt)
            case Output():
                self._bind_result(pattern.operation, pattern.index, item, reader, attempt)
            case OneOf():
                self._bind_choice(pattern, item, reader, attempt)
            case tuple() | list():
                if not isinstance(item, tuple) or len(item) != len(pattern):
                    fail(f"a list of {len(pattern)} is expected, not {format_operand(item)}")
                for inner, part in zip(pattern, item):
                    self._bind(inner, part, reader, attempt)
            case _:
                if not equal_literals(item, pattern):
                    fail(f"{format_operand(pattern)} is expected, not {format_operand(item)}")

    def _bind_choice(self, pattern: OneOf, item: object, reader: int, attempt: PartialMatch) -> None:
        reasons = []
        for choice in pattern.choices:
            reason = self._try_bind(choice, item, reader, attempt)
            if reason is None:
                return
            reasons.append(reason)
        fail(" and ".join(reasons))

    def _try_bind(self, pattern: object, item: object, reader: int, attempt: PartialMatch) -> str | None:
        """Binds a pattern to an item, or returns why it does not match and leaves the attempt unchanged."""
        trial = attempt.copy()
        try:
            self._bind(pattern, item, reader, trial)
        except MatchFailed as reason:
            return str(reason)
        attempt.assign(trial)
        return None

    def _capture(self, wildcard: Wildcard, item: object, reader: int, attempt: PartialMatch) -> None:
        name = wildcard.name
        if wildcard.kind == "tensor" and not isinstance(item, Value):
            fail(f"'{name}' is a tensor, not {format_operand(item)}")
        if wildcard.kind == "number" and not _is_number(item):
            fail(f"'{name}' is a number, not {format_operand(item)}")
        if wildcard.type is not None:
            mismatch = wildcard.type.mismatch(item.type) if isinstance(item, Value) else "it is no tensor"
            if mismatch is not None:
                fail(f"'{name}' does not match: {mismatch}")
        if wildcard.condition is not None and not wildcard.condition(item):
            fail(f"the condition on '{name}' does not hold")
        if name not in attempt.captured:
            attempt.captured[name] = item
            if isinstance(item, Value):
                attempt.read_positions[name] = reader
            return
        known = attempt.captured[name]
        if not equal_literals(item, known) or self._version_read(item, reader) != self._version_read(
            known, attempt.read_positions.get(name, 0)
        ):
            fail(f"'{name}' is {format_operand(known)} and {format_operand(item)}")

    def _version_read(self, item: object, reader: int) -> MemoryVersion | None:
        return self.flow.version_at(item, reader) if isinstance(item, Value) else None

    def _bind_result(self, operation: Operation, index: int, item: object, reader: int, attempt: PartialMatch) -> None:
        """Binds an operation to the line that defines an operand."""
        if not isinstance(item, Value):
            fail(f"{operation} is expected, not {format_operand(item)}")
        def_position = self.flow.def_position[item.name]
        is_alias = def_position >= 0 and self.flow.lines[def_position].alias_of(item) is not None
        if operation.kind == "view":
            if is_alias and view_base(self.flow.lines[def_position]) is not None:
                self._operation(operation, def_position, reader, attempt)
            elif operation.optional:
                self._bind(operation.operands[0], item, reader, attempt)
            else:
                fail(f"%{item.name} is no view")
            return
        definition = self.flow.reaching_def(item, reader)
        position = definition.position if definition is not None else def_position if is_alias else -1
        if position < 0:
            reason = "is an input of the block" if def_position < 0 else "is not defined by a single line"
            fail(f"{operation} is expected, but %{item.name} {reason}")
        self._operation(operation, position, reader, attempt)
        results = self._results(operation, position, attempt)
        value = item if definition is None else definition.value
        result = results[index] if 0 <= index < len(results) else None
        if result is None or result.name != value.name:
            fail(f"%{item.name} is not result {index} of {operation}")


def _operation(pattern: Pattern) -> Operation:
    match pattern:
        case Operation():
            return pattern
        case Output():
            return pattern.operation
        case _:
            raise TypeError(f"an output of a pattern is an operation or one of its results, not {pattern}")


def _holds(predicate: Any, *arguments: object) -> bool:
    return True if predicate is None else bool(predicate(*arguments))


def _is_number(item: object) -> bool:
    return isinstance(item, int | float | complex | sympy.Basic) and not isinstance(item, bool)

"""Patterns of the operators that a kernel computes, matched with the calls in the provenance of its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxwrap.lines import Launch
from fxwrap.matching.binding import (
    Binder,
    MatchFailed,
    PartialMatch,
    bind_pairs,
    by_position,
    by_schema,
    equal_literals,
    fail,
    format_operand,
)
from fxwrap.matching.dataflow import CalledOperator
from fxwrap.matching.patterns import Computes, OneOf, Operation, Output, Wildcard
from fxwrap.torch_compat import operator_arguments
from fxwrap.wrapper_ir import (
    CallResult,
    KernelCall,
    KernelCalls,
    LaunchOperand,
    UnreadOperand,
    Value,
    launched_calls,
    leaves,
    print_type,
    types_agree,
)


def launch_mismatch(target: Computes, line: Launch) -> str | None:
    """Returns why a launch computes none of the operators that a pattern names, or None."""
    shown = f"it launches @{line.kernel}"
    calls = launched_calls(line.origin)
    if not target.exactly:
        operators = line.origin.operators if line.origin is not None else ()
        missing = [name for name in target.names if name.removesuffix(".default") not in operators]
        return f"{shown}, which does not compute {missing[0]}" if missing else None
    if calls is None:  # a candidate, which fails for that reason, if it may compute an operator of the pattern
        operators = line.origin.operators if line.origin is not None else ()
        names = [name.removesuffix(".default") for name in _operator_names(target)]
        may_match = not operators or not set(names).isdisjoint(operators)
        return None if may_match else f"{shown}, which computes {', '.join(operators)}"
    missing = [name for name in map(full_name, target.names) if name not in calls.operators]
    missing += [str(root) for root in target.roots if not any(_may_be(root, call) for call in calls.calls)]
    return f"{shown}, which computes {', '.join(calls.operators)}, not {missing[0]}" if missing else None


def _operator_names(target: Computes) -> list[str]:
    operations = [root.operation if isinstance(root, Output) else root for root in target.roots]
    named = [name for item in operations if isinstance(item.target, frozenset) for name in item.target]
    return [*map(full_name, target.names), *named]


def full_name(operator: str) -> str:
    """Returns an overload's name with its overload: "aten.gelu.default" for "aten.gelu"."""
    return operator if operator.count(".") > 1 else f"{operator}.default"


def _may_be(pattern: Operation | Output, call: KernelCall) -> bool:
    operation = pattern.operation if isinstance(pattern, Output) else pattern
    if operation.kind == "view":
        return call.is_view or operation.optional
    return isinstance(operation.target, frozenset) and call.target in operation.target


def operands_by_role(calls: KernelCalls) -> list[object]:
    """Returns the operands of a kernel's operators in order.

    Those that the kernel computes, and those that have the default of the schema, are left out.
    """
    operands: list[object] = []
    for call in calls.calls:
        named = operator_arguments(call.target) or {}
        arguments = {**dict(zip(named, call.arguments)), **dict(call.keywords)} if named else {}
        items = list(arguments.items()) if named else list(enumerate(call.arguments))
        for name, item in items:
            if isinstance(item, tuple) and any(isinstance(leaf, CallResult) for leaf in leaves(item)):
                operands += [leaf for leaf in leaves(item) if not isinstance(leaf, CallResult)]
            elif not isinstance(item, CallResult) and not equal_literals(item, named.get(str(name), _NO_DEFAULT)):
                operands.append(item)
    return operands


_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class LaunchMatcher:
    """Matches a pattern with the calls of the launch at a position.

    `view_base` returns the tensor of which a value is a view, `bind` binds a pattern to an operand of the launch.
    """

    target: Computes
    operation: Operation
    line: Launch
    position: int
    view_base: Callable[[Value], Value | None]
    bind: Binder

    def match(self, attempt: PartialMatch) -> None:
        """Binds the operands, and the order of the results. Raises MatchFailed."""
        if not self.target.exactly:
            return
        if self.target.roots:
            self._match_roots(attempt)
        else:
            self._match_names(attempt)

    @property
    def _calls(self) -> KernelCalls:
        calls = launched_calls(self.line.origin)
        if calls is None or len(calls.results) != len(self.line.outs):
            reason = "it computes a part of an operator, or the program was parsed or combined"
            fail(f"the operands of @{self.line.kernel} have no known roles: {reason}")
        return calls

    # --- names ------------------------------------------------------------------------------------------------------

    def _match_names(self, attempt: PartialMatch) -> None:
        calls, names = self._calls, tuple(map(full_name, self.target.names))
        if calls.operators != names:
            fail(f"@{self.line.kernel} computes {', '.join(calls.operators)}, not {', '.join(names)}")
        pairs = by_position(self.operation, operands_by_role(calls))
        bind_pairs(self.operation, pairs, self._operand, attempt)
        attempt.results[id(self.operation)] = tuple([self.line.outs[index] for index in result_order(calls)])

    # --- patterns ---------------------------------------------------------------------------------------------------

    def _match_roots(self, attempt: PartialMatch) -> None:
        calls, roots = self._calls, self.target.roots
        if len(roots) != len(calls.results):
            fail(f"@{self.line.kernel} has {len(calls.results)} results, and the pattern {len(roots)}")
        outs = self._match_from(0, (), attempt)
        bound = {call for position, call in attempt.calls.values() if position == self.position}
        others = [call.target for index, call in enumerate(calls.calls) if index not in bound]
        if others:
            fail(f"@{self.line.kernel} also computes {', '.join(others)}")
        attempt.results[id(self.operation)] = tuple([self.line.outs[index] for index in outs])

    def _match_from(self, number: int, outs: tuple[int, ...], attempt: PartialMatch) -> tuple[int, ...]:
        """Binds the roots from one on to the outputs that are not bound; returns the outputs in order."""
        if number == len(self.target.roots):
            return outs
        reasons: list[str] = []
        for index, result in enumerate(self._calls.results):
            if index in outs:
                continue
            trial = attempt.copy()
            try:
                self._operand(self.target.roots[number], result, attempt=trial)
                order = self._match_from(number + 1, (*outs, index), trial)
            except MatchFailed as reason:
                reasons.append(str(reason))
                continue
            attempt.assign(trial)
            return order
        raise MatchFailed(" and ".join(dict.fromkeys(reasons)))

    # --- operands ---------------------------------------------------------------------------------------------------

    def _operand(self, pattern: object, item: object, *, attempt: PartialMatch) -> None:
        """Binds a pattern to an operand of a call."""
        if isinstance(pattern, OneOf):
            self._choice(pattern, item, attempt)
        elif isinstance(item, CallResult):
            self._call(pattern, item, attempt)
        elif isinstance(item, tuple) and isinstance(pattern, tuple | list) and len(item) == len(pattern):
            for inner, part in zip(pattern, item):
                self._operand(inner, part, attempt=attempt)
        else:
            self.bind(pattern, self._in_memory(item), attempt=attempt)

    def _choice(self, pattern: OneOf, item: object, attempt: PartialMatch) -> None:
        reasons = []
        for choice in pattern.choices:
            trial = attempt.copy()
            try:
                self._operand(choice, item, attempt=trial)
            except MatchFailed as reason:
                reasons.append(str(reason))
                continue
            attempt.assign(trial)
            return
        fail(" and ".join(reasons))

    def _in_memory(self, item: object) -> object:
        """Returns an operand that the kernel does not compute, as a value of the program or a literal."""
        match item:
            case tuple():
                return tuple([self._in_memory(part) for part in item])
            case LaunchOperand():
                tensors: tuple[object, ...] = self.line.outs if item.is_out else self.line.arguments
                value = tensors[item.position] if item.position < len(tensors) else None
                if item.is_base and isinstance(value, Value):
                    value = self.view_base(value)
                if not isinstance(value, Value):
                    fail(f"an operand of @{self.line.kernel} is unknown")
                if item.type is not None and not types_agree(value.type, item.type, compare_strides=False):
                    types = f"{print_type(value.type)}, and the operator takes {print_type(item.type)}"
                    fail(f"%{value.name} is stored as {types}")
                return value
            case UnreadOperand() | CallResult():
                raise MatchFailed(f"an operand is {format_operand(item)}")
            case _:
                return item

    def _call(self, pattern: object, item: CallResult, attempt: PartialMatch) -> None:
        """Binds a pattern to a result that the kernel computes."""
        call = self._calls.calls[item.call]
        match pattern:
            case Output():
                operation, index = pattern.operation, pattern.index
            case Operation():
                operation, index = pattern, 0
            case Wildcard():
                fail(f"'{pattern.name}' is computed by the kernel itself: {call.target}")
            case _:
                fail(f"{format_operand(pattern)} is expected, but the kernel computes {call.target}")
        if operation.kind == "computed" and isinstance(operation.target, Computes):
            (root,) = operation.target.roots
            self._call(root, item, attempt)
            return
        if operation.kind == "view" and not call.is_view and operation.optional:
            self._operand(operation.operands[0], item, attempt=attempt)
            return
        if (item.index or 0) != index:
            fail(f"result {item.index or 0} of {call.target} is not result {index}")
        self._bind_call(operation, item, call, attempt)

    def _bind_call(self, operation: Operation, item: CallResult, call: KernelCall, attempt: PartialMatch) -> None:
        place, known = (self.position, item.call), attempt.calls.get(id(operation))
        if known is not None:
            if known != place:
                fail(f"{operation} is two different calls")
            return
        if not _may_be(operation, call):
            fail(f"{operation} is expected, but the kernel computes {call.target}")
        if place in attempt.calls.values():
            fail(f"one call would be two operations of the pattern: {operation} and another")
        self._check_result(operation, item)
        attempt.calls[id(operation)] = place
        if operation.kind == "view":
            self._operand(operation.operands[0], call.arguments[0], attempt=attempt)
            return
        named = operator_arguments(call.target)
        if named is None:
            pairs = by_position(operation, list(call.arguments))
        else:
            pairs = by_schema(operation, CalledOperator(call.target, call.arguments, call.keywords), named)
        bind_pairs(operation, pairs, self._operand, attempt)

    def _check_result(self, operation: Operation, item: CallResult) -> None:
        """Checks the conditions on the result of a call, which are known for outputs of the kernel only."""
        if operation.condition is not None:
            fail(f"the condition of {operation} is on a line, and a kernel computes it")
        if operation.type is None:
            return
        stored = [out for out, result in zip(self.line.outs, self._calls.results) if result == item]
        mismatch = operation.type.mismatch(stored[0].type) if stored else "the kernel does not store it"
        if mismatch is not None:
            fail(f"the result of {operation} does not match: {mismatch}")


def result_order(calls: KernelCalls) -> list[int]:
    """Returns the positions of a kernel's outputs in the order of the operators; outputs that are copies come first."""

    def place(position: int) -> tuple[int, int]:
        result = calls.results[position]
        return (result.call, result.index or 0) if isinstance(result, CallResult) else (-1, 0)

    return sorted(range(len(calls.results)), key=place)

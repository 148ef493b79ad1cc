"""Checks of patterns and replacements before they are matched: operators, arguments and wildcards."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from fxwrap.errors import RewriteError
from fxwrap.matching.launches import full_name
from fxwrap.matching.patterns import Computes, OneOf, Operation, Output, Pattern, Wildcard, operations_of, wildcards_of
from fxwrap.torch_compat import (
    REQUIRED,
    argument_kinds,
    operator_arguments,
    operator_overload,
    overload_names_of,
    torch_schema,
)

_NUMBERS = ("IntType", "FloatType", "NumberType", "SymIntType")
_WITHOUT_TENSORS = (*_NUMBERS, "BoolType", "StringType", "DeviceObjType")


def check_pattern(outputs: Sequence[Pattern]) -> None:
    """Raises RewriteError for a pattern that matches nothing in any program.

    Its operators are registered with torch, its arguments are those of their schemas, and a wildcard has one kind.
    """
    kinds: dict[str, str] = {}
    for wildcard in wildcards_of(outputs):
        if not wildcard.name:
            raise RewriteError("a wildcard has a name that is not empty")
        if kinds.setdefault(wildcard.name, wildcard.kind) != wildcard.kind:
            raise RewriteError(
                f"wildcard '{wildcard.name}' is {kinds[wildcard.name]} and {wildcard.kind}: use one kind"
            )
    labels: dict[str, Operation] = {}
    for operation in operations_of(outputs):
        if operation.label and labels.setdefault(operation.label, operation) is not operation:
            raise RewriteError(f"two operations of the pattern have the name '{operation.label}'")
        _check_operation(operation)


def check_replacement(outputs: Sequence[Pattern], replacement: object) -> None:
    """Raises RewriteError for a replacement, written as a pattern, that no match of a pattern can have."""
    captured = dict.fromkeys([wildcard.name for wildcard in wildcards_of(outputs)])
    for wildcard in wildcards_of(replacement):
        if wildcard.name not in captured:
            names = ", ".join(captured) or "no wildcards"
            raise RewriteError(f"the replacement uses '{wildcard.name}', which the pattern does not capture: {names}")
    if any(isinstance(item, OneOf) for item in _parts(replacement)):
        raise RewriteError("a replacement has no choices: write a builder function")
    for operation in operations_of(replacement):
        is_call = operation.kind == "call" and isinstance(operation.target, frozenset) and len(operation.target) == 1
        if not is_call:
            raise RewriteError(f"a replacement calls operators by name; for {operation}, write a builder function")
        _check_operation(operation)
    items = replacement if isinstance(replacement, tuple) else (replacement,)
    wanted, built = [_result_count(item) for item in outputs], [_result_count(item) for item in items]
    if None not in (*wanted, *built) and sum(map(int, wanted)) != sum(map(int, built)):  # type: ignore[arg-type]
        raise RewriteError(f"the replacement has {sum(built)} results, and the pattern {sum(wanted)}")  # type: ignore[arg-type]


def _parts(pattern: object) -> Iterator[object]:
    yield pattern
    match pattern:
        case Operation():
            children: Sequence[object] = (*pattern.operands, *[item for _, item in pattern.keywords])
        case Output():
            children = (pattern.operation,)
        case tuple() | list():
            children = pattern
        case _:
            children = ()
    for child in children:
        yield from _parts(child)


def _result_count(pattern: object) -> int | None:
    """Returns the number of outputs of a pattern, None if it depends on the program."""
    match pattern:
        case Output() | Wildcard():
            return 1
        case Operation(kind="call", target=frozenset() as names):
            schemas = [torch_schema(operator_overload(name)) for name in names]
            counts = {len(schema.returns) for schema in schemas if not schema.is_mutable}
            is_known = len(counts) == 1 and not any(schema.is_mutable for schema in schemas)
            is_list = any(item.type.kind() == "ListType" for schema in schemas for item in schema.returns)
            return counts.pop() if is_known and not is_list else None
        case Operation(kind="view"):
            return 1
        case _:
            return None


# --- operations -----------------------------------------------------------------------------------------------------


def _check_operation(operation: Operation) -> None:
    target = operation.target
    match target:
        case Computes():
            _check_computes(operation, target)
        case frozenset() if operation.kind == "call":
            for name in sorted(target):
                _check_call(operation, name, known_operator(name))


def _check_computes(operation: Operation, target: Computes) -> None:
    if not target.calls:
        raise RewriteError("computes() names no operator")
    if (target.names and target.roots) or len(target.names) + len(target.roots) != len(target.calls):
        raise RewriteError(f"{target} has names of operators, or patterns of calls; not both, and nothing else")
    for name in target.names:
        known_operator(full_name(name))
    if target.exactly and target.names:
        return
    if target.roots and not target.exactly:
        raise RewriteError(f"{target} with exactly=False takes names of operators")
    if operation.operands or (target.names and not operation.allow_more_operands):
        remedy = "its operands are those of the calls" if target.roots else "with exactly=False, its operand is `...`"
        raise RewriteError(f"launch({target}) has no operands of its own: {remedy}")
    for root in target.roots:
        inner = root.operation if isinstance(root, Output) else root
        if inner.kind not in ("call", "view") or not isinstance(inner.target, frozenset | None):
            raise RewriteError(f"{target} has patterns of calls by the names of operators, not {inner}")


def known_operator(name: str) -> Mapping[str, object]:
    """Returns the defaults of an operator's arguments by name. Raises RewriteError if torch has no such operator."""
    named = operator_arguments(name)
    if named is not None:
        return named
    known = overload_names_of(name.partition(".")[0])
    overloads = [item for item in known if item.rpartition(".")[0] == name.removesuffix(".default")]
    near = (overloads or difflib.get_close_matches(name, known, n=3, cutoff=0.8))[:3]
    remedy = f"did you mean {' or '.join(near)}?" if near else "Import the library that registers it first"
    raise RewriteError(f"torch has no operator '{name}'; {remedy}")


def _check_call(operation: Operation, name: str, named: Mapping[str, object]) -> None:
    """Checks the patterns of a call's arguments by the operator's schema."""
    operands, keywords, kinds = operation.operands, dict(operation.keywords), argument_kinds(name)
    if operation.any_position:
        return
    if len(operands) > len(named):
        raise RewriteError(f"{name} has {len(named)} arguments, and the pattern {len(operands)}")
    unknown = [key for key in keywords if key not in named]
    if unknown:
        raise RewriteError(f"{name} has no argument '{unknown[0]}'; its arguments are {', '.join(named)}")
    patterns = dict(zip(named, operands))
    twice = [key for key in keywords if key in patterns]
    if twice:
        raise RewriteError(f"the pattern of {name} has the argument '{twice[0]}' twice")
    patterns |= keywords
    missing = [key for key, default in named.items() if default is REQUIRED and key not in patterns]
    is_out = name.rpartition(".")[2].endswith("out")
    if missing and not operation.allow_more_operands and not is_out:
        raise RewriteError(
            f"{name} has no default for '{missing[0]}': add its pattern, or `...` for all other arguments"
        )
    for key, pattern in patterns.items():
        reason = _argument_mismatch(pattern, kinds[key])
        if reason is not None:
            raise RewriteError(f"argument '{key}' of {name} {reason}")


def _argument_mismatch(pattern: object, kind: str) -> str | None:
    """Returns why no argument of a kind matches a pattern, or None."""
    is_tensor = isinstance(pattern, Operation | Output) or (isinstance(pattern, Wildcard) and pattern.kind == "tensor")
    is_number = isinstance(pattern, Wildcard) and pattern.kind == "number"
    is_number |= isinstance(pattern, int | float) and not isinstance(pattern, bool)
    match pattern:
        case _ if is_tensor and kind in _WITHOUT_TENSORS:
            return "is no tensor"
        case _ if is_tensor and kind == "ListType":
            return "is a list: write a list of patterns"
        case _ if is_number and kind in ("BoolType", "StringType", "ListType"):
            return "is no number"
        case str() if kind in (*_NUMBERS, "TensorType", "BoolType", "ListType"):
            return f"is no string, and {pattern!r} never matches"
        case tuple() | list() if kind in (*_WITHOUT_TENSORS, "TensorType"):
            return "is no list"
        case _:
            return None

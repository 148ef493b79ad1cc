"""The user's passes over programs.

The result of a pass is verified, beyond the rules of the IR: inputs and results keep their types, and each new operator
call has the results, aliases, mutations and effects of the operator's schema and fake-tensor rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from fxwrap.errors import PassError, RewriteError, VerifyError
from fxwrap.inference import CallInference, InferredCall, InferredResult, UnknownResultError
from fxwrap.lines import ExternCall, Mutate
from fxwrap.options import Pass
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import out_argument_names
from fxwrap.wrapper_ir import (
    Input,
    LineBase,
    Program,
    Value,
    leaves,
    print_line,
    print_type,
    reads,
    types_agree,
    verify,
    writes,
)


def run_program_pass(item: Pass, program: Program, *, check: bool = True) -> Program:
    """Returns a program after a pass, verified unless `check` is false.

    Raises PassError, with the pass, the line, the reason and the texts of both programs.
    """
    run = _ProgramPassRun(item, program)
    try:
        after = item.run(program)
    except Exception as error:  # a user's pass may raise anything
        raise run.error(f"it raised {type(error).__name__}: {error}") from error
    if not isinstance(after, Program):
        raise run.error(f"it returned a {type(after).__name__}, not a program")
    if check and after is not program:
        run.check(after)
    return after


class _ProgramPassRun:
    """One run of a pass: the program before it, and the checks of its result."""

    def __init__(self, item: Pass, before: Program) -> None:
        self.item = item
        self.before = before
        self.after: Program | None = None

    def error(self, reason: str, where: str = "") -> PassError:
        """Returns the error, with both programs as text."""
        after = "" if self.after is None else str(self.after)
        return PassError(self.item.name, self.item.at, reason, where, str(self.before), after)

    def _fail(self, line: LineBase, reason: str) -> NoReturn:
        raise self.error(reason, f"> {print_line(line).partition(chr(10))[0].strip()}")

    def check(self, after: Program) -> None:
        """Raises PassError for the first error in the result."""
        self.after = after
        try:
            verify(after)
        except VerifyError as error:
            raise self.error(f"[{error.rule}] {error.reason}", error.context) from error
        self._check_interface(after)
        inference = CallInference.for_program(after)
        for line in _new_calls(self.before, after):
            self._check_call(line, inference)

    def _check_interface(self, after: Program) -> None:
        """Checks that the types and ownership of inputs, and the types of results, are unchanged."""
        if len(after.inputs) != len(self.before.inputs) or not all(map(_same_input, self.before.inputs, after.inputs)):
            raise self.error("it changed the program's inputs or their ownership")
        old, new = _returned(self.before.body.lines[-1]), _returned(after.body.lines[-1])
        last = after.body.lines[-1]
        if len(old) != len(new):
            self._fail(last, f"it returns {len(new)} results, and the program returned {len(old)}")
        for position, (first, second) in enumerate(zip(old, new)):
            if isinstance(first, Value) != isinstance(second, Value):
                self._fail(last, f"result {position} was {first} and is {second}")
            if isinstance(first, Value) and not types_agree(first.type, second.type):
                self._fail(last, f"result {position} was {print_type(first.type)} and is {print_type(second.type)}")

    def _check_call(self, line: ExternCall | Mutate, inference: CallInference) -> None:
        keywords = line.keywords
        try:
            if isinstance(line, ExternCall) and line.outs:
                keywords = (*keywords, *zip(out_argument_names(line.target), line.outs, strict=True))
            inferred = inference.call(line.target, line.arguments, keywords)
        except UnknownResultError:
            return  # the interpreter checks the results at run time
        except RewriteError as error:
            self._fail(line, error.reason)
        except (LookupError, ValueError) as error:
            self._fail(line, str(error))
        mutated = inferred.operator.mutated_operands(line.arguments, keywords)
        undeclared = [value.name for value in mutated if value not in writes(line)]
        if undeclared:
            self._fail(line, f"{line.target} writes %{undeclared[0]}, and the line does not declare it")
        missing = set(inferred.effects) - set(line.effects())
        if missing:
            effect = next(iter(missing)).name
            self._fail(line, f"{line.target} has the effect {effect}, and the line does not declare it")
        if line.results:
            self._check_results(line, inferred)

    def _check_results(self, line: ExternCall | Mutate, inferred: InferredCall) -> None:
        count = len(inferred.results)
        if len(line.results) != count:
            self._fail(line, f"{line.target} returns {count} results, and the line has {len(line.results)}")
        operands = [leaf for leaf in leaves((line.arguments, line.keywords)) if isinstance(leaf, Value)]
        for value, result in _pairs(line.results, inferred.results):
            if not isinstance(value, Value):
                continue
            if not isinstance(result, InferredResult) or not types_agree(value.type, result.type):
                returned = print_type(result.type) if isinstance(result, InferredResult) else "nothing"
                declared = print_type(value.type)
                self._fail(
                    line, f"{line.target} returns {returned} for %{value.name}, and the line declares {declared}"
                )
            if result.base is not None and line.alias_of(value) is None:
                base = operands[result.base].name
                self._fail(line, f"%{value.name} aliases %{base}, and the line declares it as a new storage")


def _new_calls(before: Program, after: Program) -> Iterator[ExternCall | Mutate]:
    """Yields the operator calls that the program before did not have."""
    existing = {line for line in before.lines() if isinstance(line, ExternCall | Mutate)}
    for line in after.lines():
        if isinstance(line, ExternCall | Mutate) and line not in existing:
            yield line


def _pairs(values: Any, results: Any) -> Iterator[tuple[object, Any]]:
    for value, result in zip(values, results):
        if isinstance(value, tuple) and isinstance(result, tuple):
            yield from _pairs(value, result)
        else:
            yield value, result


def _returned(line: LineBase) -> tuple[Any, ...]:
    values: tuple[Any, ...] = getattr(line, "values", tuple(reads(line)))
    return values


def _same_input(first: Input, second: Input) -> bool:
    """Whether two inputs have equal types and ownership; names may differ."""
    if isinstance(first.value, Value) and isinstance(second.value, Value):
        return first.ownership is second.ownership and types_agree(first.value.type, second.value.type)
    return type(first.value) is type(second.value) and symbol_kind(first.name) == symbol_kind(second.name)

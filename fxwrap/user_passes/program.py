"""Passes over programs: what they give is verified, beyond the rules of the IR.

A pass keeps what a program takes and gives, and each operator's call that it adds says what the operator's schema and
its rule for fake tensors say: its results, its windows, what it writes and its effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from fxwrap.errors import PassError, RewriteError, VerifyError
from fxwrap.inference import CallFacts, CallInference, Result, UnknownResult
from fxwrap.lines import Call, Mutate
from fxwrap.pass_spec import Pass
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
    """Returns what a pass makes of a program, verified unless `check` is false.

    Raises PassError, which names the pass, the line and the reason, and has both programs, for a pass that raises or
    leaves something wrong.
    """
    run = _Run(item, program)
    try:
        after = item.run(program)
    except Exception as error:  # whatever a pass of somebody else's raises
        raise run.error(f"it raised {type(error).__name__}: {error}") from error
    if not isinstance(after, Program):
        raise run.error(f"it returned a {type(after).__name__}, not a program")
    if check and after is not program:
        run.check(after)
    return after


class _Run:
    """One run of a pass: the program before it, and the checks of the one after it."""

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
        """Raises PassError for the first thing that is wrong with what the pass left."""
        self.after = after
        try:
            verify(after)
        except VerifyError as error:
            raise self.error(f"[{error.rule}] {error.reason}", error.context) from error
        self._check_interface(after)
        inference = CallInference(after)
        for line in _new_calls(self.before, after):
            self._check_call(line, inference)

    def _check_interface(self, after: Program) -> None:
        """What a program takes and gives stays: callers were promised it."""
        if len(after.inputs) != len(self.before.inputs) or not all(map(_same_input, self.before.inputs, after.inputs)):
            raise self.error("it changed the program's inputs, or what may be done with them")
        old, new = self.before.body.lines[-1], after.body.lines[-1]
        results, others = _returned(old), _returned(new)
        if len(results) != len(others):
            self._fail(new, f"it gives {len(others)} results where the program gave {len(results)}")
        for position, (first, second) in enumerate(zip(results, others)):
            if isinstance(first, Value) != isinstance(second, Value):
                self._fail(new, f"result {position} was {first} and is {second}")
            if isinstance(first, Value) and not types_agree(first.type, second.type):
                self._fail(new, f"result {position} was {print_type(first.type)} and is {print_type(second.type)}")

    # --- calls ------------------------------------------------------------------------------------------------------

    def _check_call(self, line: Call | Mutate, inference: CallInference) -> None:
        keywords = line.keywords
        try:
            if isinstance(line, Call) and line.outs:
                keywords = (*keywords, *zip(out_argument_names(line.target), line.outs, strict=True))
            facts = inference.call(line.target, line.arguments, keywords)
        except UnknownResult:
            return  # checked when it runs, by the interpreter
        except RewriteError as error:
            self._fail(line, error.reason)
        except (LookupError, ValueError) as error:
            self._fail(line, str(error))
        written = facts.operator.written_operands(line.arguments, keywords)
        silent = [value.name for value in written if value not in writes(line)]
        if silent:
            self._fail(line, f"{line.target} writes %{silent[0]}, and the line does not say so")
        missing = set(facts.effects) - set(line.effects())
        if missing:
            self._fail(line, f"{line.target} has the effect {next(iter(missing)).name}, and the line does not say so")
        if line.results:
            self._check_results(line, facts)

    def _check_results(self, line: Call | Mutate, facts: CallFacts) -> None:
        if len(line.results) != len(facts.results):
            self._fail(line, f"{line.target} gives {len(facts.results)} results, and the line has {len(line.results)}")
        operands = [leaf for leaf in leaves((line.arguments, line.keywords)) if isinstance(leaf, Value)]
        for value, result in _pairs(line.results, facts.results):
            if not isinstance(value, Value):
                continue
            if not isinstance(result, Result) or not types_agree(value.type, result.type):
                gives = print_type(result.type) if isinstance(result, Result) else "nothing"
                said = print_type(value.type)
                self._fail(line, f"{line.target} gives {gives} for %{value.name}, which the line says is {said}")
            if result.base is not None and line.alias_of(value) is None:
                base = operands[result.base].name
                self._fail(line, f"%{value.name} is a window on %{base}, and the line says that it is new memory")


def _new_calls(before: Program, after: Program) -> Iterator[Call | Mutate]:
    """Yields the operator calls that a program did not have before."""
    known = {line for line in before.lines() if isinstance(line, Call | Mutate)}
    for line in after.lines():
        if isinstance(line, Call | Mutate) and line not in known:
            yield line


def _pairs(values: Any, results: Any) -> Iterator[tuple[Any, Any]]:
    for value, result in zip(values, results):
        if isinstance(value, tuple) and isinstance(result, tuple):
            yield from _pairs(value, result)
        else:
            yield value, result


def _returned(line: LineBase) -> tuple[Any, ...]:
    given: tuple[Any, ...] = getattr(line, "values", tuple(reads(line)))
    return given


def _same_input(first: Input, second: Input) -> bool:
    """Whether two inputs are the same to a caller: their type and ownership, names aside."""
    if isinstance(first.value, Value) and isinstance(second.value, Value):
        return first.ownership is second.ownership and types_agree(first.value.type, second.value.type)
    return type(first.value) is type(second.value) and symbol_kind(first.name) == symbol_kind(second.name)

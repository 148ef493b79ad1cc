"""Rewriting programs: every match of a pattern is replaced, in the body, in functions and in nested blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fxwrap.errors import RewriteError
from fxwrap.lines import Alloc, PoolSlice, Reuse, View, Workspace
from fxwrap.lines.frees import insert_frees
from fxwrap.matching import (
    DataFlow,
    Found,
    Matcher,
    OneOf,
    Operation,
    Output,
    Pattern,
    Placed,
    Wildcard,
    is_plain_free,
    operations_of,
    place,
    wildcards_of,
)
from fxwrap.pass_spec import IR_BEFORE_PLANNING, Pass
from fxwrap.passes.order_streams import order_streams
from fxwrap.rewrite.builder import LineBuilder, Names
from fxwrap.rewrite.match import Match
from fxwrap.rewrite.replacement import Refused, Replacement, fit, substituted
from fxwrap.wrapper_ir import (
    Block,
    Constant,
    ConstantStore,
    LineBase,
    Program,
    Role,
    Value,
    defined,
    map_line,
    print_line,
    program_arguments,
    released_inputs,
    used,
    verify,
)

Build: TypeAlias = Callable[[Match, LineBuilder], Any]
"""Makes the lines that replace a match; returns the values of its outputs: one, a tuple, or None where it has none.

It may raise `Skip` to leave a match as it is."""


class Skip(Exception):
    """Raised by a builder function to leave a match as it is; the message says why, in the report."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line that the first output of a pattern could be, and why it was left alone."""

    line: str
    reason: str

    def __str__(self) -> str:
        return f"{self.line}\n    {self.reason}"


@dataclass(frozen=True)
class Rewritten:
    """A rewritten program, the matches that were replaced, and what looked like one and was left alone."""

    program: Program
    matches: tuple[Match, ...]
    refusals: tuple[Refusal, ...]

    def report(self) -> str:
        """Returns a text for people: how many matches were replaced, and why the other candidates were not."""
        parts = [f"{len(self.matches)} replaced, {len(self.refusals)} left alone"]
        parts += [f"replaced: {print_line(match.lines[-1]).partition(chr(10))[0]}" for match in self.matches]
        return "\n".join([*parts, *[f"left alone: {refusal}" for refusal in self.refusals]])


def find(program: Program, pattern: Any) -> Rewritten:
    """Returns the matches of a pattern in a program as it is, and why other candidates are none."""
    return _Rewriter(program, pattern, None).run()


def rewrite(program: Program, pattern: Any, replacement: Build | Any) -> Rewritten:
    """Returns the program with every match of a pattern replaced, verified.

    Matches are taken in the program's order; lines of one are in no other, and what a replacement makes is not matched
    again. Frees are placed anew in blocks that change; kernels that no line launches any more go. Near-linear in the
    number of lines.

    Args:
        program: a verified program. It is not changed.
        pattern: an operation, one of its results, or a tuple of these: the outputs that the replacement has to give.
        replacement: a function of the match and a `LineBuilder`, or calls in terms of the pattern's wildcards.

    Raises RewriteError for a pattern that is none and a replacement that does not fit, VerifyError for lines that break
    a rule of the IR.
    """
    build = replacement if not isinstance(replacement, Operation | Output | Wildcard | tuple) else _built(replacement)
    if not callable(build):
        raise RewriteError(f"a replacement is a function, or calls in terms of wildcards, not {replacement!r}")
    done = _Rewriter(program, pattern, build).run()
    verify(done.program)
    return done


def rewriting(
    pattern: Any, replacement: Build | Any, *, key: str, at: str = IR_BEFORE_PLANNING, name: str = ""
) -> Pass:
    """Returns the pass that replaces every match of a pattern in a program, as `rewrite` does.

    `key` says which version of pattern and replacement this is; see `Pass`.
    """

    def run(program: Program) -> Program:
        return rewrite(program, pattern, replacement).program

    return Pass(run, key, at, name or getattr(replacement, "__name__", "rewriting"))


class _Rewriter:
    """One rewrite of a program. Without a builder it only finds matches."""

    def __init__(self, program: Program, pattern: Any, build: Build | None) -> None:
        self.program = program
        self.pattern = _outputs(pattern)
        self.operations = operations_of(self.pattern)
        self.wildcards = tuple(dict.fromkeys(wildcards_of(self.pattern)))
        self.build = build
        self.names = Names(program)
        self.functions = dict(program.functions)
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.matches: list[Match] = []
        self.refusals: list[Refusal] = []
        self._blocks: dict[int, tuple[Block, Block]] = {}

    def run(self) -> Rewritten:
        program = self.program
        owned = released_inputs(program.inputs)
        functions = tuple([(name, self._inner(block)) for name, block in program.functions])
        body = self._block(program.body, program_arguments(program), owned, nested=False)
        if self.build is None or (not self.matches):
            return Rewritten(program, tuple(self.matches), tuple(self.refusals))
        constants = self._constants(body)
        tensors = {**program.store.tensors, **self.names.constants}
        store = ConstantStore({item.value.name: tensors[item.value.name] for item in constants})
        changed = program.replace(body=body, functions=functions, constants=constants, store=store)
        changed = order_streams(changed)  # frees are placed anew, and some must wait for a stream
        launched = {name for line in changed.lines() for name in _kernels_of(line)}
        was = {name for line in program.lines() for name in _kernels_of(line)}
        unused = {kernel.name for kernel in program.kernels} - was
        kept = tuple([item for item in self.names.kernels.values() if item.name in launched | unused])
        return Rewritten(changed.replace(kernels=kept), tuple(self.matches), tuple(self.refusals))

    def _constants(self, body: Block) -> tuple[Constant, ...]:
        """Returns the program's constants and the new ones, without those that nothing reads any more."""
        read = {value.name for line in body.lines for value in used(line)}
        was = {value.name for line in self.program.body.lines for value in used(line)}
        every = (*self.program.constants, *self.names.constant_values)
        return tuple([item for item in every if item.value.name in read or item.mutable
                      or (item in self.program.constants and item.value.name not in was)])  # fmt: skip

    def _inner(self, block: Block) -> Block:
        """Returns a block inside of a line, or a function, rewritten; one that several lines share stays one."""
        known = self._blocks.get(id(block))
        if known is None:
            known = self._blocks[id(block)] = block, self._block(block, block.arguments, (), nested=True)
        return known[1]

    def _block(self, block: Block, arguments: Sequence[Value], owned: Sequence[Value], *, nested: bool) -> Block:
        def inner(leaf: Any) -> Any:
            return self._inner(leaf) if isinstance(leaf, Block) else leaf

        before = [map_line(line, inner, (Role.BLOCK,)) for line in block.lines]
        walk = _BlockWalk(self, [line for line in before if not is_plain_free(line)], arguments, nested)
        if not walk.run():
            same = all(new is old for new, old in zip(before, block.lines))
            return block if same else Block(block.arguments, tuple(before))
        constants = () if nested else [item.value for item in self.names.constant_values]
        return Block(block.arguments, insert_frees(walk.lines, [*arguments, *constants], owned))


class _BlockWalk:
    """The rounds of one block: matches that would move across one another are replaced one round later."""

    def __init__(
        self, rewriter: _Rewriter, lines: Sequence[LineBase], arguments: Sequence[Value], nested: bool
    ) -> None:
        self.rewriter = rewriter
        self.lines: Sequence[LineBase] = lines
        self.arguments = arguments
        self.nested = nested
        self.made: dict[int, LineBase] = {}  # new lines by identity: they are not matched again
        self.tried: dict[int, LineBase] = {}  # lines at which a builder refused

    def run(self) -> bool:
        """Rewrites the block; returns whether anything changed."""
        changed, again = False, True
        while again:
            found, again = self._accepted()
            replacements = self._built(found)
            again = again and bool(replacements)
            if replacements:
                changed = True
                self._apply(replacements)
        return changed

    def _accepted(self) -> tuple[list[tuple[Found, Placed]], bool]:
        """Returns the matches of a round, and whether some have to wait for the next one."""
        rewriter = self.rewriter
        constants = () if self.nested else [item.value for item in rewriter.names.constant_values]
        flow = self.flow = DataFlow(self.lines, [*self.arguments, *constants], rewriter.functions)
        kernels = {kernel.name: kernel for kernel in rewriter.names.kernels.values()}
        matcher = Matcher(rewriter.pattern, flow, kernels)
        found: list[tuple[Found, Placed]] = []
        refusals: list[Refusal] = []
        taken: set[int] = set()
        end, moved_end, waiting = -1, -1, False
        for anchor in matcher.anchors():
            if id(self.lines[anchor]) in self.made or id(self.lines[anchor]) in self.tried:
                continue
            match = self._placed(matcher, anchor)
            if isinstance(match, str):
                refusals.append(Refusal(_text(self.lines[anchor]), match))
                continue
            positions = match[0].positions.values()
            if any(position in taken for position in positions):
                refusals.append(Refusal(_text(self.lines[anchor]), "it has a line of another match"))
                continue
            start, last = min(positions), max(positions)
            moves = match[1].position < last
            if start <= moved_end or (moves and start <= end):
                waiting = True
                continue
            taken.update(positions)
            end, moved_end = max(end, last), max(moved_end, last if moves else -1)
            found.append(match)
        if not waiting:
            rewriter.refusals += refusals
        return found, waiting

    def _placed(self, matcher: Matcher, anchor: int) -> tuple[Found, Placed] | str:
        match = matcher.match_at(anchor)
        if isinstance(match, str):
            return match
        if any(id(self.lines[position]) in self.made for position in match.positions.values()):
            return "it has a line that a replacement made"
        placed = place(match, self.rewriter.operations, self.rewriter.wildcards, self.flow)
        return placed if isinstance(placed, str) else (match, placed)

    def _built(self, found: Sequence[tuple[Found, Placed]]) -> list[Replacement]:
        """Has the builder make the lines of each match."""
        rewriter, replacements = self.rewriter, []
        for match, placed in sorted(found, key=lambda item: item[1].position):
            shown = self._match(match)
            if rewriter.build is None:
                rewriter.matches.append(shown)
                continue
            builder = LineBuilder(rewriter.names, shown.origin, nested=self.nested)
            anchor = self.lines[match.anchor]
            try:
                given = rewriter.build(shown, builder)
                replacements.append(fit(shown, match, placed, builder.lines, given, self.flow))
            except (Skip, Refused) as reason:
                rewriter.refusals.append(Refusal(_text(anchor), str(reason)))
                self.tried[id(anchor)] = anchor
            except RewriteError as error:
                raise RewriteError(f"replacing {_text(anchor)}: {error.reason}", error.line) from error
            else:
                rewriter.matches.append(shown)
        return replacements

    def _match(self, found: Found) -> Match:
        lines = tuple([self.lines[position] for position in sorted(found.positions.values())])
        labelled = {item.label: self.lines[found.positions[id(item)]] for item in self.rewriter.operations
                    if item.label and id(item) in found.positions}  # fmt: skip
        return Match(lines, found.captured, labelled, tuple([value for value, _ in found.outputs]))

    def _apply(self, replacements: Sequence[Replacement]) -> None:
        """Puts the new lines in their places, in one walk."""
        at = {item.placed.position: item for item in replacements}
        gone = {position for item in replacements for position in (*item.placed.removed, *item.dropped)}
        orphans = {value.name for position in gone for value in used(self.lines[position])}
        orphans |= {value.name for position in gone for value in defined(self.lines[position])}
        values: dict[str, Value] = {}
        lines: list[LineBase] = []
        for position, line in enumerate(self.lines):
            if position in at:
                for new in at[position].lines:
                    lines.append(substituted(new, values))
                    self.made[id(lines[-1])] = lines[-1]
                for old, value in at[position].substituted.items():
                    values[old] = values.get(value.name, value)
            if position not in gone:
                lines.append(substituted(line, values) if values else line)
                if id(line) in self.made:
                    self.made[id(lines[-1])] = lines[-1]
                if id(line) in self.tried:
                    self.tried[id(lines[-1])] = lines[-1]
        self.lines = _without_orphans(lines, orphans)


_MEMORY = (Alloc, Reuse, View, PoolSlice, Workspace)


def _without_orphans(lines: Sequence[LineBase], orphans: set[str]) -> list[LineBase]:
    """Returns the lines without those that make or show memory which only removed lines used."""
    read: set[str] = set()
    kept = []
    for line in reversed(lines):
        results = defined(line)
        if isinstance(line, _MEMORY) and results[0].name in orphans and results[0].name not in read:
            orphans.update([value.name for value in used(line)])
            continue
        read.update([value.name for value in used(line)])
        kept.append(line)
    kept.reverse()
    return kept


def _outputs(pattern: Any) -> tuple[Pattern, ...]:
    given = pattern if isinstance(pattern, tuple | list) else (pattern,)
    for item in given:
        if not isinstance(item, Operation | Output):
            what = "a choice" if isinstance(item, OneOf) else repr(item)
            raise RewriteError(f"a pattern's outputs are operations or results of them, not {what}")
    if not given:
        raise RewriteError("a pattern has at least one output")
    return tuple(given)


def _built(replacement: Any) -> Build:
    """Returns the builder function that makes the calls of a replacement that is written as a pattern."""

    def build(match: Match, builder: LineBuilder) -> Any:
        made: dict[int, Any] = {}

        def make(item: Any) -> Any:
            match item:
                case Wildcard():
                    return match_of(item.name)
                case Operation():
                    if id(item) not in made:
                        made[id(item)] = call(item)
                    return made[id(item)]
                case Output():
                    return make(item.operation)[item.index]
                case tuple() | list():
                    return tuple([make(inner) for inner in item])
                case _:
                    return item

        def call(item: Operation) -> Any:
            if item.kind != "call" or not isinstance(item.target, frozenset) or len(item.target) != 1:
                raise RewriteError(f"a replacement calls operators by name; for {item}, write a builder function")
            (target,) = item.target
            keywords = {name: make(given) for name, given in item.keywords}
            return builder.call(target, *[make(operand) for operand in item.operands], **keywords)

        match_of = match.__getitem__
        return make(replacement)

    return build


def _kernels_of(line: LineBase) -> Iterable[str]:
    return [getattr(line, name) for name, refers in line.target_fields if refers == "kernel"]


def _text(line: LineBase) -> str:
    return print_line(line).partition("\n")[0].strip()

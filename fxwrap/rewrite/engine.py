"""Rewriting of programs: each match of a pattern is replaced, in the body, in functions and in nested blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch.fx import GraphModule

from fxwrap import matching
from fxwrap import wrapper_ir as ir
from fxwrap.errors import RewriteError
from fxwrap.lines import Alloc, Launch, PoolSlice, Reuse, View, Workspace
from fxwrap.lines.frees import insert_frees
from fxwrap.matching import Match, MatchFailure, RewriteResult
from fxwrap.options import IR_BEFORE_PLANNING, Pass, PassPoint
from fxwrap.passes.stream_events import insert_stream_events
from fxwrap.rewrite.builder import LineBuilder, RewriteContext
from fxwrap.rewrite.forms import graph_in_form_of, program_of
from fxwrap.rewrite.replacement import Replacement, ReplacementRejected, fit_replacement, substitute_values

ReplacementFunction: TypeAlias = Callable[[Match, LineBuilder], Any]
"""Builds the lines that replace a match, and returns the values of its outputs: one, a tuple, or None.

It may raise `Skip`."""


class Skip(Exception):
    """Raised by a builder function to decline a match; the message is the reason in the report."""


def find(program: ir.Program | GraphModule, pattern: object) -> RewriteResult:
    """Returns the matches of a pattern in a program or in a graph of it, and why other candidates do not match."""
    matching.check_pattern(_outputs(pattern))
    return _Rewriter(program_of(program), pattern, None).run()


def check_rewrite(pattern: object, replacement: object) -> None:
    """Raises RewriteError for a pattern that cannot match, or a replacement that no match can have."""
    outputs = _outputs(pattern)
    matching.check_pattern(outputs)
    if callable(replacement):
        return
    if not isinstance(replacement, matching.Operation | matching.Output | matching.Wildcard | tuple):
        raise RewriteError(f"a replacement is a function, or calls in terms of wildcards, not {replacement!r}")
    matching.check_replacement(outputs, replacement)


def rewrite(
    program: ir.Program | GraphModule | RewriteResult, pattern: object, replacement: ReplacementFunction | object
) -> RewriteResult:
    """Returns the program with every match of a pattern replaced, verified.

    Matches are replaced in the program's order; they do not overlap, and new lines are not matched again. Frees are
    inserted again in blocks that change; kernels without a launch are removed. Near-linear in the number of lines.

    Args:
        program: a verified program, or an FX graph in any form: of ATen operators, functional, or in place. It is not
            changed; `RewriteResult.graph_module` is a new graph in its form, or the graph itself if nothing matched.
            The result of an earlier rewrite is rewritten further, and its matches are counted too.
        pattern: an operation, one of its results, or a tuple of these: the outputs that the replacement must define.
        replacement: a function of the match and a `LineBuilder`, or calls in terms of the pattern's wildcards.

    Raises RewriteError for an invalid pattern or replacement, VerifyError for lines that break a rule of the IR, and
    FxImportError for a graph that no program represents.
    """
    if isinstance(program, RewriteResult):
        graph_or_program = program.program if program.graph_module is None else program.graph_module
        result = rewrite(graph_or_program, pattern, replacement)
        failures = (*program.match_failures, *result.match_failures)
        return replace(result, matches=(*program.matches, *result.matches), match_failures=failures)
    check_rewrite(pattern, replacement)
    build = replacement if callable(replacement) else _pattern_builder(replacement)
    result = _Rewriter(program_of(program), pattern, build).run()
    ir.verify(result.program)
    if isinstance(program, ir.Program):
        return result
    graph_module = graph_in_form_of(program, result.program) if result.matches else program
    return replace(result, graph_module=graph_module)


def rewrite_pass(
    pattern: object,
    replacement: ReplacementFunction | object,
    *,
    key: str,
    at: PassPoint = IR_BEFORE_PLANNING,
    name: str = "",
    order: int = 0,
    must_match: bool = False,
) -> Pass:
    """Returns the pass that runs `rewrite`, at any pass point.

    `key` identifies the version of pattern and replacement; see `Pass`. Raises RewriteError for an invalid pattern or
    replacement.
    """
    check_rewrite(pattern, replacement)

    def run(program: ir.Program | GraphModule) -> RewriteResult:
        return rewrite(program, pattern, replacement)

    return Pass(run, key, at, name or getattr(replacement, "__name__", "rewrite"), order, must_match)


class _Rewriter:
    """One rewrite of a program. Without a builder it only finds matches."""

    def __init__(self, program: ir.Program, pattern: object, build: ReplacementFunction | None) -> None:
        self.program = program
        self.pattern = _outputs(pattern)
        self.operations = matching.operations_of(self.pattern)
        self.wildcards = tuple(dict.fromkeys(matching.wildcards_of(self.pattern)))
        self.build = build
        self.context = RewriteContext(program)
        self.functions = dict(program.functions)
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.matches: list[Match] = []
        self.match_failures: list[MatchFailure] = []
        self._blocks: dict[int, tuple[ir.Block, ir.Block]] = {}

    def run(self) -> RewriteResult:
        program = self.program
        owned = ir.released_inputs(program.inputs)
        functions = tuple([(name, self._rewrite_nested(block)) for name, block in program.functions])
        body = self._block(program.body, ir.program_arguments(program), owned, nested=False)
        if self.build is None or (not self.matches):
            return RewriteResult(program, tuple(self.matches), tuple(self.match_failures))
        constants = self._constants(body)
        tensors = {**program.store.tensors, **self.context.constants}
        store = ir.ConstantStore({item.value.name: tensors[item.value.name] for item in constants})
        changed = program.replace(body=body, functions=functions, constants=constants, store=store)
        changed = insert_stream_events(changed)  # for the inserted frees
        launched = {name for line in changed.lines() for name in _kernels_of(line)}
        launched_before = {name for line in program.lines() for name in _kernels_of(line)}
        unused = {kernel.name for kernel in program.kernels} - launched_before
        kernels = tuple([item for item in self.context.kernels.values() if item.name in launched | unused])
        return RewriteResult(changed.replace(kernels=kernels), tuple(self.matches), tuple(self.match_failures))

    def _constants(self, body: ir.Block) -> tuple[ir.ProgramConstant, ...]:
        """Returns the program's constants and the new ones, without those that lost their readers."""
        read = {value.name for line in body.lines for value in ir.used(line)}
        read_before = {value.name for line in self.program.body.lines for value in ir.used(line)}
        constants = (*self.program.constants, *self.context.constant_values)
        return tuple([item for item in constants if item.value.name in read or item.mutable
                      or (item in self.program.constants and item.value.name not in read_before)])  # fmt: skip

    def _rewrite_nested(self, block: ir.Block) -> ir.Block:
        """Returns a nested block or function rewritten; a shared block stays shared."""
        if id(block) not in self._blocks:
            self._blocks[id(block)] = block, self._block(block, block.arguments, (), nested=True)
        return self._blocks[id(block)][1]

    def _block(
        self, block: ir.Block, arguments: Sequence[ir.Value], owned: Sequence[ir.Value], *, nested: bool
    ) -> ir.Block:
        def rewritten(leaf: object) -> object:
            return self._rewrite_nested(leaf) if isinstance(leaf, ir.Block) else leaf

        before = [ir.map_line(line, rewritten, (ir.Role.BLOCK,)) for line in block.lines]
        walk = _BlockRewriter(self, [line for line in before if not matching.is_movable_free(line)], arguments, nested)
        if not walk.run():
            is_same = all(new is old for new, old in zip(before, block.lines))
            return block if is_same else ir.Block(block.arguments, tuple(before))
        constants = () if nested else [item.value for item in self.context.constant_values]
        return ir.Block(block.arguments, insert_frees(walk.lines, [*arguments, *constants], owned))


class _BlockRewriter:
    """The rounds of one block: matches that would move across each other are replaced in different rounds."""

    def __init__(
        self, rewriter: _Rewriter, lines: Sequence[ir.LineBase], arguments: Sequence[ir.Value], nested: bool
    ) -> None:
        self.rewriter = rewriter
        self.lines: Sequence[ir.LineBase] = lines
        self.arguments = arguments
        self.nested = nested
        self.new_lines: dict[int, ir.LineBase] = {}  # by identity: they are not matched again
        self.tried: dict[int, ir.LineBase] = {}  # anchors that a builder declined

    def run(self) -> bool:
        """Rewrites the block; returns whether anything changed."""
        changed, again = False, True
        while again:
            matches, again = self._select_matches()
            replacements = self._build(matches)
            again = again and bool(replacements)
            if replacements:
                changed = True
                self._apply(replacements)
        return changed

    def _select_matches(self) -> tuple[list[tuple[matching.MatchBindings, matching.ReplacementSite]], bool]:
        """Returns the matches of a round, and whether others wait for the next round."""
        rewriter = self.rewriter
        constants = () if self.nested else [item.value for item in rewriter.context.constant_values]
        flow = self.flow = matching.DataFlow(self.lines, [*self.arguments, *constants], rewriter.functions)
        kernels = {kernel.name: kernel for kernel in rewriter.context.kernels.values()}
        matcher = matching.Matcher(rewriter.pattern, flow, kernels)
        matches: list[tuple[matching.MatchBindings, matching.ReplacementSite]] = []
        match_failures: list[MatchFailure] = []
        matched: set[int] = set()
        end, moved_end, waiting = -1, -1, False
        for anchor in matcher.anchors():
            if id(self.lines[anchor]) in self.new_lines or id(self.lines[anchor]) in self.tried:
                continue
            match = self._match_at(matcher, anchor)
            if isinstance(match, str):
                match_failures.append(MatchFailure(ir.line_text(self.lines[anchor]), match))
                continue
            positions = match[0].positions.values()
            if not matched.isdisjoint(positions):
                match_failures.append(MatchFailure(ir.line_text(self.lines[anchor]), "it has a line of another match"))
                continue
            start, last = min(positions), max(positions)
            moves = match[1].position < last
            if start <= moved_end or (moves and start <= end):
                waiting = True
                continue
            matched.update(match[1].removed)  # matches may share views and other lines that stay
            end, moved_end = max(end, last), max(moved_end, last if moves else -1)
            matches.append(match)
        if not waiting:
            rewriter.match_failures += match_failures
        return matches, waiting

    def _match_at(
        self, matcher: matching.Matcher, anchor: int
    ) -> tuple[matching.MatchBindings, matching.ReplacementSite] | str:
        match = matcher.match_at(anchor)
        if isinstance(match, str):
            return match
        if any(id(self.lines[position]) in self.new_lines for position in match.positions.values()):
            return "it has a line of a replacement"
        site = matching.find_replacement_site(match, self.rewriter.operations, self.rewriter.wildcards, self.flow)
        return site if isinstance(site, str) else (match, site)

    def _build(self, matches: Sequence[tuple[matching.MatchBindings, matching.ReplacementSite]]) -> list[Replacement]:
        """Returns the replacements that the builder function makes for matches."""
        rewriter, replacements = self.rewriter, []
        for bindings, site in sorted(matches, key=lambda item: item[1].position):
            match = self._match(bindings)
            if rewriter.build is None:
                rewriter.matches.append(match)
                continue
            builder = LineBuilder(rewriter.context, match.origin, nested=self.nested)
            anchor = self.lines[bindings.anchor]
            try:
                outputs = self._as_stored(bindings, rewriter.build(match, builder), builder)
                replacements.append(fit_replacement(match, bindings, site, builder.lines, outputs, self.flow))
            except (Skip, ReplacementRejected) as reason:
                rewriter.match_failures.append(MatchFailure(ir.line_text(anchor), str(reason)))
                self.tried[id(anchor)] = anchor
            except RewriteError as error:
                raise RewriteError(f"replacing {ir.line_text(anchor)}: {error.reason}", error.line) from error
            else:
                rewriter.matches.append(match)
        return replacements

    def _as_stored(self, bindings: matching.MatchBindings, outputs: Any, builder: LineBuilder) -> Any:
        """Returns new outputs with the sizes in which a launch stores them, where those are another view."""
        items = outputs if isinstance(outputs, tuple | list) else (outputs,)
        if len(items) != len(bindings.outputs):
            return outputs
        stored = [
            _as_stored(self.lines[position], old, new, builder) for (old, position), new in zip(bindings.outputs, items)
        ]
        return tuple(stored) if isinstance(outputs, tuple | list) else stored[0]

    def _match(self, bindings: matching.MatchBindings) -> Match:
        positions = bindings.positions
        lines = tuple([self.lines[position] for position in sorted(positions.values())])
        operations = [item for item in self.rewriter.operations if item.label and id(item) in positions]
        labelled_lines = {item.label: self.lines[positions[id(item)]] for item in operations}
        return Match(lines, bindings.captured, labelled_lines, tuple([value for value, _ in bindings.outputs]))

    def _apply(self, replacements: Sequence[Replacement]) -> None:
        """Inserts new lines and removes old ones, in one walk."""
        at = {item.site.position: item for item in replacements}
        removed = {position for item in replacements for position in (*item.site.removed, *item.dropped_lines)}
        orphans = {value.name for position in removed for value in ir.used(self.lines[position])}
        orphans |= {value.name for position in removed for value in ir.defined(self.lines[position])}
        values: dict[str, ir.Value] = {}
        lines: list[ir.LineBase] = []
        for position, line in enumerate(self.lines):
            if position in at:
                for new in at[position].lines:
                    lines.append(substitute_values(new, values))
                    self.new_lines[id(lines[-1])] = lines[-1]
                for old, value in at[position].substitutions.items():
                    values[old] = values.get(value.name, value)
            if position not in removed:
                lines.append(substitute_values(line, values) if values else line)
                if id(line) in self.new_lines:
                    self.new_lines[id(lines[-1])] = lines[-1]
                if id(line) in self.tried:
                    self.tried[id(lines[-1])] = lines[-1]
        self.lines = _remove_dead_memory(lines, orphans)


def _as_stored(line: ir.LineBase, old: ir.Value | None, new: object, builder: LineBuilder) -> object:
    """Returns the new value of a launch's output as a view of the output's type.

    A pass that folded views changed the sizes and strides of the output, and not the content of its memory.
    """
    calls = ir.launched_calls(line.origin) if isinstance(line, Launch) else None
    if calls is None or old is None or not isinstance(new, ir.Value) or old not in line.outs:  # type: ignore[attr-defined]
        return new
    returned = calls.result_types[line.outs.index(old)]  # type: ignore[attr-defined]
    is_same = ir.types_agree(old.type, returned)
    if is_same or not ir.types_agree(new.type, returned) or old.tensor_type.storage_offset != 0:
        return new
    return builder.view(new, old.tensor_type.sizes, old.tensor_type.strides)


_MEMORY = (Alloc, Reuse, View, PoolSlice, Workspace)


def _remove_dead_memory(lines: Sequence[ir.LineBase], orphans: set[str]) -> list[ir.LineBase]:
    """Returns the lines without allocations and views that only removed lines used."""
    read: set[str] = set()
    live = []
    for line in reversed(lines):
        names = [value.name for value in ir.used(line)]
        if isinstance(line, _MEMORY) and line.result.name in orphans and line.result.name not in read:
            orphans.update(names)
        else:
            read.update(names)
            live.append(line)
    return live[::-1]


def _outputs(pattern: object) -> tuple[matching.Pattern, ...]:
    outputs = pattern if isinstance(pattern, tuple | list) else (pattern,)
    for item in outputs:
        if not isinstance(item, matching.Operation | matching.Output):
            what = "a choice" if isinstance(item, matching.OneOf) else repr(item)
            raise RewriteError(f"a pattern's outputs are operations or results of them, not {what}")
    if not outputs:
        raise RewriteError("a pattern has at least one output")
    return tuple(outputs)


def _pattern_builder(replacement: object) -> ReplacementFunction:
    """Returns the builder function for a replacement that is written as a pattern."""

    def build(matched: Match, builder: LineBuilder) -> Any:
        calls: dict[int, object] = {}

        def instantiate(item: object) -> Any:
            match item:
                case matching.Wildcard():
                    return matched[item.name]
                case matching.Operation():
                    if id(item) not in calls:
                        calls[id(item)] = call(item)
                    return calls[id(item)]
                case matching.Output():
                    return instantiate(item.operation)[item.index]
                case tuple() | list():
                    return tuple([instantiate(inner) for inner in item])
                case _:
                    return item

        def call(item: matching.Operation) -> Any:
            (target,) = item.target  # type: ignore[misc]  # by `check_replacement`
            keywords = {name: instantiate(operand) for name, operand in item.keywords}
            return builder.call(target, *instantiate(item.operands), **keywords)

        return instantiate(replacement)

    return build


def _kernels_of(line: ir.LineBase) -> Iterable[str]:
    return [getattr(line, name) for name, target_kind in line.target_fields if target_kind == "kernel"]

"""Checks of one replacement, and its connection to the lines around it.

A new root takes the name of the match's output, so that later lines do not change. An output that is replaced by other
memory is substituted in later lines, if that is unobservable. Results that the match wrote into shared memory are
copied there, unless the builder wrote them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxwrap import wrapper_ir as ir
from fxwrap.errors import RewriteError
from fxwrap.inference import lists_to_tuples
from fxwrap.lines import Alloc, ExternCall, Mutate, PoolSlice, Reuse, Workspace
from fxwrap.matching import DataFlow, Match, MatchBindings, ReplacementSite


class ReplacementRejected(Exception):
    """A replacement that would change the meaning of the program."""


@dataclass(slots=True)
class Replacement:
    """The new lines of a match, and the substitutions of values in later lines.

    `dropped_lines` are the positions of allocations that new lines replace.
    """

    match: Match
    site: ReplacementSite
    lines: list[ir.LineBase]
    substitutions: dict[str, ir.Value] = field(default_factory=dict)
    dropped_lines: set[int] = field(default_factory=set)


def fit_replacement(
    match: Match,
    bindings: MatchBindings,
    site: ReplacementSite,
    lines: list[ir.LineBase],
    outputs: object,
    flow: DataFlow,
) -> Replacement:
    """Returns the replacement of a match by lines with these outputs.

    Raises RewriteError for an invalid replacement, ReplacementRejected for one that is illegal at this site.
    """
    return _ReplacementFitter(match, bindings, site, lines, flow).run(outputs)


class _ReplacementFitter:
    def __init__(
        self, match: Match, bindings: MatchBindings, site: ReplacementSite, lines: list[ir.LineBase], flow: DataFlow
    ) -> None:
        self.outputs = bindings.outputs
        self.flow = flow
        self.removed = site.removed
        self.position = site.position
        self.new_values = {value.name: line for line in lines for value in ir.defined(line)}
        self.new_roots: dict[str, str] = {}
        for line in lines:
            for value in ir.defined(line):
                base = line.alias_of(value)
                self.new_roots[value.name] = value.name if base is None else self._root(base.name)
        self.renamed: dict[str, ir.Value] = {}
        self.result = Replacement(match, site, lines)
        self.copies: list[ir.LineBase] = []
        self.output_roots: list[str] = []  # of the new values
        self._check_lines(lines)

    def run(self, new_outputs: object) -> Replacement:
        """Replaces each output of the match by a new value."""
        items = new_outputs if isinstance(new_outputs, tuple | list) else (new_outputs,)
        values = list(ir.leaves(lists_to_tuples(items)))
        count = len(self.outputs)
        if len(values) != count:
            names = ", ".join([f"%{value.name}" if value is not None else "none" for value, _ in self.outputs])
            raise RewriteError(f"the replacement returns {len(values)} values, but the match has {count}: {names}")
        self.output_roots = [self._root(value.name) for value in values if isinstance(value, ir.Value)]
        for (old, position), new in zip(self.outputs, values):
            if old is not None:
                self._output(old, position, new)
        lines = [ir.map_line(line, self._rename) for line in self.result.lines] if self.renamed else self.result.lines
        needed = {old.name for old, _ in self.outputs if old is not None}
        needed |= {new.name for new in self.result.substitutions.values()}
        needed |= {value.name for line in self.copies for value in ir.used(line)}
        self.result.lines = [*_drop_unused_results(lines, needed), *self.copies]
        return self.result

    def _rename(self, leaf: object) -> object:
        return self.renamed.get(leaf.name, leaf) if isinstance(leaf, ir.Value) else leaf

    # --- checks of lines ------------------------------------------------------------------------------------------

    def _check_lines(self, lines: Sequence[ir.LineBase]) -> None:
        """Raises RewriteError for a line that uses removed values, or writes memory that the match does not write."""
        allowed = {self.flow.root_of[value.name] for position in self.removed
                   for value in ir.writes(self.flow.lines[position])}  # fmt: skip
        removed = {value.name for position in self.removed for value in ir.defined(self.flow.lines[position])}
        for line in lines:
            for value in ir.used(line):
                if value.name in removed:
                    reason = f"the replacement uses %{value.name}, which the match removes"
                    raise RewriteError(reason, ir.line_text(line))
                if value.name not in self.new_values and self.flow.def_position.get(value.name, -1) >= self.position:
                    reason = f"the replacement uses %{value.name}, which is defined later"
                    raise RewriteError(reason, ir.line_text(line))
            for value in ir.writes(line):
                if value.name not in self.new_values and self._root(value.name) not in allowed:
                    reason = f"the replacement writes %{value.name}, which the matched lines do not write"
                    raise RewriteError(reason, ir.line_text(line))

    def _root(self, name: str) -> str:
        return self.new_roots.get(name) or self.flow.root_of.get(name, name)

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _output(self, old: ir.Value, position: int, new: object) -> None:
        if not isinstance(new, ir.Value):
            raise RewriteError(f"the replacement returns {new!r} for %{old.name}, which is no value")
        line = self.flow.lines[position]
        if new.name not in self.new_values and self.flow.def_position.get(new.name, -1) in self.removed:
            raise RewriteError(f"the replacement returns %{new.name}, which the match removes", ir.line_text(line))
        defines = old in ir.defined(line)
        is_gone = self.flow.def_position[self.flow.root_of[old.name]] in self.removed
        if not ir.types_agree(old.type, new.type, compare_strides=defines or is_gone):
            reason = f"%{old.name} is {ir.print_type(old.type)}, but its replacement is {ir.print_type(new.type)}"
            raise RewriteError(reason, ir.line_text(line))
        fresh = self.new_roots.get(new.name) == new.name and new.name not in self.renamed  # no output is renamed to it
        if not defines and not is_gone:
            self._replace_buffer_content(old, position, new, fresh)
        elif not defines or line.alias_of(old) is None or (is_gone and self._is_only_output_of_root(old)):
            if fresh:
                self.renamed[new.name] = old
            else:
                self._substitute(old, new)
        else:
            self._replace_view(old, new, fresh)

    def _is_only_output_of_root(self, old: ir.Value) -> bool:
        """Whether later lines reach the memory of an output's root, which the match removes, through it only."""
        roots = [self.flow.root_of[value.name] for value, _ in self.outputs if value is not None]
        return roots.count(self.flow.root_of[old.name]) == 1

    def _substitute(self, old: ir.Value, new: ir.Value) -> None:
        """Substitutes other memory for a root of the match, if that is unobservable."""
        flow, root = self.flow, self.flow.root_of[old.name]
        end = len(flow.lines)
        renamed = self.renamed.get(self._root(new.name))
        other = renamed.name if renamed is not None else self._root(new.name)
        is_own = self._root(new.name) in self.new_values and self.output_roots.count(self._root(new.name)) == 1
        if not is_own and any(flow.root_of[value.name] == root for value in ir.reads(flow.lines[-1])):
            raise ReplacementRejected(f"%{old.name} is returned, and %{new.name} is no new root")
        if flow.write_between(root, self.position, end, self.removed) is not None:
            raise ReplacementRejected(f"%{old.name} is written or consumed later, and %{new.name} is no new root")
        last = max([self.position, *flow.accesses(root)]) + 1
        if flow.write_between(other, self.position, last, self.removed) is not None:
            raise ReplacementRejected(f"%{new.name} would replace %{old.name}, but is written before its last use")
        self.result.substitutions[old.name] = new

    def _replace_view(self, old: ir.Value, new: ir.Value, fresh: bool) -> None:
        flow, root = self.flow, self.flow.root_of[old.name]
        same_memory = self._root(new.name) == root
        if old.type != new.type:
            raise ReplacementRejected(f"%{old.name} is a view of another layout or offset than %{new.name}")
        returned = any(value.name == old.name for value in ir.reads(flow.lines[-1]))
        if not same_memory and (returned or flow.write_between(root, self.position, len(flow.lines), self.removed)):
            raise ReplacementRejected(f"%{old.name} shows memory of %{root}, and %{new.name} does not")
        if new.name in self.new_values and new.name not in self.renamed and (fresh or same_memory):
            self.renamed[new.name] = old
        else:
            self.result.substitutions[old.name] = new

    def _replace_buffer_content(self, old: ir.Value, position: int, new: ir.Value, fresh: bool) -> None:
        """Replaces memory that the match wrote by the new value, or copies the new value there."""
        if new.name == old.name:
            if not any(value.name == old.name for line in self.result.lines for value in ir.writes(line)):
                raise RewriteError(f"the replacement returns %{old.name}, but does not write it")
            return
        def_position = self.flow.def_position[old.name]
        is_root = self.flow.root_of[old.name] == old.name and def_position >= 0
        if fresh and is_root and old.type == new.type and not isinstance(self.flow.lines[def_position], PoolSlice):
            if self._is_only_written_by_match(old, position, def_position):
                self.renamed[new.name] = old
                self.result.dropped_lines.add(def_position)
                return
            if not self._has_live_views(old):
                self.result.substitutions[old.name] = new
                return
        source = self.renamed.get(new.name, new)
        copy = Mutate((), "aten.copy_.default", (old, source), (old,), origin=self.result.match.origin)
        self.copies.append(copy)

    def _is_only_written_by_match(self, old: ir.Value, position: int, def_position: int) -> bool:
        before = [access for access in self.flow.accesses(old.name) if access <= position]
        is_memory = isinstance(self.flow.lines[def_position], Alloc | Reuse | Workspace)
        return is_memory and self.removed.issuperset(before)

    def _has_live_views(self, old: ir.Value) -> bool:
        """Whether a view from before the match is used after it."""
        flow = self.flow
        later = [access for access in flow.accesses(old.name) if access > self.position]
        names = {value.name for access in later for value in ir.used(flow.lines[access])} - {old.name}
        return any(flow.root_of[name] == old.name and flow.def_position[name] < self.position for name in names)


def _drop_unused_results(lines: Sequence[ir.LineBase], outputs: set[str]) -> list[ir.LineBase]:
    """Returns the lines without the unused results of calls that have several."""
    read = outputs | {value.name for line in lines for value in ir.used(line)}

    def trimmed(line: ir.LineBase) -> ir.LineBase:
        if not isinstance(line, ExternCall | Mutate) or len(list(ir.leaves(line.results))) < 2:
            return line
        results = ir.map_leaves(line.results, lambda leaf: leaf if leaf is not None and leaf.name in read else None)
        pairs = zip(ir.leaves(results), line.aliases)
        aliases = tuple([alias if leaf is not None else None for leaf, alias in pairs])
        changed: ir.LineBase = line.replace(results=results, aliases=aliases if any(aliases) else ())
        return changed

    return [trimmed(line) for line in lines]


def substitute_values(line: ir.LineBase, values: Mapping[str, ir.Value]) -> ir.LineBase:
    """Returns a line with other operands for some, by name."""
    changed: ir.LineBase = ir.map_line(
        line,
        lambda leaf: values.get(leaf.name, leaf) if type(leaf) is ir.Value else leaf,
        (ir.Role.READ, ir.Role.WRITE, ir.Role.CONSUME, ir.Role.ATTR),
    )
    return changed

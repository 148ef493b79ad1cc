"""Every error fxwrap raises on purpose.

All derive from `FxwrapError`. A message says what was wrong, where, and what to do about it; the fields carry the
same facts for programs that want to react.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


class FxwrapError(Exception):
    """Base of all errors that fxwrap raises on purpose."""


class OptionError(FxwrapError):
    """An option, mode or emitter that does not exist, or a value it cannot take."""


@dataclass
class GraphError(FxwrapError):
    """An FX graph that fxwrap cannot compile: the node, its place in the model's source, and the remedy.

    Fields: `node` is the FX node's name ("" when the graph as a whole is at fault), `reason` what is wrong,
    `remedy` what to do, `location` "file:line" of the model's source or "".
    """

    node: str
    reason: str
    remedy: str
    location: str = ""

    def __str__(self) -> str:
        where = f"node '{self.node}'" if self.node else "graph"
        place = f" ({self.location})" if self.location else ""
        return f"{where}{place}: {self.reason}. {self.remedy}"


@dataclass
class VerifyError(FxwrapError):
    """A program that breaks a rule of the Wrapper IR.

    Fields: `rule` the rule's short name, `reason` what is wrong, `context` the bad line between its neighbours,
    marked with '>'.
    """

    rule: str
    reason: str
    context: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.reason}" + (f"\n{self.context}" if self.context else "")


@dataclass
class ParseError(FxwrapError):
    """IR text that cannot be read: what was expected, at which line and column (both from 1)."""

    reason: str
    line: int
    column: int
    text: str = ""

    def __str__(self) -> str:
        pointer = f"\n  {self.text}\n  {' ' * (self.column - 1)}^" if self.text else ""
        return f"line {self.line}, column {self.column}: {self.reason}{pointer}"


@dataclass
class RewriteError(FxwrapError):
    """A pattern or a replacement that cannot be what its author meant: what is wrong, and at which line.

    Fields: `reason` what is wrong; `line` the text of the line or node at fault, or "".
    """

    reason: str
    line: str = ""

    def __str__(self) -> str:
        return self.reason + (f"\n> {self.line}" if self.line else "")


@dataclass
class PassError(FxwrapError):
    """A pass of the user's that failed, or left something that is wrong.

    Fields: `name` the pass; `point` where in the pipeline it ran; `reason` what is wrong; `where` the line between its
    neighbours, or the node, or ""; `before` and `after` the texts of what the pass got and gave ("" where it gave
    nothing).
    """

    name: str
    point: str
    reason: str
    where: str = ""
    before: str = ""
    after: str = ""

    @property
    def diff(self) -> str:
        """The difference that the pass made, as a unified diff."""
        before, after = self.before.splitlines(), self.after.splitlines()
        return "\n".join(difflib.unified_diff(before, after, "before", "after", n=2, lineterm=""))

    def __str__(self) -> str:
        parts = [f"pass '{self.name}' ({self.point}): {self.reason}", self.where]
        changed = self.diff.splitlines() if self.after else []
        shown = changed[:_DIFF_LINES]
        if len(changed) > len(shown):
            shown.append(f"... and {len(changed) - len(shown)} lines more; the error's `before` and `after` have all")
        return "\n".join([part for part in (*parts, *shown) if part])


_DIFF_LINES = 60
"""How many lines of a difference a message shows."""


@dataclass
class Unsupported(FxwrapError):
    """A line (or kernel, or type) that a converter cannot express: which one, by which converter, and why."""

    line: str
    converter: str
    reason: str

    def __str__(self) -> str:
        return f"the {self.converter} converter cannot express '{self.line}': {self.reason}"


class ValueKindError(FxwrapError, TypeError):
    """A value of the Wrapper IR that is not of the kind its use needs, e.g. a number where a tensor must be."""


class InputError(FxwrapError):
    """Run-time inputs that a program was not compiled for: wrong number, dtype, device, shape, stride or class."""


class NativeBuildError(FxwrapError):
    """The C++ compiler is missing or failed. The message holds the command and the compiler's own output."""


class KernelBuildError(FxwrapError):
    """A kernel that the compiler of its language refuses, or that asks for more than its device has."""


class ExpressionError(FxwrapError):
    """A symbolic size or condition that the IR has no form for: an unknown symbol, function or kind of operand."""


class CompareError(FxwrapError):
    """A comparison that cannot be made: of what is no function or graph, or of a function that fails in eager mode."""


class GraphModuleError(FxwrapError):
    """Something an emitted GraphModule does not do, because torch's way of doing it would give wrong numbers."""


@dataclass
class ReadBackError(FxwrapError):
    """A node of an FX graph that no line of a program says: which one, what it calls, why, and what to do.

    Fields: `node` is its name ("" when the graph as a whole is at fault), `target` what it calls or names.
    """

    node: str
    target: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = f"node '{self.node}' ({self.target})" if self.node else "graph"
        return f"{where}: {self.reason}. {self.remedy}"


@dataclass
class ArtifactError(FxwrapError):
    """A saved program that cannot be written or used: the file, the entry in it, what is wrong, and the remedy.

    Fields: `path` is the file, `entry` the name of the entry at fault ("" when the file as a whole is).
    """

    path: str
    entry: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        entry = f", entry '{self.entry}'" if self.entry else ""
        return f"{self.path}{entry}: {self.reason}. {self.remedy}"


@dataclass
class PlanningError(FxwrapError):
    """Memory that cannot be planned, or a plan that does not hold: sizes out of range, memory that overlaps.

    Fields: `reason` what is wrong; where a plan exceeds a capacity, `needed` the bytes of the best one found and
    `lower_bound` the bytes that are live at once, else both 0.
    """

    reason: str
    needed: int = 0
    lower_bound: int = 0

    def __str__(self) -> str:
        return self.reason


class MemoryCheckError(FxwrapError):
    """Memory that is not where the program says, or in use twice, found while a program ran with `check_memory`."""


@dataclass
class DeviceError(FxwrapError):
    """A device type that cannot be registered, or whose registration lacks what a program needs.

    Fields: `device` is its type, `reason` what is wrong, `remedy` what to do.
    """

    device: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"device '{self.device}': {self.reason}. {self.remedy}"


class CommandError(FxwrapError):
    """A command line that names something that is not there, or asks for what cannot be done."""


class FusionWarning(UserWarning):
    """A kernel could not be generated or compiled, and its operators are called instead; results are the same."""


class TuningWarning(UserWarning):
    """Kernels could not be timed and run as they were compiled; results are the same."""


class ReplayWarning(UserWarning):
    """Part of a program cannot be recorded, or not as often as its calls want; results are the same."""


class PassWarning(UserWarning):
    """A pass without a key: caches outside cannot tell it from another, so nothing that it made may be cached."""

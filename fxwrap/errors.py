"""The errors and warnings of fxwrap.

All errors derive from `FxwrapError`. A message says what is wrong, where, and what to do; the fields have the same
information for programs.
"""

from __future__ import annotations

import difflib
import pickle
from dataclasses import dataclass


class FxwrapError(Exception):
    """The base class of fxwrap's errors."""


class OptionError(FxwrapError):
    """An unknown option, mode or emitter, or an invalid value."""


@dataclass
class ArgumentError(FxwrapError, TypeError):
    """An argument of a public function of a type that it does not take.

    Fields: `function` and `argument` are their names, `actual` is the name of the argument's type, `expected` has those
    that the function takes.
    """

    function: str
    argument: str
    actual: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.function} takes {self.expected} as '{self.argument}', not {self.actual}. {self.remedy}"

    @classmethod
    def check(cls, function: str, argument: str, value: object, types: tuple[type, ...], remedy: str) -> None:
        """Raises ArgumentError unless a value is of one of the types; an object with such a `program` has it."""
        if isinstance(value, types):
            return
        expected = " or ".join(["None" if item is type(None) else item.__name__ for item in types])
        held = getattr(value, "program", None)
        if held is not None and isinstance(held, types):
            remedy = "Pass its attribute 'program'"
        raise cls(function, argument, type(value).__name__, expected, remedy)


@dataclass
class GraphError(FxwrapError):
    """An FX graph that fxwrap cannot compile.

    Fields: `node` is the FX node's name, or "" for an error of the whole graph; `location` is "file:line" in the
    model's source, or "".
    """

    node: str
    reason: str
    remedy: str
    location: str = ""

    def __str__(self) -> str:
        where = f"node '{self.node}'" if self.node else "graph"
        location = f" ({self.location})" if self.location else ""
        return f"{where}{location}: {self.reason}. {self.remedy}"


class CallError(GraphError):
    """A call of an operator on operands that eager mode rejects.

    Its class is also the class of eager's error: code that catches an IndexError of `x.amax(1)` catches that of the
    compile. `of` returns the class.
    """

    @staticmethod
    def of(error: BaseException) -> type[CallError]:
        """Returns the class of errors that are also of an error's class."""
        classes = (CallIndexError, CallValueError, CallTypeError, CallNotImplementedError, CallRuntimeError)
        return next((item for item in classes if isinstance(error, item.__bases__[1])), CallError)


class CallRuntimeError(CallError, RuntimeError):
    """A `CallError` where eager mode raises RuntimeError."""


class CallIndexError(CallError, IndexError):
    """A `CallError` where eager mode raises IndexError."""


class CallValueError(CallError, ValueError):
    """A `CallError` where eager mode raises ValueError."""


class CallTypeError(CallError, TypeError):
    """A `CallError` where eager mode raises TypeError."""


class CallNotImplementedError(CallError, NotImplementedError):
    """A `CallError` where eager mode raises NotImplementedError, for a dtype or device that an operator lacks."""


@dataclass
class StepError(FxwrapError):
    """A training step that cannot become one program, or whose state does not match the program any more.

    Fields: `location` is "file:line" in the user's code, or "".
    """

    reason: str
    remedy: str
    location: str = ""

    def __str__(self) -> str:
        location = f" ({self.location})" if self.location else ""
        return f"training step{location}: {self.reason}. {self.remedy}"


@dataclass
class VerifyError(FxwrapError):
    """A program that violates a rule of the Wrapper IR.

    Fields: `rule` is the rule's short name; `context` shows the invalid line between its neighbours, marked with '>'.
    """

    rule: str
    reason: str
    context: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.reason}" + (f"\n{self.context}" if self.context else "")


@dataclass
class ParseError(FxwrapError):
    """IR text that cannot be parsed; `line` and `column` count from 1."""

    reason: str
    line: int
    column: int
    text: str = ""

    def __str__(self) -> str:
        pointer = f"\n  {self.text}\n  {' ' * (self.column - 1)}^" if self.text else ""
        return f"line {self.line}, column {self.column}: {self.reason}{pointer}"


@dataclass
class RewriteError(FxwrapError):
    """An invalid pattern or replacement; `line` is the text of the invalid line or node, or ""."""

    reason: str
    line: str = ""

    def __str__(self) -> str:
        return self.reason + (f"\n> {self.line}" if self.line else "")


@dataclass
class PassError(FxwrapError):
    """A user's pass that raised, or whose result is invalid.

    Fields: `name` is the pass's name; `point` its pass point; `where` the invalid line between its neighbours, the
    node, or ""; `before` and `after` the texts of the program or graph before and after the pass, "" without a result.
    """

    name: str
    point: str
    reason: str
    where: str = ""
    before: str = ""
    after: str = ""

    @property
    def diff(self) -> str:
        """The pass's changes as a unified diff."""
        before, after = self.before.splitlines(), self.after.splitlines()
        return "\n".join(difflib.unified_diff(before, after, "before", "after", n=2, lineterm=""))

    def __str__(self) -> str:
        parts = [f"pass '{self.name}' ({self.point}): {self.reason}", self.where]
        changed = self.diff.splitlines() if self.after else []
        shown = changed[:_DIFF_LINES]
        if len(changed) > len(shown):
            shown.append(f"... and {len(changed) - len(shown)} more lines; `before` and `after` have the whole texts")
        return "\n".join([part for part in (*parts, *shown) if part])


_DIFF_LINES = 60
"""The most lines of a diff in a message."""


@dataclass
class UnsupportedError(FxwrapError):
    """A line, kernel or type that a converter does not support."""

    line: str
    converter: str
    reason: str

    def __str__(self) -> str:
        return f"the {self.converter} converter cannot express '{self.line}': {self.reason}"


class ValueKindError(FxwrapError, TypeError):
    """A value of the Wrapper IR of the wrong kind, for example a number instead of a tensor."""


class InputError(FxwrapError):
    """Run-time inputs that violate the input guards: wrong number, dtype, device, sizes, strides or class."""


class ResultError(FxwrapError):
    """A result of an operator from outside torch with another dtype, device, sizes or strides than its fake result."""


class JitTraceError(FxwrapError):
    """A compiled program called under torch.jit.trace, which records constants in place of the results of kernels."""

    def __init__(self) -> None:
        super().__init__(
            "torch.jit.trace cannot record a compiled program, whose kernels are no operators of TorchScript. Trace "
            "the model itself, write the program to a file with fxwrap.save, or export it with fxwrap.fx.export"
        )


class PickleError(FxwrapError, pickle.PicklingError):
    """A program that is pickled or deep-copied: it has machine code and state of this process."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"a {kind} cannot be pickled or deep-copied: it has machine code and state of this process. Write it to a "
            "file with fxwrap.save, read that with fxwrap.load for a copy with its own constants, or compile again"
        )


class NativeBuildError(FxwrapError):
    """The C++ compiler is missing or failed. The message has the command and the compiler's output."""


@dataclass
class CacheError(FxwrapError):
    """A cache folder that another user could have written, or that cannot be written; `path` is the folder."""

    path: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"the cache folder {self.path}: {self.reason}. {self.remedy}"


class KernelBuildError(FxwrapError):
    """A kernel that its compiler rejects, or that needs more resources than its device has."""


@dataclass
class KernelTextError(FxwrapError):
    """A kernel that a graph launches by its content hash, and whose text is missing, damaged or changed.

    Fields: `kernel` is its name, or its content hash if the name is unknown, or "" for an error of all texts.
    """

    kernel: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = f"kernel '{self.kernel}'" if self.kernel else "kernels"
        return f"{where}: {self.reason}. {self.remedy}"


class ExpressionError(FxwrapError):
    """A symbolic size or condition that the IR cannot express: an unknown symbol, function or kind of operand."""


@dataclass
class ExportError(FxwrapError):
    """A compiled program that no `ExportedProgram` can represent."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}"


class CompareError(FxwrapError):
    """A comparison of an object that is not a function or graph, or of a function that fails in eager mode."""


class GraphModuleError(FxwrapError):
    """A feature of GraphModule that emitted graphs do not support, since torch's implementation would be wrong."""


@dataclass
class FxImportError(FxwrapError):
    """A node of an FX graph that cannot be imported into a program.

    Fields: `node` is its name, or "" for an error of the whole graph; `target` is its target.
    """

    node: str
    target: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = f"node '{self.node}' ({self.target})" if self.node else "graph"
        return f"{where}: {self.reason}. {self.remedy}"


@dataclass
class RegionError(FxwrapError):
    """A region of an emitted graph that does not match its metadata, or whose graph is no region.

    Fields: `region` is the name of its submodule; `field` is the part that is wrong: "inputs", "operators" or
    "results".
    """

    region: str
    field: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"region '{self.region}', {self.field}: {self.reason}. {self.remedy}"


@dataclass
class ArtifactError(FxwrapError):
    """A saved program that cannot be written or loaded.

    Fields: `path` is the file; `entry` is the name of the invalid entry, or "" for an error of the whole file.
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
    """Memory that cannot be planned, or an invalid plan: sizes out of range, live buffers that overlap.

    Fields: if a plan exceeds a capacity, `needed` is the bytes of the best plan and `lower_bound` the largest live
    bytes; else both are 0.
    """

    reason: str
    needed: int = 0
    lower_bound: int = 0

    def __str__(self) -> str:
        return self.reason


class MemoryCheckError(FxwrapError):
    """A violated memory plan or a use after free, detected at run time with `check_memory`."""


@dataclass
class DivergenceError(FxwrapError):
    """A compiled graph whose values differ from eager's by more than rounding, with the option debug="bisect".

    Fields: `report` is the text of the divergence; `part` the part of the compiler that is at fault; `location`
    "file:line" in the model's source, or ""; `divergence` the `fxwrap.debugging.Divergence`.
    """

    report: str
    part: str
    location: str = ""
    divergence: object = None

    def __str__(self) -> str:
        return self.report


class ReproError(FxwrapError):
    """A failure that a file cannot reproduce: no graph is known, or it has objects that code cannot build."""


@dataclass
class NonFiniteError(FxwrapError):
    """A line that computes NaN or infinity, with the option check_values="nan".

    Fields: `graph` is the graph's name; `line` the line as text; `location` "file:line" in the model's source, or "";
    `operators` the line's operators; `nan` and `inf` count the elements; `values` has the statistics as text.
    """

    graph: str
    line: str
    location: str
    operators: tuple[str, ...]
    nan: int
    inf: int
    values: str

    def __str__(self) -> str:
        where = f" ({self.location})" if self.location else ""
        counts = " and ".join([f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count])
        return (
            f"graph '{self.graph}'{where}: {', '.join(self.operators) or 'a line'} computes {counts}: {self.values}\n"
            f"> {self.line}\nNo earlier line does; check_values='stats' shows the range of each line's values"
        )


@dataclass
class DeviceError(FxwrapError):
    """A device type that cannot be registered, or without a capability that a program needs."""

    device: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"device '{self.device}': {self.reason}. {self.remedy}"


class RankError(FxwrapError):
    """Ranks of a process group whose programs call different collectives, or none until a timeout."""


@dataclass
class InspectionError(FxwrapError):
    """A function without compiled graphs to inspect."""

    function: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"cannot inspect '{self.function}': {self.reason}. {self.remedy}"


class ProfileError(FxwrapError):
    """A function that cannot be profiled."""


class CommandError(FxwrapError):
    """An invalid command line."""


class FusionWarning(UserWarning):
    """A kernel could not be generated or compiled; its operators are called instead, with the same results."""


class TuningWarning(UserWarning):
    """Kernels could not be autotuned; they run as compiled, with the same results."""


class GraphCaptureWarning(UserWarning):
    """Part of a program is not captured as a CUDA graph, or not for all sizes; results are the same."""


class PassWarning(UserWarning):
    """A pass without a key, so that results of the compile are not cached."""


class CommunicationFusionWarning(UserWarning):
    """Collectives are not fused with the operators beside them, for lack of hardware; results are the same."""


class DumpWarning(UserWarning):
    """The folder for dumps cannot be written; compiled graphs work."""


class CacheWarning(UserWarning):
    """The cache folder cannot be written: compiled code is in a temporary folder, with the same results."""

"""The pass that fuses collectives with the operators beside them, and its report."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch.fx import GraphModule

from fxwrap import rewrite as rw
from fxwrap import wrapper_ir as ir
from fxwrap.errors import CommunicationFusionWarning
from fxwrap.fused_communication.rules import Rule, rules_for
from fxwrap.fused_communication.support import symmetric_memory_decline
from fxwrap.fused_communication.views import hoist_views
from fxwrap.lines import ExternCall, StartCollective, View, WaitCollective
from fxwrap.options import FX_BEFORE_LOWERING, PassPoint
from fxwrap.rewrite.forms import graph_in_form_of, program_of
from fxwrap.torch_compat import load_symmetric_memory_operators

log = logging.getLogger("fxwrap.fused_communication")

_VERSION = "2"
_MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
_REARRANGING = frozenset({
    "aten.split.Tensor", "aten.cat.default", "aten.view.default", "aten.t.default", "aten.clone.default",
    "aten.clone.out", "aten.transpose.int", "aten.permute.default", "aten.slice.Tensor",
})  # fmt: skip
"""Operators between a collective and a matmul that change the place of elements only."""

_NORM = frozenset({
    "aten.add.Tensor", "aten.add.Scalar", "aten.view.default", "aten._to_copy.default", "aten.pow.Tensor_Scalar",
    "aten.mean.dim", "aten.rsqrt.default", "aten.mul.Tensor",
})  # fmt: skip
"""Operators of an RMSNorm and of the sum before it."""

Failures: TypeAlias = dict[tuple[str, str], list[str]]
"""Why candidates of rules failed, by the kind of collective and the candidate's line."""


@dataclass(frozen=True)
class UnfusedCollective:
    """A collective that could be part of a fused operator, as a line of the program, and why it is not."""

    line: str
    reason: str


@dataclass(frozen=True)
class FusedCommunication:
    """The result of the pass.

    Fields:
        program: the rewritten program.
        graph_module: it in the form of the graph that was rewritten, the argument itself if nothing was fused; None if
            the argument was a program.
        fused: for each fused operator, the last line that it replaced.
        unfused: the collectives of the kinds that can be fused that are not.
    """

    program: ir.Program
    graph_module: GraphModule | None
    fused: tuple[str, ...]
    unfused: tuple[UnfusedCollective, ...]

    def report(self) -> str:
        """Returns the fused places, and each collective that is not fused with the reason, as text."""
        lines = [f"{len(self.fused)} fused, {len(self.unfused)} not fused"]
        lines += [f"fused: {line}" for line in self.fused]
        return "\n".join([*lines, *[f"not fused: {item.line}\n    {item.reason}" for item in self.unfused]])


@dataclass(frozen=True)
class CommunicationFusion:
    """A pass that fuses all_gather + matmul, matmul + reduce_scatter, all_reduce + add + RMSNorm, small all_reduces.

    `Options(passes=[CommunicationFusion()])` turns it on. Matmuls become torch's operators over symmetric memory, which
    overlap the parts of a matmul with those of the collective (asynchronous tensor parallelism). Where a group or a
    device has none, the graph stays as it is, with one CommunicationFusionWarning.

    Fields:
        matmuls: the largest number of matmuls that share one gathered operand; 0 fuses none.
        norm_operator: the name of an operator `(Tensor x, Tensor residual, Tensor weight, float epsilon, str group) ->
            (Tensor, Tensor)` of the hardware's vendor, which returns the RMSNorm of the sum over all ranks plus the
            residual, and that sum; "" fuses no norms.
        decline: returns why collectives of a group cannot be fused on a device, "" if they can.
        one_shot_bytes: the largest all_reduce, in bytes, that becomes one kernel in which each rank reads the tensors
            of the others, with a fraction of the latency; 0 for none.
    """

    matmuls: int = 4
    norm_operator: str = ""
    decline: Callable[[torch.device, str], str] = symmetric_memory_decline
    one_shot_bytes: int = 128 * 1024

    at: ClassVar[PassPoint] = FX_BEFORE_LOWERING

    @property
    def key(self) -> str:
        """Identifies the pass to caches. Whether groups have symmetric memory is part of each graph's result."""
        fields = f"{self.matmuls}/{self.norm_operator}/{self.one_shot_bytes}"
        return f"{_VERSION}/{fields}/{self.decline.__module__}.{self.decline.__qualname__}"

    def __call__(self, graph_module: GraphModule) -> GraphModule:
        """Returns the graph with fused communication; logs the report to `fxwrap.fused_communication`."""
        result = self.fuse(graph_module)
        if result.fused or result.unfused:
            log.info("%s", result.report())
        return graph_module if result.graph_module is None else result.graph_module

    def fuse(self, subject: ir.Program | GraphModule) -> FusedCommunication:
        """Returns the rewritten program or graph of ATen operators, and the report. The argument is not changed."""
        graph_module = None if isinstance(subject, ir.Program) else subject
        program = program_of(subject)
        starts = list(_starts(program, self._kinds()))
        if not starts:
            return FusedCommunication(program, graph_module, (), ())
        load_symmetric_memory_operators()
        declined = self._declined_groups(starts)
        if len(declined) == len(_groups(starts)):
            reason = next(iter(declined.values()))
            warnings.warn(f"communication is not fused: {reason}", CommunicationFusionWarning, stacklevel=2)
            unfused = [UnfusedCollective(ir.line_text(line), declined[_group(line)]) for line in starts]
            return FusedCommunication(program, graph_module, (), tuple(unfused))
        return self._rewrite(graph_module, program)

    def _kinds(self) -> frozenset[str]:
        matmuls = ("all_gather_into_tensor", "reduce_scatter_tensor") if self.matmuls else ()
        return frozenset([*matmuls, *(["all_reduce"] if self.norm_operator or self.one_shot_bytes else [])])

    def _declined_groups(self, starts: Sequence[StartCollective]) -> dict[tuple[str, str], str]:
        reasons = {key: self.decline(torch.device(key[0]), key[1]) for key in _groups(starts)}
        return {key: reason for key, reason in reasons.items() if reason}

    def _rewrite(self, graph_module: GraphModule | None, program: ir.Program) -> FusedCommunication:
        fused: list[str] = []
        failures: Failures = {}
        program = hoist_views(program)
        for rule in self._rules(program):
            result = rw.rewrite(program, rule.pattern, rule.build)
            program = result.program
            fused += [ir.line_text(match.lines[-1]) for match in result.matches]
            for item in result.match_failures if rule.is_reported else ():
                failures.setdefault((rule.collective, item.line), []).append(item.reason)
        unfused = [
            UnfusedCollective(ir.line_text(line), _reason(program, line, failures))
            for line in _starts(program, self._kinds())
        ]
        if fused and graph_module is not None:
            graph_module = graph_in_form_of(graph_module, program)
        return FusedCommunication(program, graph_module, tuple(fused), tuple(unfused))

    def _rules(self, program: ir.Program) -> list[Rule]:
        kinds, calls = self._kinds(), [line for line in program.lines() if isinstance(line, ExternCall)]
        parts = {len(items) for line in calls if line.target == "aten.cat.default" for items in line.arguments[:1]
                 if isinstance(items, tuple)}  # fmt: skip
        joined = {argument for line in calls if line.target == "aten.cat.default" for argument in line.arguments[1:]}
        split = {argument for line in calls if line.target == "aten.split.Tensor" for argument in line.arguments[2:]}
        dimensions = sorted({0, *[item for item in (*joined, *split) if isinstance(item, int) and item >= 0]})
        rules = rules_for(
            sorted(parts) or [1], dimensions, self.matmuls, self.norm_operator, self.one_shot_bytes, self.decline
        )
        return [rule for rule in rules if rule.collective in kinds]


def _starts(program: ir.Program, kinds: frozenset[str]) -> Iterator[StartCollective]:
    for line in program.lines():
        if isinstance(line, StartCollective) and line.operator.split(".")[1] in kinds:
            yield line


def _group(line: StartCollective) -> tuple[str, str]:
    """Returns the device and the group of a collective."""
    return str(ir.reads(line)[0].tensor_type.device), line.group


def _groups(starts: Sequence[StartCollective]) -> list[tuple[str, str]]:
    return list(dict.fromkeys([_group(line) for line in starts]))


# --- reasons ----------------------------------------------------------------------------------------------------------


def _reason(program: ir.Program, start: StartCollective, failures: Failures) -> str:
    """Returns why no rule replaced a collective: the failure of the candidate that matched furthest, if any."""
    kind = start.operator.split(".")[1]
    names, readers = _readers(program, start, _NORM if kind == "all_reduce" else _REARRANGING)
    if kind == "all_gather_into_tensor":
        matmuls = [line for line in readers if isinstance(line, ExternCall) and line.target in _MATMULS]
        if not matmuls:
            return "no matmul reads the gathered tensor"
        readers = [line for line in matmuls if _reads(line.arguments[line.target == "aten.addmm.default"], names)]
        if not readers:
            return "it is the right operand of a matmul, and the fused operator gathers the left one"
        if all(line.target != _MATMULS[0] for line in matmuls):
            return f"{matmuls[0].target} is no plain matmul of two matrices"
    reasons = [reason for line in readers for reason in failures.get((kind, ir.line_text(line)), ())]
    defaults = {"all_reduce": "no RMSNorm of its sum with a residual follows"}
    reasons.reverse()  # the last rules are those with the fewest conditions
    return max(reasons, key=_progress, default=defaults.get(kind, "its operand is no result of a matmul"))


def _progress(reason: str) -> float:
    """Returns how far a candidate matched: the depth of the operand that did not, infinity for a whole match."""
    return reason.count("operand ") if " is expected" in reason else float("inf")


def _reads(operand: object, names: Set[str]) -> bool:
    return isinstance(operand, ir.Value) and operand.name in names


def _readers(
    program: ir.Program, start: StartCollective, passed: Collection[str]
) -> tuple[Set[str], list[ir.LineBase]]:
    """Returns the values that follow from a collective by waits, views and `passed` operators, and their readers."""
    names = {value.name for value in ir.defined(start)}
    readers: list[ir.LineBase] = []
    for line in program.lines():
        if line is start or ir.is_release(line) or names.isdisjoint([value.name for value in ir.used(line)]):
            continue
        readers.append(line)
        if isinstance(line, View | WaitCollective) or (isinstance(line, ExternCall) and line.target in passed):
            names |= {value.name for value in (*ir.defined(line), *ir.writes(line))}
    return names, readers

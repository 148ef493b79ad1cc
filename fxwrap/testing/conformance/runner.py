"""Runs the conformance suite on a device, and compares each case with eager PyTorch on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fxwrap.comparison import TOLERANCES
from fxwrap.compile import inspect
from fxwrap.devices import DeviceSpec, registered_spec, registered_specs
from fxwrap.errors import CommandError, DeviceError, FusionWarning, UnsupportedError
from fxwrap.options import EMITTERS
from fxwrap.testing.conformance.case import GROUPS, ConformanceCase, is_floating
from fxwrap.testing.conformance.cases import CASES
from fxwrap.torch_compat import tree_flatten

Status: TypeAlias = Literal["passed", "failed", "not supported"]


@dataclass(frozen=True)
class CaseResult:
    """The outcome of a case with an emitter; `reason` says why it did not pass, or which operators were called."""

    group: str
    name: str
    emitter: str
    status: Status
    reason: str = ""
    kernels: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ConformanceReport:
    """The outcomes of a run on a device."""

    device: str
    results: tuple[CaseResult, ...]

    @property
    def passes(self) -> bool:
        """Whether no case failed, and at least one passed."""
        statuses = {result.status for result in self.results}
        return "failed" not in statuses and "passed" in statuses

    def count(self, status: Status) -> int:
        """Returns the number of cases with an outcome."""
        return sum([result.status == status for result in self.results])

    def __str__(self) -> str:
        rows = [("group", "case", "emitter", "result", "kernels", "reason")]
        rows += [
            (item.group, item.name, item.emitter, item.status, str(item.kernels), item.reason) for item in self.results
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join([*[cell.ljust(width) for cell, width in zip(row, widths)], row[5]]).rstrip() for row in rows]
        total = ", ".join([f"{self.count(status)} {status}" for status in ("passed", "failed", "not supported")])
        return "\n".join([*lines, f"{self.device}: {total}"])

    def to_json(self) -> str:
        """Returns the outcomes as a JSON object."""
        results = [dataclasses.asdict(item) for item in self.results]
        return json.dumps({"device": self.device, "results": results}, indent=1)

    @staticmethod
    def from_json(text: str) -> ConformanceReport:
        """Returns the report that `to_json` wrote."""
        fields = json.loads(text)
        return ConformanceReport(fields["device"], tuple([CaseResult(**item) for item in fields["results"]]))


def run_conformance(
    device: str,
    *,
    groups: Collection[str] = GROUPS,
    emitters: Sequence[str] = ("python", "fx", "interpreter"),
    part: tuple[int, int] = (0, 1),
) -> ConformanceReport:
    """Runs the cases on a registered device, with each emitter, and returns the outcomes.

    A case passes if results, mutated inputs and gradients equal those of eager PyTorch on the CPU up to the tolerance
    of the dtype. It is not supported if the device's spec lacks the capability, or if fxwrap or torch say so.

    Args:
        device: its type ("npu") or one device ("npu:1"); the vendor's package is imported.
        groups: the groups to run.
        emitters: the emitters to run.
        part: which part of the cases to run, and of how many: several processes share them.

    Raises CommandError for an unregistered device, an unknown group or emitter.
    """
    spec = registered_spec(torch.device(device).type) if _is_device(device) else None
    if spec is None:
        known = ", ".join([item.device_type for item in registered_specs()])
        raise CommandError(f"device '{device}' is not registered; registered: {known}. Import the vendor's package")
    _check_names("group", groups, GROUPS)
    _check_names("emitter", emitters, EMITTERS)
    chosen = [item for group in GROUPS if group in groups for item in CASES if item.group == group][part[0] :: part[1]]
    results = [run_case(item, torch.device(device), spec, emitter) for item in chosen for emitter in emitters]
    return ConformanceReport(device, tuple(results))


def merge_reports(reports: Sequence[ConformanceReport]) -> ConformanceReport:
    """Returns the outcomes of all parts of a run, in the order of the cases."""
    groups: list[str] = list(GROUPS)
    order: dict[str, int] = {item.name: number for number, item in enumerate(CASES)}
    results = [result for report in reports for result in report.results]
    results.sort(key=lambda item: (groups.index(item.group), order[item.name]))
    return ConformanceReport(reports[0].device, tuple(results))


def _check_names(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise CommandError(f"unknown {kind} '{name}'; known: {', '.join(known)}")


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def run_case(item: ConformanceCase, device: torch.device, spec: DeviceSpec, emitter: str) -> CaseResult:
    """Runs one case with one emitter."""
    result = CaseResult(item.group, item.name, emitter, "not supported")
    if item.requires and not getattr(spec, item.requires):
        return dataclasses.replace(result, reason=f"DeviceSpec.{item.requires} is false")
    start = time.perf_counter()
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reason, kernels = _run(item, device, emitter)
            status: Status = "failed" if reason else "passed"
        except Exception as error:  # noqa: BLE001  a device may raise anything
            unsupported = _unsupported_reason(error)
            status, kernels = ("failed" if unsupported is None else "not supported"), 0
            reason = unsupported or _failure_reason(error)
    if not reason:
        reason = "; ".join([str(entry.message) for entry in caught if issubclass(entry.category, FusionWarning)])
    return dataclasses.replace(
        result, status=status, reason=reason, kernels=kernels, seconds=time.perf_counter() - start
    )


def _unsupported_reason(error: BaseException | None) -> str | None:
    """Returns the reason if an error, or one of its causes, says that something is not supported."""
    while error is not None:
        if isinstance(error, UnsupportedError | DeviceError | NotImplementedError):
            return _first_line(error)
        error = error.__cause__ or error.__context__
    return None


def _failure_reason(error: BaseException) -> str:
    """Returns the class and the first line of the error behind those of torch.compile."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):  # of torch.compile
        error = inner
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _run(item: ConformanceCase, device: torch.device, emitter: str) -> tuple[str, int]:
    """Returns the first difference to eager on the CPU, or "", and the number of kernels."""
    options: dict[str, Any] = {**item.options, "emitter": emitter, "compile_cache": False}
    dynamic = bool(item.later_inputs)
    compiled = torch.compile(item.function, backend="fxwrap", options=options, dynamic=dynamic, fullgraph=True)
    for inputs in (item.inputs, *item.later_inputs):
        expected = _observe(item.reference or item.function, inputs(), None, item.training)
        results = _observe(compiled, inputs(), device, item.training)
        reason = _difference(results, expected)
        if reason:
            return reason, 0
    records = inspect(compiled)
    if item.later_inputs and len(records) > 1:
        return f"it was compiled {len(records)} times for other sizes", 0
    return "", sum([len(record.program.kernels) for record in records])


def _observe(
    function: Any, inputs: Sequence[Any], device: torch.device | None, training: bool
) -> list[tuple[str, object]]:
    """Returns the results of a call, the inputs after it and their gradients, by name, on the CPU."""
    moved = [_moved(item, device, training) for item in inputs]
    with torch.set_grad_enabled(training):
        results = function(*moved)
    leaves = tree_flatten(results)[0]
    if training:
        losses = [(leaf.float() * _weights(leaf)).sum() for leaf in leaves if is_floating(leaf)]
        sum(losses[1:], losses[0]).backward()
    named = [(f"result {number}", leaf) for number, leaf in enumerate(leaves)]
    named += [(f"input {number} after the call", item) for number, item in enumerate(moved)]
    named += [(f"the gradient of input {number}", item.grad) for number, item in enumerate(moved) if is_floating(item)]
    return [(name, _on_cpu(item)) for name, item in named]


def _weights(result: Tensor) -> Tensor:
    """Returns weights of a result's elements in the loss: the gradient of a plain sum may be zero."""
    weights: Tensor = torch.arange(result.numel(), dtype=torch.float32).cos().view(result.shape).to(result.device)
    return weights


def _moved(item: Any, device: torch.device | None, training: bool) -> Any:
    """Returns an input on the device, with its strides."""
    if not isinstance(item, Tensor):
        return item
    if device is not None and device != item.device:
        moved = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device)
        moved.copy_(item)
        item = moved
    else:
        item = copy.copy(item)
    return item.requires_grad_() if training and item.is_floating_point() else item


def _on_cpu(item: object) -> object:
    return item.detach().cpu().clone() if isinstance(item, Tensor) else item


def _difference(results: Iterable[tuple[str, object]], expected: Iterable[tuple[str, object]]) -> str:
    """Returns the first difference between observations, or ""."""
    results, expected = list(results), list(expected)
    if len(results) != len(expected):
        return f"there are {len(results)} results instead of {len(expected)}"
    for (name, ours), (_, theirs) in zip(results, expected):
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
            if type(ours) is not type(theirs) or ours != theirs:
                return f"{name} is {ours}, eager's is {theirs}"
        elif ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return f"{name} is {ours.dtype} {tuple(ours.shape)}, eager's is {theirs.dtype} {tuple(theirs.shape)}"
        elif not _agrees(ours, theirs):
            return f"{name} differs by {_error(ours, theirs):.1e}"
    return ""


def _agrees(ours: Tensor, theirs: Tensor) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    finite = torch.isfinite(theirs)
    if not torch.equal(finite, torch.isfinite(ours)):
        return False
    if not torch.allclose(ours[~finite], theirs[~finite], equal_nan=True):
        return False
    return _error(ours[finite], theirs[finite]) <= TOLERANCES.get(ours.dtype, 0.0)


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error by norm."""
    difference, norm = (ours.double() - theirs.double()).norm(), theirs.double().norm()
    return float(difference / norm) if norm else float(difference)

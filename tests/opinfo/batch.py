"""Calls compiled together as one program, run, and each compared with eager."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from fxwrap import Options, compile_graph
from fxwrap.compile import Compiled
from fxwrap.debugging import copy_inputs
from fxwrap.torch_compat import FakeTensorMode, OpOverload
from fxwrap.wrapper_ir.operators import operator_schema
from tests.opinfo.calls import SEED, Call, concatenate_graphs, new_mode, traced
from tests.opinfo.comparison import difference, metadata

PASSED = "passed"
FAILED = "failed"
REJECTED_BY_EAGER = "rejected by eager"
NOT_TRACEABLE = "not traceable"
WRONG_FAKE_METADATA = "wrong fake metadata"
WRONG_TRACE = "wrong trace"
UNSTABLE = "nondeterministic in eager"
NOT_RUN = "not run"


@dataclass
class Verdict:
    """The outcome of a call: one of the words above, with the observed difference or error."""

    call: Call
    word: str = PASSED
    detail: str = ""


@dataclass
class Verdicts:
    """The outcomes of a case's calls, with counts of fused, view and called nodes of their graphs."""

    calls: list[Verdict] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    called: dict[str, str] = field(default_factory=dict)

    def add(self, other: Verdicts) -> None:
        """Adds the content of another."""
        self.calls += other.calls
        self.kinds += other.kinds
        self.called |= other.called


@dataclass(frozen=True)
class _TracedCall:
    """A call with its graph, and with eager's results."""

    verdict: Verdict
    graph: GraphModule
    eager: list[Any]
    exact: list[Any] | None
    written: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return self.verdict.call.tensors

    @property
    def is_random(self) -> bool:
        targets = [node.target for node in self.graph.graph.nodes if isinstance(node.target, OpOverload)]
        return any(operator_schema(target).is_random for target in targets)


def run_and_compare(calls: Sequence[Call], options: Options) -> Verdicts:
    """Compiles calls as one program, runs it, and compares each call with eager.

    If the program cannot be compiled or run, the calls are bisected to isolate those that fail.
    """
    verdicts = Verdicts([Verdict(call) for call in calls])
    mode = new_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced_calls = [
            item for item in (_trace_and_run(verdict, mode) for verdict in verdicts.calls) if item is not None
        ]
        _compare([item for item in traced_calls if not item.is_random], options, verdicts)
        for item in traced_calls:
            if item.is_random:  # each starts from the seed, as eager did
                _compare([item], options, verdicts)
    return verdicts


def _trace_and_run(verdict: Verdict, mode: FakeTensorMode) -> _TracedCall | None:
    """Runs a call in eager and traces it. Returns None, with the verdict's word set, if one of them fails."""
    call = verdict.call
    operands = copy_inputs(call.tensors)
    try:
        eager = _seeded(call, operands)
    except Exception as error:  # noqa: BLE001 - operators raise any exception
        verdict.word, verdict.detail = REJECTED_BY_EAGER, text_of(error)
        return None
    eager = [item.clone() if isinstance(item, Tensor) and _is_in(item, operands) else item for item in eager]
    unstable = difference(_seeded(call, copy_inputs(call.tensors)), eager, None, call.defined)
    if unstable is not None:
        verdict.word, verdict.detail = UNSTABLE, unstable
        return None
    try:
        graph = traced(call, mode)
    except Exception as error:  # noqa: BLE001 - tracing raises any exception
        verdict.word, verdict.detail = NOT_TRACEABLE, text_of(error)
        return None
    result = _TracedCall(verdict, graph, eager, None, operands)
    return result if result.is_random else replace(result, exact=_exact(call))  # float64 draws differ


def _seeded(call: Call, tensors: Sequence[Tensor], wide: bool = False) -> list[Any]:
    torch.manual_seed(SEED)
    return call.run(tensors, wide)


def _is_in(item: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(item is other for other in tensors)


def _exact(call: Call) -> list[Any] | None:
    torch.set_default_dtype(torch.float64)  # the dtype that integers are promoted to
    try:
        return _seeded(call, copy_inputs(call.tensors, to_float64=True), wide=True)
    except Exception:  # noqa: BLE001 - eager is then the reference
        return None
    finally:
        torch.set_default_dtype(torch.float32)


def _compare(calls: Sequence[_TracedCall], options: Options, verdicts: Verdicts) -> None:
    if not calls:
        return
    try:
        graph = calls[0].graph if len(calls) == 1 else concatenate_graphs([item.graph for item in calls])
        fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        compiled = compile_graph(graph, fakes, options=options)
        results, written = _run(compiled, calls)
    except Exception as error:  # noqa: BLE001 - the sweep reports any failure
        if len(calls) == 1:
            calls[0].verdict.word, calls[0].verdict.detail = FAILED, text_of(error)
            return
        middle = len(calls) // 2
        _compare(calls[:middle], options, verdicts)
        _compare(calls[middle:], options, verdicts)
        return
    verdicts.kinds += Counter(item.kind for item in compiled.coverage)
    verdicts.called |= {item.operator: item.reason for item in compiled.coverage if item.kind == "call"}
    for item in calls:
        mine = [results.pop(0) for _ in item.eager]
        after = [written.pop(0) for _ in item.tensors]
        detail = difference(mine, item.eager, item.exact, item.verdict.call.defined) or difference(after, item.written)
        if detail is not None:
            item.verdict.word, item.verdict.detail = _classify_mismatch(item, mine), detail


def _classify_mismatch(item: _TracedCall, mine: Sequence[Any]) -> str:
    """Returns the cause of a difference: fxwrap, torch's fake tensors, or torch's tracing."""
    output = item.graph.graph.find_nodes(op="output")[0].args[0]
    fakes = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output]
    for fake, real in zip(fakes, item.eager, strict=True):
        if isinstance(real, Tensor) and _is_static(fake) and metadata(fake) != metadata(real):
            return WRONG_FAKE_METADATA
    return WRONG_TRACE if _is_mistraced(item, mine) else FAILED


def _is_mistraced(item: _TracedCall, mine: Sequence[Any]) -> bool:
    """Whether the graph, run in eager, differs from the call in eager and agrees with the compiled program."""
    torch.manual_seed(SEED)
    try:
        interpreted = list(Interpreter(item.graph).run(*copy_inputs(item.tensors)))
    except Exception:  # noqa: BLE001 - the cause is unknown
        return False
    defined = item.verdict.call.defined
    if difference(interpreted, item.eager, item.exact, defined) is None:
        return False
    return difference(mine, interpreted, item.exact, defined) is None


def _is_static(fake: Any) -> bool:
    return isinstance(fake, Tensor) and all(isinstance(size, int) for size in fake.shape)


def _run(compiled: Compiled, calls: Sequence[_TracedCall]) -> tuple[list[Any], list[Tensor]]:
    """Returns the results of all calls, and their operands after the call."""
    operands = [tensor for item in calls for tensor in copy_inputs(item.tensors)]
    torch.manual_seed(SEED)
    return list(compiled(*operands)), operands


def text_of(error: BaseException) -> str:
    """Returns an error's class and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"

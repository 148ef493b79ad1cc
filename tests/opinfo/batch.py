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
from fxwrap.compare import copied
from fxwrap.compiler import Compiled
from fxwrap.torch_compat import FakeTensorMode, OpOverload
from fxwrap.wrapper_ir.operators import operator_facts
from tests.opinfo.calls import SEED, Call, joined, new_mode, traced
from tests.opinfo.judge import difference, metadata

PASSED = "passed"
FAILED = "failed"
REFUSED = "eager refuses it"
UNTRACED = "torch traces no graph of it"
MISDESCRIBED = "torch's fake tensors say other strides or dtypes than eager gives"
MISTRACED = "torch's graph computes something else than eager"
UNSTABLE = "eager differs from itself"
NOT_RUN = "not run"


@dataclass
class Verdict:
    """What became of a call: one of the words above, with what was seen."""

    call: Call
    word: str = PASSED
    seen: str = ""


@dataclass
class Verdicts:
    """What became of a case's calls, and how many nodes of their graphs were fused, were views, or were called."""

    calls: list[Verdict] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    called: dict[str, str] = field(default_factory=dict)

    def add(self, other: Verdicts) -> None:
        """Takes over what another has."""
        self.calls += other.calls
        self.kinds += other.kinds
        self.called |= other.called


@dataclass(frozen=True)
class _Ready:
    """A call with its graph and with what eager gives."""

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
        return any(operator_facts(target).is_random for target in targets)


def judged(calls: Sequence[Call], options: Options) -> Verdicts:
    """Compiles calls as one program, runs it, and says of each how it agrees with eager.

    Where the program cannot be made or run, the calls are halved until those at fault are alone.
    """
    found = Verdicts([Verdict(call) for call in calls])
    mode = new_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ready = [item for item in (_ready(verdict, mode) for verdict in found.calls) if item is not None]
        _judge([item for item in ready if not item.is_random], options, found)
        for item in ready:
            if item.is_random:  # each starts from the seed, as eager did
                _judge([item], options, found)
    return found


def _ready(verdict: Verdict, mode: FakeTensorMode) -> _Ready | None:
    """Runs a call by eager and traces it; None, with the verdict's word, where one of them refuses it."""
    call = verdict.call
    given = copied(call.tensors)
    try:
        eager = _seeded(call, given)
    except Exception as error:  # noqa: BLE001 - operators raise what they please
        verdict.word, verdict.seen = REFUSED, text_of(error)
        return None
    eager = [item.clone() if isinstance(item, Tensor) and _is_among(item, given) else item for item in eager]
    unstable = difference(_seeded(call, copied(call.tensors)), eager, None, call.defined)
    if unstable is not None:
        verdict.word, verdict.seen = UNSTABLE, unstable
        return None
    try:
        graph = traced(call, mode)
    except Exception as error:  # noqa: BLE001 - so does tracing
        verdict.word, verdict.seen = UNTRACED, text_of(error)
        return None
    found = _Ready(verdict, graph, eager, None, given)
    return found if found.is_random else replace(found, exact=_exact(call))  # wider random numbers are other ones


def _seeded(call: Call, tensors: Sequence[Tensor], wide: bool = False) -> list[Any]:
    torch.manual_seed(SEED)
    return call.run(tensors, wide)


def _is_among(item: Tensor, given: Sequence[Tensor]) -> bool:
    return any(item is other for other in given)


def _exact(call: Call) -> list[Any] | None:
    torch.set_default_dtype(torch.float64)  # what integers become
    try:
        return _seeded(call, copied(call.tensors, wide=True), wide=True)
    except Exception:  # noqa: BLE001 - then eager is what counts
        return None
    finally:
        torch.set_default_dtype(torch.float32)


def _judge(ready: Sequence[_Ready], options: Options, found: Verdicts) -> None:
    if not ready:
        return
    try:
        graph = ready[0].graph if len(ready) == 1 else joined([item.graph for item in ready])
        fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        compiled = compile_graph(graph, fakes, options=options)
        results, written = _run(compiled, ready)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the sweep is there to find
        if len(ready) == 1:
            ready[0].verdict.word, ready[0].verdict.seen = FAILED, text_of(error)
            return
        middle = len(ready) // 2
        _judge(ready[:middle], options, found)
        _judge(ready[middle:], options, found)
        return
    found.kinds += Counter(item.kind for item in compiled.coverage)
    found.called |= {item.operator: item.reason for item in compiled.coverage if item.kind == "call"}
    for item in ready:
        mine = [results.pop(0) for _ in item.eager]
        after = [written.pop(0) for _ in item.tensors]
        seen = difference(mine, item.eager, item.exact, item.verdict.call.defined) or difference(after, item.written)
        if seen is not None:
            item.verdict.word, item.verdict.seen = _word(item, mine), seen


def _word(item: _Ready, mine: Sequence[Any]) -> str:
    """Returns whether it is fxwrap's fault that results differ: torch may have described or traced them wrongly."""
    output = item.graph.graph.find_nodes(op="output")[0].args[0]
    fakes = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output]
    for fake, real in zip(fakes, item.eager, strict=True):
        if isinstance(real, Tensor) and _described(fake) and metadata(fake) != metadata(real):
            return MISDESCRIBED
    return MISTRACED if _is_mistraced(item, mine) else FAILED


def _is_mistraced(item: _Ready, mine: Sequence[Any]) -> bool:
    """Whether the graph, run by eager, differs from the call in eager and agrees with what was compiled."""
    torch.manual_seed(SEED)
    try:
        wanted = list(Interpreter(item.graph).run(*copied(item.tensors)))
    except Exception:  # noqa: BLE001 - then it is not known
        return False
    defined = item.verdict.call.defined
    if difference(wanted, item.eager, item.exact, defined) is None:
        return False
    return difference(mine, wanted, item.exact, defined) is None


def _described(fake: Any) -> bool:
    return isinstance(fake, Tensor) and all(isinstance(size, int) for size in fake.shape)


def _run(compiled: Compiled, ready: Sequence[_Ready]) -> tuple[list[Any], list[Tensor]]:
    """Returns the results of all calls, and their operands as they are afterwards."""
    given = [tensor for item in ready for tensor in copied(item.tensors)]
    torch.manual_seed(SEED)
    return list(compiled(*given)), given


def text_of(error: BaseException) -> str:
    """Returns an error's class and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"

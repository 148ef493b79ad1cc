"""Composite operators of torch's operator database, in graphs traced before dispatch, beside eager.

Programs are run by the interpreter, so that no C++ is compiled. `make long-test` runs all operators.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.debugging import copy_inputs
from fxwrap.lines import ExternCall
from fxwrap.torch_compat import OpOverload, is_composite
from tests.conftest import NO_EXPECTTEST

pytest.importorskip("expecttest", reason=NO_EXPECTTEST)  # before the imports below need it

from tests.opinfo.calls import SEED, Call, Case, cases, new_mode
from tests.opinfo.comparison import difference

OPTIONS = Options(compile_cache=False)
SAMPLES = 2
GROUPS = 40

STAYS = {
    "aten.corrcoef.default": "it compares elements to warn of few observations",
    "aten.cov.default": "it compares elements to warn of few observations",
    "aten.ctc_loss.IntList": "sizes inside of it depend on data",
    "aten.ctc_loss.Tensor": "sizes inside of it depend on data",
}
"""Composite operators that are called, with the reason."""

UNKNOWN_RESULTS = "the results of aten.tensor_split.tensor_indices_or_sections are known only at run time"
"""The error of the one operator whose number of results is an element of a tensor."""


def traced_before_dispatch(call: Call, *, with_metadata: bool) -> GraphModule:
    if not with_metadata:
        graph = make_fx(lambda *tensors: call.run(tensors), pre_dispatch=True)(*copy_inputs(call.tensors))
        for node in graph.graph.nodes:
            node.meta = {}
        return graph
    mode = new_mode()
    fakes = [mode.from_tensor(item, static_shapes=True) for item in call.tensors]
    with mode:
        return make_fx(lambda *tensors: call.run(tensors), pre_dispatch=True)(*fakes)


def seeded(call: Call) -> tuple[list[object], list[Tensor]]:
    """Eager's results and its operands after the call."""
    operands = copy_inputs(call.tensors)
    torch.manual_seed(SEED)
    results = call.run(operands)
    return [item.clone() if any(item is other for other in operands) else item for item in results], operands


def is_strided(call: Call, results: list[object]) -> bool:
    return all(item.layout is torch.strided for item in [*call.tensors, *results] if isinstance(item, Tensor))


def defects(case: Case) -> Iterator[str]:
    """What differs from eager, and the composite operators that are called without a known reason."""
    for call in case.samples()[:SAMPLES]:
        try:
            expected, written = seeded(call)
            graphs = [traced_before_dispatch(call, with_metadata=item) for item in (True, False)]
        except Exception:  # noqa: BLE001 - eager rejects it, or torch cannot trace it
            continue
        targets = {node.target for node in graphs[0].graph.nodes if isinstance(node.target, OpOverload)}
        composites = {str(target) for target in targets if is_composite(target)}
        if not is_strided(call, expected) or not composites:
            continue
        for graph in graphs:
            try:
                program = fxwrap.lower(graph, copy_inputs(call.tensors), options=OPTIONS)
                operands = copy_inputs(call.tensors)
                torch.manual_seed(SEED)
                results = list(fxwrap.run(program, operands))
            except Exception as error:  # noqa: BLE001 - an operator's own
                if UNKNOWN_RESULTS not in str(error):
                    yield f"{case.name} {call}: {type(error).__name__}: {error}"
                continue
            detail = difference(results, expected, None, call.defined) or difference(operands, written)
            if detail is not None:
                yield f"{case.name} {call}: {detail}"
            called = {line.target for line in program.lines() if isinstance(line, ExternCall)}
            if remaining := (called & composites) - STAYS.keys():
                yield f"{case.name} {call}: {remaining} stay calls"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("group", range(GROUPS))
def test_composites_of_the_database_match_eager_and_are_decomposed(group: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        differences = [defect for case in cases((torch.float32,))[group::GROUPS] for defect in defects(case)]
    assert not differences, "\n".join(differences)

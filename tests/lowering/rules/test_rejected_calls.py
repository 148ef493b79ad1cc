"""Rules decline calls that eager mode rejects for a dtype or a number, so that the call raises eager's error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS
from tests.conftest import NO_EXPECTTEST
from tests.lowering.evaluate_definitions import fuses

pytest.importorskip("expecttest", reason=NO_EXPECTTEST)  # before what follows imports it

from tests.lowering.rules.rejected_calls import fused_though_rejected, recorded_calls

aten = torch.ops.aten
BOOLS, INTS, BYTES = torch.ones(3, dtype=torch.bool), torch.arange(3), torch.ones(3, dtype=torch.uint8)
FLOATS, DOUBLES, HALVES = torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float16)
SHORT = INTS.int()
CUBE = torch.ones(1, 1, 4, 4, 4, dtype=torch.float16)
ROWS, GROUPS, HALF_ROWS = torch.ones(2, 3), torch.ones(1, 3, 2), torch.ones(2, 3, dtype=torch.float16)
NO_ROWS = torch.ones(0, 3)
STATISTICS = torch.ones(2, 1)
NORM_MASK = [True, True, True]

REJECTED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *[(aten.arange.default, (3,), {"dtype": torch.bool}), (aten.linspace.default, (0, 1, 3), {"dtype": torch.bool})],
    *[(operator.default, (BOOLS, 0), {"dtype": torch.bool}) for operator in (aten.cumsum, aten.cumprod)],
    *[(aten._softmax.default, (x, 0, False), {}) for x in (BOOLS, INTS, BYTES)],
    *[(aten._safe_softmax.default, (x, 0), {}) for x in (BOOLS, INTS)],
    (aten._log_softmax.default, (INTS, 0, False), {}),
    (aten._softmax_backward_data.default, (FLOATS, HALVES, 0, torch.float32), {}),
    (aten._softmax_backward_data.default, (FLOATS, FLOATS, 0, torch.float16), {}),
    (aten._log_softmax_backward_data.default, (FLOATS, FLOATS, 0, torch.float16), {}),
    (aten.nll_loss_forward.default, (ROWS, INTS[:2].int(), None, 1, -100), {}),
    (aten.nll_loss_forward.default, (ROWS, INTS[:2], DOUBLES, 1, -100), {}),
    (aten.nll_loss_forward.default, (ROWS.int(), INTS[:2], None, 1, -100), {}),
    (aten.native_layer_norm.default, (ROWS, [3], HALVES, HALVES, 1e-5), {}),
    (aten.native_layer_norm.default, (ROWS, [3], DOUBLES, None, 1e-5), {}),
    (aten.native_group_norm.default, (GROUPS, DOUBLES, FLOATS, 1, 3, 2, 1, 1e-5), {}),
    *[
        (aten.native_layer_norm_backward.default, (grad, ROWS, [3], mean, STATISTICS, FLOATS, FLOATS, NORM_MASK), {})
        for grad, mean in ((HALF_ROWS, STATISTICS), (ROWS, STATISTICS.double()))
    ],
    (aten.avg_pool3d.default, (CUBE, [2, 2, 2]), {}),
    (aten.avg_pool3d_backward.default, (CUBE[..., :2, :2, :2], CUBE, [2] * 3, [2] * 3, [0] * 3, False, True, None), {}),
    (aten.glu_backward.default, (HALVES, torch.ones(6), 0), {}),
    (aten.reflection_pad1d_backward.default, (torch.ones(1, 5), torch.ones(1, 3, dtype=torch.float64), [1, 1]), {}),
    *[(operator.default, (BOOLS,), {}) for operator in (aten.argmax, aten.argmin)],
    (aten.trace.default, (torch.ones(2, 2, dtype=torch.bool),), {}),
    *[(operator.correction, (x,), {}) for operator in (aten.var, aten.std) for x in (BOOLS, INTS, BYTES)],
    (aten.dist.default, (BOOLS, FLOATS), {}),
    (aten.index_add.default, (FLOATS, 0, INTS, DOUBLES), {}),
    (aten.index_copy.default, (FLOATS, 0, INTS, DOUBLES), {}),
    (aten.index_copy.default, (FLOATS, 0, SHORT, FLOATS), {}),
    (aten.index_fill.int_Scalar, (FLOATS, 0, SHORT, 1), {}),
    (aten.index_fill.int_Scalar, (BYTES, 0, INTS, -1.5), {}),
    (aten.index_put.default, (FLOATS, [INTS], DOUBLES), {}),
    (aten.put.default, (FLOATS, INTS, DOUBLES), {}),
    (aten.put.default, (FLOATS, SHORT, FLOATS), {}),
    (aten.full.default, ([3], -1.5), {"dtype": torch.uint8}),
    (aten.full_like.default, (BYTES, 300.5), {}),
    (aten.masked_fill.Scalar, (HALVES, BOOLS, 1e6), {}),
    (aten.constant_pad_nd.default, (BYTES, [1, 1], -2.5), {}),
    (aten.clamp_min.default, (FLOATS, 1e60), {}),
    *[(operator.default, (NO_ROWS, [0]), {}) for operator in (aten.amax, aten.amin)],
    *[(operator.dim, (NO_ROWS, 0), {}) for operator in (aten.max, aten.min)],
    *[(operator.default, (NO_ROWS, 0), {}) for operator in (aten.argmax, aten.argmin)],
    *[(operator.default, (NO_ROWS,), {}) for operator in (aten.max, aten.min, aten.argmax, aten.argmin)],
    (aten._native_batch_norm_legit.no_stats, (NO_ROWS, None, None, True, 0.1, 1e-5), {}),
]  # fmt: skip


@pytest.mark.parametrize(("overload", "arguments", "keywords"), REJECTED, ids=lambda item: str(item)[:40])
def test_a_call_that_eager_mode_rejects_is_not_fused(
    overload: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        overload(*arguments, **keywords)
    assert not fuses(overload, *arguments, **keywords)


def test_calls_of_the_operator_database_with_other_dtypes_are_rejected() -> None:
    """A part of `python -m tests.lowering.rules.rejected_calls`, the one that holds for every release of torch."""
    calls = recorded_calls("index_add|masked_fill|var", samples=2)
    assert len({str(call.overload) for call in calls}) >= 4
    assert not list(fused_though_rejected(calls))


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_emitted_code_raises_the_error_of_eager_mode(emitter: Any) -> None:
    """The fake rule accepts bools, so the graph compiles; the operator raises."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.argmax.default, (graph.call_function(aten.logical_not.default, (x,)),)),))
    compiled = fxwrap.compile_graph(GraphModule({}, graph), [BOOLS], options=Options(emitter=emitter))
    with pytest.raises(RuntimeError, match=r"argmax.*does not support bool"):
        compiled(BOOLS)


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_a_write_over_elements_that_it_reads_raises_eagers_error(emitter: str) -> None:
    """Under torch.compile, AOTAutograd has replaced the write by a sum, whatever the backend is."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.add_.Tensor, (x, graph.call_function(aten.t.default, (x,)))))
    compiled = fxwrap.compile_graph(GraphModule({}, graph), [torch.ones(3, 3)], options=Options(emitter=emitter))
    with pytest.raises(
        RuntimeError, match="some elements of the input tensor and the written-to tensor refer to a single"
    ):
        compiled(torch.ones(3, 3))

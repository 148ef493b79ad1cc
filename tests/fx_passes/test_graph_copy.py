"""Fake results of calls that passes add: views of static layouts without torch's references in Python."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph

from fxwrap.fx_passes import graph_copy
from fxwrap.fx_passes.graph_copy import fake_call, run_on_fakes
from fxwrap.torch_compat import is_view_operator, storage_identity

_aten = torch.ops.aten

VIEWS = [
    (_aten.view.default, ([3, 8],)), (_aten.view.default, ([-1],)), (_aten._unsafe_view.default, ([6, 4],)),
    (_aten.transpose.int, (0, -1)), (_aten.permute.default, ([2, 0, 1],)), (_aten.slice.Tensor, (1, 1, 4, 2)),
    (_aten.slice.Tensor, (1, 1, 9223372036854775807)), (_aten.select.int, (0, 1)), (_aten.unsqueeze.default, (1,)),
    (_aten.expand.default, ([5, 2, 3, 4],)), (_aten.squeeze.dim, (0,)), (_aten.as_strided.default, ([2, 2], [4, 1], 3)),
    (_aten.detach.default, ()), (_aten.diagonal.default, (0, 1, 2)), (_aten.unfold.default, (2, 2, 1)),
]  # fmt: skip


def _run(target: Any, arguments: tuple[Any, ...], base: FakeTensor) -> FakeTensor:
    graph = Graph()
    x = graph.placeholder("x")
    result: FakeTensor = run_on_fakes(graph.call_function(target, (x, *arguments)), {x: base})
    return result


@pytest.mark.parametrize(("target", "arguments"), VIEWS, ids=lambda item: str(item) if callable(item) else None)
def test_views_are_those_of_fake_tensors(
    target: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        memory = torch.empty(60, dtype=torch.bfloat16, device="cuda")
    base = memory.as_strided((2, 3, 4), (12, 4, 1), 5)
    wanted = fake_call(target, (base, *arguments))
    monkeypatch.setattr(graph_copy, "fake_call", None)
    result = _run(target, arguments, base)
    layout = operator.attrgetter("shape", "dtype", "device", "fake_mode")
    assert isinstance(result, FakeTensor) and layout(result) == layout(wanted)
    assert result.stride() == wanted.stride() and result.storage_offset() == wanted.storage_offset()
    assert storage_identity(result) == storage_identity(wanted) == storage_identity(memory)


def test_wrong_views_raise_the_error_of_fake_tensors() -> None:
    with FakeTensorMode():
        base = torch.empty(6, 4)
    for target, arguments in ((_aten.view.default, ([5, 5],)), (_aten.select.int, (7, 0))):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as wanted:
            fake_call(target, (base, *arguments))
        with pytest.raises(wanted.type) as raised:
            _run(target, arguments, base)
        assert str(raised.value) == str(wanted.value)


def test_other_calls_are_run_on_fakes() -> None:
    assert not any(map(is_view_operator, (_aten.split.Tensor, _aten.relu.default, _aten.relu_.default)))
    with FakeTensorMode():
        base = torch.empty(6, 4, dtype=torch.complex64)
    assert _run(_aten.real.default, (), base).dtype is torch.float32
    assert _run(_aten.view.dtype, (torch.float32,), base).shape == (6, 8)

"""Graphs with unbacked symbols, lowered again and again: a lowering leaves nothing behind in the graph's ShapeEnv."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.errors import GraphError
from fxwrap.torch_compat import ShapeEnv, find_shape_env, isolate_pending_symbols, new_unbacked_number
from tests.lowering.control.cases import random

X, COUNT = random(4, 5), torch.tensor(3)


class Counted(nn.Module):
    """Symbols that are read from a tensor, and those of a result."""

    def forward(self, x: Tensor, n: Tensor) -> Any:
        count = n.item()
        torch._check(count >= 0)
        torch._check(count <= 100)
        return x.nonzero().float().sum(1).relu(), torch.zeros(count) + x[x > 0].sum()


@pytest.fixture(scope="module")
def exported() -> ExportedProgram:
    return torch.export.export(Counted(), (X, COUNT), dynamic_shapes=({0: Dim.DYNAMIC}, {}))


def waiting(exported: ExportedProgram) -> list[Any]:
    """The unbacked symbols that no node has defined yet."""
    env = find_shape_env([node.meta.get("val") for node in exported.graph.nodes])
    assert env is not None
    return env.pending_fresh_unbacked_symbols


def compiled(exported: ExportedProgram, emitter: str, **options: Any) -> fxwrap.Compiled:
    return fxwrap.compile_graph(exported, options=Options(emitter=emitter, compile_cache=False, fuse=False, **options))


def test_one_exported_program_is_lowered_for_one_emitter_after_another(exported: ExportedProgram) -> None:
    wanted, texts = Counted()(X, COUNT), set()
    for emitter in ("fx", "cpp", "python"):
        call = compiled(exported, emitter)
        assert waiting(exported) == []
        torch.testing.assert_close(list(call(X, COUNT)), list(wanted))
        texts.add(str(call.program).count("symbol."))
    assert len(texts) == 1


def test_a_graph_is_lowered_after_a_failed_lowering(exported: ExportedProgram) -> None:
    def refused(*_arguments: Any, **_keywords: Any) -> Any:
        raise RuntimeError("no such decomposition")

    with pytest.raises(Exception, match="no such decomposition"):
        compiled(exported, "python", decompositions={torch.ops.aten.relu.default: refused})
    assert waiting(exported) == []
    torch.testing.assert_close(list(compiled(exported, "python")(X, COUNT)), list(Counted()(X, COUNT)))


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fxwrap_repeated.unknown(x.nonzero())


def test_a_failed_lowering_leaves_no_pending_symbols() -> None:
    """An operator without a rule for fake tensors, after symbols that the graph was run on fake tensors for."""
    library = torch.library.Library("fxwrap_repeated", "DEF")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", lambda x: x + 1, "CPU")
    graph = make_fx(Unknown(), tracing_mode="real")(X)
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
    env = ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=env)
    for _ in range(2):
        with pytest.raises(GraphError, match="has no fake implementation"):
            fxwrap.lower(graph, [mode.from_tensor(X)])
        assert env.pending_fresh_unbacked_symbols == []
    library._destroy()


def test_pending_symbols_stay_pending() -> None:
    """As where something is lowered while a graph is traced."""
    env = ShapeEnv()
    own = env.create_unbacked_symint().node.expr
    with pytest.raises(RuntimeError, match="in between"), isolate_pending_symbols(env):
        assert env.pending_fresh_unbacked_symbols == []
        env.create_unbacked_symint()
        raise RuntimeError("in between")
    new_unbacked_number(env, "int")
    assert env.pending_fresh_unbacked_symbols == [own]

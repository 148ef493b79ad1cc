"""The functional form: graphs without writes, equal results, and the way back to the compiled program."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile.steps import plan_program
from fxwrap.options import PLANNERS
from tests.form_round_trips import PLANS, check_round_trip, options_of
from tests.fuzz import Case as GraphCase
from tests.round_trips import Subject, device_of
from tests.support.capture import capture_graphs
from tests.support.long_form import long_only
from tests.support.models import REPRESENTATIVE, SHALLOW
from tests.support.program_equality import assert_equal

OPTIONS = options_of("none")


def _writes(module: GraphModule) -> list[str]:
    """Returns the nodes of a graph, its submodules' included, that write or manage memory, without final copies."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    names = []
    for node in (node for graph in graphs for node in graph.nodes if node.op == "call_function"):
        schema = getattr(node.target, "_schema", None)
        written = schema is not None and schema.is_mutable
        is_final = node.target is torch.ops.aten.copy_.default and node.args[0].op in ("placeholder", "get_attr")
        memory = str(node.target) in ("fxwrap.reuse.default", "fxwrap.pool.default", "fxwrap.pool_slice.default")
        if (written and not is_final) or memory or "mutation" in str(node.target):
            names.append(node.name)
    return names


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.down(nn.functional.gelu(self.up(x))), -1)


@torch.no_grad()
def test_an_mlp_is_functional_and_comes_back() -> None:
    model, x = _Mlp().eval(), torch.randn(4, 16)
    compiled = fxwrap.compile_graph(torch.export.export(model, (x,)), options=OPTIONS)
    module = fxwrap.to_fx(compiled.program, form="functional").graph_module
    assert not _writes(module)
    torch.testing.assert_close(module(x), (model(x),))
    assert_equal(compiled.program, fxwrap.from_fx(module))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (name, plan) if name in REPRESENTATIVE else long_only(name, plan)
        for name, plan in zip(SHALLOW, itertools.cycle(("none", "reuse", *PLANNERS)))
    ],
)
def test_models_come_back_as_the_compiled_program(name: str, plan: str, training: bool) -> None:
    """All models with all plans: `make form-round-trips`."""
    for captured in capture_graphs(SHALLOW[name], training):
        assert not _writes(check_round_trip(captured, plan))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", ["default", "search"])
def test_other_memory_plans_come_back(plan: str) -> None:
    assert plan in PLANS
    for captured in capture_graphs(SHALLOW["gpt2"], training=True, dropout=True):
        check_round_trip(captured, plan)


@pytest.mark.long  # `test_functional_writes.py` has symbolic sizes too
@pytest.mark.parametrize("plan", [long_only("reuse"), "auto"])
def test_programs_with_symbolic_sizes_come_back(plan: str) -> None:
    for captured in capture_graphs(SHALLOW["gpt2"], training=True, dropout=True, dynamic=True):
        check_round_trip(captured, plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", ["static", "dynamic", "control"])
def test_random_graphs_come_back_as_the_compiled_program(source: str) -> None:
    for seed in range(4):
        subject = Subject(seed, [source], ["functional"])
        with device_of(subject.cases[0]):
            program = subject.drawn("functional").program
            module = fxwrap.to_fx(program, form="functional").graph_module
            options = fxwrap.Options(**GraphCase.draw(source, seed, 0).options).resolve_devices()
            imported = plan_program(fxwrap.from_fx(module), options)
        assert_equal(program, imported.replace(header=()))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_out_variants_of_unbacked_sizes(length: int) -> None:
    """The operator that replaces an out variant runs on fake tensors, whose sizes are as bounded as the program's."""
    graph = make_fx(lambda x: (x.nonzero() > 0,), tracing_mode="symbolic")(torch.randn(3))
    program = fxwrap.compile_graph(graph, options=OPTIONS.replace(fuse=False)).program
    assert [line.opcode for line in program.lines() if line.opcode.startswith("extern")] == ["extern.call"] * 2
    module = fxwrap.fx.functional(fxwrap.to_fx(program).graph_module)
    x = torch.ones(8).index_fill(0, torch.arange(length, 8), 0)
    torch.testing.assert_close(module(x), (x.nonzero() > 0,))


def test_out_variants_of_sizes_with_unbacked_parts() -> None:
    """`min(s0, u0)` is a size because both are; the hint of `s0` does not say so (round trip 30018)."""
    program = fxwrap.parse("""
    program @p(%x: borrowed i64[s0, s0]@cpu, %end: borrowed i64[]@cpu) {
      s0 = symbol.size(%x) range=(2, inf) hint=5 dim=0 rank=2
      check.layout(%x) name="x" : i64[s0, s0]@cpu
      check.layout(%end) name="end" : i64[]@cpu
      u0 = symbol.item(%end) range=(0, 6)
      %part = memory.view(%x) : i64[s0, min(s0, u0) | s0, 1]@cpu
      %y = memory.alloc() : i64[s0, min(s0, u0) | max(1, min(s0, u0)), 1]@cpu
      extern.call @aten.remainder.Scalar_out(%part, s0) outs=(%y)
      control.return(%y)
    }
    """)
    module = fxwrap.fx.functional(fxwrap.to_fx(program).graph_module)
    for size, end in ((5, 3), (2, 6), (3, 0)):
        x = torch.arange(size * size).reshape(size, size)
        (y,) = module(x, torch.tensor(end))
        assert torch.equal(y, x[:, :end] % size)

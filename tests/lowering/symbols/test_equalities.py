"""Equalities that guards state, in the sizes of a graph's tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.errors import InputError
from fxwrap.lowering.symbols.equalities import apply_replacements, solve_equalities
from fxwrap.options import EMITTERS
from fxwrap.symbolic import parse_expr

S0, S1 = sympy.symbols("s0 s1", integer=True)
PADDED = "s0 + mod(64 - mod(s0, 64), 64)"


@pytest.mark.parametrize(
    ("equalities", "size", "expected"),
    [
        ([("floordiv(s0, 8)", "4")], "128*floordiv(s0, 8)", "512"),
        ([("floordiv(s0, 8)", "4")], "floordiv(floordiv(s0, 8)*floordiv(s0, 8), floordiv(s0, 8))", "4"),
        ([("3072*s0", "3072*s0 + 3072*s1")], "s0 + s1", "s0"),
        ([("s0*s2", "s0*(s2 + s1)")], "s2 + s1", "s2"),
        ([(PADDED, "64")], f"16*({PADDED})", "1024"),
        ([(f"floordiv({PADDED}, s1)", "64"), (f"floordiv({PADDED}, s1)", PADDED)], PADDED, "64"),
        ([("max(s0, 5)", "s0")], "2*max(s0, 5)", "2*s0"),
        ([("s1*s2", "0")], "s1 + s2", "s1 + s2"),  # either may be 0
        ([("s0 + s1", "8")], "s0", "s0"),  # neither is a number
        ([("2*floordiv(s0, 8)", "s1")], "floordiv(s0, 8)", "floordiv(s0, 8)"),  # a graph may lack s1
    ],
)
def test_sizes_are_simplified(equalities: list[tuple[str, str]], size: str, expected: str) -> None:
    """`s0` is positive, `s1` and `s2` may be 0."""
    pairs = [(sympy.sympify(parse_expr(left)), sympy.sympify(parse_expr(right))) for left, right in equalities]
    replacements = solve_equalities(pairs, lambda factor: str(factor) == "s0")
    simplified = apply_replacements(sympy.sympify(parse_expr(size)), replacements)
    assert sympy.expand(simplified - sympy.sympify(parse_expr(expected))) == 0


def chunk(x: Tensor) -> Tensor:
    """One chunk of 64 rows, as linear attention divides a sequence; the guards say that there is one."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, (64 - x.shape[2] % 64) % 64)).sin()
    chunks = padded.reshape(*padded.shape[:2], -1, 64, padded.shape[-1])
    return chunks[:, :, 0].transpose(-1, -2) @ chunks[:, :, 0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_graph_for_one_chunk(emitter: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Views of the chunk are chains of operators, and sequences of two chunks are rejected."""
    inputs = [torch.randn(2, 3, 16, 5)]
    graph = make_fx(lambda x: (chunk(x),), tracing_mode="symbolic")(*inputs)
    compiled = fxwrap.compile_graph(graph, inputs, options=Options(emitter=emitter))
    for rows in (16, 50, 64):
        x = torch.randn(2, 3, rows, 5)
        torch.testing.assert_close(compiled(x)[0], chunk(x))
    with pytest.raises(InputError, match="the graph holds for inputs with"):
        compiled(torch.randn(2, 3, 70, 5))
    compiled.save(tmp_path / "chunk.fxw")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fxwrap.artifact"]
    assert re.search(
        r"chunk\.fxw: the traced graph restricts sizes of its inputs: .* == 64 \(s\d is size 2 of 'x_1'\)", line
    )
    module = fxwrap.to_fx(compiled.program).graph_module
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    again = fxwrap.from_fx(module)
    torch.testing.assert_close(fxwrap.run(again, [x])[0], chunk(x))
    assert fxwrap.run(fxwrap.parse(str(compiled.program)), [x])[0].equal(fxwrap.run(again, [x])[0])


def one_row(chosen: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return torch.where(chosen, x, x[rows % x.shape[0]]), x.sum(1) * rows.shape[0]


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_size_that_a_guard_determines(emitter: Any) -> None:
    """A guard states that a size is 1, since it was broadcast; the ShapeEnv has a symbol for it all the same."""
    inputs = torch.tensor([True]), torch.randn(7, 1), torch.tensor([3])
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        graph = make_fx(one_row, tracing_mode="symbolic")(*inputs)
    compiled = fxwrap.compile_graph(graph, None, options=Options(emitter=emitter))
    for rows in (7, 2, 30):
        for chosen in (True, False):
            others = torch.tensor([chosen]), torch.randn(rows, 1), torch.tensor([1])
            torch.testing.assert_close(compiled(*others), one_row(*others))
    with pytest.raises(InputError, match=r"expected f32\[\d+, 1\]|expected i64\[1\]|expected bool\[1\]"):
        compiled(torch.ones(2, dtype=torch.bool), torch.randn(7, 2), torch.tensor([1, 2]))

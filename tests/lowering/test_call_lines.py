"""The lines that scatter, index_put and other operator calls become between kernels: golden files, one rule a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from tests.support.golden import check_golden, sections

GOLDENS = Path(__file__).parent / "golden"

aten = torch.ops.aten


def scatter_reuses_a_dead_base(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
    return aten.scatter_reduce(x * 2, 0, i[:, None], v[:2, :1] + 1, "mean", include_self=False).exp()


def scatter_copies_a_live_base(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    return aten.scatter_reduce(base, 0, i[:, None], v[:2, :1], "mean"), aten.masked_scatter(x, v > 0, v), base


def index_put_chain_shares_one_buffer(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
    result = aten.index_put(x @ x, [None, v[0] > 0], v[0, 0], True)
    result = aten.index_put(result, [v > 0], v[0, 1], True)
    return aten.index_put(result.view(-1), [v.view(-1) > 0], v[0, 2], True).view(3, 3)


def an_in_place_line_separates_kernels_that_read_its_target(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    before, row = x.exp(), x[1]
    aten.index_put_(x, [i], v[:2] * 2, True)
    return before + x, row.sin()


def a_mutating_call_separates_kernels_that_read_its_operands(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    low, high = torch.empty_like(v[0]), torch.empty_like(v[0], dtype=torch.int64)
    before = x.exp()
    aten._foreach_add_.Scalar([x, v.t()], 2.0)
    aten.max.dim_max(v, 0, max=low, max_values=high)
    return before + x, v.sin(), low * 2, high


def unused_results_are_none(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    u, _, _ = aten._linalg_svd(x * 2)[:3]
    return u + 1, aten.topk(v * 3, 2)[1] + i


def views_are_view_lines_and_dtype_views_share_a_root(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    bits = aten.view.dtype(x * 2, torch.int32)
    left, right = torch.split(v * 3, [1, 2], 1)
    return bits, left * right, right


RULES: dict[str, Any] = {
    function.__name__: function
    for function in (
        scatter_reuses_a_dead_base, scatter_copies_a_live_base,
        index_put_chain_shares_one_buffer, an_in_place_line_separates_kernels_that_read_its_target,
        a_mutating_call_separates_kernels_that_read_its_operands, unused_results_are_none,
        views_are_view_lines_and_dtype_views_share_a_root,
    )
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_golden_lines(rule: str, update_golden: bool) -> None:
    """Graph and program, the latter without the text of its kernels, which is the printers' matter."""
    arguments = [torch.zeros(3, 3), torch.tensor([2, 0]), torch.zeros(3, 3)]
    graph = make_fx(RULES[rule], tracing_mode="fake")(*arguments)
    for target in (aten.detach.default, aten.alias.default):  # which of them torch adds depends on its release
        for node in graph.graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    program = fxwrap.lower(graph, arguments, options=Options(check_inputs=False))
    lines = str(program).partition("\n}\n")[0] + "\n}\n"
    text = sections([("input", str(graph.graph)), ("after lower", lines)])
    check_golden(GOLDENS / f"{rule}.txt", text, update_golden)


def test_every_golden_has_its_rule() -> None:
    assert {path.stem for path in GOLDENS.glob("*.txt")} == set(RULES)

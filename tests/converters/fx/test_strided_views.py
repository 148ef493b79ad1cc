"""Direct code writes a chain of views as one plain tensor, by the graph's numbers if its sizes are symbolic."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

import fxwrap
from tests.support.samples import SAMPLES

_ATEN = torch.ops.aten

_HEADS = """
program @heads(%x: borrowed f32[s0, s1, 8]@cpu) {
  s0 = symbol.size(%x) range=(2, inf) hint=3 dim=0 rank=3
  s1 = symbol.size(%x) range=(2, inf) hint=5 dim=1
  check.layout(%x) name="x" : f32[s0, s1, 8]@cpu
  %a = extern.call @aten.clone.default(%x) : f32[s0, s1, 8]@cpu
  %b = memory.view(%a) : f32[s0, 2, s1, 2 | 8*s1, 2, 8, 1 | 4]@cpu
  %c = extern.call @aten.neg.default(%b) : f32[s0, 2, s1, 2 | 4*s1, 2, 4, 1]@cpu
  memory.free(%a)
  control.return(%c)
}
"""

VIEWS = frozenset({_ATEN.slice.Tensor, _ATEN.view.default, _ATEN.permute.default})
CHECK_LAYOUT = torch.ops.fxwrap.check_layout.default
SIZES = ((2, 2), (3, 5), (7, 2))


def _emitted(text: str) -> GraphModule:
    return fxwrap.to_fx(fxwrap.parse(text)).graph_module


def _only(module: GraphModule, target: Callable[..., object]) -> Node:
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


def _heads(x: torch.Tensor) -> torch.Tensor:
    return -x[:, :, 4:].unflatten(2, (2, 2)).transpose(1, 2)


def test_a_chain_of_symbolic_views_is_one_statement() -> None:
    module = _emitted(_HEADS)
    views = [node.target for node in module.graph.nodes if node.target in VIEWS]
    assert views == [_ATEN.slice.Tensor, _ATEN.view.default, _ATEN.permute.default]
    lines = [line.strip() for line in module.code.splitlines()]
    start = next(index for index, line in enumerate(lines) if line.startswith("a = "))
    assert lines[start + 1 : start + 3] == [
        "b = tensors.strided_view(a, (s0, 2, s1, 2), (8*s1, 2, 8, 1), 4);  a = s0 = s1 = None",
        "c = torch.neg(b);  b = None",
    ]
    for sizes in SIZES:
        x = torch.rand(*sizes, 8)
        assert torch.equal(module(x)[0], _heads(x))


# --- rewrites ---------------------------------------------------------------------------------------------------------


def _permute_otherwise(module: GraphModule) -> None:
    permute = _only(module, _ATEN.permute.default)
    permute.args = (permute.args[0], [0, 2, 3, 1])


def _slice_otherwise(module: GraphModule) -> None:
    slice_ = _only(module, _ATEN.slice.Tensor)
    slice_.args = (slice_.args[0], 2, 0, 4, 1)


def _view_otherwise(module: GraphModule) -> None:
    view = _only(module, _ATEN.view.default)
    first, second, *others = view.args[1]  # type: ignore[misc, union-attr]
    view.args = (view.args[0], [second, first, *others])


def _exchange_symbols(module: GraphModule) -> None:
    module.graph.erase_node(_only(module, CHECK_LAYOUT))
    for node in module.graph.find_nodes(op="call_function", target=_ATEN.sym_size.int):
        node.args = (node.args[0], 1 - node.args[1])  # type: ignore[operator]


def _transposed_sizes(x: torch.Tensor) -> torch.Tensor:
    return -x[:, :, 4:].reshape(x.shape[1], x.shape[0], 2, 2).transpose(1, 2)


_Rewrite = tuple[Callable[[GraphModule], None], Callable[[torch.Tensor], torch.Tensor]]
REWRITES: dict[str, _Rewrite] = {
    "permutation": (_permute_otherwise, lambda x: -x[:, :, 4:].unflatten(2, (2, 2)).permute(0, 2, 3, 1)),
    "slice": (_slice_otherwise, lambda x: -x[:, :, :4].unflatten(2, (2, 2)).transpose(1, 2)),
    "sizes": (_view_otherwise, _transposed_sizes),
    "symbols": (_exchange_symbols, _transposed_sizes),
}


@pytest.mark.parametrize("name", REWRITES)
def test_changed_steps_of_a_chain_run_as_operators(name: str) -> None:
    rewrite, expected = REWRITES[name]
    module = _emitted(_HEADS)
    rewrite(module)
    module.recompile()
    assert "torch.permute(" in module.code
    for sizes in SIZES:
        x = torch.rand(*sizes, 8)
        assert torch.equal(module(x)[0], expected(x))


_ROWS = """
program @rows(%x: borrowed f32[s0, s1, 8]@cpu) {
  s0 = symbol.size(%x) range=(2, inf) hint=3 dim=0 rank=3
  s1 = symbol.size(%x) range=(2, inf) hint=5 dim=1
  check.layout(%x) name="x" : f32[s0, s1, 8]@cpu
  %a = extern.call @aten.clone.default(%x) : f32[s0, s1, 8]@cpu
  %b = memory.view(%a) : f32[2, s0*s1, 4 | 4, 8, 1]@cpu
  %c = extern.call @aten.neg.default(%b) : f32[2, s0*s1, 4 | 4, 8, 1]@cpu
  memory.free(%a)
  control.return(%c)
}
"""


def test_sizes_are_followed_through_the_graphs_arithmetic() -> None:
    module, x = _emitted(_ROWS), torch.rand(3, 5, 8)
    rows = "b = tensors.strided_view(a, (2, {}, 4), (4, 8, 1));"
    (number,) = [node for node in module.graph.nodes if node.target is operator.mul and node.args[0] != 8]
    assert rows.format(number.name) in module.code
    assert torch.equal(module(x)[0], -x.reshape(15, 2, 4).transpose(0, 1))
    number.args = number.args[::-1]  # the same number
    module.recompile()
    assert rows.format(number.name) in module.code
    number.args = (number.args[0], number.args[0])
    module.recompile()
    assert "strided_view" not in module.code
    with pytest.raises(RuntimeError, match="invalid for input of size 120"):
        module(x)


_TRANSPOSED = """
program @transposed(%x: borrowed f32[s0, s1]@cpu) {
  s0 = symbol.size(%x) range=(2, inf) hint=3 dim=0 rank=2
  s1 = symbol.size(%x) range=(2, inf) hint=5 dim=1
  check.layout(%x) name="x" : f32[s0, s1]@cpu
  %a = extern.call @aten.clone.default(%x) : f32[s0, s1]@cpu
  %b = memory.view(%a) : f32[s1, s0 | 1, s1]@cpu
  %c = extern.call @aten.neg.default(%b) : f32[s1, s0 | 1, s1]@cpu
  memory.free(%a)
  control.return(%c)
}
"""


def test_views_by_numbers_that_are_dropped_before_run_as_operators() -> None:
    module, x = _emitted(_TRANSPOSED), torch.rand(3, 5)
    assert "b = torch.permute(a, [1, 0]);" in module.code  # the layout check is the last user of both sizes
    assert torch.equal(module(x)[0], -x.t())


def test_returned_chains_are_detached_views_of_torch() -> None:
    returned = _HEADS.replace("  memory.free(%a)\n  control.return(%c)", "  memory.free(%c)\n  control.return(%b)")
    module, x = _emitted(returned), torch.rand(3, 5, 8)
    assert "strided_view" not in module.code
    (view,) = module(x)
    assert torch.equal(view, -_heads(x)) and view._base is None


_POSITIONS = """
program @positions(%x: borrowed f32[6]@cpu, %y: borrowed f32[6]@cpu) {
  check.layout(%x) name="x" : f32[6]@cpu
  check.layout(%y) name="y" : f32[6]@cpu
  %where = extern.call @aten.nonzero.default(%x) : i64[u0, 1 | 1, u0]@cpu
  u0 = symbol.bind(%where) path=(size(0)) range=(0, 6)
  %flat = memory.view(%where) : i64[u0]@cpu
  %c = extern.call @aten.neg.default(%flat) : i64[u0]@cpu
  memory.free(%where)
  %first = extern.call @aten.narrow_copy.default(%y, 0, 0, u0) : f32[u0]@cpu
  memory.free(%first)
  control.return(%c)
}
"""


def test_copies_of_a_node_with_a_data_dependent_size_have_sizes_of_their_own() -> None:
    module = _emitted(_POSITIONS)
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target != CHECK_LAYOUT]
    copies = dict(zip(graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder")[::-1], strict=True))
    negative = _only(module, _ATEN.neg.default)
    with graph.inserting_before(nodes[2]):  # while the first size is in scope
        for node in nodes:
            copies[node] = graph.node_copy(node, lambda item: copies[item])
    graph.output_node().args = ((negative, copies[negative]),)
    module.recompile()
    x, y = torch.tensor([0.0, 1, 0, 2, 3, 4]), torch.tensor([1.0, 0, 0, 0, 1, 0])
    first, second = module(x, y)
    assert first.tolist() == [-1, -3, -4, -5] and second.tolist() == [0, -4]


# --- results of functional launches -----------------------------------------------------------------------------------

_LAUNCH = """
program @launch(%x: borrowed f32[s0, 8]@cpu) {
  s0 = symbol.size(%x) range=(2, inf) hint=25 dim=0 rank=2
  check.layout(%x) name="x" : f32[s0, 8]@cpu
  %a = memory.alloc() : f32[s0, 8]@cpu
  kernel.launch @relu(%x, 8*s0) outs=(%a)GRID
  %b = memory.view(%a) : f32[8, s0 | 1, 8]@cpu
  %c = extern.call @aten.neg.default(%b) : f32[8, s0 | 1, 8]@cpu
  memory.free(%a)
  control.return(%c, s0)
}
"""


def _functional_launch(sample: str, grid: str) -> GraphModule:
    program = fxwrap.parse(_LAUNCH.replace("GRID", grid)).replace(kernels=SAMPLES[sample].kernels)
    return fxwrap.to_fx(fxwrap.verify(program), form="functional").graph_module


@pytest.mark.parametrize(("sample", "grid"), [("mlp", ""), ("triton_kernel", " grid=(ceildiv(8*s0, 64), 1, 1)")])
def test_views_of_symbolic_results_of_functional_launches_are_plain_tensors(sample: str, grid: str) -> None:
    module = _functional_launch(sample, grid)
    assert re.search(r"strided_view\(a(_1)?, \(8, s0\), \(1, 8\)\)", module.code)
    x = torch.randn(5, 8)
    assert torch.equal(module(x)[0], -torch.relu(x).t())


def test_a_changed_layout_of_a_functional_launch_is_not_assumed() -> None:
    module = _functional_launch("mlp", "")
    launch = _only(module, torch.ops.fxwrap.cpp_kernel_functional.default)
    rank, rows, *rest = launch.kwargs["layouts"]  # type: ignore[misc]
    with module.graph.inserting_before(launch):
        other = module.graph.call_function(operator.add, (rows, 1))
    launch.kwargs = {**launch.kwargs, "layouts": [rank, other, *rest]}
    module.recompile()
    assert "strided_view" not in module.code

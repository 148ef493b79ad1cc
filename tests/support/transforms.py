"""torch's transforms of a GraphModule, each with what it loses of the program that the graph holds."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.const_fold import _inline_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module
from torch.fx.passes.tools_common import stable_topological_sort
from torch.fx.subgraph_rewriter import replace_pattern

ATEN = torch.ops.aten


class Loss(Enum):
    """A part of a program that a transform does not preserve. Results are equal after all of them."""

    UNUSED = "calls whose results nothing uses"
    SYMBOLS = "symbols: the graph is that of the example inputs' sizes"
    CALLS = "calls: others compute the same, with other memory"


UNUSED, SYMBOLS, CALLS = frozenset({Loss.UNUSED}), frozenset({Loss.SYMBOLS}), frozenset({Loss.CALLS})


@dataclass(frozen=True)
class Transform:
    """A transform of torch's: `apply(module, inputs)` may change the module and the inputs.

    `refusals` are patterns of the errors with which torch rejects a graph. `forms` are the forms of graphs that the
    transform is defined for; empty means all. `flat` says that it is not defined for graphs that call graphs,
    `excluded_languages` for graphs with such kernels. `weight` is its share in random chains. `specialises` says
    that the result is for sizes like those of the inputs, `single_stream` that it moves or merges nodes across streams.
    """

    name: str
    apply: Callable[[GraphModule, Sequence[Any]], GraphModule]
    losses: frozenset[Loss] = frozenset()
    refusals: tuple[str, ...] = ()
    forms: frozenset[str] = frozenset()
    flat: bool = False
    excluded_languages: frozenset[str] = frozenset()
    weight: float = 1.0
    specialises: bool = False
    single_stream: bool = False

    def accepts(self, module: GraphModule, languages: Set[str]) -> bool:
        """Whether the transform is defined for a graph that launches kernels in some languages."""
        calls_graphs = bool(module.graph.find_nodes(op="call_module"))
        return not (self.flat and calls_graphs) and not self.excluded_languages & languages

    def refuses(self, error: Exception) -> bool:
        """Whether torch rejects graphs with this error."""
        text = f"{type(error).__name__}: {error}"
        return any(re.search(pattern, text, re.DOTALL) for pattern in self.refusals)


def _eliminated(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _recompiled(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    module.print_readable(print_output=False)
    module.graph.python_code("self")
    module.graph.lint()
    module.recompile()
    return module


def _renamed(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    for number, node in enumerate(reversed(list(module.graph.nodes))):
        if node.op == "call_function":
            node._rename(f"renamed_{number}")
    module.recompile()
    return module


def _parts(module: GraphModule) -> GraphModule:
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    part = {node: 3 * index // max(len(nodes), 1) for index, node in enumerate(nodes)}
    return split_module(module, module, lambda node: part.get(node, 0), keep_original_order=True)  # type: ignore[arg-type]


def _inlined(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    parts = _parts(module)
    for node in parts.graph.find_nodes(op="call_module"):
        if str(node.target).startswith("submod_"):
            _inline_module(parts, node.target, run_dce=False)
    parts.graph.lint()
    parts.recompile()
    return parts


def _copied_nodes(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    """Copies the nodes into a new graph, as most passes of a graph into another one do."""
    graph = torch.fx.Graph()
    mapping: dict[Node, Node] = {}
    for node in module.graph.nodes:
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    copied = GraphModule(module, graph)
    copied.meta = dict(module.meta)
    return copied


def _shape_propagated(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    ShapeProp(module).propagate(*inputs)
    return module


def _sorted(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    return stable_topological_sort(module)


def _traced_with_symbols(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    return _traced(module, inputs, "symbolic")


def _replaced(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    """Replaces calls with equal ones, whose nodes have no metadata of fxwrap's."""

    def pattern(x: Any) -> Any:
        return ATEN.tanh.default(x)

    replace_pattern(module, pattern, pattern)
    return module


def _cse(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    reduced = GraphModule(module, fx_graph_cse(module.graph))
    reduced.meta = dict(module.meta)
    return reduced


def _exported(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    program = torch.export.export(module, tuple(inputs), strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    exported = torch.export.load(file).module(check_guards=False)
    exported(*inputs)  # may raise an assertion of torch's
    return exported


def _traced(run: Callable[..., Any], inputs: Sequence[Any], mode: str = "fake") -> GraphModule:
    """Traces with constants as tensors that are not fake."""
    return make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)


_FUNCTIONAL_ONLY = frozenset({"functional"})
"""Transforms that merge or reorder calls by their operands alone; calls of the in-place form are ordered by effects."""

_SCAN_OF_CONSTANTS = "erroneously tracing into a custom kernel"
"""torch's `scan` reads the addresses of its operands while it is traced, which constants do not have."""

_RETURNED_CONSTANT = r"^KeyError: '\w+'$"
"""`split_module` with the original order of nodes does not find constants that the graph returns."""

_TRACED = (_SCAN_OF_CONSTANTS,)
_FUNCTIONALISED = (
    *_TRACED,
    r"'FunctorchFunctionalizeAPI' object has no attribute 'mode'",  # `invoke_subgraph` under functorch
    r"might be aliasing the input or the output",
    r"might be modifying the input",
    r"isFunctionalTensor\(t\) INTERNAL ASSERT FAILED",  # control flow whose operands are constants
)
_EXPORTED = (
    *_TRACED,
    r"SpecViolationError: Node\.meta .* is missing val field",
    r"'int' object has no attribute 'name'",  # control flow with constants as operands
    r"SyntaxError: duplicate argument",  # control flow with one tensor as two operands
    r"SerializeError: .*Unsupported list/tuple argument type",
    r"triton required to serialize triton kernels",  # torch asks for a GPU
    r"Runtime assertion failed for expression u\d+ <= ",  # a slice beyond the end of a static dimension
)
_WITHOUT_USER_KERNELS = frozenset({"user_triton"})
"""On a CPU torch cannot read Triton kernels: it assumes that they write all operands, arguments of blocks too."""

TRANSFORMS: dict[str, Transform] = {
    transform.name: transform
    for transform in (
        Transform("eliminate_dead_code", _eliminated, UNUSED, flat=True),
        Transform("deepcopy", lambda module, _inputs: copy.deepcopy(module)),
        Transform("recompile", _recompiled),
        Transform("rename", _renamed),
        Transform("node_copy", _copied_nodes),
        Transform("stable_topological_sort", _sorted),
        Transform("split_module", lambda module, _inputs: _parts(module), refusals=(_RETURNED_CONSTANT,), flat=True),
        Transform(
            "inline", _inlined, UNUSED, refusals=("references nonexistent attribute", _RETURNED_CONSTANT), flat=True
        ),
        Transform("ShapeProp", _shape_propagated),
        Transform("replace_pattern", _replaced, UNUSED, forms=_FUNCTIONAL_ONLY, flat=True, single_stream=True),
        Transform("make_fx", _traced, SYMBOLS, _TRACED, specialises=True),
        Transform("make_fx_symbolic", _traced_with_symbols, CALLS, _TRACED, specialises=True),
        Transform(
            "Interpreter",
            lambda module, inputs: _traced(Interpreter(module).run, inputs),
            SYMBOLS,
            _TRACED,
            specialises=True,
        ),
        Transform(
            "functionalize",
            lambda module, inputs: _traced(torch.func.functionalize(module), inputs),
            CALLS,
            _FUNCTIONALISED,
            excluded_languages=_WITHOUT_USER_KERNELS,
            specialises=True,
        ),
        Transform("export", _exported, CALLS, _EXPORTED, weight=0.3, specialises=True),
        Transform("fx_graph_cse", _cse, CALLS, forms=_FUNCTIONAL_ONLY, flat=True, single_stream=True, weight=0.5),
    )
}

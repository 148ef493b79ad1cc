"""torch's transforms of a GraphModule, each with what it loses of the program that the graph holds."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch._functorch.compile_utils import fx_graph_cse
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.const_fold import _inline_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module
from torch.fx.passes.tools_common import stable_topological_sort
from torch.fx.subgraph_rewriter import replace_pattern

from tests.support.versions import is_before

ATEN = torch.ops.aten


class Loss(Enum):
    """A part of a program that a transform does not preserve. Results are equal after all of them."""

    UNUSED = "calls whose results nothing uses"
    SYMBOLS = "symbols: the graph is that of the example inputs' sizes"
    CALLS = "calls: others compute the same, with other memory"


UNUSED, SYMBOLS, CALLS = frozenset({Loss.UNUSED}), frozenset({Loss.SYMBOLS}), frozenset({Loss.CALLS})


@dataclass(frozen=True)
class Rejection:
    """An error with which torch rejects graphs: why, a pattern of its class and message, and which graphs.

    `graphs` has the module that torch rejects and the match; an error for another graph is a failure. `before` is the
    first release of torch that accepts these graphs, empty if none does.
    """

    reason: str
    pattern: str
    graphs: Callable[[GraphModule, re.Match[str]], bool]
    before: str = ""

    def explains(self, error: Exception, module: GraphModule) -> bool:
        """Whether the error is torch's for this graph."""
        if self.before and not is_before(self.before):
            return False
        match = re.search(f"^{self.pattern}", f"{type(error).__name__}: {error}", re.DOTALL)
        return match is not None and self.graphs(module, match)


@dataclass(frozen=True)
class Transform:
    """A transform of torch's: `apply(module, inputs)` may change the module and the inputs.

    `forms` are the forms of graphs that the transform is defined for; empty means all. `flat` says that it is not
    defined for graphs that call graphs, `excluded_languages` for graphs with such kernels. `weight` is its share in
    random chains. `specialises` says that the result is for sizes like those of the inputs, `single_stream` that it
    moves or merges nodes across streams. `restrides` says for which graphs results may have other strides, and other
    last bits: torch's loops over elements that are not adjacent do not use vectorised functions.
    """

    name: str
    apply: Callable[[GraphModule, Sequence[Any]], GraphModule]
    losses: frozenset[Loss] = frozenset()
    rejections: tuple[Rejection, ...] = ()
    forms: frozenset[str] = frozenset()
    flat: bool = False
    excluded_languages: frozenset[str] = frozenset()
    weight: float = 1.0
    specialises: bool = False
    single_stream: bool = False
    restrides: Callable[[GraphModule], bool] = lambda _module: False

    def accepts(self, module: GraphModule, languages: Set[str]) -> bool:
        """Whether the transform is defined for a graph that launches kernels in some languages."""
        calls_graphs = bool(module.graph.find_nodes(op="call_module"))
        return not (self.flat and calls_graphs) and not self.excluded_languages & languages

    def rejection(self, error: Exception, module: GraphModule) -> Rejection | None:
        """Returns the rejection that explains an error for a graph, None if the error is not torch's."""
        return next((item for item in self.rejections if item.explains(error, module)), None)


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

# --- the errors with which torch rejects graphs -----------------------------------------------------------------------


def _parts_of(module: GraphModule) -> list[GraphModule]:
    return [part for part in module.modules() if isinstance(part, GraphModule)]


def _called(module: GraphModule) -> set[str]:
    """Returns the names of the functions that a graph and its blocks call."""
    calls = [node for part in _parts_of(module) for node in part.graph.nodes if node.op == "call_function"]
    names = [getattr(node.target, "__name__", "") for node in calls]
    return {name.partition(".")[0] for name in names}


def _has_strides_of_torch(module: GraphModule) -> bool:
    """Whether functionalization gives results other strides.

    It calls operators in place of their out variants, which write memory of any layout, and copies views in blocks.
    """
    targets = [node.target for part in _parts_of(module) for node in part.graph.nodes if node.op == "call_function"]
    into_memory = any(isinstance(target, OpOverload) and "out" in target._overloadname for target in targets)
    return into_memory or bool(_called(module) & {*_CONTROL})


def _get_attrs(module: GraphModule) -> list[tuple[GraphModule, Node]]:
    return [(part, node) for part in _parts_of(module) for node in part.graph.find_nodes(op="get_attr")]


def _has_constants(module: GraphModule) -> bool:
    """Whether a graph or its blocks read tensors that are constants."""
    return any(isinstance(attrgetter(node.target)(part), torch.Tensor) for part, node in _get_attrs(module))


def _calling(*names: str, constants: bool = False) -> Callable[[GraphModule, re.Match[str]], bool]:
    """Graphs that call one of these operators; with `constants`, those of them that have constants."""
    return lambda module, _match: bool(_called(module) & {*names}) and (not constants or _has_constants(module))


def _returns_constant(module: GraphModule, match: re.Match[str]) -> bool:
    returned = module.graph.output_node().all_input_nodes
    return match[1] in [node.name for node in returned if node.op == "get_attr"]


def _reads_block(module: GraphModule, match: re.Match[str]) -> bool:
    return match[1] in [node.target for _, node in _get_attrs(module)]


def _maps_items(module: GraphModule, _match: re.Match[str]) -> bool:
    """Graphs with a `map` whose body reads a number."""
    calls = [node for part in _parts_of(module) for node in part.graph.find_nodes(op="call_function", target=_MAP)]
    bodies = [getattr(node.graph.owning_module, node.args[0].target) for node in calls]
    return any(_called(body) & {"_local_scalar_dense", "item"} for body in bodies)


def _writes_unbacked_sizes(module: GraphModule, _match: re.Match[str]) -> bool:
    """Graphs with an operator that writes a tensor whose sizes have unbacked symbols, or copies such a tensor."""
    nodes = [node for part in _parts_of(module) for node in part.graph.nodes]
    writes = [node for node in nodes if isinstance(node.target, OpOverload) and _writes(node.target)]
    return any(free_unbacked_symbols(item.meta.get("val")) for node in writes for item in node.all_input_nodes)


def _writes(target: OpOverload) -> bool:
    return target._schema.is_mutable or target is ATEN.copy.default


def _selects_by_wider_masks(module: GraphModule, _match: re.Match[str]) -> bool:
    """Graphs with a `masked_select` of a tensor that is broadcast to the shape of its mask."""
    target = ATEN.masked_select.default
    calls = [node for part in _parts_of(module) for node in part.graph.find_nodes(op="call_function", target=target)]
    return any(len({str(item.meta["val"].shape) for item in node.all_input_nodes}) > 1 for node in calls)


_CONTROL = ("cond", "while_loop", "scan", "map_impl", "invoke_subgraph")
_MAP = torch.ops.higher_order.map_impl


def _block_operands(part: GraphModule, node: Node) -> list[Any]:
    """Returns the operands of control flow in the order of the parameters of its blocks."""
    arguments = node.args[1:] if getattr(node.target, "__name__", "") == "cond" else node.args  # the predicate
    leaves = pytree.tree_leaves(arguments)
    blocks = [item for item in leaves if isinstance(item, Node) and item.op == "get_attr"]
    blocks = [item for item in blocks if isinstance(attrgetter(item.target)(part), GraphModule)]
    return [item for item in leaves if item not in blocks and not isinstance(item, str)]


def _has_no_fake_tensor(part: GraphModule, operand: Any) -> bool:
    """Whether an operand is a number or a constant."""
    if not isinstance(operand, Node):
        return True
    return operand.op == "get_attr" or not isinstance(operand.meta.get("val", torch.Tensor()), torch.Tensor)


def _numbers_and_constants(module: GraphModule) -> Iterator[list[bool]]:
    """Yields for each call of control flow which parameters of its blocks are numbers or constants."""
    for part in _parts_of(module):
        for node in part.graph.nodes:
            if getattr(node.target, "__name__", "") in _CONTROL:
                yield [_has_no_fake_tensor(part, item) for item in _block_operands(part, node)]


def _passes_number_or_constant(module: GraphModule, match: re.Match[str]) -> bool:
    """Whether control flow passes a number or a constant: any, or as the parameter of a block that the error names."""
    flags = list(_numbers_and_constants(module))
    if match.groups():
        flags = [items[int(match[1]) :][:1] for items in flags]
    return any(map(any, flags))


def _merges_contiguous(module: GraphModule, match: re.Match[str]) -> bool:
    """Whether a graph has a `cond` whose branches both return contiguous results, by the layouts that the error has."""
    texts = [re.sub(r"Max\(1, (\w+)\)", r"\1", text).rstrip(",") for text in match.groups()]
    layouts = [sympy.sympify(f"[{text}]") for text in texts]
    pairs = zip(layouts[::2], layouts[1::2], strict=True)
    return _calling("cond")(module, match) and all(
        strides == [sympy.prod(sizes[axis + 1 :]) for axis in range(len(sizes))] for sizes, strides in pairs
    )


RETURNED_CONSTANT = Rejection(
    "split_module with the original order of nodes copies constants that partitions read, not returned ones",
    r"KeyError: '(\w+)'$",
    _returns_constant,
)
UNKNOWN_BLOCK = Rejection(
    "_inline_module copies a node that reads a block of control flow, and not the block",
    r"RuntimeError: Node \w+ target (\w+) references nonexistent attribute \1 of",
    _reads_block,
)
SCAN_OF_CONSTANTS = Rejection(
    "scan reads the addresses of its operands while it is traced, which constants do not have",
    r"RuntimeError: Cannot access data pointer of Tensor .* erroneously tracing into a custom kernel",
    _calling("scan", constants=True),
)
WHILE_OF_SYMBOLS = Rejection(
    "traced with symbols, a loop whose carried value comes from a constant or captured tensor changes its sizes",
    r"UncapturedHigherOrderOpError: Expected carried_inputs and body_output to have same metadata but found",
    _calling("while_loop"),
)
COND_OF_SYMBOLS = Rejection(
    "traced with symbols, a cond whose branches return sizes of a constant and of symbols returns unbacked ones",
    r"GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq\(\d+, u\d+\)",
    _calling("cond", constants=True),
)
_MERGED_STRIDES = (
    "traced with symbols, a cond merges strides of equal results that are products of sizes, not of maxima"
)
MERGED_STRIDES = (
    Rejection(_MERGED_STRIDES, r"KeyError: Max\(1, u\d+\)$", _calling("cond")),
    Rejection(
        _MERGED_STRIDES,
        r"RuntimeError: It seems one of cond's output stride is not a simple accumulative multiplication of sizes\..* "
        r"True branch has size torch\.Size\(\[(.*)\]\), stride \((.*)\) and "
        r"false branch has size torch\.Size\(\[(.*)\]\) stride \((.*)\)\. ",
        _merges_contiguous,
    ),
)
COPIED_SHAPE_ENV = Rejection(
    "a module that was traced with symbols holds the ShapeEnv, and a storage of a symbolic size cannot be copied",
    r"RuntimeError: Expected !size_bytes_is_heap_allocated_ to be true",
    lambda module, _match: getattr(module, "shape_env", None) is not None,
)
MAP_OF_ITEMS = Rejection(
    "map does not ignore the unbacked symbols of its body",
    r"PendingUnbackedSymbolNotFound: Pending unbacked symbols",
    _maps_items,
    before="2.13",
)
UNBACKED_WRITES = Rejection(
    "the fake rule of writes compares unbacked sizes with 1 and with each other",
    r"GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq\(.*\bu\d+",
    _writes_unbacked_sizes,
    before="2.12",
)

_TRACED = (SCAN_OF_CONSTANTS, MAP_OF_ITEMS, UNBACKED_WRITES)
_FUNCTIONALISED = (
    *_TRACED,
    Rejection(
        "invoke_subgraph has no rule for functorch's functionalization",
        r"AttributeError: 'FunctorchFunctionalizeAPI' object has no attribute 'mode'",
        _calling("invoke_subgraph"),
    ),
    Rejection(
        "functionalised blocks of control flow may neither return nor write their operands",
        r"(UnsupportedAliasMutationException|RuntimeError): [\w.]+ might be "
        r"(aliasing the input or the output|modifying the input)",
        _calling(*_CONTROL),
    ),
    Rejection(
        # On a CPU torch cannot read Triton kernels, and assumes that they write all operands.
        "functionalization of blocks and Triton kernels asks whether operands are functional, which constants are not",
        r"RuntimeError: .*isFunctionalTensor\(t\) INTERNAL ASSERT FAILED",
        _calling(*_CONTROL, "triton_kernel_wrapper_mutation", constants=True),
    ),
)
_EXPORTED = (
    *_TRACED,
    Rejection(
        "parameters of blocks are described by fake tensors, which constants and numbers are not",
        r"SpecViolationError: Node\.meta arg(\d+)_\d+ is missing val field",
        _passes_number_or_constant,
    ),
    Rejection(
        "launches of Triton kernels that write operands return nothing, so torch's tracing gives them no val",
        r"SpecViolationError: Node\.meta triton_kernel_wrapper_mutation\w* is missing val field",
        _calling("triton_kernel_wrapper_mutation"),
    ),
    Rejection(
        "operands of control flow are names of nodes, which numbers are not",
        r"AttributeError: 'int' object has no attribute 'name'$",
        _passes_number_or_constant,
    ),
    Rejection(
        "the parameters of a block are named after its operands, of which two may be one tensor",
        r"SyntaxError: duplicate argument '\w+' in function definition",
        _calling(*_CONTROL),
    ),
    Rejection(
        "lists of operands hold only tensors",
        r"SerializeError: Failed serializing node \w+ in graph: %\w+ : .*torch\.ops\.higher_order\.(\w+)\]"
        r".*Unsupported list/tuple argument type",
        lambda _module, match: match[1] in _CONTROL,
    ),
    Rejection(
        "a kernel, also one in a block, is saved as its binary, which Triton compiles on a GPU",
        r"SerializeError: Failed serializing node \w+ in graph: .*AssertionError: "
        r"(kernel caches not found for kernel \w+|triton required to serialize triton kernels)",
        _calling("triton_kernel_wrapper_functional"),
    ),
    Rejection(
        "a graph that blocks and the body call is stored with the first block, where the body does not look",
        r"AttributeError: 'Module' object has no attribute '[\w.]+\.repeated_subgraph\d+'",
        _calling("invoke_subgraph"),
    ),
    Rejection(
        "assertions on sizes with a condition in them have no code",
        r"AttributeError: type object 'PythonReferenceAnalysis' has no attribute 'expr_cond_pair'",
        _calling("sym_ite"),
        before="2.12",
    ),
    Rejection(
        "a slice beyond the end of a static dimension is asserted not to be one",
        r"\w*Error: Runtime assertion failed for expression u\d+ <= ",
        _calling("slice"),
    ),
    Rejection(
        "masked_select is asserted to select no more elements than its tensor has before it is broadcast",
        r"\w*Error: Runtime assertion failed for expression u\d+ <= ",
        _selects_by_wider_masks,
    ),
)
_WITHOUT_USER_KERNELS = frozenset({"user_triton"})
"""On a CPU torch cannot read Triton kernels: it assumes that they write all operands, arguments of blocks too."""

TRANSFORMS: dict[str, Transform] = {
    transform.name: transform
    for transform in (
        Transform("eliminate_dead_code", _eliminated, UNUSED, flat=True),
        Transform("deepcopy", lambda module, _inputs: copy.deepcopy(module), rejections=(COPIED_SHAPE_ENV,)),
        Transform("recompile", _recompiled),
        Transform("rename", _renamed),
        Transform("node_copy", _copied_nodes),
        Transform("stable_topological_sort", _sorted),
        Transform("split_module", lambda module, _inputs: _parts(module), rejections=(RETURNED_CONSTANT,), flat=True),
        Transform("inline", _inlined, UNUSED, (UNKNOWN_BLOCK, RETURNED_CONSTANT), flat=True),
        Transform("ShapeProp", _shape_propagated),
        Transform("replace_pattern", _replaced, UNUSED, forms=_FUNCTIONAL_ONLY, flat=True, single_stream=True),
        Transform("make_fx", _traced, SYMBOLS, _TRACED, specialises=True),
        Transform(
            "make_fx_symbolic",
            _traced_with_symbols,
            CALLS,
            (*_TRACED, COND_OF_SYMBOLS, WHILE_OF_SYMBOLS, *MERGED_STRIDES),
            specialises=True,
        ),
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
            restrides=_has_strides_of_torch,
        ),
        Transform("export", _exported, CALLS, _EXPORTED, weight=0.3, specialises=True),
        Transform("fx_graph_cse", _cse, CALLS, forms=_FUNCTIONAL_ONLY, flat=True, single_stream=True, weight=0.5),
    )
}

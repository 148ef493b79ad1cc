"""What can be lowered: an FX graph or an exported program, in one form."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node

from fxwrap.errors import GraphError
from fxwrap.lowering.attention import change_masks, masks_to_change
from fxwrap.lowering.decompositions import decompose, exported_table
from fxwrap.lowering.effects import submodules
from fxwrap.lowering.stream_calls import unwrapped
from fxwrap.lowering.write_back import without_tokens, write_back
from fxwrap.options import Options
from fxwrap.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    apart_from_pending_symbols,
    is_desugared,
    shape_env_in,
)
from fxwrap.wrapper_ir import Source

_TORCH = str(Path(torch.__file__).parent)

SYMBOLIC_BUILTINS: frozenset[Any] = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
        operator.neg, operator.pos, operator.abs, operator.lshift, operator.rshift,
        operator.and_, operator.or_, operator.xor, operator.not_,
        operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        torch.sym_float, torch.sym_int, torch.sym_ite, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_sum,
        torch.sym_sqrt, round, max, min, abs, int, float, bool, pow, divmod,
    }
)  # fmt: skip
"""Python functions that a graph may call on symbolic numbers; their result is an expression, not a line."""


@dataclass(frozen=True)
class GraphSource:
    """A graph with what its placeholders and outputs stand for.

    `constants` maps placeholder names to tensors of the program's own (the others are inputs, in order);
    `gives_written` says that what is copied into an input or constant at last may be given back as that itself.
    `replaced` are calls of the graph as it was given that others stand for: whether each is "view" or "fused" with one.
    """

    graph_module: GraphModule
    name: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gives_written: bool = False
    replaced: Mapping[Node, str] = field(default_factory=dict)

    @property
    def output(self) -> Node:
        """The graph's output node."""
        found: Node = self.graph_module.graph.find_nodes(op="output")[0]
        return found


def graph_source(
    graph: GraphModule | ExportedProgram, example_inputs: Sequence[Any] | None, options: Options, name: str
) -> GraphSource:
    """Returns the source for a graph, decomposed by the options' table; the graph itself is left as it is.

    Raises GraphError for a graph with nodes fxwrap does not take.
    """
    if isinstance(graph, ExportedProgram):
        placeholders = graph.graph.find_nodes(op="placeholder")
        shape_env = shape_env_in([node.meta.get("val") for node in placeholders])
        with warnings.catch_warnings(), apart_from_pending_symbols(shape_env):
            warnings.simplefilter("ignore", FutureWarning)  # torch's own copy of its own tree specification warns
            decomposed = _with_plain_attention(graph, options).run_decompositions(exported_table(options))
        return _exported_source(decomposed, name)
    check_graph(graph)
    return GraphSource(decompose(unwrapped(graph), example_inputs, options), name)


def _with_plain_attention(exported: ExportedProgram, options: Options) -> ExportedProgram:
    """Returns a program with masks changed as `attention` says; itself where there are none to change."""
    if not masks_to_change(exported.graph, options):
        return exported
    copy: ExportedProgram = exported.run_decompositions({})
    change_masks(masks_to_change(copy.graph, options), options)
    return copy


def _exported_source(exported: ExportedProgram, name: str) -> GraphSource:
    constants: dict[str, torch.Tensor] = {}
    signature = exported.graph_signature
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            stored = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            constants[spec.arg.name] = stored
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = exported.constants[spec.target]
    by_target = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target is not None}
    check_graph(exported.graph_module)
    taken = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.TOKEN]
    given = [place for place, spec in enumerate(signature.output_specs) if spec.kind is OutputKind.TOKEN]
    left = without_tokens(exported.graph_module, taken, given)
    mutations: dict[int, str] = {}
    for position, output in enumerate([signature.output_specs[place] for place in left]):
        if output.kind is OutputKind.BUFFER_MUTATION:
            mutations[position] = by_target[output.target]
        elif output.kind is OutputKind.USER_INPUT_MUTATION:
            mutations[position] = str(output.target)
    write_back(exported.graph_module, mutations, constants)
    return GraphSource(exported.graph_module, name, constants, gives_written=True)


def location_of(node: Node) -> str:
    """Returns "file:line" of the model's source that made a node, or ""."""
    return source_of(node).location


def source_of(node: Node) -> Source:
    """Returns what a node's metadata says of it and of the model's source; in a backward, that of its forward."""
    file, line = _place(node.meta.get("stack_trace") or "")
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = str(next(reversed(stack.values()))[0]) if stack else ""
    made_from = node.meta.get("from_node") or ()
    return Source(
        node.name,
        str(node.target).removesuffix(".default"),
        file,
        line,
        _DYNAMO_ROOT.sub("", module),
        str(made_from[0].name) if made_from else "",
    )


_DYNAMO_ROOT = re.compile(r"^L\['\w+'\]\.?")
"""How Dynamo writes the local variable that holds the model, in the paths of modules."""


def _place(trace: str) -> tuple[str, int]:
    """Returns file and line of a stack trace's innermost frame outside torch; of the innermost where there is none."""
    innermost, end = ("", 0), len(trace)
    while (start := trace.rfind('File "', 0, end)) >= 0:
        path, _, rest = trace[start + 6 : end].partition('", line ')
        number = rest.split(",", 1)[0].split("\n", 1)[0]
        place = (path, int(number) if number.isdigit() else 0)
        if not path.startswith(_TORCH):
            return place
        innermost, end = innermost if innermost[0] else place, start
    return innermost


def check_graph(graph_module: GraphModule) -> None:
    """Raises GraphError for a node that fxwrap does not take, naming it, its place and the remedy."""
    ended: Node | None = None
    for node in graph_module.graph.nodes:
        if ended is not None:
            raise _error(node, f"it comes after the output node '{ended.name}'", "End the graph with its output")
        if node.op == "output":
            ended = node
        elif node.op in ("call_module", "call_method"):
            raise _error(
                node,
                f"{node.op} of '{node.target}' is not an ATen operator",
                "Trace the module with torch.export or make_fx first",
            )
        elif node.op == "call_function":
            _check_call(node)
            for nested in submodules(node):
                check_graph(nested)
    if ended is None:
        raise GraphError("", "the graph has no output node", "End it with graph.output(...)")


def _check_call(node: Node) -> None:
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    if isinstance(target, OpOverload) or target is operator.getitem:
        return
    if isinstance(target, HigherOrderOperator):
        return  # one without a lowering is refused there
    if target in SYMBOLIC_BUILTINS or getattr(target, "__module__", "") == "math":
        return  # on numbers; one that gives a tensor is refused when it is lowered
    raise _error(
        node,
        f"'{getattr(target, '__name__', target)}' is not an operator overload with a schema",
        "Call an overload such as torch.ops.aten.add.Tensor, or trace the graph with make_fx",
    )


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))


def check_desugared(name: str, value: Any) -> None:
    """Raises GraphError for a tensor subclass that torch has not desugared into plain tensors."""
    if isinstance(value, torch.Tensor) and not is_desugared(value):
        raise GraphError(
            name,
            f"it is the tensor subclass {type(value).__name__}",
            "Compile through torch.compile, which takes subclasses apart, or pass plain tensors",
        )

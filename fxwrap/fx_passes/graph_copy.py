"""Editing of graphs: a copy of a prepared graph to which a pass adds calls, and calls on fake values."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.fx_passes.effects import attribute_of, is_movable
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph, Target
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    OpOverload,
    fake_like,
    fake_tensor,
    in_dispatched_fake_mode,
    in_fake_mode,
    is_view_operator,
    rename_unbacked,
    storage_identity,
    symbol_expression,
    symbol_hint,
    tree_map,
    without_library_guards,
)
from fxwrap.wrapper_ir import contiguous_strides


def items_of(fake: object) -> Sequence[Any]:
    """Returns the elements of a fake value that is a tuple, list or dict; a single value is its only element."""
    return fake if isinstance(fake, tuple | list) else tuple(fake.values()) if isinstance(fake, dict) else (fake,)


def storages_of(fake: object) -> set[int]:
    """Returns the identities of the storages of a fake value's strided tensors."""
    tensors = [item for item in items_of(fake) if isinstance(item, torch.Tensor)]
    return {storage_identity(item) for item in tensors if item.layout is torch.strided}


def expression_of(number: int | torch.SymInt) -> int | sympy.Expr:
    """Returns a size or stride as an int or an expression. Installs no guard."""
    return number if isinstance(number, int) else symbol_expression(number)


def expressions_of(numbers: Iterable[int | torch.SymInt]) -> list[int | sympy.Expr]:
    """Returns sizes or strides as ints and expressions, whose comparison installs no guard."""
    return [expression_of(number) for number in numbers]


def same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the strides of two tensors are equal expressions."""
    return expressions_of(one.stride()) == expressions_of(other.stride())


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the sizes and strides of two tensors are equal expressions."""
    return expressions_of(one.shape) == expressions_of(other.shape) and same_strides(one, other)


def is_sum(node: Node, fakes: NodeValues) -> bool:
    """Whether a node adds two tensors of its own dtype, sizes and strides, which may be one tensor."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or not all(isinstance(x, Node) for x in node.args):
        return False
    result, terms = fakes.get(node), [fakes.get(item) for item in node.all_input_nodes]
    return isinstance(result, torch.Tensor) and all(
        isinstance(item, torch.Tensor) and item.dtype == result.dtype and same_layout(item, result) for item in terms
    )


def is_dense(fake: torch.Tensor) -> bool:
    """Whether a tensor is known to fill its memory without gaps or overlaps."""
    sizes, strides = expressions_of(fake.shape), expressions_of(fake.stride())
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    step = 1
    while dims:
        inner = next((dim for dim in dims if dim[1] == step), None)
        if inner is None:
            return False
        dims.remove(inner)
        step = inner[0] * step
    return True


def is_contiguous(fake: torch.Tensor) -> bool:
    """Whether the strides of a tensor are contiguous as expressions. Installs no guard."""
    return list(contiguous_strides(tuple(expressions_of(fake.shape)))) == expressions_of(fake.stride())


def has_static_strides(fake: object) -> bool:
    """Whether a value is a tensor whose strides contain no symbols."""
    return isinstance(fake, torch.Tensor) and all(type(stride) is int for stride in fake.stride())


def size_hint(number: int | torch.SymInt) -> int:
    """Returns a size or stride; for a symbolic one its hint, or 1 if it has none."""
    return number if type(number) is int else int(symbol_hint(number) or 1)  # type: ignore[arg-type]


def bytes_of(fake: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements; symbolic sizes count as their hints."""
    count: int = fake.dtype.itemsize
    for size in fake.shape:
        count *= size_hint(size)
    return count


def fake_call(
    target: Target, arguments: Sequence[object], keywords: Mapping[str, object] | None = None, like: object = None
) -> Any:
    """Returns the fake result of a call; `like` has the fake mode if no argument is a fake tensor."""
    keywords = keywords or {}
    mode = fake_mode_of((*arguments, *keywords.values(), like))
    # Fake implementations call composite operators, which take symbolic sizes in torch's Python dispatcher only.
    is_symbolic = mode is not None and any(map(_has_symbols, (*arguments, *keywords.values())))
    scope = in_dispatched_fake_mode if is_symbolic else in_fake_mode
    with scope(mode), without_library_guards(mode, target):
        return target(*arguments, **keywords)


def _has_symbols(value: object) -> bool:
    """Whether an argument is a symbolic number, or a tensor of symbolic sizes or strides, or has such items."""
    if isinstance(value, FakeTensor):
        strides = (*value.stride(), value.storage_offset()) if value.layout is torch.strided else ()
        return not all(type(number) is int for number in (*value.shape, *strides))
    return isinstance(value, torch.SymInt) or (isinstance(value, tuple | list) and any(map(_has_symbols, value)))


def fake_mode_of(values: Sequence[object]) -> FakeTensorMode | None:
    """Returns the mode of the first fake tensor among values and their items; None if there is none."""
    items = [item for value in values for item in items_of(value)]
    return next((item.fake_mode for item in items if isinstance(item, FakeTensor)), None)


def run_on_fakes(node: Node, fakes: NodeValues, like: object = None) -> Any:
    """Returns the fake result of a call of an operator or of `getitem`, from fake values of its operands.

    Unbacked symbols that the call defines have the names that the node's metadata binds.
    """
    arguments: Any
    arguments, keywords = map_arg((node.args, node.kwargs), fakes.__getitem__)
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    result = None if keywords else _static_view(node.target, arguments)
    if result is not None:
        return result
    result = fake_call(node.target, arguments, keywords, like)
    rename_unbacked(node, result)
    return result


def _static_view(target: Target, arguments: Sequence[Any]) -> FakeTensor | None:
    """Returns the view of a fake tensor of static layout, which C++ computes; None for other calls.

    A call on fakes runs torch's references in Python, which takes tens of times as long.
    """
    if not (isinstance(target, OpOverload) and is_view_operator(target)):
        return None
    base, *numbers = arguments
    if layout_text(base) is None or base.is_neg() or base.is_complex():
        return None
    if any(not isinstance(item, int | None) for number in numbers for item in items_of(number)):
        return None
    meta = torch.empty(0, dtype=base.dtype, device="meta")
    meta.set_(base.untyped_storage(), base.storage_offset(), base.shape, base.stride())
    try:
        return fake_tensor(base.fake_mode, target(meta, *numbers), base.device)
    except (RuntimeError, IndexError):  # fake tensors raise the error, with its usual text
        return None


def fresh_like(mode: FakeTensorMode, item: object, strides: tuple[int, ...] | None = None) -> Any:
    """Returns a tensor like a fake one on a new storage, with other strides if some are named; other objects as is."""
    if not isinstance(item, FakeTensor):
        return item
    if strides is None and item.fake_mode is mode:
        return fake_like(item)
    meta = torch.empty_strided(item.shape, strides or item.stride(), dtype=item.dtype, device="meta")
    return fake_tensor(mode, meta, item.device)


def rebased(view: object, base: object, new_base: object) -> FakeTensor | None:
    """Returns a view of `base` as a view of another tensor of the same layout; None if no view follows from that.

    A call on fakes with symbolic sizes takes tens of times as long.
    """
    if not (isinstance(view, FakeTensor) and isinstance(base, FakeTensor) and isinstance(new_base, FakeTensor)):
        return None
    if view.dtype != new_base.dtype or base.dtype != new_base.dtype or view.device != new_base.device:
        return None
    if any(item.layout is not torch.strided or item.is_neg() or item.is_conj() for item in (view, base, new_base)):
        return None
    offsets = expressions_of([base.storage_offset(), new_base.storage_offset()])
    if not same_layout(base, new_base) or offsets[0] != offsets[1]:
        return None
    return fake_like(view, new_base.untyped_storage())


def call_text(node: Node, fakes: NodeValues) -> str | None:
    """Returns the operator, arguments and layouts of operands of a call as a text; None for other operands."""
    texts = {operand: _operand_text(fakes[operand]) for operand in node.all_input_nodes}
    if None in texts.values():
        return None
    return f"{node.target} {map_arg((node.args, node.kwargs), texts.__getitem__)}"


def _operand_text(fake: object) -> str | None:
    """Returns the layout of a tensor or the expression of a symbolic integer as a text; None for other values."""
    if isinstance(fake, torch.SymInt):
        return f"<{symbol_expression(fake)}>"
    if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided:
        return None
    numbers = [expressions_of(item) for item in (fake.shape, fake.stride(), (fake.storage_offset(),))]
    return f"<{fake.dtype} {fake.device} {numbers}>"


def layout_text(fake: object) -> str | None:
    """Returns the dtype, device, sizes and strides of a tensor as a text; None for symbolic ones and other values."""
    return None if not isinstance(fake, FakeTensor) or _has_symbols(fake) else _operand_text(fake)


def can_propagate_fake(node: Node) -> bool:
    """Whether `run_on_fakes` supports a node."""
    return isinstance(node.target, OpOverload) or node.target is operator.getitem


class CallResults:
    """Fake results of calls: those of calls with equal operators, arguments and layouts of operands are inferred once.

    Models repeat their layers, and a new fake tensor of known layout takes a tenth of the time of a call on fakes.
    """

    def __init__(self) -> None:
        self._known: dict[str, _CallResult] = {}

    def run(self, node: Node, fakes: NodeValues, like: object = None) -> Any:
        """Returns the fake result of a call, as `run_on_fakes` does."""
        text = call_text(node, fakes)
        if text is None:
            return run_on_fakes(node, fakes, like)
        operands = [fakes[operand] for operand in node.all_input_nodes]
        known = self._known.get(text)
        result = None if known is None else known.of(operands)
        if result is None:
            result = run_on_fakes(node, fakes, like)
            if _symbols_in(result) <= _symbols_in((operands, node.args, node.kwargs)):  # else they are its own
                self._known[text] = _CallResult(result, operands, _mode_of_new_tensors(result, operands))
        return result


@dataclass(frozen=True)
class _CallResult:
    """The fake result of a call with some operands; `mode` is its mode if it consists of new tensors."""

    result: Any
    operands: Sequence[Any]
    mode: FakeTensorMode | None

    def of(self, operands: Sequence[Any]) -> Any:
        """Returns the result for operands of the same layouts: new tensors or a view; None where it is neither."""
        if self.mode is not None:
            return tree_map(partial(fresh_like, self.mode), self.result)
        own = storages_of(self.result)
        bases = [position for position, operand in enumerate(self.operands) if storages_of(operand) & own]
        return rebased(self.result, self.operands[bases[0]], operands[bases[0]]) if len(bases) == 1 else None


def _symbols_in(value: object) -> set[sympy.Basic]:
    """Returns the symbols of symbolic numbers and of layouts of fake tensors in nested values."""
    if isinstance(value, torch.SymInt):
        return set(symbol_expression(value).free_symbols)
    if isinstance(value, FakeTensor) and value.layout is torch.strided:
        value = (*value.shape, *value.stride(), value.storage_offset())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return {symbol for item in items for symbol in _symbols_in(item)}


def _mode_of_new_tensors(result: object, operands: Sequence[Any]) -> FakeTensorMode | None:
    """Returns the mode of a result that consists of strided tensors, each on a storage of its own."""
    tensors = [item for item in items_of(result) if isinstance(item, torch.Tensor)]
    storages = [storage_identity(item) for item in tensors]
    read = {storage for operand in operands for storage in storages_of(operand)}
    are_new = (
        all(_operand_text(item) is not None and expression_of(item.storage_offset()) == 0 for item in tensors)
        and len(set(storages)) == len(storages)
        and read.isdisjoint(storages)
    )
    return fake_mode_of(operands) if are_new else None


class GraphCopy:
    """A copy of a graph, edited by one pass.

    `node_map` maps each node of the original graph to its current replacement; `fakes` holds the fake values of the
    copy's nodes.
    """

    def __init__(self, source: PreparedGraph) -> None:
        self._source = source
        self._replaced: dict[Node, Node] = {}
        self._retargeted: set[Node] = set()
        self._coverage_kind: dict[Node, str] = {}
        self._output_clones: list[tuple[Node, str]] = []
        self._attributes: dict[str, object] = {}
        self.graph = Graph()
        self.node_map: dict[Node, Node] = {}
        self.fakes: dict[Node, Any] = {}
        self._results = CallResults()
        # The fake mode of calls that create tensors before a node without a tensor, such as the output.
        fakes = (item for fake in source.fakes.values() for item in items_of(fake))
        self._fake = next((item for item in fakes if isinstance(item, FakeTensor)), None)
        for node in source.nodes:
            copy = self.node_map[node] = self.graph.node_copy(node, self.node_map.__getitem__)
            if node in source.fakes:
                self.fakes[copy] = source.fakes[node]

    def call(
        self,
        before: Node,
        target: Target,
        arguments: Sequence[Any],
        name: str,
        keywords: Mapping[str, Any] | None = None,
        fake: object = None,
        origin: Node | None = None,
    ) -> Node:
        """Inserts a call before a node of the copy, with the metadata of `origin`, by default of that node.

        Infers the fake value if it is None.
        """
        with self.graph.inserting_before(before), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Raw SymInt")  # lowering reads sizes that are symbols, not nodes
            call = self.graph.create_node("call_function", target, tuple(arguments), dict(keywords or {}), name)
        if fake is None:
            fake = self._results.run(call, self.fakes, (*items_of(self.fakes.get(before)), self._fake))
        call.meta = {**(origin or before).meta, "val": fake}
        call.meta.pop("unbacked_bindings", None)
        self.fakes[call] = fake
        return call

    def element(self, before: Node, call: Node, position: int, name: str, origin: Node | None = None) -> Node:
        """Inserts a read of one of the results of a call of the copy, as `call` does."""
        fake = self.fakes[call][position]
        return self.call(before, operator.getitem, (call, position), name, fake=fake, origin=origin)

    def hoist(self, nodes: Iterable[Node], before: Node, written: Collection[int]) -> bool:
        """Moves nodes of the copy, and what they are computed from, before another node; returns whether it can.

        Calls that are random, have effects or depend on that node stay, and those of memory that the graph writes.
        """
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        later = [node for node in nodes if order[node] >= order[before]]
        for node in later:
            later += [item for item in node.all_input_nodes if order[item] >= order[before] and item not in later]
        if before in later or not all(
            is_movable(node) and not storages_of(self.fakes.get(node)) & {*written} for node in later
        ):
            return False
        for node in sorted(later, key=order.__getitem__):
            before.prepend(node)
        return True

    def size_arguments(self, before: Node, sizes: Iterable[int | torch.SymInt]) -> list[Any]:
        """Returns sizes as arguments of a call before a node: symbolic ones as the node that has their value, if any.

        torch's partitioner sees no use of a symbol in an argument that is no node.
        """
        arguments: list[Any] = list(sizes)
        missing = {expression_of(size): size for size in arguments if type(size) is not int}
        nodes: dict[Any, Node] = {}
        for node in self.graph.nodes if missing else ():
            if node is before:
                break
            fake = self.fakes.get(node)
            if isinstance(fake, torch.SymInt) and expression_of(fake) in missing:
                nodes.setdefault(expression_of(fake), node)
        return [size if type(size) is int else nodes.get(expression_of(size), size) for size in arguments]

    def inline(self, before: Node, module: GraphModule, operands: Sequence[object], name: str, prefix: str) -> Any:
        """Inserts the calls of a graph before a node of the copy, and returns its results.

        Fake values are inferred from the operands. The graph's attributes become attributes of the copy, named after
        `prefix`.
        """
        remaining = iter(operands)
        values: dict[Node, Any] = {}
        for node in module.graph.nodes:
            arguments: Any
            arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
            match node.op:
                case "placeholder":
                    values[node] = next(remaining)
                case "get_attr":
                    values[node] = self.attribute(before, f"{prefix}_{node.target}", attribute_of(node))
                case "output":
                    return arguments[0]
                case _:
                    values[node] = self.call(before, node.target, arguments, name, keywords)
        raise AssertionError("a graph ends with its output")

    def attribute(self, before: Node, name: str, payload: object) -> Node:
        """Inserts a `get_attr` of a new attribute before a node of the copy; equal names have one payload."""
        name = name.replace(".", "_")
        self._attributes[name] = payload
        with self.graph.inserting_before(before):
            attribute = self.graph.create_node("get_attr", name)
        mode = fake_mode_of((self.fakes[before],))
        if isinstance(payload, torch.Tensor) and not isinstance(payload, FakeTensor) and mode is not None:
            payload = mode.from_tensor(payload, static_shapes=True)
        self.fakes[attribute] = attribute.meta["val"] = payload
        return attribute

    def substitute(
        self, node: Node, replacement: Node, coverage_kind: str = "view", erased: Sequence[Node] = ()
    ) -> None:
        """Replaces all uses of a node, and erases it with the nodes `erased`, which have no other uses.

        `coverage_kind` is their coverage: "view" of another call's result, or "fused" with one.
        """
        self._coverage_kind |= dict.fromkeys((node, *erased), coverage_kind)
        self.node_map[node].replace_all_uses_with(replacement)
        self._replaced |= {item: self.node_map[item] for item in (node, *erased)}
        self.node_map[node] = replacement

    def erase(self, node: Node) -> None:
        """Erases a node without users."""
        self._replaced[node] = self.node_map[node]

    def retarget(self, node: Node, target: Target, fake: object) -> None:
        """Makes a node's copy a call of another operator with the same arguments, whose result is `fake`."""
        call = self.node_map[node]
        call.target, call.meta["val"], self.fakes[call] = target, fake, fake
        self._retargeted.add(node)

    def clone_output(self, node: Node, name: str) -> None:
        """Makes the graph return a contiguous clone of a node's tensor."""
        self._output_clones.append((node, name))

    def finish(self) -> PreparedGraph:
        """Returns the edited graph. Recomputes the fake values of views of replaced nodes."""
        nodes, fakes = self._source.nodes, self._source.fakes
        moved = {*self._replaced, *self._retargeted}
        for node in nodes:
            bases = [operand for operand in node.all_input_nodes
                     if operand in moved and storages_of(fakes[operand]) & storages_of(fakes.get(node))]  # fmt: skip
            if bases and node not in moved and can_propagate_fake(node):
                moved.add(node)
                view, base = self.node_map[node], bases[0]
                fake = rebased(fakes[node], fakes[base], self.fakes[self.node_map[base]])
                self.fakes[view] = view.meta["val"] = self._results.run(view, self.fakes) if fake is None else fake
        output = self.graph.output_node()
        for node, name in self._output_clones:
            returned = self.node_map[node]
            keywords: dict[str, Any] = {"memory_format": torch.contiguous_format}
            with self.graph.inserting_before(output):
                clone = self.graph.create_node("call_function", _CLONE, (returned,), keywords, name)
            self.fakes[clone] = self._results.run(clone, self.fakes)
            clone.meta = {**returned.meta, "val": self.fakes[clone]}
            output.replace_input_with(returned, clone)
        positions = {node: position for position, node in enumerate(nodes)}
        for node in sorted(self._replaced, key=positions.__getitem__, reverse=True):
            self.fakes.pop(self._replaced[node], None)
            self.graph.erase_node(self._replaced[node])
        module = LazyGraphModule(self._root(), self.graph)
        replaced = {**self._source.replaced, **self._coverage_kind}
        return replace(self._source, graph_module=module, replaced=replaced, fakes=self.fakes)

    def _root(self) -> GraphModule | dict[str, object]:
        """Returns the owner of the attributes that the copy reads."""
        if not self._attributes:
            return self._source.graph_module
        attributes = [node for node in self._source.nodes if node.op == "get_attr"]
        return {str(node.target): attribute_of(node) for node in attributes} | self._attributes


_CLONE: Callable[..., object] = torch.ops.aten.clone.default

"""Products of matrices: what an activation or a bias, several of one tensor, and a single term between them become.

A library that adds a bias and applies an activation while a product is still in registers saves a kernel that would
read and write all of it. Several products of one tensor with small matrices (queries, keys and values) are bound by
what each call costs besides its arithmetic, so one product with the matrices side by side is faster, although they must
be copied for it. Where a library is slow with a bias, what reads the product adds it. `DeviceSpec` says of each device
type where that is so. A product over one term is a multiplication, which fuses with what reads it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.device_spec import ROW_ALIGNMENT, DeviceSpec
from fxwrap.lowering.graph_copy import GraphCopy, bytes_of, call_on_fakes, same_layout
from fxwrap.lowering.rules import RULES
from fxwrap.lowering.source import GraphSource
from fxwrap.lowering.storage_views import StorageViews, same_layouts
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten

_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_FORMULA: Mapping[Any, Callable[..., float]] = {
    _aten.add.Tensor: operator.add,
    _aten.add.Scalar: operator.add,
    _aten.sub.Tensor: operator.sub,
    _aten.mul.Tensor: operator.mul,
    _aten.mul.Scalar: operator.mul,
    _aten.pow.Tensor_Scalar: operator.pow,
    _aten.tanh.default: math.tanh,
    _aten.clone.default: float,
    _aten._to_copy.default: float,
}
"""What formulas of an activation by its hyperbolic tangent are made of."""
_LONGEST_FORMULA = 16


def with_products(
    source: GraphSource, fakes: dict[Node, Any], options: Options
) -> tuple[GraphSource, dict[Node, Any]]:
    """Returns a graph whose products of matrices do more at a time, where that pays, and fake values of its nodes.

    The graph itself is not changed; it is given back where there is nothing to do. Calls that the options name in
    `keep` or `lowerings` stay as they are.
    """
    if not options.fuse:
        return source, fakes
    for change in (_outer, _activated, _joined, _unbiased):
        copy = change(source, fakes, options)
        if copy is not None:
            source, fakes = copy.finished()
    return source, fakes


@dataclass(frozen=True)
class _Product:
    """A product of two matrices, `bias` added to each row if there is one."""

    node: Node
    left: Node
    right: Node
    bias: Node | None


def _product(node: Node, fakes: Mapping[Node, Any], options: Options) -> _Product | None:
    """Returns what a node multiplies, if it is a plain product of matrices, its bias a vector."""
    if str(node.target) in options.keep or str(node.target) in options.lowerings:
        return None
    match node.target, node.args, node.kwargs:
        case _aten.mm.default, (Node() as left, Node() as right), _ if not node.kwargs:
            return _Product(node, left, right, None)
        case _aten.addmm.default, (Node() as bias, Node() as left, Node() as right), _ if not node.kwargs:
            found = fakes.get(bias)
            return _Product(node, left, right, bias) if isinstance(found, FakeTensor) and found.ndim == 1 else None
        case _:
            return None


# --- outer products ---------------------------------------------------------------------------------------------------


def _outer(source: GraphSource, fakes: Mapping[Node, Any], options: Options) -> GraphCopy | None:
    """Returns a copy of the graph in which products over one term are multiplications, which fuse, or None."""
    found = [node for node in source.graph_module.graph.nodes if _is_outer(node, fakes, options)]
    if not found:
        return None
    copy = GraphCopy(source, fakes)
    for node in found:
        made = copy.made_of[node]
        copy.substitute(node, copy.call(made, _aten.mul.Tensor, made.args, {}, f"{node.name}_outer"), "fused")
    return copy


def _is_outer(node: Node, fakes: Mapping[Node, Any], options: Options) -> bool:
    """Whether a node multiplies a column by a row, or several by several."""
    if node.target not in (_aten.mm.default, _aten.bmm.default) or not {"aten.mul.Tensor", str(node.target)}.isdisjoint(
        {*options.keep, *options.lowerings}
    ):
        return False
    left, right = [fakes.get(operand) if isinstance(operand, Node) else None for operand in node.args[:2]]
    result = fakes.get(node)
    if node.kwargs or not all(isinstance(item, FakeTensor) for item in (left, right, result)):
        return False
    return is_outer_product(left, right, result)  # type: ignore[arg-type]


def is_outer_product(left: FakeTensor, right: FakeTensor, result: FakeTensor) -> bool:
    """Whether a product of matrices is that of columns and rows, and a multiplication gives the same tensor."""
    if type(left.shape[-1]) is not int or left.shape[-1] != 1:
        return False
    made = call_on_fakes(_aten.mul.Tensor, (left, right), {})
    return made.dtype == result.dtype and same_layouts(made, result)


# --- activations ----------------------------------------------------------------------------------------------------


def _activated(source: GraphSource, fakes: Mapping[Node, Any], options: Options) -> GraphCopy | None:
    """Returns a copy of the graph in which products with an activation behind them are one call, or None."""
    specs = options.device_specs()
    nodes = source.graph_module.graph.nodes
    found = [
        activation for node in nodes
        if (product := _product(node, fakes, options)) is not None and _may_activate(product, fakes, specs)
        and (activation := _activation(product, fakes, options)) is not None
    ]  # fmt: skip
    if not found:
        return None
    copy = GraphCopy(source, fakes)
    zeros: dict[tuple[Any, ...], Node] = {}
    for activation in found:
        _activate(copy, activation, zeros)
    return copy


def _may_activate(product: _Product, fakes: Mapping[Node, Any], specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a library activates a product before it rounds it: where rows are aligned, as its fast kernels need."""
    fake = fakes.get(product.node)
    spec = specs.get(fake.device.type) if isinstance(fake, FakeTensor) else None
    if fake is None or spec is None or fake.dtype not in spec.activated_products:
        return False
    lengths = (fake.shape[1], fakes[product.left].shape[1])
    return all(type(length) is int and length * fake.dtype.itemsize % ROW_ALIGNMENT == 0 for length in lengths)


@dataclass(frozen=True)
class _Activation:
    """What is computed of a product alone: `shown`, the product or a view of it, goes in, and `end` comes out."""

    product: _Product
    shown: Node
    inside: tuple[Node, ...]
    is_gelu: bool

    @property
    def end(self) -> Node:
        """The node that gives the activation's result."""
        return self.inside[-1]


def _activation(product: _Product, fakes: Mapping[Node, Any], options: Options) -> _Activation | None:
    """Returns the activation that is all that reads a product, if a library has it."""
    shown = product.node
    while len(shown.users) == 1 and (user := next(iter(shown.users))).target in _VIEWS:
        shown = user
    inside = _closed_formula(shown, options)
    if inside is None:
        return None
    fake, result = fakes[shown], fakes.get(inside[-1])
    if not isinstance(result, FakeTensor) or result.dtype != fake.dtype or not same_layout(result, fake):
        return None
    if inside[0].target == _aten.relu.default:
        return _Activation(product, shown, inside, is_gelu=False)
    if _is_gelu(shown, inside):
        return _Activation(product, shown, inside, is_gelu=True)
    return None


def _closed_formula(shown: Node, options: Options) -> tuple[Node, ...] | None:
    """Returns the nodes that compute an activation of one tensor, in order; only the last is read by others."""
    users = list(shown.users)
    if len(users) == 1 and users[0].target in (_aten.relu.default, _aten.gelu.default):
        return None if str(users[0].target) in options.keep else (users[0],)
    reached: dict[Node, None] = {}
    pending = users
    while pending and len(reached) <= _LONGEST_FORMULA:
        node = pending.pop(0)
        if node in reached or node.target not in _FORMULA or str(node.target) in options.keep:
            continue
        if all(operand is shown or operand in reached for operand in node.all_input_nodes):
            reached[node] = None
            pending += node.users
    for end in reached:
        inside = _inside(end, reached)
        read_inside = all(user in inside for node in (shown, *inside) if node is not end for user in node.users)
        if read_inside and any(node.target == _aten.tanh.default for node in inside):
            return tuple([node for node in reached if node in inside])
    return None


def _inside(end: Node, reached: Collection[Node]) -> set[Node]:
    """Returns the nodes among those reached that one is computed from, itself included."""
    found, pending = {end}, [end]
    while pending:
        new = [node for node in pending.pop().all_input_nodes if node in reached and node not in found]
        found.update(new)
        pending += new
    return found


def _is_gelu(shown: Node, inside: Sequence[Node]) -> bool:
    """Whether nodes compute the form of GELU that has a hyperbolic tangent, in whichever way it is written.

    They are polynomials and one such tangent, which are compared with it at more places than they have terms.
    """
    if inside[0].target == _aten.gelu.default:
        return inside[0].kwargs.get("approximate") == "tanh"
    for place in range(-40, 41):
        x = place / 8
        known: dict[Node, float] = {shown: x}
        for node in inside:
            found = _value(node, known)
            if found is None:
                return False
            known[node] = found
        wanted = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if abs(known[inside[-1]] - wanted) > 1e-7 * max(1.0, abs(x)):
            return False
    return True


def _value(node: Node, known: Mapping[Node, float]) -> float | None:
    """Returns what an operator of a formula gives on numbers; None where the call says more than is known here."""
    operands: list[Any] = [known[item] if isinstance(item, Node) else item for item in node.args]
    if not all(isinstance(item, int | float) for item in operands):
        return None
    match node.target:
        case _aten._to_copy.default:
            dtype = node.kwargs.get("dtype")
            plain = set(node.kwargs) == {"dtype"} and isinstance(dtype, torch.dtype) and dtype.is_floating_point
            return float(operands[0]) if plain else None
        case _aten.clone.default:
            return float(operands[0])
        case _:
            return None if node.kwargs else _FORMULA[node.target](*operands)


def _activate(copy: GraphCopy, activation: _Activation, zeros: dict[tuple[Any, ...], Node]) -> None:
    """Puts one call in the place of a product and what is computed of it; `zeros` are biases that are made already."""
    product, end = activation.product, activation.end
    made = copy.made_of[product.node]
    fake = copy.fakes[made]
    if product.bias is None:
        key = (fake.shape[1], fake.dtype, fake.device)
        if key not in zeros:
            keywords = {"dtype": fake.dtype, "device": fake.device}
            zeros[key] = copy.call(made, _aten.full.default, ([fake.shape[1]], 0), keywords, "no_bias")
        bias = zeros[key]
    else:
        bias = copy.made_of[product.bias]
    operands = (bias, *[copy.made_of[node] for node in (product.left, product.right)])
    keywords = {"use_gelu": True} if activation.is_gelu else {}
    name = f"{product.node.name}_activated"
    found = copy.call(made, _aten._addmm_activation.default, operands, keywords, name)
    shown = found if activation.shown is product.node else copy.made_of[activation.shown]
    copy.substitute(end, shown, "fused", gone=[node for node in activation.inside if node is not end])
    copy.substitute(product.node, found, "fused")


# --- several products of one tensor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weight:
    """A matrix of the graph's own: `base` is an input or constant, which the product takes as it is or transposed."""

    base: Node
    transposed: bool


def _weight(product: _Product) -> _Weight | None:
    right = product.right
    if right.op in ("placeholder", "get_attr"):
        return _Weight(right, transposed=False)
    match right.target, right.args:
        case _aten.t.default, (Node(op="placeholder" | "get_attr") as base,):
            return _Weight(base, transposed=True)
        case _aten.permute.default, (Node(op="placeholder" | "get_attr") as base, [1, 0]):
            return _Weight(base, transposed=True)
        case _aten.transpose.int, (Node(op="placeholder" | "get_attr") as base, 0 | -2, 1 | -1):
            return _Weight(base, transposed=True)
        case _:
            return None


@dataclass(frozen=True)
class _Joinable:
    """A product that may be a part of a wider one: whatever reads it takes rows that lie further apart."""

    product: _Product
    weight: _Weight

    @property
    def group(self) -> tuple[Any, ...]:
        """What is equal for products that may be joined."""
        return (self.product.left, self.weight.transposed, self.product.bias is not None)


def _joined(source: GraphSource, fakes: Mapping[Node, Any], options: Options) -> GraphCopy | None:
    """Returns a copy of the graph in which small products of one tensor are one product, or None."""
    specs = options.device_specs()
    if not any(spec.joined_products for spec in specs.values()):
        return None
    nodes = list(source.graph_module.graph.nodes)
    views = StorageViews(nodes, fakes)
    groups: dict[tuple[Any, ...], list[_Joinable]] = {}
    for node in nodes:
        product = _product(node, fakes, options)
        weight = None if product is None else _weight(product)
        if product is None or weight is None or (product.bias is not None and product.bias.op == "call_function"):
            continue
        found = _Joinable(product, weight)
        groups.setdefault(found.group, []).append(found)
    chosen = []
    for group in groups.values():
        spec = specs.get(fakes[group[0].product.node].device.type)
        if spec is None or not spec.joined_products or len(group) < 2:
            continue
        members = [item for item in group if _is_static(item, fakes) and _may_be_slice(views, item.product.node)]
        if _pays(members, fakes, spec.joined_products):
            chosen.append(members)
    if not chosen:
        return None
    copy = GraphCopy(source, fakes)
    for members in chosen:
        _join(copy, members)
    return copy


def _is_static(item: _Joinable, fakes: Mapping[Node, Any]) -> bool:
    """Whether all sizes are numbers, and all of one dtype."""
    product, base = item.product, item.weight.base
    operands = [fakes.get(node) for node in (product.node, product.left, base, product.bias) if node is not None]
    return all(
        isinstance(fake, FakeTensor) and fake.dtype == operands[0].dtype  # type: ignore[union-attr]
        and all(type(size) is int for size in (*fake.shape, *fake.stride()))
        for fake in operands
    )  # fmt: skip


def _pays(members: Sequence[_Joinable], fakes: Mapping[Node, Any], worth: int) -> bool:
    """Whether the calls that are saved cost more than the matrices are to copy; biases are one more copy."""
    copied = sum(bytes_of(fakes[item.weight.base]) for item in members)
    biased = any(item.product.bias is not None for item in members)
    return len(members) > 1 and copied <= worth * (len(members) - 1 - biased)


def _may_be_slice(views: StorageViews, node: Node) -> bool:
    """Whether a product may be a slice of a wider one."""
    fake = views.fakes[node]
    if views.is_written(node) or views.is_given_back(node) or not fake.is_contiguous():
        return False
    rows, columns = fake.shape
    wide = call_on_fakes(_aten.new_empty.default, (fake, [rows, 2 * columns]), {})
    return views.may_lie_as(node, call_on_fakes(_aten.slice.Tensor, (wide, 1, 0, columns), {}))


def _join(copy: GraphCopy, members: Sequence[_Joinable]) -> None:
    """Puts one product before the first of several, and slices of it in their places."""
    first = members[0].product
    before = copy.made_of[first.node]
    along = 0 if members[0].weight.transposed else 1
    bases = [copy.made_of[item.weight.base] for item in members]
    name = f"{first.node.name}_joined"
    weight = copy.call(before, _aten.cat.default, (bases, along), {}, f"{name}_weight")
    right = copy.call(before, _aten.t.default, (weight,), {}, f"{name}_t") if along == 0 else weight
    operands = (copy.made_of[first.left], right)
    if first.bias is not None:
        biases = [copy.made_of[item.product.bias] for item in members if item.product.bias is not None]
        bias = copy.call(before, _aten.cat.default, (biases, 0), {}, f"{name}_bias")
        joined = copy.call(before, _aten.addmm.default, (bias, *operands), {}, name)
    else:
        joined = copy.call(before, _aten.mm.default, operands, {}, name)
    start = 0
    for item in members:
        node = item.product.node
        end = start + copy.fakes[copy.made_of[node]].shape[1]
        made = copy.call(before, _aten.slice.Tensor, (joined, 1, start, end), {}, f"{node.name}_part")
        copy.substitute(node, made)
        start = end


# --- biases -----------------------------------------------------------------------------------------------------------


def _unbiased(source: GraphSource, fakes: Mapping[Node, Any], options: Options) -> GraphCopy | None:
    """Returns a copy of the graph in which kernels that read products add their biases, or None."""
    specs = options.device_specs()
    if not any(spec.separate_biases for spec in specs.values()):
        return None
    nodes = list(source.graph_module.graph.nodes)
    found = [product for node in nodes if (product := _product(node, fakes, options)) is not None
             and _is_separate(product, fakes, specs)]  # fmt: skip
    if not found:
        return None
    views = StorageViews(nodes, fakes)
    chosen = [product for product in found if _is_read_by_kernels(product.node, views, options)]
    if not chosen:
        return None
    copy = GraphCopy(source, fakes)
    for product in chosen:
        made = copy.made_of[product.node]
        bias, *operands = made.args
        plain = copy.call(made, _aten.mm.default, tuple(operands), {}, f"{product.node.name}_plain")
        added = copy.call(made, _aten.add.Tensor, (plain, bias), {}, f"{product.node.name}_biased")
        copy.substitute(product.node, added, "fused")
    return copy


def _is_separate(product: _Product, fakes: Mapping[Node, Any], specs: Mapping[str, DeviceSpec]) -> bool:
    """Whether a library adds a bias to a product more slowly than a kernel that reads it."""
    fake = fakes.get(product.node)
    spec = specs.get(fake.device.type) if isinstance(fake, FakeTensor) else None
    separate = fake is not None and spec is not None and fake.dtype in spec.separate_biases
    return separate and product.bias is not None and fakes[product.bias].dtype == fake.dtype  # type: ignore[union-attr]


def _is_read_by_kernels(node: Node, views: StorageViews, options: Options) -> bool:
    """Whether kernels are all that reads a tensor."""
    if views.is_written(node) or views.is_given_back(node):
        return False
    called = {*options.keep, *options.lowerings}
    return all(str(user.target) in RULES and str(user.target) not in called for user in views.readers(node))

"""Products of matrices whose sizes are what a library's fast kernels want.

Tensor cores are fed 16 bytes at a time, so a product of matrices with rows of another length (a vocabulary of 50257
words) takes several times as long. Such a product becomes one of larger matrices, whose further elements are zeros, and
a slice of its result. Operands that kernels compute are computed with the zeros, others are copied. What the graph
gives back has the strides it had before: it is copied there, some columns of the product after others, so that there
are never two of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap.device_spec import ROW_ALIGNMENT
from fxwrap.lowering.graph_copy import GraphCopy, bytes_of, call_on_fakes, expressions_of, hinted
from fxwrap.lowering.rules import RULES
from fxwrap.lowering.source import GraphSource
from fxwrap.lowering.storage_views import StorageViews
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor, tree_flatten
from fxwrap.wrapper_ir import contiguous_strides

_aten = torch.ops.aten

_SAVED = 1 / 32
"""What aligned rows save for each multiplication and each addition, in bytes that are copied meanwhile.

Of 4096 x 768 by 768 x 50257 in bfloat16 an H200 does 95 Top/s, with 50264 columns 709. Copies are taken to go at
3.5 TB/s.
"""
_COPY = 10_000_000
"""What a copy is taken to cost besides its bytes, in such bytes: about 3 us."""
_LEAST = 3_000_000
"""What has to be saved at least, in such bytes."""

_PART_COLUMNS = 2048
"""What parts of a product that is copied have a multiple of in columns: many tiles of any kernel, whole 16 bytes."""
_PARTS = 8
"""About how many such parts there are: more hold less, and keep the device less busy."""

_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


Pads = tuple[int, ...]
"""What `constant_pad_nd` takes: how much is appended to the last dimension, and to the one before, each after a 0."""
_Part = tuple[Node, Pads, tuple[int, int] | None]
"""A matrix or vector, what is appended to it, and from where to where it is taken along its first dimension."""


@dataclass(frozen=True)
class _Operand:
    """A matrix as it lies in memory: `node` is it, or where `turned`, its transpose."""

    node: Node
    turned: bool

    def pads(self, rows: int, columns: int) -> Pads:
        """What is appended to it as it lies for so many more rows and columns."""
        return (0, rows, 0, columns) if self.turned else (0, columns, 0, rows)


@dataclass(frozen=True)
class _Larger:
    """A product that becomes one of larger matrices: by how many rows, terms and columns."""

    product: Node
    bias: Node | None
    left: _Operand
    right: _Operand
    rows: int
    terms: int
    columns: int

    @property
    def operands(self) -> list[tuple[Node, bool, Pads]]:
        """The operands in order: each with whether it is turned, and what is appended to it."""
        left, right = self.left.pads(self.rows, self.terms), self.right.pads(self.terms, self.columns)
        bias = [] if self.bias is None else [(self.bias, False, (0, self.columns))]
        return [*bias, (self.left.node, self.left.turned, left), (self.right.node, self.right.turned, right)]


def with_aligned_products(
    source: GraphSource, fakes: dict[Node, Any], options: Options, free_outputs: Collection[int] = ()
) -> tuple[GraphSource, dict[Node, Any]]:
    """Returns a graph whose large products have rows of aligned lengths, and fake values of its nodes.

    The graph itself is not changed; it is given back where there is nothing to do. Strides of the outputs at
    `free_outputs` need not be those of the graph.
    """
    if not options.fuse:
        return source, fakes
    nodes = list(source.graph_module.graph.nodes)
    found = [larger for node in nodes if (larger := _larger(node, fakes, options)) is not None]
    if not found:
        return source, fakes
    views = StorageViews(nodes, fakes)
    readers = {larger.product for larger in found}
    worth = [(larger, _worth(larger, views, readers, free_outputs)) for larger in found]
    chosen = [(larger, copied) for larger, copied in worth if copied is not None]
    if not chosen:
        return source, fakes
    copy = GraphCopy(source, fakes)
    padded: dict[_Part, Node] = {}
    for larger, copied in chosen:
        width = _part_columns(larger, fakes)
        if copied and width:
            _compute_in_parts(copy, larger, width, padded)
            continue
        _compute(copy, larger, padded)
        for node in copied:
            keywords = {"memory_format": torch.contiguous_format}
            copy.give_back(node, _aten.clone.default, keywords, f"{node.name}_together")
    return copy.finished()


# --- which products ---------------------------------------------------------------------------------------------------


def _larger(node: Node, fakes: Mapping[Node, Any], options: Options) -> _Larger | None:
    """Returns what a product becomes; None for another call, and where rows are aligned or it is too small."""
    if node.target not in _PRODUCTS or node.kwargs or str(node.target) in {*options.keep, *options.lowerings}:
        return None
    result: Any = fakes.get(node)
    spec = options.device_specs().get(result.device.type) if isinstance(result, FakeTensor) else None
    if spec is None or result.dtype not in spec.aligned_products or not _is_contiguous(result):
        return None
    arguments: list[Any] = [None, *node.args][-3:]
    bias, left, right = arguments
    if bias is not None and fakes[bias].ndim != 1:
        return None
    left_as_it_lies, right_as_it_lies = [_as_it_lies(operand, fakes) for operand in (left, right)]
    (rows, columns), terms = result.shape, fakes[left].shape[1]
    if left_as_it_lies is None or right_as_it_lies is None or _saved(rows, columns, terms) < _LEAST:
        return None
    step = ROW_ALIGNMENT // result.dtype.itemsize
    found = _Larger(
        node, bias, left_as_it_lies, right_as_it_lies,
        rows=_missing(rows, step) if left_as_it_lies.turned else 0,
        terms=_missing(terms, step) if right_as_it_lies.turned or not left_as_it_lies.turned else 0,
        columns=_missing(columns, step),
    )  # fmt: skip
    return found if any((found.rows, found.terms, found.columns)) else None


def _as_it_lies(node: Node, fakes: Mapping[Node, Any]) -> _Operand | None:
    """Returns a matrix as it lies in memory, if its rows or columns do."""
    strides = fakes[node].stride()
    if type(strides[1]) is int and strides[1] == 1:
        return _Operand(node, turned=False)
    if type(strides[0]) is not int or strides[0] != 1:
        return None
    match node.target, node.args:
        case (_aten.t.default, (Node() as base,)) | (_aten.permute.default, (Node() as base, [1, 0])):
            return _Operand(base, turned=True)
        case _aten.transpose.int, (Node() as base, 0 | -2, 1 | -1):
            return _Operand(base, turned=True)
        case _:
            return None


def _missing(size: Any, step: int) -> int:
    """Returns by how much a size is to grow; vectors and symbols stay."""
    return -size % step if type(size) is int and size > 1 else 0


def _saved(*sizes: Any) -> float:
    operations = 2.0
    for size in sizes:
        operations *= hinted(size)
    return operations * _SAVED


def _is_contiguous(fake: torch.Tensor) -> bool:
    """Whether a tensor is, as far as is known without asking for it."""
    return list(contiguous_strides(tuple(expressions_of(fake.shape)))) == expressions_of(fake.stride())


# --- whether it pays --------------------------------------------------------------------------------------------------


def _worth(
    larger: _Larger, views: StorageViews, products: Collection[Node], free_outputs: Collection[int]
) -> list[Node] | None:
    """Returns which outputs are copied for a larger product; None where it cannot be, or costs more than it saves."""
    product, fakes = larger.product, views.fakes
    if views.is_written(product) or not views.may_lie_as(product, _slice_of_larger(larger, fakes[product])):
        return None
    copied = _fixed_outputs(product, views, free_outputs) if larger.columns else []
    if not all(_is_contiguous(fakes[node]) for node in copied):
        return None
    made = [node for node, _, pads in larger.operands if any(pads) and not _is_computed_for(node, views, products)]
    cost = sum(_COPY + 2 * bytes_of(fakes[node]) for node in (*made, *copied))
    return copied if _saved(*fakes[product].shape, fakes[product.args[-2]].shape[1]) > cost else None  # type: ignore[index]


def _slice_of_larger(larger: _Larger, like: FakeTensor) -> Any:
    """Returns the fake value of a product that is a slice of a larger one."""
    rows, columns = like.shape
    whole = call_on_fakes(_aten.new_empty.default, (like, [rows + larger.rows, columns + larger.columns]), {})
    above = call_on_fakes(_aten.slice.Tensor, (whole, 0, 0, rows), {}) if larger.rows else whole
    return call_on_fakes(_aten.slice.Tensor, (above, 1, 0, columns), {}) if larger.columns else above


def _is_computed_for(node: Node, views: StorageViews, products: Collection[Node]) -> bool:
    """Whether a kernel computes a tensor for such products alone, and so can compute it with zeros."""
    computed = node.op == "call_function" and str(node.target) in RULES and views.shown(node)[0] is node
    return computed and not views.is_given_back(node) and all(reader in products for reader in views.readers(node))


def _part_columns(larger: _Larger, fakes: Mapping[Node, Any]) -> int:
    """Returns how many columns of a product are computed at a time before they are copied; 0 for all of them.

    Its second matrix has to lie so that as many of its columns are aligned by themselves.
    """
    columns = fakes[larger.product].shape[1]
    width = max(round(columns / _PARTS / _PART_COLUMNS), 1) * _PART_COLUMNS
    return width if larger.right.turned and width < columns else 0


def _fixed_outputs(node: Node, views: StorageViews, free_outputs: Collection[int]) -> list[Node]:
    """Returns the nodes on a tensor's storage that the graph gives back with strides that it is known to have."""
    (output,) = node.graph.find_nodes(op="output")
    fixed = {item for position, item in enumerate(tree_flatten(output.args)[0]) if position not in free_outputs}
    given = [item for item in views.shown(node) if any(user.op == "output" for user in item.users)]
    return [item for item in given if item in fixed or not _has_plain_strides(views.fakes[item])]


def _has_plain_strides(fake: torch.Tensor) -> bool:
    """Whether a tensor's strides will be known before it is made, as those who are told of them want it."""
    return all(type(stride) is int for stride in fake.stride())


# --- what it becomes --------------------------------------------------------------------------------------------------


def _compute(copy: GraphCopy, larger: _Larger, padded: dict[_Part, Node]) -> None:
    """Puts a slice of a larger product in the place of one; `padded` are the operands that there are already."""
    copy.substitute(larger.product, _computed(copy, larger, None, padded))


def _compute_in_parts(copy: GraphCopy, larger: _Larger, width: int, padded: dict[_Part, Node]) -> None:
    """Puts a tensor in the place of a product, into which so many columns at a time are copied."""
    product, before = larger.product, copy.made_of[larger.product]
    like = copy.fakes[before]
    keywords = {"dtype": like.dtype, "device": like.device}
    found = copy.call(before, _aten.empty.memory_format, (list(like.shape),), keywords, f"{product.name}_whole")
    for start in range(0, like.shape[1], width):
        end = min(start + width, like.shape[1])
        last = end == like.shape[1]
        part = _computed(copy, larger if last else replace(larger, columns=0), (start, end), padded)
        computed = copy.call(before, _aten.clone.default, (part,), {}, f"{product.name}_columns")
        arguments = (found, computed, 1, start, end)
        found = copy.call(before, _aten.slice_scatter.default, arguments, {}, f"{product.name}_until_{end}")
    copy.substitute(product, found)


def _computed(
    copy: GraphCopy, larger: _Larger, columns: tuple[int, int] | None, padded: dict[_Part, Node]
) -> Node:
    """Returns a product as a slice of a larger one, or these columns of it."""
    product, before = larger.product, copy.made_of[larger.product]
    *bias, left, right = larger.operands
    operands = [_operand(copy, before, operand, columns, padded) for operand in bias]
    operands += [_operand(copy, before, left, None, padded), _operand(copy, before, right, columns, padded)]
    assert callable(product.target)
    found = copy.call(before, product.target, tuple(operands), {}, f"{product.name}_larger")
    start, end = columns or (0, copy.fakes[before].shape[1])
    for dim, more, size in ((0, larger.rows, copy.fakes[before].shape[0]), (1, larger.columns, end - start)):
        if more:
            found = copy.call(before, _aten.slice.Tensor, (found, dim, 0, size), {}, f"{product.name}_part")
    return found


def _operand(
    copy: GraphCopy,
    before: Node,
    operand: tuple[Node, bool, Pads],
    columns: tuple[int, int] | None,
    padded: dict[_Part, Node],
) -> Node:
    """Returns an operand of a larger product, or what these columns of the product need of it."""
    node, turned, pads = operand
    found = copy.made_of[node]
    if columns is not None:
        found = copy.call(before, _aten.slice.Tensor, (found, 0, *columns), {}, f"{node.name}_part")
    if any(pads):
        if (node, pads, columns) not in padded:
            arguments = (found, list(pads))
            made = copy.call(before, _aten.constant_pad_nd.default, arguments, {}, f"{node.name}_padded")
            padded[node, pads, columns] = made
        found = padded[node, pads, columns]
    return copy.call(before, _aten.t.default, (found,), {}, f"{node.name}_turned") if turned else found

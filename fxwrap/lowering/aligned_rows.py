"""Rows of matrices that begin where a library's fast products want them.

Tensor cores are fed by loads of 16 bytes, so a product of matrices whose rows begin elsewhere (a vocabulary of 50257
words) takes several times as long. What a graph computes itself gets rows that lie further apart, in which the last
few elements are never written or read: products, by their out= form, and what kernels compute. Others are copied.
What the graph gives back has the strides it had before, if need be by a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.lowering.graph_copy import GraphCopy, call_on_fakes, expression_of
from fxwrap.lowering.rules import RULES
from fxwrap.lowering.source import GraphSource
from fxwrap.lowering.storage_views import PRODUCTS, StorageViews
from fxwrap.options import Options
from fxwrap.passes.given_memory import OUT_FORMS
from fxwrap.torch_compat import FakeTensor, symbol_hint, tree_flatten
from fxwrap.wrapper_ir import contiguous_strides

_aten = torch.ops.aten

_ALIGNMENT = 16
"""Bytes that rows are to begin at multiples of."""

_SAVED = 1 / 32
"""What a product with aligned rows saves for each multiplication and each addition, in bytes that are copied meanwhile.

Of 4096 x 768 by 768 x 50257 in bfloat16 an H200 does 95 Top/s, and 709 where rows are aligned; it copies 3.5 TB/s.
"""
_COPY = 10_000_000
"""What a copy costs besides its bytes, in such bytes: about 3 us."""
_LEAST = 3_000_000
"""What has to be saved at least, in such bytes: rows apart make kernels' index arithmetic longer."""


@dataclass(frozen=True)
class _Matrix:
    """A matrix that a product reads or makes, with the bytes that aligned rows save there."""

    product: Node
    node: Node
    saved: float


@dataclass
class _Apart:
    """A tensor whose rows are to lie further apart: what it will be like, and which outputs are copied for it."""

    base: Node
    fake: FakeTensor
    copied: list[Node]


def with_aligned_rows(
    source: GraphSource, fakes: dict[Node, Any], options: Options, free_outputs: Collection[int] = ()
) -> tuple[GraphSource, dict[Node, Any]]:
    """Returns a graph whose large products of matrices have aligned rows, and fake values of its nodes.

    The graph itself is not changed; it is given back where there is nothing to do. Strides of the outputs at
    `free_outputs` need not be those of the graph.
    """
    if not options.fuse:
        return source, fakes
    nodes = list(source.graph_module.graph.nodes)
    found = list(_unaligned(nodes, fakes, options))
    if not found:
        return source, fakes
    views = StorageViews(nodes, fakes)
    bases: dict[Node, list[_Matrix]] = {}
    for matrix in found:
        bases.setdefault(views.shown(matrix.node)[0], []).append(matrix)
    apart, copied = [], []
    for base, matrices in bases.items():
        plan = _apart(base, matrices, views, free_outputs)
        if plan is not None:
            apart.append(plan)
        else:
            copied += [matrix for matrix in matrices if matrix.node is not matrix.product]
    return _changed(source, fakes, apart, _worth_copying(copied, fakes))


# --- what is unaligned ------------------------------------------------------------------------------------------------


def _unaligned(nodes: Sequence[Node], fakes: Mapping[Node, Any], options: Options) -> Iterator[_Matrix]:
    """Gives the matrices of large products whose rows are not aligned."""
    specs = options.device_specs()
    for node in nodes:
        result = fakes.get(node)
        if str(node.target) not in PRODUCTS or str(node.target) in {*options.keep, *options.lowerings}:
            continue
        spec = specs.get(result.device.type) if isinstance(result, FakeTensor) else None
        left, right = [item for item in node.args if isinstance(item, Node)][-2:]
        if spec is None or result.dtype not in spec.aligned_products:  # type: ignore[union-attr]
            continue
        operations = 2 * _hinted(fakes[left].shape[-1])
        for size in result.shape:  # type: ignore[union-attr]
            operations *= _hinted(size)
        if operations * _SAVED >= _LEAST:
            for matrix in (node, left, right):
                if _has_unaligned_rows(fakes[matrix]):
                    yield _Matrix(node, matrix, operations * _SAVED)


def _has_unaligned_rows(fake: Any) -> bool:
    """Whether a matrix, or one of several, has rows or columns of adjacent elements that are not aligned."""
    strides: tuple[Any, ...] = fake.stride()[-2:]
    if not all(type(stride) is int for stride in strides) or 1 not in strides:
        return False
    if any(type(size) is int and size <= 1 for size in fake.shape[-2:]):
        return False
    step: int = strides[0] if strides[1] == 1 else strides[1]
    itemsize: int = fake.dtype.itemsize
    return step * itemsize % _ALIGNMENT != 0


def _hinted(number: Any) -> int:
    return number if type(number) is int else int(symbol_hint(number) or 1)


# --- what becomes of it -----------------------------------------------------------------------------------------------


def _apart(
    base: Node, matrices: Sequence[_Matrix], views: StorageViews, free_outputs: Collection[int]
) -> _Apart | None:
    """Returns how a tensor's rows can lie further apart; None where they cannot, or what is given back costs more."""
    fake = views.fakes[base]
    if base.op != "call_function" or not (str(base.target) in OUT_FORMS or str(base.target) in RULES):
        return None
    if not isinstance(fake, FakeTensor) or fake.ndim < 2 or not _is_contiguous(fake) or views.is_written(base):
        return None
    columns = fake.shape[-1]
    step = _ALIGNMENT // fake.dtype.itemsize
    if type(columns) is not int or columns % step == 0:
        return None
    whole = call_on_fakes(_aten.new_empty.default, (fake, [*fake.shape[:-1], columns + -columns % step]), {})
    wide = call_on_fakes(_aten.slice.Tensor, (whole, fake.ndim - 1, 0, columns), {})
    if not views.may_lie_as(base, wide):
        return None
    copied = _fixed_outputs(base, views, free_outputs)
    if not all(_is_contiguous(views.fakes[node]) for node in copied):
        return None
    cost = sum(_COPY + 2 * _bytes(views.fakes[node]) for node in copied)
    return _Apart(base, wide, copied) if sum(matrix.saved for matrix in matrices) > cost else None


def _is_contiguous(fake: torch.Tensor) -> bool:
    """Whether a tensor is, as far as is known without asking for it."""
    sizes = tuple([expression_of(size) for size in fake.shape])
    return contiguous_strides(sizes) == tuple([expression_of(stride) for stride in fake.stride()])


def _fixed_outputs(base: Node, views: StorageViews, free_outputs: Collection[int]) -> list[Node]:
    """Returns the nodes on a tensor's storage that the graph gives back with strides that it is known to have."""
    if not views.is_given_back(base):
        return []
    shown = views.shown(base)
    output = next(node for node in reversed(base.graph.nodes) if node.op == "output")
    fixed = {item for position, item in enumerate(tree_flatten(output.args)[0]) if position not in free_outputs}
    given = [node for node in shown if any(user.op == "output" for user in node.users)]
    return [node for node in given if node in fixed or not _is_plain(views.fakes[node])]


def _is_plain(fake: Any) -> bool:
    """Whether the strides of a tensor will be known before it is made, as those who are told of them want it."""
    return isinstance(fake, torch.Tensor) and all(type(stride) is int for stride in fake.stride())


def _worth_copying(matrices: Sequence[_Matrix], fakes: Mapping[Node, Any]) -> list[_Matrix]:
    """Returns the operands whose copies cost less than the products that read them save by it."""
    saved: dict[Node, float] = {}
    for matrix in matrices:
        saved[matrix.node] = saved.get(matrix.node, 0.0) + matrix.saved
    return [matrix for matrix in matrices if saved[matrix.node] > _COPY + 2 * _bytes(fakes[matrix.node])]


def _bytes(fake: torch.Tensor) -> int:
    count = fake.dtype.itemsize
    for size in fake.shape:
        count *= _hinted(size)
    return count


def _changed(
    source: GraphSource, fakes: dict[Node, Any], apart: Sequence[_Apart], copied: Sequence[_Matrix]
) -> tuple[GraphSource, dict[Node, Any]]:
    if not apart and not copied:
        return source, fakes
    copy = GraphCopy(source, fakes)
    padded: dict[Node, Node] = {}
    for matrix in copied:
        if matrix.node not in padded:
            padded[matrix.node] = _padded(copy, matrix)
        copy.made_of[matrix.product].replace_input_with(copy.made_of[matrix.node], padded[matrix.node])
    for plan in apart:
        copy.lay(plan.base, plan.fake)
    for node in {node: None for plan in apart for node in plan.copied}:
        copy.give_back(node, _aten.clone.default, {"memory_format": torch.contiguous_format}, f"{node.name}_together")
    return copy.finished()


def _padded(copy: GraphCopy, matrix: _Matrix) -> Node:
    """Returns a copy of an operand whose adjacent elements are in aligned rows."""
    made, before = copy.made_of[matrix.node], copy.made_of[matrix.product]
    fake, name = copy.fakes[made], matrix.node.name
    turned, dims = fake.stride(-1) != 1, (fake.ndim - 2, fake.ndim - 1)
    rows = copy.call(before, _aten.transpose.int, (made, *dims), {}, f"{name}_turned") if turned else made
    length = copy.fakes[rows].shape[-1]
    more = -length % (_ALIGNMENT // fake.dtype.itemsize)
    whole = copy.call(before, _aten.constant_pad_nd.default, (rows, [0, more]), {}, f"{name}_padded")
    aligned = copy.call(before, _aten.slice.Tensor, (whole, dims[1], 0, length), {}, f"{name}_aligned")
    return copy.call(before, _aten.transpose.int, (aligned, *dims), {}, f"{name}_as_before") if turned else aligned

"""What is known of the tensors of an emitted graph: their types, and which views nobody can tell from plain tensors.

Whatever was done to the graph since it was emitted, a node's type is known where the node is still what its line was
made into and its operands have the types that they had in the line. Sizes that are symbols are left out, as are lines
whose results do not follow from types alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap.converters.views import view_form
from fxwrap.lines import Alloc, Call, View
from fxwrap.runtime.library import cpp_kernel_operator
from fxwrap.torch_compat import operator_overload, out_argument_names, shared_or_written, triton_launch
from fxwrap.wrapper_ir import TensorType, Value

_ATEN = torch.ops.aten

VIEWS = {
    "view": _ATEN.view.default,
    "permute": _ATEN.permute.default,
    "expand": _ATEN.expand.default,
    "slice": _ATEN.slice.Tensor,
    "select": _ATEN.select.int,
    "as_strided": _ATEN.as_strided.default,
}
"""The operators that views are written with, by the kind of their form."""


def known_types(nodes: Iterable[Node]) -> dict[Node, TensorType]:
    """Returns the types that are known, of nodes in the order of a graph. Linear in the number of nodes."""
    known: dict[Node, TensorType] = {}
    for node in nodes:
        type_ = _type_of(node, known)
        if type_ is not None and all(type(number) is int for number in (*type_.sizes, *type_.strides)):
            known[node] = type_
    return known


def _type_of(node: Node, known: dict[Node, TensorType]) -> TensorType | None:
    if node.op == "placeholder":
        type_ = node.meta.get("fxwrap_type")
        return type_ if isinstance(type_, TensorType) else None
    line = node.meta.get("fxwrap_line")
    if node.op != "call_function":
        return None
    match line:
        case Alloc():
            return line.result.tensor_type if _is_allocation(node, line.result.tensor_type) else None
        case View():
            return line.result.tensor_type if _is_view(node, line, known) else None
        case Call():
            return _result_type(node, line, known)
        case _:
            return None


def _is_allocation(node: Node, type_: TensorType) -> bool:
    return (
        node.target is _ATEN.empty_strided.default
        and node.args == (list(type_.sizes), list(type_.strides))
        and node.kwargs == {"dtype": type_.dtype, "device": type_.device}
    )


def _is_view(node: Node, line: View, known: dict[Node, TensorType]) -> bool:
    old, new = line.base.tensor_type, line.result.tensor_type
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or known.get(base) != old or node.kwargs:
        return False
    form = view_form(old, new)
    arguments = form.arguments
    if form.kind == "as_strided":
        if new.storage_offset != old.storage_offset:
            return False  # a node computes where it starts
        arguments = arguments[:2]
    return node.target is VIEWS[form.kind] and _agree(arguments, node.args[1:], known)


def _result_type(node: Node, line: Call, known: dict[Node, TensorType]) -> TensorType | None:
    """Returns the type of an operator's only result, or of one that is taken out of several."""
    called, item = node, None
    if node.target is operator.getitem:
        called, item = node.args  # type: ignore[assignment]
        if called.op != "call_function" or called.meta.get("fxwrap_line") is not line:
            return None
    if not _is_call(called, line, known):
        return None
    results: Any = line.results
    if item is not None:
        results = results[0] if len(results) == 1 and isinstance(results[0], tuple) else results
        results = results[item : item + 1] if isinstance(item, int) else ()
    only = results[0] if len(results) == 1 else None
    return only.type if isinstance(only, Value) and isinstance(only.type, TensorType) else None


def _is_call(node: Node, line: Call, known: dict[Node, TensorType]) -> bool:
    if node.target is not operator_overload(line.target):
        return False
    keywords = dict(line.keywords)
    if line.outs:
        keywords.update(zip(out_argument_names(line.target), line.outs, strict=True))
    return (
        _agree(line.arguments, node.args, known)
        and node.kwargs.keys() == keywords.keys()
        and all(_agree(item, node.kwargs[name], known) for name, item in keywords.items())
    )


def _agree(then: Any, now: Any, known: dict[Node, TensorType]) -> bool:
    """Says whether an argument of a node is what the line's became; a tensor may be another one of the same type."""
    if isinstance(then, Value):
        return isinstance(now, Node) and known.get(now) == then.type
    if isinstance(then, tuple):
        if not isinstance(now, list | tuple) or len(then) != len(now):
            return False
        return all(_agree(one, other, known) for one, other in zip(then, now, strict=True))
    return type(then) is type(now) and bool(then == now)


_VIEWS = frozenset(VIEWS.values())
_LAUNCHES = frozenset({cpp_kernel_operator, triton_launch})


def unseen_views(nodes: Sequence[Node]) -> frozenset[Node]:
    """Returns the views that may be tensors on the same memory instead of views of torch's.

    Nobody can tell the two apart where only kernels, and operators that neither write nor share it, read the tensor or
    a view of it.
    """
    seen: set[Node] = set()
    found = []
    for node in reversed(nodes):
        if node.op == "call_function" and node.target in _VIEWS and node not in seen:
            found.append(node)
        elif node.op != "call_function" or node.target not in _LAUNCHES:
            seen.update(shared_or_written(node))
    return frozenset(found)

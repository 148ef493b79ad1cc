"""Views in emitted code: the plainest operator for each, and which of them need no operator.

The plainest one is `permute`, `view`, `expand`, `slice` or `select` if one fits, else `as_strided`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxwrap.lines import View
from fxwrap.wrapper_ir import LineBase, Size, TensorType, Value, blocks, defined, reads, roots, used, writes


@dataclass(frozen=True, slots=True)
class ViewForm:
    """A view operator with its arguments after the tensor.

    `kind` is "view" (sizes), "permute" (dims), "expand" (sizes), "slice" (dim, start, end, step), "select" (dim, index)
    or "as_strided" (sizes, strides, offset relative to the base's own first element).
    """

    kind: str
    arguments: tuple[Any, ...]


def view_form(base: TensorType, view: TensorType) -> ViewForm:
    """Returns the plainest operator that makes a window of type `view` from a tensor of type `base`."""
    offset: Size = view.storage_offset - base.storage_offset
    found = None
    if offset == 0:
        found = _permute(base, view) or _reshape(base, view) or _expand(base, view)
    found = found or _narrow(base, view, offset)
    return found or ViewForm("as_strided", (view.sizes, view.strides, offset))


def _permute(base: TensorType, view: TensorType) -> ViewForm | None:
    if len(base.sizes) != len(view.sizes) or len(base.sizes) < 2:
        return None
    available = list(enumerate(zip(base.sizes, base.strides, strict=True)))
    order = []
    for wanted in zip(view.sizes, view.strides, strict=True):
        match = next((entry for entry in available if entry[1] == wanted), None)
        if match is None:
            return None
        available.remove(match)
        order.append(match[0])
    return ViewForm("permute", (tuple(order),))


def _reshape(base: TensorType, view: TensorType) -> ViewForm | None:
    same_count = base.element_count == view.element_count
    return ViewForm("view", (view.sizes,)) if same_count and base.is_contiguous and view.is_contiguous else None


def _expand(base: TensorType, view: TensorType) -> ViewForm | None:
    added = len(view.sizes) - len(base.sizes)
    if added < 0 or any(stride != 0 for stride in view.strides[:added]):
        return None
    grown = added > 0
    for size, stride, new_size, new_stride in zip(
        base.sizes, base.strides, view.sizes[added:], view.strides[added:], strict=True
    ):
        if size == 1 and new_size != 1:
            if new_stride != 0:
                return None
            grown = True
        elif size != new_size or stride != new_stride:
            return None
    return ViewForm("expand", (view.sizes,)) if grown else None


def _narrow(base: TensorType, view: TensorType, offset: Size) -> ViewForm | None:
    """One dimension sliced with a step of 1, or taken at one index."""
    if not isinstance(offset, int) or not all(type(n) is int for n in (*base.sizes, *base.strides, *view.sizes)):
        return None
    rank = len(base.sizes)
    if len(view.sizes) == rank and view.strides == base.strides:
        changed = [dim for dim in range(rank) if view.sizes[dim] != base.sizes[dim]]
        if len(changed) != 1:
            return None
        dim = changed[0]
        start = _steps(offset, base.strides[dim])
        if start is not None and start + view.sizes[dim] <= base.sizes[dim]:
            return ViewForm("slice", (dim, start, start + view.sizes[dim], 1))
    if len(view.sizes) == rank - 1:
        for dim in range(rank):
            rest = (base.sizes[:dim] + base.sizes[dim + 1 :], base.strides[:dim] + base.strides[dim + 1 :])
            index = _steps(offset, base.strides[dim])
            if rest == (view.sizes, view.strides) and index is not None and index < base.sizes[dim]:
                return ViewForm("select", (dim, index))
    return None


def _steps(offset: int, stride: Size) -> int | None:
    """Returns how many strides make the offset, if a whole number of them does."""
    if not isinstance(stride, int) or stride == 0:
        return 0 if offset == 0 else None
    return offset // stride if offset % stride == 0 and offset >= 0 else None


def unseen_views(lines: Sequence[LineBase], arguments: Iterable[Value]) -> frozenset[str]:
    """Returns the names of a block's views that may be tensors on the same memory instead of views of torch's.

    What tells the two apart is the version counter, which a view shares with its base, and the base that it names. That
    can be seen from outside, or by autograd, where a view is given back while something else that lives on has its
    memory: one of the `arguments` of the lines, or another result. It can be seen too where an
    operator writes an argument through a view, where an operator gives a view of the view, and in nested blocks. Linear
    in the number of lines.
    """
    given = {value.name: value for value in arguments}
    root_of = roots(lines, given.values())
    results = dict.fromkeys([value.name for value in reads(lines[-1])])
    sharing = Counter([root_of[name] for name in results])
    seen = {name for name in results if root_of[name] in given or sharing[root_of[name]] > 1}
    found = []
    for line in reversed(lines):
        if isinstance(line, View):
            if line.result.name in seen:
                seen.add(line.base.name)
            else:
                found.append(line.result.name)
            continue
        seen.update([value.name for value in writes(line) if root_of[value.name] in given])
        aliased = [line.alias_of(value) for value in defined(line)]
        seen.update([value.name for value in aliased if value is not None])
        if blocks(line) or any(refers == "function" for _, refers in line.target_fields):
            seen.update([value.name for value in used(line)])
    return frozenset(found)

"""Views in emitted code: the simplest operator for each view, and the views that need no operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Launch, View


@dataclass(frozen=True, slots=True)
class ViewForm:
    """A view operator with its arguments after the tensor.

    `kind` is "view" (sizes), "permute" (dims), "expand" (sizes), "slice" (dim, start, end, step), "select" (dim, index)
    or "as_strided" (sizes, strides, offset relative to the base's first element).
    """

    kind: Literal["view", "permute", "expand", "slice", "select", "as_strided"]
    arguments: tuple[Any, ...]


def view_form(base: ir.TensorType, view: ir.TensorType) -> ViewForm:
    """Returns the simplest operator from a tensor of type `base` to a view of type `view`, else `as_strided`."""
    offset: ir.Size = view.storage_offset - base.storage_offset
    form = _permute(base, view) or _reshape(base, view) or _expand(base, view) if offset == 0 else None
    return form or _narrow(base, view, offset) or ViewForm("as_strided", (view.sizes, view.strides, offset))


def _permute(base: ir.TensorType, view: ir.TensorType) -> ViewForm | None:
    if len(base.sizes) != len(view.sizes) or len(base.sizes) < 2:
        return None
    available = list(enumerate(zip(base.sizes, base.strides, strict=True)))
    order = []
    for dimension in zip(view.sizes, view.strides, strict=True):
        match = next((entry for entry in available if entry[1] == dimension), None)
        if match is None:
            return None
        available.remove(match)
        order.append(match[0])
    return ViewForm("permute", (tuple(order),))


def _reshape(base: ir.TensorType, view: ir.TensorType) -> ViewForm | None:
    same_count = base.element_count == view.element_count
    return ViewForm("view", (view.sizes,)) if same_count and base.is_contiguous and view.is_contiguous else None


def _expand(base: ir.TensorType, view: ir.TensorType) -> ViewForm | None:
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


def _narrow(base: ir.TensorType, view: ir.TensorType, offset: ir.Size) -> ViewForm | None:
    """Returns a slice of one dimension with step 1, or the selection of one index."""
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


def _steps(offset: int, stride: ir.Size) -> int | None:
    """Returns the offset in strides, or None if it is not a multiple of the stride."""
    if not isinstance(stride, int) or stride == 0:
        return 0 if offset == 0 else None
    return offset // stride if offset % stride == 0 and offset >= 0 else None


def arguments_written_by_kernels(lines: Sequence[ir.LineBase], arguments: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """Returns the arguments of a block that its kernels write, themselves or through views.

    Operators increment the version counters of tensors that they write, by which autograd notices; kernels do not.
    """
    if not any(isinstance(line, Launch) for line in lines):
        return ()
    root_of = ir.alias_roots(lines, arguments)
    written = {root_of[value.name] for line in lines if isinstance(line, Launch) for value in line.outs}
    return tuple([value for value in arguments if value.name in written])


def untracked_views(lines: Sequence[ir.LineBase], arguments: Sequence[ir.Value]) -> frozenset[str]:
    """Returns the names of a block's views that may be new tensors on the same storage instead of torch views.

    Unlike such a tensor, a torch view has a `_base` and shares its version counter. The caller and autograd observe
    this for a returned view that aliases an argument or another result, for a view through which an operator writes an
    argument, and for a view whose view an operator returns. Views used by nested blocks count as observed. Linear in
    the number of lines.
    """
    names = {value.name for value in arguments}
    root_of = ir.alias_roots(lines, arguments)
    results = dict.fromkeys([value.name for value in ir.reads(lines[-1])])
    sharing = Counter([root_of[name] for name in results])
    observed = {name for name in results if root_of[name] in names or sharing[root_of[name]] > 1}
    untracked = []
    for line in reversed(lines):
        if isinstance(line, View):
            if line.result.name in observed:
                observed.add(line.base.name)
            else:
                untracked.append(line.result.name)
            continue
        observed.update([value.name for value in ir.writes(line) if root_of[value.name] in names])
        aliased = [line.alias_of(value) for value in ir.defined(line)]
        observed.update([value.name for value in aliased if value is not None])
        if ir.blocks(line) or ir.called_functions(line):
            observed.update([value.name for value in ir.used(line)])
    return frozenset(untracked)

"""Views in emitted code: those that need no operator, and the arguments that kernels write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxwrap import wrapper_ir as ir
from fxwrap.lines import ExternCall, Launch, View


def arguments_written_by_kernels(lines: Sequence[ir.LineBase], arguments: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """Returns the arguments of a block that its kernels write, themselves or through views.

    Operators increment the version counters of tensors that they write, by which autograd notices; kernels do not.
    """
    if not any(isinstance(line, Launch) for line in lines):
        return ()
    root_of = ir.alias_roots(lines, arguments)
    written = {root_of[value.name] for line in lines if isinstance(line, Launch) for value in line.outs}
    return tuple([value for value in arguments if value.name in written])


def detached_results(lines: Sequence[ir.LineBase], arguments: Sequence[ir.Value]) -> tuple[str, ...]:
    """Returns the names of views that a program returns and whose memory is its own: tensors without a `_base`.

    `aten.detach` removes the base and keeps the version counter. Autograd rejects in-place operators on a torch view
    that a custom function returns, such as a compiled forward, and eager's `linear`, which ends with
    `aten._unsafe_view`, returns no view.
    """
    root_of = ir.alias_roots(lines, arguments)
    borrowed = {value.name for value in arguments}
    views = [value for line in lines if isinstance(line, View | ExternCall) for value in ir.defined(line)]
    own = {value.name for value in views if root_of[value.name] not in (value.name, *borrowed)}
    return tuple(dict.fromkeys([value.name for value in ir.reads(lines[-1]) if value.name in own]))


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

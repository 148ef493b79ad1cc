"""Integers that are one of a few constants, which conditions select: what is computed from them is selected, too.

A max pooling selects the offset of a window's maximum. Training saves it packed into a byte, which takes divisions of
the selected offset, or none where the packed offsets are selected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from fxwrap.loop_ir.body_operations import Compute, Constant, DeviceAssert, IndexValue, Operation, Store, operands
from fxwrap.loop_ir.builder import OperationCopier, replace_operations
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import INTEGERS, OPERATIONS
from fxwrap.loop_ir.small_integers import add_terms

_MAX_CONSTANTS = 64


@dataclass(frozen=True)
class _Selection:
    """Constants and how conditions select one of them.

    A tree is None for one constant, or the position of a condition with the trees for true and false; `constants` is a
    vector of those of its leaves, in order.
    """

    tree: Any
    constants: torch.Tensor


def fold_selected_constants(kernel: Kernel) -> Kernel:
    """Returns a kernel that selects results of integer operations where these depend on one selected constant."""
    if not any(
        isinstance(item, Compute) and item.name == "where" and item.dtype in INTEGERS for item in kernel.operations
    ):
        return kernel
    selections: dict[int, _Selection] = {}
    for position, item in enumerate(kernel.operations):
        selection = _selection(kernel, item, selections)
        if selection is not None and len(selection.constants) <= _MAX_CONSTANTS:
            selections[position] = selection
    trees = {position: selection.tree for position, selection in selections.items() if selection.tree is not None}
    effects = [at for at, item in enumerate(kernel.operations) if isinstance(item, Store | DeviceAssert)]
    others = kernel.backward_slice([*effects, *[at for tree in trees.values() for at in _conditions(tree)]], trees)
    read = sorted({used for at in others for used in operands(kernel.operations[at]) if used in trees})
    read_trees = [trees[position] for position in read]
    folded = {at for at in read if not _is_where(kernel.operations[at]) and read_trees.count(trees[at]) == 1}
    if not folded:
        return kernel

    def select(body: OperationCopier, position: int) -> int:
        return _select(body, trees[position], [*selections[position].constants])

    return replace_operations(kernel, folded, select)


def _conditions(tree: Any) -> Iterator[int]:
    if tree is not None:
        yield tree[0]
        yield from _conditions(tree[1])
        yield from _conditions(tree[2])


def _is_where(item: Operation) -> TypeGuard[Compute]:
    return isinstance(item, Compute) and item.name == "where"


def _selection(kernel: Kernel, item: Operation, selections: dict[int, _Selection]) -> _Selection | None:
    """Returns the constants that an integer operation selects from; None if its results are others."""
    if not isinstance(item, Constant | IndexValue | Compute) or item.dtype not in INTEGERS:
        return None
    match item:
        case Constant(value=value, dtype=dtype):
            return _Selection(None, torch.tensor([value], dtype=dtype))
        case IndexValue(index=index) if index.constant is not None:
            return _Selection(None, torch.tensor([index.constant]))
        case Compute(name="where", operands=(condition, true, false)) if true in selections and false in selections:
            chosen, other = selections[true], selections[false]
            return _Selection((condition, chosen.tree, other.tree), torch.cat([chosen.constants, other.constants]))
        case Compute(name=name, operands=used, dtype=dtype) if all(at in selections for at in used):
            trees = {selections[at].tree for at in used} - {None}
            if len(trees) > 1 or name == "where":
                return None
            spec, arguments = OPERATIONS[name], [selections[at].constants for at in used]
            constants = spec.reference(*arguments, *((dtype,) if spec.result == "declared" else ()))
            return _Selection(trees.pop() if trees else None, constants)
        case Compute(name=("add" | "sub"), dtype=torch.int64):
            return _difference(kernel, item, selections)
        case _:
            return None


def _difference(kernel: Kernel, item: Compute, selections: dict[int, _Selection]) -> _Selection | None:
    """Returns the constants of a sum or difference in which indices cancel out, with one selected term."""
    left, right = item.operands
    terms: dict[int, int] = {}
    rest = add_terms(kernel, left, 1, terms) + add_terms(kernel, right, 1 if item.name == "add" else -1, terms)
    terms = {at: factor for at, factor in terms.items() if factor}
    if rest.constant is None or len(terms) != 1:
        return None
    ((term, factor),) = terms.items()
    if term not in selections:
        return None
    return _Selection(selections[term].tree, selections[term].constants * factor + rest.constant)


def _select(body: OperationCopier, tree: Any, constants: list[torch.Tensor]) -> int:
    """Adds the selection of one of the constants, which it removes from the front of the list."""
    if tree is None:
        constant = constants.pop(0)
        return body.constant(int(constant), constant.dtype)
    condition, true, false = tree
    dtype = constants[0].dtype
    chosen = _select(body, true, constants)
    return body.compute("where", body.new[condition], chosen, _select(body, false, constants), dtype=dtype)

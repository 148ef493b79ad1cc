"""Fake-tensor propagation of calls that read elements of tensors, but have one layout of results for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

# Why: torch.overrides has no mode for operators below autograd; the module path of the mode is private.
from torch.utils._python_dispatch import TorchDispatchMode

from fxwrap.torch_compat.fake_tensors import FakeTensor, in_tracing_fake_mode, is_data_dependent_error, shape_env_of
from fxwrap.torch_compat.pytrees import tree_leaves
from fxwrap.torch_compat.symbols import new_unbacked_number, symbol_expression
from fxwrap.torch_compat.tensors import storage_identity

_MOST_BRANCHES = 64
"""The largest number of combinations of truth values that a call is run with."""

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def infer_despite_reads(
    error: Exception, function: Callable[..., Any], arguments: Sequence[object], keywords: Mapping[str, object]
) -> Any:
    """Returns the fake result of a call that failed because it reads elements, in the fake mode that is entered.

    Composite operators check elements, and warn of some or correct others: `aten.cov` compares a count with 0. The call
    is run with all combinations of the truth values that it reads, and those that it rejects are left out. Its results
    are known if they have the same types, layouts and aliases for all the others.

    Raises `error` if they differ or depend on numbers, and if it is no error of such a call.
    """
    if not is_data_dependent_error(error):
        raise error
    operands = [item for item in tree_leaves((arguments, keywords)) if isinstance(item, FakeTensor)]
    if not operands:
        raise error
    function = _ctc_loss_of_lists if function is torch.ops.aten.ctc_loss.IntList else function
    mode, storages = operands[0].fake_mode, list(map(storage_identity, operands))
    results: dict[str, Any] = {}
    truths: list[bool] = []
    for _ in range(_MOST_BRANCHES):
        branch = _Branch(truths)
        try:
            with in_tracing_fake_mode(mode), branch:
                result = function(*arguments, **keywords)
            results.setdefault(_description(result, storages), result)
        except Exception as failure:  # noqa: BLE001 - an operator's own
            if is_data_dependent_error(failure):
                raise error from None
        truths = branch.next_truths()
        if not truths or len(results) > 1:
            break
    if truths or len(results) != 1:
        raise error
    return results.popitem()[1]


class _Branch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Runs a call on fake tensors with assumed truth values: `truths` for its first reads, False for all others."""

    def __init__(self, truths: Sequence[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._truths = list(truths)
        self._reads = 0

    def next_truths(self) -> list[bool]:
        """Returns the truth values of the next branch, as a binary counter of the reads; empty after the last one."""
        truths = self._truths[: self._reads]
        while truths and truths[-1]:
            truths.pop()
        return [*truths[:-1], True] if truths else []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CTC_LOSSES:
            return _ctc_loss(*args, **(kwargs or {}))
        if not _reads_truth(func, args):
            return func(*args, **(kwargs or {}))
        if self._reads == len(self._truths):
            self._truths.append(False)
        self._reads += 1
        return self._truths[self._reads - 1]


def _reads_truth(operator: OpOverload, arguments: tuple[Any, ...]) -> bool:
    """Whether an operator returns a Python truth value that it computes from elements."""
    if torch.Tag.data_dependent_output not in operator.tags:
        return False
    if operator is torch.ops.aten._local_scalar_dense.default:
        return bool(arguments[0].dtype is torch.bool)
    return [str(item.type) for item in operator._schema.returns] == ["bool"]


_CTC_LOSSES = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)


def _ctc_loss(log_probs: torch.Tensor, _targets: object, _lengths: object, target_lengths: Any, *_: object) -> Any:
    """Returns the losses, (batch,), and the table, (batch, time, states), for which torch has no rule.

    The number of states follows from the longest target. It is an unbacked symbol for lengths in a tensor.
    """
    steps, batch, _classes = log_probs.shape
    if isinstance(target_lengths, torch.Tensor):
        states = new_unbacked_number(shape_env_of(log_probs.fake_mode), "int")  # type: ignore[attr-defined]
    else:
        states = 2 * max(target_lengths) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, states)


def _ctc_loss_of_lists(*arguments: Any, **keywords: Any) -> Any:
    """Calls the overload for lengths in tensors; that for lists writes them to the memory of a tensor."""
    log_probs, targets, lengths, target_lengths, *others = arguments
    tensors = (log_probs, targets, torch.tensor(lengths), torch.tensor(target_lengths))
    return torch.ops.aten.ctc_loss.Tensor(*tensors, *others, **keywords)


def _description(result: object, storages: Sequence[object]) -> str:
    """Returns the types, layouts and aliases of a fake result as a text; equal texts mean equal metadata."""
    return str([_leaf_description(leaf, storages) for leaf in tree_leaves(result)])


def _leaf_description(leaf: object, storages: Sequence[object]) -> object:
    if not isinstance(leaf, torch.Tensor):
        return symbol_expression(leaf) if isinstance(leaf, _SYMBOLIC) else leaf
    numbers = [*leaf.shape, *leaf.stride(), leaf.storage_offset()]
    layout = [symbol_expression(item) if isinstance(item, _SYMBOLIC) else item for item in numbers]
    identity = storage_identity(leaf)
    alias = storages.index(identity) if identity in storages else None
    return leaf.dtype, leaf.device, leaf.layout, leaf.is_conj(), leaf.is_neg(), leaf.dim(), layout, alias

"""Calls that `torch.vmap` cannot vectorise over fake tensors, in forms that it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxwrap.torch_compat import OpOverload, is_vectorised, torch_schema

_aten = torch.ops.aten


class VectorisedCalls(TorchFunctionMode):
    """Rewrites calls of overloads inside of `torch.vmap`.

    vmap casts a number that a tensor is combined with to the tensor's dtype, which fails for a symbolic one: it becomes
    a tensor of the promoted dtype. Indices of which only some are vectorised fail for fake tensors: the others are
    applied first.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.index.Tensor:
            return _index(*args, **kwargs)
        if isinstance(func, OpOverload):
            args = _with_tensors(func, args)
        return func(*args, **kwargs)


def _with_tensors(overload: OpOverload, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns positional arguments in which symbolic numbers, where the schema has tensors, are tensors."""
    like = next((item for item in arguments if isinstance(item, Tensor)), None)
    if like is None or not any(isinstance(item, torch.SymInt | torch.SymFloat) for item in arguments):
        return arguments
    takes_tensor = [isinstance(item.type, torch.TensorType) for item in torch_schema(overload).arguments]
    return tuple([
        _as_tensor(item, like) if is_tensor and isinstance(item, torch.SymInt | torch.SymFloat) else item
        for item, is_tensor in zip(arguments, takes_tensor, strict=False)
    ])  # fmt: skip


def _as_tensor(number: torch.SymInt | torch.SymFloat, like: Tensor) -> Tensor:
    """Returns a number in the dtype to which torch promotes it beside a tensor."""
    dtype = torch.result_type(like, 1 if isinstance(number, torch.SymInt) else 1.0)
    result: Tensor = _aten.scalar_tensor.default(number, dtype=dtype, device=like.device)
    return result


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Returns the elements at indices of all leading dimensions, those that are the same everywhere first."""
    vectorised = [item is not None and is_vectorised(item) for item in indices]
    is_scalar = all(item is not None and item.ndim == 0 for item in indices)
    if is_scalar and any(vectorised) and not all(vectorised):
        common = [None if varies else item for item, varies in zip(indices, vectorised, strict=True)]
        tensor = _aten.index.Tensor(tensor, common)
        indices = [item for item, varies in zip(indices, vectorised, strict=True) if varies]
    result: Tensor = _aten.index.Tensor(tensor, [*indices])
    return result

"""Copies of inputs that keep what a program can see of them: strides, offsets, and who shares memory with whom."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxwrap.torch_compat import negated_view, storage_identity, tree_map

WIDE: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""What the float64 reference computes in, for each narrower dtype."""


def copied(tree: Any, *, wide: bool = False) -> Any:
    """Returns inputs with every tensor copied; anything else is passed on.

    Two tensors on one storage have copies on one storage, and an input given twice has one copy. Sizes, strides,
    offsets, `requires_grad` and the class Parameter are kept. With `wide`, floating dtypes become float64, complex
    ones complex128.
    """
    copier = _Copier(wide)
    return tree_map(lambda leaf: copier.copy(leaf) if isinstance(leaf, Tensor) else leaf, tree)


class _Copier:
    def __init__(self, wide: bool) -> None:
        self.wide = wide
        self.tensors: dict[int, Tensor] = {}
        self.storages: dict[tuple[int, torch.dtype | None], torch.UntypedStorage] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        made = self.tensors.get(id(tensor))
        if made is None:
            with torch.no_grad():
                made = self._window(tensor) if _has_plain_storage(tensor) else tensor.detach().clone()
            made.requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, tensor.requires_grad)
            self.tensors[id(tensor)] = made
        return made

    def _window(self, tensor: Tensor) -> Tensor:
        dtype = WIDE.get(tensor.dtype, tensor.dtype) if self.wide else tensor.dtype
        made = torch.empty(0, dtype=dtype, device=tensor.device)
        made.set_(self._storage(tensor, dtype), tensor.storage_offset(), tensor.shape, tensor.stride())
        made = made.conj() if tensor.is_conj() else made
        return negated_view(made) if tensor.is_neg() else made

    def _storage(self, tensor: Tensor, dtype: torch.dtype) -> torch.UntypedStorage:
        key = (storage_identity(tensor), dtype if dtype is not tensor.dtype else None)
        if key not in self.storages:
            storage = tensor.untyped_storage()
            self.storages[key] = _duplicate(storage) if key[1] is None else _converted(storage, tensor, dtype)
        return self.storages[key]


def _has_plain_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def _duplicate(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage.clone()  # type: ignore[no-untyped-call,no-any-return]


def _converted(storage: torch.UntypedStorage, tensor: Tensor, dtype: torch.dtype) -> torch.UntypedStorage:
    """Returns a storage whose elements, read as `tensor` has them, are of another dtype; offsets keep their meaning."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    count = storage.nbytes() // tensor.dtype.itemsize
    whole.set_(storage, 0, (count,), (1,))
    return whole.to(dtype).untyped_storage()


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a module's deep copy with float64 parameters and buffers; any other function itself."""
    if not isinstance(function, torch.nn.Module):
        return function
    module = copy.deepcopy(function)
    tensors: Iterable[Tensor] = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        tensor.data = tensor.data.to(WIDE.get(tensor.dtype, tensor.dtype))
    return module


class State:
    """The parameters and buffers of a module, or the constants of a program, with the contents they had at first."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._contents = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self._gradients = {name: tensor.grad for name, tensor in self.tensors.items() if tensor.is_leaf}

    def restore(self) -> None:
        """Gives every tensor its first contents, and no gradient."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if not torch.equal(tensor, self._contents[name]):  # an expanded buffer cannot be written
                    tensor.copy_(self._contents[name])
                if tensor.is_leaf:
                    tensor.grad = None

    def give_back(self) -> None:
        """Gives every tensor its first contents and its first gradient."""
        self.restore()
        for name, gradient in self._gradients.items():
            self.tensors[name].grad = gradient


def state_of(function: Any) -> State:
    """Returns the state of a module; an empty one for a function, whose own state is out of sight."""
    if not isinstance(function, torch.nn.Module):
        return State({})
    return State({**dict(function.named_parameters()), **dict(function.named_buffers())})

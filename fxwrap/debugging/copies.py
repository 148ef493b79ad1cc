"""Copies of inputs with equal strides, offsets and storage sharing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxwrap.debugging.objects import change_fields, holds_tensors
from fxwrap.torch_compat import is_opaque, negated_view, storage_identity, tree_leaves, tree_map

WIDENED_DTYPES: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""The dtype of the float64 reference, for each narrower dtype."""


def copy_inputs(tree: object, *, to_float64: bool = False) -> Any:
    """Returns nested inputs with every tensor copied.

    Tensors that share a storage have copies that share one, and a repeated input has one copy. Copies have the sizes,
    strides, offset, `requires_grad` and class (Parameter or Tensor) of the original. Objects with tensors in their
    fields, such as caches, are copied too. With `to_float64`, floating dtypes become float64 and complex ones
    complex128.
    """
    return _Copier(to_float64).copy_tree(tree)


class _Copier:
    def __init__(self, to_float64: bool) -> None:
        self.to_float64 = to_float64
        self.tensors: dict[int, Tensor] = {}
        self.storages: dict[tuple[int, torch.dtype | None], torch.UntypedStorage] = {}
        self.objects: dict[int, object] = {}

    def copy_tree(self, tree: object) -> Any:
        return tree_map(self._copy_leaf, tree)

    def _copy_leaf(self, leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return self.copy(leaf)
        if id(leaf) not in self.objects and holds_tensors(leaf):
            self.objects[id(leaf)] = copied = copy.copy(leaf)
            change_fields(copied, self.copy_tree)  # which may contain the object itself
        return self.objects.get(id(leaf), leaf)

    def copy(self, tensor: Tensor) -> Tensor:
        copied = self.tensors.get(id(tensor))
        if copied is None:
            with torch.no_grad():
                copied = self._view(tensor) if _has_plain_storage(tensor) else tensor.detach().clone()
            copied.requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, tensor.requires_grad)
            self.tensors[id(tensor)] = copied
        return copied

    def _view(self, tensor: Tensor) -> Tensor:
        dtype = WIDENED_DTYPES.get(tensor.dtype, tensor.dtype) if self.to_float64 else tensor.dtype
        view = torch.empty(0, dtype=dtype, device=tensor.device)
        view.set_(self._storage(tensor, dtype), tensor.storage_offset(), tensor.shape, tensor.stride())
        view = view.conj() if tensor.is_conj() else view
        return negated_view(view) if tensor.is_neg() else view

    def _storage(self, tensor: Tensor, dtype: torch.dtype) -> torch.UntypedStorage:
        key = (storage_identity(tensor), dtype if dtype is not tensor.dtype else None)
        if key not in self.storages:
            storage = tensor.untyped_storage()
            self.storages[key] = storage.clone() if key[1] is None else _converted(storage, tensor, dtype)  # type: ignore[no-untyped-call]
        return self.storages[key]


def _has_plain_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def _converted(storage: torch.UntypedStorage, tensor: Tensor, dtype: torch.dtype) -> torch.UntypedStorage:
    """Returns a storage with its elements, of the dtype of `tensor`, converted; offsets in elements stay valid."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    count = storage.nbytes() // tensor.dtype.itemsize
    whole.set_(storage, 0, (count,), (1,))
    return whole.to(dtype).untyped_storage()


def widen_module(function: Callable[..., object]) -> Callable[..., Any]:
    """Returns a deep copy of a module with float64 parameters and buffers; other functions are returned as they are."""
    if not isinstance(function, torch.nn.Module):
        return function
    module = copy.deepcopy(function)
    tensors: Iterable[Tensor] = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        tensor.data = tensor.data.to(WIDENED_DTYPES.get(tensor.dtype, tensor.dtype))
    return module


class OpaqueState:
    """The attributes of opaque inputs, and the states of random number generators among them.

    Objects such as process groups and meshes cannot be copied: every run has the same ones, in their initial state.
    What an attribute holds is not copied either.
    """

    def __init__(self, inputs: object) -> None:
        objects = [leaf for leaf in tree_leaves(inputs) if is_opaque(leaf)]
        self._attributes = [(item, dict(vars(item))) for item in objects if hasattr(item, "__dict__")]
        self._generators = [(item, item.get_state()) for item in objects if isinstance(item, torch.Generator)]

    def restore(self) -> None:
        """Restores the initial attributes and states."""
        for item, attributes in self._attributes:
            if vars(item) != attributes:
                vars(item).clear()
                vars(item).update(attributes)
        for generator, state in self._generators:
            generator.set_state(state)


class TensorState:
    """The parameters and buffers of a module, or the constants of a program, with their initial contents."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._contents = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self._gradients = {name: tensor.grad for name, tensor in self.tensors.items() if tensor.is_leaf}

    def restore(self) -> None:
        """Restores the initial contents, and clears gradients."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if not torch.equal(tensor, self._contents[name]):  # an expanded buffer cannot be written
                    tensor.copy_(self._contents[name])
                if tensor.is_leaf:
                    tensor.grad = None

    def restore_all(self) -> None:
        """Restores the initial contents and gradients."""
        self.restore()
        for name, gradient in self._gradients.items():
            self.tensors[name].grad = gradient


def module_state(function: object) -> TensorState:
    """Returns the state of a module; empty for other functions, whose state is unknown."""
    if not isinstance(function, torch.nn.Module):
        return TensorState({})
    return TensorState({**dict(function.named_parameters()), **dict(function.named_buffers())})

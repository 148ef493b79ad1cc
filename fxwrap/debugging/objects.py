"""Tensors inside of objects that are no nodes of a pytree: caches, dataclasses, plain classes."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fxwrap.torch_compat import is_opaque, keystr, tree_flatten_with_path

_LEAVES = (
    torch.Tensor, torch.nn.Module, torch.Generator, torch.dtype, torch.device, torch.ScriptObject, enum.Enum, type,
    types.ModuleType, str, bytes, int, float, complex, bool, type(None),
)  # fmt: skip


@dataclass(frozen=True)
class ObjectOf:
    """An object with fields, of a class that is compared by name; its fields are leaves of their own."""

    name: str


def fields_of(item: object) -> Mapping[str, object] | None:
    """Returns the fields of a dataclass or plain object by name; None for all else."""
    if isinstance(item, _LEAVES) or callable(item) or is_opaque(item):
        return None
    if dataclasses.is_dataclass(item):
        return {each.name: getattr(item, each.name, None) for each in dataclasses.fields(item)}
    return dict(vars(item)) if hasattr(item, "__dict__") else None


def named_leaves(tree: object, prefix: str) -> dict[str, object]:
    """Returns the leaves of nested values by a name with their path, with the fields of objects in them."""
    leaves: dict[str, object] = {}
    _add_leaves(leaves, tree, prefix, ())
    return leaves


def _add_leaves(leaves: dict[str, object], tree: object, prefix: str, enclosing: tuple[int, ...]) -> None:
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name, fields = prefix + keystr(path), fields_of(leaf)
        if fields is None:
            leaves[name] = leaf
            continue
        leaves[name] = ObjectOf(f"{type(leaf).__module__}.{type(leaf).__qualname__}")
        if id(leaf) not in enclosing:
            for key, item in fields.items():
                _add_leaves(leaves, item, f"{name}.{key}", (*enclosing, id(leaf)))


def holds_tensors(item: object) -> bool:
    """Whether an object that is no node of a pytree has tensors in its fields, at any depth."""
    return fields_of(item) is not None and any(
        isinstance(leaf, torch.Tensor) for leaf in named_leaves(item, "").values()
    )


def change_fields(item: object, change: Callable[[object], object]) -> None:
    """Changes the fields of an object in place, frozen dataclasses included."""
    for name, field in (fields_of(item) or {}).items():
        object.__setattr__(item, name, change(field))

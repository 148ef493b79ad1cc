"""Opaque objects of a graph: device meshes, process groups, script objects and classes registered as opaque."""

from __future__ import annotations

import torch

# Why: graphs hold a wrapper in place of an opaque object, and the registry of opaque classes has no public name.
from torch._library.fake_class_registry import FakeScriptObject as FakeScriptObject
from torch._library.opaque_object import get_opaque_obj_repr, is_opaque_type, is_opaque_value_type

NESTED_INT = "NestedInt"
"""The type of a ragged size of nested tensors, which identifies the sizes of the rows and is no number."""


def is_nested_int(value: object) -> bool:
    """Whether a value is a ragged size of nested tensors, or a symbol for one."""
    if not isinstance(value, torch.SymInt):
        return False
    hint = value if value.node.is_nested_int() else value.node.hint
    return isinstance(hint, torch.SymInt) and hint.node.is_nested_int()


def is_opaque(value: object) -> bool:
    """Whether a value of a graph is an opaque object or its stand-in during tracing.

    Random number generators and ragged sizes of nested tensors are opaque too.
    """
    if isinstance(value, torch.Tensor | int | float | str | tuple | list | None):
        return False
    if isinstance(value, FakeScriptObject | torch.ScriptObject | torch.Generator):
        return True
    return is_nested_int(value) or is_opaque_type(type(value))


def real_object(value: object) -> object:
    """Returns the object that a stand-in represents; any other value is unchanged."""
    return object.__getattribute__(value, "real_obj") if isinstance(value, FakeScriptObject) else value


def opaque_class_name(value: object) -> str:
    """Returns the qualified name of an opaque object's class, without the module for classes of torch itself."""
    value = real_object(value)
    if isinstance(value, torch.SymInt):
        return NESTED_INT
    if isinstance(value, torch.ScriptObject):
        return str(value._type().qualified_name()).removeprefix("__torch__.")
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("torch", "torch._C", "builtins") else _qualified_name(kind)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def opaque_literal_text(value: object) -> str | None:
    """Returns the text of an opaque object that torch treats as a constant by its content; None for other objects."""
    if is_opaque(value) and is_opaque_value_type(type(value)):
        return f"{_qualified_name(type(value))} {get_opaque_obj_repr(value)[0]}"
    return None

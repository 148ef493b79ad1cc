"""Attributes of a module by the dotted names of `get_attr` and `call_module` nodes."""

from __future__ import annotations

from typing import Any


def attribute_of(module: object, target: object) -> Any:
    """Returns the attribute of a module with a dotted name, None if there is none."""
    for part in str(target).split("."):
        module = getattr(module, part, None)
    return module

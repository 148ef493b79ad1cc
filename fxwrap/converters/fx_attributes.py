"""Attributes of a module by their dotted names, as `get_attr` and `call_module` nodes name them."""

from __future__ import annotations

from typing import Any


def attribute_of(module: Any, target: Any) -> Any:
    """Returns what a dotted name stands for in a module; None where there is nothing."""
    found = module
    for part in str(target).split("."):
        found = getattr(found, part, None)
    return found

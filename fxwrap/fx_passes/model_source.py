"""The place of a node in the model's source: file and line, modules and functions, from its metadata."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

from fxwrap.caching import bounded_cache
from fxwrap.wrapper_ir import Origin, Source

_TORCH = str(Path(torch.__file__).parent)


def location_of(node: Node) -> str:
    """Returns "file:line" of a node in the model's source, or ""."""
    file, line = _innermost_frame(_stack_trace(node))
    return Source(node.name, "", file, line).location


def source_of(node: Node, name: str = "", graph_id: int = -1) -> Source:
    """Returns a node's origin in the model's source, from its metadata; for a backward node, that of its forward.

    `name` is the node's name, if it has another one in its program, and `graph_id` torch's `id` of its graph.
    """
    trace = _stack_trace(node)
    file, line = _innermost_frame(trace)
    module_stack = _module_stack(node)
    origins = node.meta.get("from_node") or ()
    operator, original = str(node.target).removesuffix(".default"), node.meta.get("original_aten")
    original_operator = "" if original is None else str(original).removesuffix(".default")
    return Source(
        name or node.name,
        operator,
        file,
        line,
        module_stack[-1][0] if module_stack else "",
        str(origins[0].name) if origins else "",
        module_stack,
        _function_stack(node),
        "" if original_operator == operator else original_operator,
        str(node.meta.get("partitioner_tag") or ""),
        trace,
        graph_id,
    )


def _stack_trace(node: Node) -> str:
    """Returns the frames that torch recorded, without the one that an emitter appended."""
    origin = node.meta.get("fxwrap_origin")
    traces = [source.stack_trace for source in origin.sources] if isinstance(origin, Origin) else []
    return next(filter(None, reversed(traces)), "") or node.meta.get("stack_trace") or ""


def _module_stack(node: Node) -> tuple[tuple[str, str], ...]:
    """Returns the path and class of each module that encloses a node, without the model itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return tuple([entry for path, class_ in stack.values() if (entry := _module_entry(str(path), class_))[0]])


@bounded_cache(4096)
def _module_entry(path: str, class_: object) -> tuple[str, str]:
    """Returns the path and class of a module of the model, as users know them."""
    return _DYNAMO_ROOT.sub("", path), qualified_name(class_)


def _function_stack(node: Node) -> tuple[tuple[str, str], ...]:
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or ()
    return tuple([(str(name), qualified_name(function)) for name, function in stack])


def qualified_name(item: object) -> str:
    """Returns the qualified name of a class or function, a text unchanged."""
    if isinstance(item, str):
        return item
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    return f"{module}.{name}" if module and name else str(item)


_DYNAMO_ROOT = re.compile(r"^L\['\w+'\]\.?")
"""Dynamo's prefix of module paths: the local variable that holds the model."""


@bounded_cache(4096)
def _innermost_frame(trace: str) -> tuple[str, int]:
    """Returns file and line of a stack trace's innermost frame outside torch, or of the innermost one."""
    innermost, end = ("", 0), len(trace)
    while (start := trace.rfind('File "', 0, end)) >= 0:
        path, _, rest = trace[start + 6 : end].partition('", line ')
        number = rest.split(",", 1)[0].split("\n", 1)[0]
        frame = (path, int(number) if number.isdigit() else 0)
        if not path.startswith(_TORCH):
            return frame
        innermost, end = innermost if innermost[0] else frame, start
    return innermost

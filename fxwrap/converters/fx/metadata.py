"""Metadata of nodes by which torch's tools show the model: stacks, provenance, operators, devices and docstrings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fxwrap.caching import bounded_cache
from fxwrap.lines import Launch
from fxwrap.torch_compat import DTYPE_NAMES, OpOverload, node_source, operator_overload
from fxwrap.wrapper_ir import Origin, Source, Value

FINAL_WRITE = "fxwrap_final_write"
"""Marks a node of the functional form that writes an input or a buffer at the end."""

PASS_NAME = "fxwrap"
"""The name of the pass in `meta["from_node"]`."""


_WRITTEN = frozenset({
    "val", "stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "original_aten", "partitioner_tag",
    "device", "stream", "docstring",
})  # fmt: skip
"""The keys that an emitted node may have, besides `fxwrap_...`."""

_OF_RESULTS = frozenset({"tensor_meta", "example_value", "unbacked_bindings", "eager_input_vals"})
"""Keys of torch that describe results or operands, which a rewrite may change."""

_IGNORED = _WRITTEN | _OF_RESULTS


def node_metadata(val: object, origin: Origin | None, stream: int, name: str = "") -> dict[str, Any]:
    """Returns the metadata of a node by its fake result, the origin of its line, the stream on which it runs, its name.

    Every key that torch's tools read is present; without an origin they are empty. Metadata of other tools is that of
    the imported node with this name, else of all nodes of the line.

    A kernel computes several nodes of the model: `from_node` has all of them, and the other keys are those of the last
    one that has them, which is the node whose result the kernel writes.
    """
    sources = () if origin is None else origin.sources
    last = sources[-1] if sources else Source("")
    module_stack = next((source.module_stack for source in reversed(sources) if source.module_stack), ())
    function_stack = next((source.function_stack for source in reversed(sources) if source.function_stack), ())
    return {
        **({} if origin is None or not origin.metadata else _other_metadata(origin, name)),
        "val": val,
        **({} if origin is None else {"fxwrap_origin": origin}),
        "stack_trace": None if origin is None else _stack_trace(origin),
        "nn_module_stack": {path: (path, class_) for path, class_ in module_stack},
        "source_fn_stack": [(name, _resolved(function)) for name, function in function_stack],
        "from_node": [_from_node(source) for source in sources],
        "original_aten": _overload(last.original_operator or last.operator),
        "partitioner_tag": last.partitioner_tag or "is_forward",
        "device": _device_of(val),
        "stream": stream,
    }


def other_metadata(node: Node) -> dict[str, Any]:
    """Returns the entries of a node's metadata that fxwrap does not write."""
    return {key: item for key, item in node.meta.items() if key not in _IGNORED and not key.startswith("fxwrap")}


def _other_metadata(origin: Origin, name: str) -> Mapping[str, Any]:
    by_name = dict(origin.metadata)
    if name in by_name:
        return by_name[name]
    return {key: item for _, entries in origin.metadata for key, item in entries.items()}


def _stack_trace(origin: Origin, text: str = "") -> str | None:
    """Returns the stack trace of the last node with a location, and after it a frame that tools print above the node.

    That frame is the innermost one of the model; its line of code is `text`, by default that of the origin.
    """
    last = next((source for source in reversed(origin.sources) if source.file), None)
    if last is None:
        return None
    frames = f"{last.stack_trace.rstrip()}\n" if last.stack_trace else ""
    return f'{frames}  File "{last.file}", line {last.line}, in {last.module or "forward"}\n    {text or origin}'


def _from_node(source: Source) -> Any:
    before = [node_source(source.original, "", -1, "", [])] if source.original else []
    return node_source(source.node, source.operator, source.graph_id, PASS_NAME, before)


@bounded_cache(4096)
def _resolved(name: str) -> object:
    """Returns the function or class of a qualified name in a module that is imported, else the name."""
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        rest = f"{outer}.{rest}"
    item: object = sys.modules.get(module)
    for part in rest.split("."):
        item = getattr(item, part, None)
    return name if item is None else item


def _overload(name: str) -> OpOverload | None:
    """Returns the overload of an operator ("aten.mm", "aten.add.Tensor"), None for another function."""
    if name.count(".") not in (1, 2):
        return None
    try:
        return operator_overload(name if name.count(".") == 2 else f"{name}.default")
    except LookupError:
        return None


def _device_of(val: object) -> torch.device | None:
    """Returns the device of the first tensor in a node's fake result."""
    if isinstance(val, torch.Tensor):
        return val.device
    items = val if isinstance(val, tuple | list) else ()
    return next((device for device in map(_device_of, items) if device is not None), None)


def kernel_metadata(line: Launch) -> dict[str, Any]:
    """Returns the docstring of a kernel, and a stack trace that shows it."""
    docstring = kernel_docstring(line)
    return {"docstring": docstring, "stack_trace": _stack_trace(line.origin or Origin(), docstring)}


def kernel_docstring(line: Launch) -> str:
    """Returns a sentence about a kernel: its operators, the largest of its tensors, results and operands."""
    operators = ", ".join(line.origin.operators) if line.origin is not None else ""
    operands = [item for item in line.arguments if isinstance(item, Value)]
    largest = max([*line.outs, *operands], key=_rank, default=None)
    space = "" if largest is None else f" over {_sizes(largest)}"
    results, inputs = (", ".join(map(_type_text, items)) or "nothing" for items in (line.outs, operands))
    return f"Computes {operators or line.kernel}{space}: {results} from {inputs}."


def _rank(value: Value) -> tuple[int, int]:
    count = value.tensor_type.element_count
    return (1, 0) if not isinstance(count, int) else (0, count)


def _sizes(value: Value) -> str:
    return f"[{', '.join(map(str, value.tensor_type.sizes))}]"


def _type_text(value: Value) -> str:
    return f"{DTYPE_NAMES[value.tensor_type.dtype]}{_sizes(value)}"

"""torch.utils._pytree: trees of values, and their text.

Why: torch.export and torch.compile flatten nested values with this module, whose registry of types has no public name.
torch's own text of a tree raises an error for types without a serialised name, which `register_dataclass` gives to none
by default, and for those that are not registered where it is read.
"""

from __future__ import annotations

import json
import operator
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils._pytree import treespec_dumps as treespec_dumps
from torch.utils._pytree import treespec_loads as treespec_loads

TreeSpec = pytree.TreeSpec

_PLAIN_TYPES: Mapping[str, type] = {
    "builtins.tuple": tuple, "builtins.list": list, "builtins.dict": dict, "collections.OrderedDict": OrderedDict,
}  # fmt: skip


def tree_labels(spec: TreeSpec) -> Any:
    """Returns a tree in which each node is a pair of its children's labels and trees, and each leaf is None.

    Labels are keys, field names, or positions if the type tells none.
    """
    try:
        sample: Any = spec.unflatten([torch.empty(0, device="meta") for _ in range(spec.num_leaves)])
    except Exception:  # noqa: BLE001  a class that accepts only its own contents
        sample = None
    return _labels(spec, sample)


def _labels(spec: TreeSpec, sample: object) -> Any:
    if spec.is_leaf():
        return None
    children = spec.children()
    node = pytree.SUPPORTED_NODES.get(spec.type)
    labels: list[str | int] = list(range(len(children)))
    samples: list[object] = [None] * len(children)
    if node is not None and node.flatten_with_keys_fn is not None and sample is not None:
        pairs = list(node.flatten_with_keys_fn(sample)[0])
        if len(pairs) == len(children):
            labels, samples = [_label(key) for key, _ in pairs], [item for _, item in pairs]
    return labels, [_labels(child, item) for child, item in zip(children, samples, strict=True)]


def _label(key: object) -> str | int:
    for name in ("key", "idx", "name"):  # of a mapping, a sequence, an attribute
        label = getattr(key, name, None)
        if isinstance(label, str | int):
            return label
    return str(key)


def tree_builder(spec: TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """Returns a function of the leaves that builds a tree, in less time than `spec.unflatten`."""
    if spec.is_leaf():
        return operator.itemgetter(0)
    build, context, children = pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context, spec.children()
    if all(child.is_leaf() for child in children):
        if spec.type is dict:
            return lambda leaves: dict(zip(context, leaves))
        return lambda leaves: build(leaves, context)
    parts: list[tuple[slice, Callable[[Sequence[Any]], Any]]] = []
    start = 0
    for child in children:
        parts.append((slice(start, start + child.num_leaves), tree_builder(child)))
        start += child.num_leaves
    return lambda leaves: build([part(leaves[place]) for place, part in parts], context)


def type_name(spec: TreeSpec) -> str:
    """Returns the name of a node's type: the one that it is registered with, or its class with the module."""
    class_ = spec.context if spec.type is namedtuple else spec.type
    registered = pytree.SUPPORTED_SERIALIZED_TYPES.get(class_)
    if registered is not None and registered.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        return registered.serialized_type_name
    return f"{class_.__module__}.{class_.__qualname__}"


def describe_tree(spec: TreeSpec) -> Any:
    """Returns a tree as JSON data: None for a leaf; the type, context, labels and children of a node.

    The type is None where the context is no JSON data, which restores the node as a plain container.
    """
    return _describe(spec, tree_labels(spec))


def _describe(spec: TreeSpec, labels: Any) -> Any:
    if spec.is_leaf():
        return None
    names, inner = labels
    name: str | None = type_name(spec)
    context: Any = None
    try:
        if spec.type is not namedtuple:
            context = _dumped_context(spec)
        if _typed_node(name, context, names, spec.children()) != spec:
            name, context = None, None
    except Exception:  # noqa: BLE001  a context that is no JSON data, or a registered function that fails
        name, context = None, None
    return {
        "type": name,
        "context": context,
        "labels": names,
        "children": [_describe(child, item) for child, item in zip(spec.children(), inner, strict=True)],
    }


def _dumped_context(spec: TreeSpec) -> Any:
    registered = pytree.SUPPORTED_SERIALIZED_TYPES.get(spec.type)
    if registered is not None and registered.to_dumpable_context is not None:
        return json.loads(json.dumps(registered.to_dumpable_context(spec.context)))
    return json.loads(json.dumps(spec.context, cls=pytree.EnumEncoder))


def restore_tree(described: Any, *, trusted: bool = True) -> tuple[TreeSpec, list[str]]:
    """Returns the tree of a description, and the names of types that are not known in this process.

    A node of an unknown type becomes a dict if its labels are names, else a tuple. With trusted=False, the text comes
    from a stranger: only plain containers are restored, since contexts may name classes and functions. Raises KeyError,
    TypeError or ValueError for another description.
    """
    if described is None:
        return pytree.treespec_leaf(), []
    restored = [restore_tree(item, trusted=trusted) for item in described["children"]]
    children, unknown = [tree for tree, _ in restored], [name for _, names in restored for name in names]
    name, context, labels = described["type"], described["context"], list(described["labels"])
    if len(labels) != len(children) or not all(isinstance(label, str | int) for label in labels):
        raise ValueError(f"a node has {len(children)} children, and the labels {labels}")
    node = _typed_node(name, context, labels, children) if trusted or name in _PLAIN_TYPES else None
    if node is not None:
        return node, unknown
    unknown = [str(name), *unknown]
    if labels and all(isinstance(label, str) for label in labels):
        return TreeSpec(dict, labels, children), unknown
    return TreeSpec(tuple, None, children), unknown


def _typed_node(name: str | None, context: Any, labels: Sequence[Any], children: list[TreeSpec]) -> TreeSpec | None:
    """Returns a node of a type by name; None if this process does not know the type."""
    class_ = None if name is None else _class_of(name)
    if class_ is None:
        return None
    if class_ in (dict, OrderedDict):
        if not isinstance(context, list) or len({*context}) != len(children):
            raise ValueError(f"a dict has {len(children)} values, and the keys {context}")
        return TreeSpec(class_, context, children)
    if class_ in (tuple, list):
        return TreeSpec(class_, None, children)
    if class_ not in pytree.SUPPORTED_NODES:
        return TreeSpec(namedtuple, class_, children) if list(class_._fields) == list(labels) else None
    registered = pytree.SUPPORTED_SERIALIZED_TYPES.get(class_)
    if registered is not None and registered.from_dumpable_context is not None:
        return TreeSpec(class_, registered.from_dumpable_context(context), children)
    return TreeSpec(class_, json.loads(json.dumps(context), object_hook=pytree.enum_object_hook), children)


def _class_of(name: str) -> Any:
    """Returns the class of a name among registered types, and classes of named tuples in imported modules."""
    if name in _PLAIN_TYPES:
        return _PLAIN_TYPES[name]
    class_ = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if class_ is not None:
        return class_
    for class_ in pytree.SUPPORTED_NODES:
        if f"{class_.__module__}.{class_.__qualname__}" == name:
            return class_
    module, _, qualified = name.rpartition(".")
    class_ = getattr(sys.modules.get(module), qualified, None)
    return class_ if isinstance(class_, type) and pytree.is_namedtuple_class(class_) else None

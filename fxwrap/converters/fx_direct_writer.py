"""What writes the direct forms of nodes: names of what a text refers to, calls of operators as by hand, windows.

All of it is read off a node's target and arguments, never off what the emitter once knew of it, so that it stays right
whatever is done to the graph. The metadata `val` says only whether an argument is a tensor or a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fxwrap.converters.fx_replay import replayed_call
from fxwrap.converters.fx_types import known_types, unseen_views
from fxwrap.converters.torch_calls import Kind, kind_of, torch_call
from fxwrap.device_registry import language_facts
from fxwrap.runtime import direct, library, tensors
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.replay import Memory
from fxwrap.torch_compat import OpOverload

_ONCE = (1, 1, 1)


class NotDirect(Exception):
    """A node has no direct form: what torch.fx writes for it stays."""


Form: TypeAlias = "Callable[[DirectWriter, Node], str]"
"""Writes one node."""


class DirectWriter:
    """Writes the direct forms of a graph's nodes.

    `globals` are the objects that the text refers to by names of `new_name`'s; `kernels` is one of them. `parameters`
    are the names of the function's parameters, which hide builtins; `forms` write the nodes that call these targets.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        new_name: Callable[[str], str],
        parameters: frozenset[str],
        forms: Mapping[Any, Form],
    ) -> None:
        self.new_name = new_name
        self.parameters = parameters
        self._forms = forms
        self.kernels = direct.Kernels()
        self.globals: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._memories: dict[str, Memory] = {}
        self._kernel_names: dict[tuple[str, bool], str] = {}
        self._unseen = unseen_views(nodes)
        self._types = known_types(nodes)

    def call(self, node: Node) -> str | None:
        """Returns a call of a function or submodule as an expression; None where it has no direct form."""
        try:
            return self._call(node)
        except NotDirect:
            return None

    def _call(self, node: Node) -> str:
        target: Any = node.target
        if node.op == "call_module":
            return self.replayed(node)
        window = self.window(node) if node in self._unseen else None
        if window is not None:
            return window
        form = self._forms.get(target)
        if form is not None:
            return form(self, node)
        if not isinstance(target, OpOverload):
            raise NotDirect
        if target.namespace == "fxwrap":
            return self.ours(node)
        return self.operator(node)

    def replayed(self, node: Node) -> str:
        """Returns a call of a submodule whose work is recorded and replayed."""
        found = replayed_call(node, self._memories)
        if found is None:
            raise NotDirect
        name = self.named(f"replay_{node.target}", found[0], ("replay", node.name))
        return f"{name}({', '.join([self.text(item) for item in found[1]])})"

    # --- names ------------------------------------------------------------------------------------------------------

    def named(self, wish: str, found: Any, key: Any = None) -> str:
        """Returns the name of an object that the text refers to; one object, or one key, has one name."""
        key = found if key is None else key
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self.new_name(wish)
            self.globals[name] = found
        return name

    def kernel(self, name: str, kernel_hash: str, text: KernelText, once: bool) -> str:
        """Returns the text of a kernel's launcher."""
        known = self._kernel_names.get((kernel_hash, once))
        if known is None:
            wish = "".join([letter if letter.isalnum() else "_" for letter in name or "kernel"])
            known, count = wish, 0
            while known in self._kernel_names.values() or known.startswith("__") or not known.isidentifier():
                known, count = f"{wish if wish[:1].isalpha() else 'kernel'}_{count}", count + 1
            self._kernel_names[kernel_hash, once] = known
            self.kernels.add(known, text, once)
        return f"{self.named('kernels', self.kernels.module, 'kernels')}.{known}"

    def builtin(self, name: str) -> str:
        """Returns the name of a builtin function, where no parameter hides it."""
        if name in self.parameters:
            raise NotDirect
        return name

    # --- arguments --------------------------------------------------------------------------------------------------

    def text(self, item: Any) -> str:
        """Returns an argument's text."""
        match item:
            case Node():
                return repr(item)
            case torch.device():
                return self.named("device_" + str(item).replace(":", "_"), item)
            case tuple() if not hasattr(item, "_fields"):
                return f"({', '.join([self.text(part) for part in item])}{',' if len(item) == 1 else ''})"
            case list():
                return f"[{', '.join([self.text(part) for part in item])}]"
            case bool() | int() | float() | str() | None:
                return repr(item)  # torch.fx defines inf and nan
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(item)
            case _:
                raise NotDirect

    def tuple(self, items: Any) -> str:
        """Returns a list argument as a tuple's text."""
        if not isinstance(items, list | tuple):
            raise NotDirect
        return self.text(tuple(items))

    def runtime(self, module: ModuleType, function: str, arguments: Sequence[str]) -> str:
        """Returns a call of a function of a module of `fxwrap.runtime`."""
        return f"{self.named(module.__name__.rpartition('.')[2], module)}.{function}({', '.join(arguments)})"

    # --- operators --------------------------------------------------------------------------------------------------

    def operator(self, node: Node) -> str:
        """Returns a call of an operator as one writes it by hand, where that is known to be the same; else by name."""
        target: Any = node.target
        name, overload = target._schema.name.partition("::")[2], target._overloadname
        texts = [self.text(item) for item in node.args]
        keywords = {key: self.text(item) for key, item in node.kwargs.items()}
        kinds = [kind_of_node(item) for item in node.args]
        if target.namespace == "aten" and Kind.TENSOR in kinds:  # factories obey torch.set_default_device
            named = {key: kind_of_node(item) for key, item in node.kwargs.items()}
            spelling = torch_call(name, overload or "default", kinds, named)
            if spelling is not None and (not spelling.method or isinstance(node.args[0], Node)):
                return spelling.write(_spread(spelling.function, texts, node.args), keywords)
        texts += [f"{key}={text}" for key, text in keywords.items()]
        short = name if overload in ("", "default") else f"{name}_{overload}"
        return f"{self.named(f'{target.namespace}_{short}', target)}({', '.join(texts)})"

    def ours(self, node: Node) -> str:
        """Returns a call of what an operator of the library `fxwrap::` does."""
        target: Any = node.target
        arguments = [self.text(item) for item in node.args]
        arguments += [f"{key}={self.text(item)}" for key, item in node.kwargs.items()]
        return self.implementation(target, arguments)

    def implementation(self, target: Any, arguments: Sequence[str]) -> str:
        """Returns a call of what an operator of the library `fxwrap::` does."""
        name = f"fxwrap_{target._schema.name.partition('::')[2]}"
        return f"{self.named(name, library.implementation(target))}({', '.join(arguments)})"

    def allocator(self, device: Any) -> str:
        """Returns the name of the function that allocates on a device."""
        if not isinstance(device, torch.device):
            raise NotDirect
        name = "allocate_" + str(device).replace(":", "_")
        return self.named(name, tensors.allocator(str(device)), name)

    def window(self, node: Node) -> str | None:
        """Returns a view as a tensor on the same memory, if its place there is known."""
        base: Any = node.args[0] if node.args else None
        old, new = self._types.get(base), self._types.get(node)
        if old is None or new is None or old.dtype.is_complex:  # windows know no conjugate bit
            return None
        arguments = [self.text(base), self.tuple(new.sizes), self.tuple(new.strides)]
        distance = new.storage_offset - old.storage_offset
        arguments += [self.text(distance)] if distance else []
        return self.runtime(tensors, "window", arguments)

    # --- kernels ----------------------------------------------------------------------------------------------------

    def launch(self, name: str, kernel_hash: str, found: library.RegisteredKernel, grid: Any, given: list[str]) -> str:
        """Returns the launch of a kernel."""
        once = language_facts(found.language).called_once and tuple(grid) == _ONCE
        text = KernelText(found.language, found.source, found.signature, found.options)
        launcher = self.kernel(found.name or name, kernel_hash, text, once)
        return f"{launcher}({', '.join(given if once else [self.tuple(grid), *given])})"


def kind_of_node(item: Any) -> Kind:
    """Returns the kind of a node's argument."""
    if isinstance(item, Node):
        return _kind_of_val(item.meta.get("val"))
    if not isinstance(item, list | tuple) or not any(isinstance(part, Node) for part in item):
        return kind_of(item)
    kinds = {kind_of_node(part) for part in item}
    if kinds == {Kind.TENSOR}:
        return Kind.TENSORS
    if kinds == {Kind.TENSOR, Kind.NONE}:
        return Kind.OPTIONAL_TENSORS
    return Kind.INTS if kinds == {Kind.INT} else Kind.OTHER


def _kind_of_val(val: Any) -> Kind:
    if isinstance(val, torch.Tensor):
        return Kind.TENSOR
    if isinstance(val, bool | torch.SymBool):
        return Kind.BOOL
    if isinstance(val, int | torch.SymInt):
        return Kind.INT
    return Kind.FLOAT if isinstance(val, float | torch.SymFloat) else Kind.OTHER


_SPREAD = ("view", "expand")


def _spread(function: str, texts: list[str], arguments: Sequence[Any]) -> list[str]:
    """Returns the arguments of a call; sizes one by one where that is cheaper."""
    if function in _SPREAD and len(arguments) == 2 and isinstance(arguments[1], list | tuple) and arguments[1]:
        return [texts[0], texts[1][1:-1].rstrip(",")]
    return texts


def only_keywords(node: Node, *keywords: str) -> None:
    """Leaves a node alone that has other keyword arguments."""
    if set(node.kwargs) - set(keywords):
        raise NotDirect


def named_arguments(node: Node, *names: str) -> list[Any]:
    """Returns a node's arguments by these names, in order; leaves a node alone that lacks one or has others."""
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if len(node.args) > len(names) or set(given) != set(names):
        raise NotDirect
    return [given[name] for name in names]



"""The context of direct code: names of globals, texts of arguments, and calls of operators as a person writes them.

Texts follow from a node's target and arguments only, not from what the emitter knew, so they stay right after rewrites.
Of the metadata, only `val` is read, for the kind of an argument: tensor or number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fxwrap.converters.fx.replay import graphed_call
from fxwrap.converters.fx.strided_views import StridedViews
from fxwrap.converters.fx.types import written_arguments
from fxwrap.converters.torch_calls import ArgumentKind, kind_of, torch_call
from fxwrap.devices import language_traits
from fxwrap.inference import scalar_kind
from fxwrap.runtime import direct, kernel_table, library, tensors
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.graph_capture.replay import GraphManager
from fxwrap.torch_compat import OpOverload, overload_name, torch_schema, triton_launch_functional

FUNCTIONAL_LAUNCHES = frozenset({torch.ops.fxwrap.cpp_kernel_functional.default, triton_launch_functional})
"""Operators that launch a kernel and return its results."""

_UNIT_GRID = (1, 1, 1)
_VARARG_METHODS = ("view", "expand")


class NoDirectForm(Exception):
    """A node without a direct form: the text that torch.fx generates for it is used."""


DirectForm: TypeAlias = "Callable[[DirectWriter, Node], str]"
"""Returns the text of one node."""


class DirectWriter:
    """Returns the direct text of a graph's nodes.

    `globals` are the objects that the text names, by names from `new_name`. `parameters` are the names of the
    function's parameters, which shadow builtins; `forms` are the forms of calls, by target. `unpacked` are launches
    whose results have names of their own, those of their `operator.getitem` nodes. `renamed` are the results that have
    the name of the tensor in whose memory they are, one of the `retained` ones.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        new_name: Callable[[str], str],
        parameters: frozenset[str],
        forms: Mapping[Any, DirectForm],
    ) -> None:
        self.new_name = new_name
        self.parameters = parameters
        self._forms = forms
        self._kernels = direct.LazyKernels()
        self.globals: dict[str, object] = {}
        self._names: dict[object, str] = {}
        self._graph_managers: dict[str, GraphManager] = {}
        self._written = written_arguments(nodes)
        self._views = StridedViews(nodes)
        self.folded_views = self._views.folded
        self.unpacked: set[Node] = set()
        self.renamed: dict[Node, Node] = {}
        self.retained: set[Node] = set()

    def call(self, node: Node) -> str | None:
        """Returns a call of a function or submodule as an expression; None if it has no direct form."""
        try:
            return self._call(node)
        except NoDirectForm:
            return None

    def _call(self, node: Node) -> str:
        target: Any = node.target
        if node.op == "call_module":
            return self._graphed_call(node)
        view = self._views.arguments(node)
        if view is not None:
            return self.runtime(tensors, "strided_view", view)
        form = self._forms.get(target)
        if form is not None:
            return form(self, node)
        if not isinstance(target, OpOverload):
            raise NoDirectForm
        return self.fxwrap_operator(node) if target.namespace == "fxwrap" else self.operator(node)

    def _graphed_call(self, node: Node) -> str:
        call = graphed_call(node, self._graph_managers)
        if call is None:
            raise NoDirectForm
        function, arguments = call
        return f"{self.global_name(f'replay_{node.target}', function, ('replay', node.name))}({self.texts(arguments)})"

    # --- names ------------------------------------------------------------------------------------------------------

    def global_name(self, name_hint: str, item: object, key: object = None) -> str:
        """Returns the name of an object that the text uses: one name for each key, which is the object by default."""
        key = item if key is None else key
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self.new_name(name_hint)
            self.globals[name] = item
        return name

    def builtin(self, name: str) -> str:
        """Returns the name of a builtin function, unless a parameter shadows it."""
        if name in self.parameters:
            raise NoDirectForm
        return name

    def results(self, node: Node, keys: Sequence[object]) -> list[Node] | None:
        """Returns the nodes of the results of a functional launch, by key; None unless each result has one node."""
        items = [user.args[1] for user in node.users if user.target is operator.getitem and user.args[0] is node]
        if len(items) == len(node.users) == len(keys) and all(type(item) in (int, str) for item in items):
            nodes: dict[object, Node] = dict(zip(items, node.users, strict=True))
            if nodes.keys() == set(keys):
                return [nodes[key] for key in keys]
        return None

    def define_result(self, result: Node, text: str, memory: Node | None) -> str:
        """Returns the statement that defines a result of an unpacked launch; `memory` is the tensor it overwrites.

        There is none if launches alone use the result: they use the name of the memory.
        """
        if memory is not None and result.users and all(user.target in FUNCTIONAL_LAUNCHES for user in result.users):
            self.renamed[result] = self.renamed.get(memory, memory)
            self.retained.add(memory)
            return ""
        return f"{result!r} = {text}\n"

    # --- arguments --------------------------------------------------------------------------------------------------

    def text(self, item: object) -> str:
        """Returns an argument's text."""
        match item:
            case torch.device():
                return self.global_name("device_" + str(item).replace(":", "_"), item)
            case tuple() if not hasattr(item, "_fields"):
                return f"({self.texts(item)}{',' if len(item) == 1 else ''})"
            case list():
                return f"[{self.texts(item)}]"
            case Node():
                return repr(self.renamed.get(item, item))
            case bool() | int() | float() | str() | None:
                return repr(item)  # torch.fx defines inf and nan
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(item)
            case _:
                raise NoDirectForm

    def texts(self, items: Sequence[object]) -> str:
        """Returns the texts of arguments, joined by commas."""
        return ", ".join([self.text(item) for item in items])

    def tuple(self, items: object) -> str:
        """Returns a list argument as a tuple's text."""
        if not isinstance(items, list | tuple):
            raise NoDirectForm
        return self.text(tuple(items))

    def runtime(self, module: ModuleType, function: str, arguments: Sequence[str]) -> str:
        """Returns a call of a function of a module of `fxwrap.runtime`."""
        return f"{self.global_name(module.__name__.rpartition('.')[2], module)}.{function}({', '.join(arguments)})"

    # --- operators --------------------------------------------------------------------------------------------------

    def operator(self, node: Node) -> str:
        """Returns a call of an operator by its public spelling in torch if that is known to be equal, else by name."""
        target: Any = node.target
        name, overload = torch_schema(target).name.partition("::")[2], overload_name(target)
        texts = [self.text(item) for item in node.args]
        keywords = {key: self.text(item) for key, item in node.kwargs.items()}
        kinds = [kind_of_node(item) for item in node.args]
        if target.namespace == "aten" and ArgumentKind.TENSOR in kinds:  # factories obey torch.set_default_device
            named = {key: kind_of_node(item) for key, item in node.kwargs.items()}
            spelling = torch_call(name, overload or "default", kinds, named)
            if spelling is not None and (not spelling.method or isinstance(node.args[0], Node)):
                sizes = node.args[1] if spelling.function in _VARARG_METHODS and len(node.args) == 2 else None
                if isinstance(sizes, list | tuple) and sizes:  # sizes one by one are parsed faster
                    texts = [texts[0], self.texts(sizes)]
                return spelling.write(texts, keywords)
        texts += [f"{key}={text}" for key, text in keywords.items()]
        short = name if overload in ("", "default") else f"{name}_{overload}"
        return f"{self.global_name(f'{target.namespace}_{short}', target)}({', '.join(texts)})"

    def fxwrap_operator(self, node: Node) -> str:
        """Returns a call of the implementation of an operator of the library `fxwrap::`."""
        arguments = [self.text(item) for item in node.args]
        return self.implementation(node.target, [*arguments, *[f"{k}={self.text(v)}" for k, v in node.kwargs.items()]])

    def implementation(self, target: Any, arguments: Sequence[str]) -> str:
        """Returns a call of the implementation of an operator of the library `fxwrap::`, on these texts."""
        name = f"fxwrap_{torch_schema(target).name.partition('::')[2]}"
        return f"{self.global_name(name, library.implementation(target))}({', '.join(arguments)})"

    def allocator(self, device: object) -> str:
        """Returns the name of the function that allocates on a device."""
        if not isinstance(device, torch.device):
            raise NoDirectForm
        name = "allocate_" + str(device).replace(":", "_")
        return self.global_name(name, tensors.allocator(str(device)), name)

    # --- kernels ----------------------------------------------------------------------------------------------------

    def launch(
        self,
        node: Node,
        kernel_hash: str,
        kernel: kernel_table.RegisteredKernel,
        grid: Sequence[object],
        arguments: list[str],
    ) -> str:
        """Returns the launch of a kernel, after an increment of the version counters of inputs that it writes."""
        gridless = language_traits(kernel.language).gridless and tuple(grid) == _UNIT_GRID
        text = KernelText.of(kernel)
        launcher = self._launcher(kernel.name or node.name, kernel_hash, text, gridless)
        launch = f"{launcher}({', '.join(arguments if gridless else [self.tuple(grid), *arguments])})"
        written = self._written.get(node)
        return (
            launch
            if written is None
            else f"{self.runtime(tensors, 'increment_versions', [self.tuple(written)])}\n{launch}"
        )

    def _launcher(self, name_hint: str, kernel_hash: str, text: KernelText, gridless: bool) -> str:
        name = self._names.get((kernel_hash, gridless))
        if name is None:
            letters = [letter if letter.isalnum() else "_" for letter in name_hint]
            name = self._names[kernel_hash, gridless] = self.new_name("kernel_" + "".join(letters))
            self.globals[name] = self._kernels.add(name, text, gridless)
        return name


_SCALAR_KINDS = {"bool": ArgumentKind.BOOL, "int": ArgumentKind.INT, "float": ArgumentKind.FLOAT}


def kind_of_node(item: object) -> ArgumentKind:
    """Returns the kind of a node's argument."""
    if isinstance(item, Node):
        val = item.meta.get("val")
        is_tensor = isinstance(val, torch.Tensor)
        return ArgumentKind.TENSOR if is_tensor else _SCALAR_KINDS.get(scalar_kind(val) or "", ArgumentKind.OTHER)
    if not isinstance(item, list | tuple) or not any(isinstance(part, Node) for part in item):
        return kind_of(item)
    kinds = {kind_of_node(part) for part in item}
    if kinds == {ArgumentKind.TENSOR}:
        return ArgumentKind.TENSORS
    if kinds == {ArgumentKind.TENSOR, ArgumentKind.NONE}:
        return ArgumentKind.OPTIONAL_TENSORS
    return ArgumentKind.INTS if kinds == {ArgumentKind.INT} else ArgumentKind.OTHER


def named_arguments(node: Node, *names: str) -> list[Any]:
    """Returns a node's arguments by these names, in order. Raises NoDirectForm for missing or other ones."""
    arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if len(node.args) > len(names) or set(arguments) != set(names):
        raise NoDirectForm
    return [arguments[name] for name in names]

"""A graph as text, for its hash: everything that lowering can learn from it, the same in every process.

The text says of each node its name, call, arguments and place in the model's source, and of its fake values dtype,
sizes, strides, offset, device and which share memory; of the symbols in them ranges, hints, replacements and guards;
of tensors that the graph holds their layout, and the content of small ones. What a graph holds that no text can stand
for makes it one that is not cached.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from fxwrap.lowering.effects import launches_kernel
from fxwrap.lowering.source import source_of
from fxwrap.lowering.streams import stream_call, stream_number
from fxwrap.torch_compat import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    operator_text,
    shape_facts,
    storage_identity,
)

SMALL = 1 << 10
"""Bytes up to which the content of a tensor on the CPU that a graph holds is part of its text."""


class NotCacheable(Exception):
    """Why a compile is not cached."""


class GraphText:
    """Writes graphs as text; `devices` collects the devices of their tensors.

    `tensors` has the tensors that the graphs hold, by where they are found: ("attr", path) or ("state", name).
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.devices: dict[torch.device, None] = {}
        self.tensors: dict[tuple[str, str], torch.Tensor] = {}
        self._storages: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._expressions: dict[Any, str] = {}
        self._symbols: set[sympy.Symbol] = set()
        self._shape_env: Any = None
        self._modules: dict[int, str] = {}
        self._devices: dict[torch.device, str] = {}

    def text(self) -> str:
        """Returns all that was written."""
        return "\n".join(self.parts)

    def symbols_text(self) -> str:
        """Returns what is known of the symbols by now: lowering reads it, and may itself learn what it then guards."""
        if not self._symbols or self._shape_env is None:
            return ""
        return "\n".join(shape_facts(self._shape_env, frozenset(self._symbols), sympy.srepr))

    # --- graphs -----------------------------------------------------------------------------------------------------

    def add(self, graph: GraphModule | ExportedProgram, example_inputs: Sequence[Any] | None) -> None:
        """Writes a graph and the examples of its inputs, which count where its nodes do not say what they are."""
        if isinstance(graph, ExportedProgram):
            self._exported(graph)
        module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
        self.module(module, "")
        nodes = module.graph.nodes
        if example_inputs is not None and not all("val" in node.meta for node in nodes if node.op != "output"):
            self.parts.append(f"examples {[self.value(item) for item in example_inputs]}")

    def _exported(self, exported: ExportedProgram) -> None:
        signature = exported.graph_signature
        self.parts.append(f"exported {signature.input_specs!r} {signature.output_specs!r}")
        for spec in signature.input_specs:
            if spec.kind is InputKind.CUSTOM_OBJ:
                raise NotCacheable(f"the input '{spec.target}' is an object of a class that only its library knows")
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                name = str(spec.target)
                held = exported.state_dict.get(name, exported.constants.get(name))
                is_number = spec.kind is InputKind.CONSTANT_TENSOR
                self.parts.append(f"state {name!r} {self._tensor_held(('state', name), held, is_number)}")

    def module(self, graph_module: GraphModule, path: str) -> None:
        """Writes the nodes of a graph; `path` is where the module is in the outermost one."""
        write, parts = self._argument, self.parts
        for node in graph_module.graph.nodes:
            if launches_kernel(node):
                raise NotCacheable(f"node '{node.name}' launches a Triton kernel of the user's")
            if stream_call(node) or stream_number(node):
                raise NotCacheable(f"node '{node.name}' is about streams, whose devices only this process knows")
            if node.op == "get_attr":
                target = self._attribute(graph_module, str(node.target), path)
            else:
                target = self._target(node)
            keywords = f" {write(node.kwargs)}" if node.kwargs else ""
            meta = node.meta
            found = f" {self.value(meta['val'])}" if "val" in meta else ""
            bindings = meta.get("unbacked_bindings")
            if bindings:
                found += f" {[(self._expression(symbol), str(steps)) for symbol, steps in bindings.items()]}"
            source = source_of(node)
            place = (source.file, source.line, source.module, source.original)
            parts.append(f"{node.op} {node.name} {target} {write(node.args)}{keywords}{found} {place!r}")
        parts.append("end")

    def _target(self, node: Node) -> str:
        target: Any = node.target
        if isinstance(target, str):
            return target
        if isinstance(target, OpOverload):
            return operator_text(target)
        if isinstance(target, HigherOrderOperator):
            return f"higher_order.{target.name()}"  # type: ignore[no-untyped-call]
        module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if module in ("_operator", "builtins", "math", "torch") and name:
            return f"{module}.{name}"
        raise NotCacheable(f"node '{node.name}' calls {target}, which no text stands for")

    def _attribute(self, graph_module: GraphModule, target: str, path: str) -> str:
        held: Any = graph_module
        for part in target.split("."):
            held = getattr(held, part)
        whole = f"{path}.{target}" if path else target
        if isinstance(held, GraphModule):
            known = self._modules.get(id(held))
            if known is not None:
                return f"{target} is {known}"
            self._modules[id(held)] = whole
            self.parts.append(f"graph {whole}")
            self.module(held, whole)
            return f"{target} is {whole}"
        if isinstance(held, torch.Tensor):
            is_number = not isinstance(held, torch.nn.Parameter)
            return f"{target} is {self._tensor_held(('attr', whole), held, is_number)}"
        return f"{target} is {self._argument(held)}"

    def _tensor_held(self, place: tuple[str, str], held: Any, is_number: bool) -> str:
        """Says what a tensor that the graph holds is, and which one it is of those that came before.

        One that the model's code says (`is_number`) is told with its content, where that is small.
        """
        if not isinstance(held, torch.Tensor):
            raise NotCacheable(f"'{place[1]}' is a {type(held).__name__}, not a tensor")
        known = self._held.setdefault(id(held), len(self._held))
        self.tensors.setdefault(place, held)
        text = f"#{known} {self._tensor(held)}"
        small = is_number and held.is_cpu and not isinstance(held, FakeTensor) and held.layout is torch.strided
        if small and held.numel() * held.element_size() <= SMALL and not (held.is_conj() or held.is_neg()):
            text += f" {_content(held)}"
        return text

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, value: Any) -> str:
        """Says what lowering can see of a fake value, or of what stands in the place of one."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._number(value)
        if isinstance(value, tuple | list):
            return f"[{' '.join([self.value(item) for item in value])}]"
        if isinstance(value, Mapping):
            return f"{{{' '.join([f'{key!r}: {self.value(item)}' for key, item in value.items()])}}}"
        return self._argument(value)

    def _tensor(self, tensor: torch.Tensor) -> str:
        device, kind = tensor.device, type(tensor)
        place = self._devices.get(device)
        if place is None:
            place = self._devices[device] = str(device)
            self.devices[device] = None
        name = "" if kind is FakeTensor else kind.__name__
        if tensor.layout is not torch.strided:
            return f"{name} {tensor.dtype}{self._sizes(tensor.shape)}@{place} {tensor.layout}"
        storage = self._storages.setdefault(storage_identity(tensor), len(self._storages))
        offset = tensor.storage_offset()
        start = offset if type(offset) is int else self._number(offset)
        flags = f"{tensor.is_conj():d}{tensor.is_neg():d}{tensor.requires_grad:d}"
        shape = f"{self._sizes(tensor.shape)}{self._sizes(tensor.stride())}"
        return f"{name} {tensor.dtype}{shape}@{place} {storage}+{start} {flags}"

    def _sizes(self, sizes: Sequence[Any]) -> str:
        return f"[{','.join([str(size) if type(size) is int else self._number(size) for size in sizes])}]"

    def _number(self, number: Any) -> str:
        node = getattr(number, "node", None)
        if node is None:
            return repr(number)
        if self._shape_env is None:
            self._shape_env = node.shape_env
        elif node.shape_env is not None and node.shape_env is not self._shape_env:
            raise NotCacheable("its sizes are of two shape environments")
        return f"{type(number).__name__}({self._expression(node.expr)})"

    def _expression(self, expression: Any) -> str:
        text = self._expressions.get(expression)
        if text is None:
            free = getattr(expression, "free_symbols", ())
            self._symbols |= set(free)
            text = self._expressions[expression] = sympy.srepr(expression)
        return text

    # --- arguments --------------------------------------------------------------------------------------------------

    def _argument(self, item: Any) -> str:
        """Says an argument of a call. Raises NotCacheable for one that no text stands for."""
        write = _WRITERS.get(type(item))
        return self._other(item) if write is None else write(self, item)

    def _items(self, items: Sequence[Any]) -> str:
        return f"({','.join([self._argument(item) for item in items])})"

    def _list(self, items: Sequence[Any]) -> str:
        return f"[{','.join([self._argument(item) for item in items])}]"

    def _mapping(self, items: Mapping[Any, Any]) -> str:
        return f"{{{','.join([f'{key!r}:{self._argument(item)}' for key, item in items.items()])}}}"

    def _other(self, item: Any) -> str:
        if isinstance(item, list | tuple):
            return self._list(item)
        if isinstance(item, Mapping):
            return self._mapping(item)
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._number(item)
        if isinstance(item, OpOverload):
            return operator_text(item)
        if isinstance(item, slice):
            return f"slice{self._items((item.start, item.stop, item.step))}"
        if isinstance(item, enum.Enum):
            return str(item)
        raise NotCacheable(f"an argument is a {type(item).__name__}, which no text stands for")


def _content(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()


_Write = Callable[[GraphText, Any], str]
_PLAIN = (str, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_WRITERS: Mapping[type, _Write] = {
    **{kind: lambda _text, item: repr(item) for kind in _PLAIN},
    Node: lambda _text, item: f"%{item.name}",
    tuple: GraphText._items,
    list: GraphText._list,
    dict: GraphText._mapping,
    type(torch.fx.immutable_collections.immutable_list()): GraphText._list,
    type(torch.fx.immutable_collections.immutable_dict()): GraphText._mapping,
}

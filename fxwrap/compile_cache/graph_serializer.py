"""A graph as text, for its hash: everything that lowering reads of it, the same in every process.

The text has each node's name, target, arguments and source location; dtype, sizes, strides, offset, device and storage
of its fake values; ranges, hints, replacements and guards of their symbols; the layout of the graph's own tensors, and
the content of small ones. Graphs with objects that have no text form are not cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from fxwrap import torch_compat
from fxwrap.artifact.tensor_file import tensor_bytes
from fxwrap.fx_passes.effects import launches_user_kernel
from fxwrap.fx_passes.model_source import source_of
from fxwrap.fx_passes.prepared_graph import RECOMPUTED
from fxwrap.fx_passes.stream_calls import stream_call, stream_number

MAX_HASHED_BYTES = 1 << 10
"""Size up to which the content of a graph's CPU tensor is part of its text."""


class NotCacheable(Exception):
    """The reason why a compile is not cached."""


class GraphSerializer:
    """Writes graphs as text; `devices` collects the devices of their tensors.

    `constants` has the graphs' own tensors and opaque objects by location: ("attr", path), ("state", name) or
    ("literal", text). `standalone` writes the text for a file that has the constants and no origins: with the content
    of every tensor, without the nodes' places in the model's source.
    """

    def __init__(self, *, standalone: bool = False) -> None:
        self._standalone = standalone
        self.parts: list[str] = []
        self.devices: dict[torch.device, None] = {}
        self.constants: dict[tuple[str, str], object] = {}
        self._storages: dict[int, int] = {}
        self._constant_numbers: dict[int, int] = {}
        self._expressions: dict[sympy.Basic, str] = {}
        self._symbols: set[sympy.Symbol] = set()
        self._shape_env: torch_compat.ShapeEnv | None = None
        self._modules: dict[int, str] = {}
        self._devices: dict[torch.device, str] = {}

    def text(self) -> str:
        """Returns the text."""
        return "\n".join(self.parts)

    def symbols_text(self) -> str:
        """Returns the current state of the symbols in their ShapeEnv, which lowering reads and may extend by guards."""
        if not self._symbols or self._shape_env is None:
            return ""
        return "\n".join(torch_compat.serialize_shape_env(self._shape_env, frozenset(self._symbols), _expression_text))

    # --- graphs -----------------------------------------------------------------------------------------------------

    def add(self, graph: GraphModule | ExportedProgram, example_inputs: Sequence[object] | None) -> None:
        """Writes a graph, and its example inputs where its placeholders have no fake values."""
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
                raise NotCacheable(f"the input '{spec.target}' is a custom class object")
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                name = str(spec.target)
                tensor = exported.state_dict.get(name, exported.constants.get(name))
                is_literal = spec.kind is InputKind.CONSTANT_TENSOR
                self.parts.append(f"state {name!r} {self._tensor_constant(('state', name), tensor, is_literal)}")

    def module(self, graph_module: GraphModule, path: str) -> None:
        """Writes the nodes of a graph; `path` is the path of the module in the outermost one."""
        write, parts = self._argument, self.parts
        for node in graph_module.graph.nodes:
            if launches_user_kernel(node):
                raise NotCacheable(f"node '{node.name}' launches a user-defined Triton kernel")
            if stream_call(node) or stream_number(node):
                raise NotCacheable(f"node '{node.name}' is a stream call, whose device depends on this process")
            if node.op == "get_attr":
                target = self._attribute(graph_module, str(node.target), path)
            else:
                target = self._target(node)
            keywords = f" {write(node.kwargs)}" if node.kwargs else ""
            meta = node.meta
            value = f" {self.value(meta['val'])}" if "val" in meta else ""
            bindings = meta.get("unbacked_bindings")
            if bindings:
                value += f" {[(self._expression(symbol), str(steps)) for symbol, steps in bindings.items()]}"
            if RECOMPUTED in meta:
                value += f" recomputed {meta[RECOMPUTED]}"
            source = "" if self._standalone else f" {source_of(node)!r}"
            parts.append(f"{node.op} {node.name} {target} {write(node.args)}{keywords}{value}{source}")
        parts.append("end")

    def _target(self, node: Node) -> str:
        target: Any = node.target
        if isinstance(target, str):
            return target
        if isinstance(target, torch_compat.OpOverload):
            return torch_compat.operator_identity(target)
        if isinstance(target, torch_compat.HigherOrderOperator):
            return f"higher_order.{target.name()}"  # type: ignore[no-untyped-call]
        module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if module in ("_operator", "builtins", "math", "torch") and name:
            return f"{module}.{name}"
        raise NotCacheable(f"node '{node.name}' calls {target}, which has no text form")

    def _attribute(self, graph_module: GraphModule, target: str, path: str) -> str:
        attribute: Any = graph_module
        for part in target.split("."):
            attribute = getattr(attribute, part)
        full_path = f"{path}.{target}" if path else target
        if isinstance(attribute, GraphModule):
            known = self._modules.get(id(attribute))
            if known is not None:
                return f"{target} is {known}"
            self._modules[id(attribute)] = full_path
            self.parts.append(f"graph {full_path}")
            self.module(attribute, full_path)
            return f"{target} is {full_path}"
        if torch_compat.is_opaque(attribute):
            self.constants.setdefault(("attr", full_path), torch_compat.real_object(attribute))
            return f"{target} is an object of {torch_compat.opaque_class_name(attribute)}"
        if isinstance(attribute, torch.Tensor):
            is_literal = not isinstance(attribute, torch.nn.Parameter)
            return f"{target} is {self._tensor_constant(('attr', full_path), attribute, is_literal)}"
        return f"{target} is {self._argument(attribute)}"

    def _tensor_constant(self, location: tuple[str, str], tensor: object, is_literal: bool) -> str:
        """Returns the text of a graph's own tensor and its number among them; of a small literal also the content."""
        if not isinstance(tensor, torch.Tensor):
            raise NotCacheable(f"'{location[1]}' is a {type(tensor).__name__}, not a tensor")
        number = self._constant_numbers.setdefault(id(tensor), len(self._constant_numbers))
        self.constants.setdefault(location, tensor)
        text = f"#{number} {self._tensor(tensor)}"
        if self._standalone:
            return f"{text} {_standalone_content(tensor, location[1])}"
        plain = tensor.is_cpu and not isinstance(tensor, torch_compat.FakeTensor) and tensor.layout is torch.strided
        plain = plain and not (tensor.is_conj() or tensor.is_neg())
        if is_literal and plain and tensor.numel() * tensor.element_size() <= MAX_HASHED_BYTES:
            text += f" {_content(tensor)}"
        return text

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, value: object) -> str:
        """Returns the text of a fake value, or of a nested structure of them."""
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
        device_name = self.device_name(device)
        name = "" if kind is torch_compat.FakeTensor else kind.__name__
        if tensor.layout is not torch.strided:
            return f"{name} {tensor.dtype}{self._sizes(tensor.shape)}@{device_name} {tensor.layout}"
        storage = self._storages.setdefault(torch_compat.storage_identity(tensor), len(self._storages))
        offset = tensor.storage_offset()
        start = offset if type(offset) is int else self._number(offset)
        flags = f"{tensor.is_conj():d}{tensor.is_neg():d}{tensor.requires_grad:d}"
        shape = f"{self._sizes(tensor.shape)}{self._sizes(tensor.stride())}"
        return f"{name} {tensor.dtype}{shape}@{device_name} {storage}+{start} {flags}"

    def device_name(self, device: torch.device) -> str:
        """Returns the name of a device in the text: its type and number among the graph's devices of that type.

        Graphs that differ in the index of a device have one text.
        """
        name = self._devices.get(device)
        if name is None:
            text = str(device)
            number = sum(other.type == device.type for other in self._devices)
            name = self._devices[device] = f"{device.type}#{number}" if ":" in text else text
            self.devices[device] = None
        return name

    def _sizes(self, sizes: Sequence[int | torch.SymInt]) -> str:
        return f"[{','.join([str(size) if type(size) is int else self._number(size) for size in sizes])}]"

    def _number(self, number: int | torch_compat.SymbolicNumber) -> str:
        if isinstance(number, int):
            return repr(number)
        shape_env = torch_compat.find_shape_env(number)
        if self._shape_env is None:
            self._shape_env = shape_env
        elif shape_env is not None and shape_env is not self._shape_env:
            raise NotCacheable("its sizes belong to two ShapeEnvs")
        return f"{type(number).__name__}({self._expression(torch_compat.symbol_expression(number))})"

    def _expression(self, expression: sympy.Basic) -> str:
        text = self._expressions.get(expression)
        if text is None:
            self._symbols |= set(getattr(expression, "free_symbols", ()))
            text = self._expressions[expression] = _expression_text(expression)
        return text

    # --- arguments --------------------------------------------------------------------------------------------------

    def _argument(self, item: object) -> str:
        """Returns the text of an argument. Raises NotCacheable for one without a text form."""
        write = _WRITERS.get(type(item))
        return self._other(item) if write is None else write(self, item)

    def _items(self, items: Sequence[object]) -> str:
        return f"({','.join([self._argument(item) for item in items])})"

    def _list(self, items: Sequence[object]) -> str:
        return f"[{','.join([self._argument(item) for item in items])}]"

    def _mapping(self, items: Mapping[object, object]) -> str:
        return f"{{{','.join([f'{key!r}:{self._argument(item)}' for key, item in items.items()])}}}"

    def _other(self, item: object) -> str:
        if isinstance(item, list | tuple):
            return self._list(item)
        if isinstance(item, Mapping):
            return self._mapping(item)
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._number(item)
        if isinstance(item, torch_compat.OpOverload):
            return torch_compat.operator_identity(item)
        if isinstance(item, slice):
            return f"slice{self._items((item.start, item.stop, item.step))}"
        if isinstance(item, torch_compat.FakeScriptObject):  # an input, whose content does not affect the program
            return f"object of {torch_compat.opaque_class_name(item)}"
        text = torch_compat.opaque_literal_text(item)
        if text is not None:
            self.constants.setdefault(("literal", text), item)
            return text
        raise NotCacheable(f"an argument is a {type(item).__name__}, which has no text form")


def _standalone_content(tensor: torch.Tensor, name: str) -> str:
    """Returns the hash of a tensor's elements. Raises NotCacheable for one without plain elements."""
    if not torch_compat.has_real_storage(tensor) or tensor.layout is not torch.strided:
        raise NotCacheable(f"the constant '{name}' is no dense tensor with elements")
    with torch_compat.without_fake_mode():
        return _content(tensor.detach().cpu().resolve_conj().resolve_neg())


def _content(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor.detach().contiguous())).hexdigest()


def _expression_text(expression: sympy.Basic) -> str:
    """Returns the tree of an expression. In another order of the terms, SymPy computes them, some of them for ever."""
    text: str = sympy.srepr(expression, order="none")
    return text


_Write: TypeAlias = Callable[[GraphSerializer, Any], str]
_PLAIN = (str, int, float, bool, complex, type(None), torch.dtype, torch.layout, torch.memory_format)
_WRITERS: Mapping[type, _Write] = {
    **{kind: lambda _text, item: repr(item) for kind in _PLAIN},
    torch.device: GraphSerializer.device_name,
    Node: lambda _text, item: f"%{item.name}",
    tuple: GraphSerializer._items,
    list: GraphSerializer._list,
    dict: GraphSerializer._mapping,
    type(torch.fx.immutable_collections.immutable_list()): GraphSerializer._list,
    type(torch.fx.immutable_collections.immutable_dict()): GraphSerializer._mapping,
}

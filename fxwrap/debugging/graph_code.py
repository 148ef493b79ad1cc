"""Graphs, inputs and options as Python code that builds them again."""

from __future__ import annotations

import builtins
import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxwrap.debugging.statistics import tensor_statistics
from fxwrap.errors import ReproError
from fxwrap.options import Options
from fxwrap.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    fresh_fake_mode,
    new_symbol,
    shape_env_of,
    symbol_expression,
    symbol_hint,
)

_INLINE_ELEMENTS = 32
"""The number of elements up to which tensors are written with their contents."""


@dataclass(frozen=True)
class GraphCode:
    """A graph as code: the functions that build it and its inputs, and the hints of its symbols by name."""

    functions: str
    symbols: Mapping[str, int]


def graph_code(graph_module: GraphModule, inputs: Sequence[object] | None) -> GraphCode:
    """Returns a graph of operators as code.

    `inputs` are values of the placeholders, or of None, fake tensors in the placeholders' metadata describe them.
    Tensors with many elements become random ones of the same range.

    Raises ReproError for a graph with objects that code cannot build.
    """
    functions: list[str] = []
    _graph_function(graph_module, "graph", functions)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = list(inputs) if inputs is not None else [None] * len(placeholders)
    symbols: dict[str, int] = {}
    rows = [_input_text(node, value, symbols) for node, value in zip(placeholders, values, strict=True)]
    body = "".join([f"        {row},\n" for row in rows])
    functions.append(f"def inputs({', '.join(symbols)}):\n    return [\n{body}    ]\n")
    return GraphCode("\n\n".join(functions), symbols)


def _graph_function(graph_module: GraphModule, name: str, functions: list[str]) -> None:
    """Adds the function that builds a graph, after those of its subgraphs."""
    lines = ["g = Graph()"]
    names: dict[Node, str] = {}
    attributes: dict[str, str] = {}
    for node in graph_module.graph.nodes:
        names[node] = f"n_{node.name}" if node.name in _RESERVED else node.name
        match node.op:
            case "placeholder":
                lines.append(f"{names[node]} = g.placeholder({str(node.target)!r})")
            case "get_attr":
                attributes[str(node.target)] = _attribute(graph_module, node, name, functions)
                lines.append(f"{names[node]} = g.get_attr({str(node.target)!r})")
            case "call_function":
                arguments = f"{_literal(node.args, names)}, {_literal(dict(node.kwargs), names)}"
                call = f'"call_function", {_target(node)}, {arguments}, {node.name!r}'
                lines.append(f"{names[node]} = g.create_node({call})")
            case "output":
                lines.append(f"g.output({_literal(node.args[0], names)})")
            case _:
                raise ReproError(f"node '{node.name}' calls a module or method, which code cannot build")
    members = ", ".join([f"{key!r}: {item}" for key, item in attributes.items()])
    lines.append(f"return GraphModule({{{members}}}, g)")
    functions.append(f"def {name}():\n" + "".join([f"    {line}\n" for line in lines]))


_RESERVED = frozenset({"g", "torch", "fxwrap", "graph", "inputs", "operator", *dir(builtins)})


def _attribute(graph_module: GraphModule, node: Node, prefix: str, functions: list[str]) -> str:
    value: Any = graph_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, GraphModule):
        name = f"{prefix}_{node.name}"
        _graph_function(value, name, functions)
        return f"{name}()"
    if isinstance(value, Tensor):
        return _tensor_text(value, {})
    raise ReproError(f"attribute '{node.target}' is an object of type {type(value).__name__}, which code cannot build")


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"  # type: ignore[no-untyped-call]
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    if getattr(builtins, name, None) is target:
        return name
    raise ReproError(f"node '{node.name}' calls {target!r}, which code cannot name")


def _literal(item: object, names: Mapping[Node, str]) -> str:
    match item:
        case Node():
            return names[item]
        case tuple() | list():
            parts = ", ".join([_literal(part, names) for part in item])
            return f"[{parts}]" if isinstance(item, list) else f"({parts}{',' if len(item) == 1 else ''})"
        case dict():
            return "{" + ", ".join([f"{key!r}: {_literal(part, names)}" for key, part in item.items()]) + "}"
        case slice():
            return f"slice({', '.join([_literal(part, names) for part in (item.start, item.stop, item.step)])})"
        case torch.device():
            return f"torch.device({str(item)!r})"
        case float() if not math.isfinite(item):
            return f"float({str(item)!r})"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(item)
        case bool() | int() | float() | complex() | str() | None:
            return repr(item)
        case _:
            raise ReproError(f"an argument is an object of type {type(item).__name__}, which code cannot build")


# --- inputs -----------------------------------------------------------------------------------------------------------


def _input_text(node: Node, value: object, symbols: dict[str, int]) -> str:
    fake = node.meta.get("val")
    if value is None:
        value = fake
    if isinstance(value, Tensor):
        described = fake if isinstance(fake, Tensor) and fake.dim() == value.dim() else value
        return _tensor_text(value, symbols, described)
    if _is_symbolic(fake):
        _add_symbols(symbol_expression(fake), symbols, value if isinstance(value, int) else symbol_hint(fake))
        return str(symbol_expression(fake))
    return _literal(value, {})


def _tensor_text(tensor: Tensor, symbols: dict[str, int], described: Tensor | None = None) -> str:
    """Returns a tensor as code; `described` has its sizes, which may be symbolic."""
    described = tensor if described is None else described
    is_fake = tensor.is_meta or any(_is_symbolic(size) for size in tensor.shape) or not _is_real(tensor)
    sizes = _sizes_text(described.shape, tensor.shape, symbols)
    strides = _sizes_text(described.stride(), tensor.stride(), symbols)
    arguments = f"{sizes}, {strides}, {tensor.dtype}, {str(tensor.device)!r}"
    if is_fake:
        return f"random_tensor({arguments})"
    is_static = not symbols or not any(_is_symbolic(size) for size in described.shape)
    if tensor.numel() <= _INLINE_ELEMENTS and is_static and tensor.is_contiguous() and not tensor.dtype.is_complex:
        contents = _literal(tensor.tolist(), {})
        return f"torch.tensor({contents}, dtype={tensor.dtype}, device={str(tensor.device)!r})"
    statistics = tensor_statistics(tensor)
    if math.isnan(statistics.minimum):
        return f"random_tensor({arguments})"
    return f"random_tensor({arguments}, {statistics.minimum!r}, {statistics.maximum!r})"


def _is_symbolic(item: object) -> TypeGuard[torch.SymInt | torch.SymFloat | torch.SymBool]:
    return isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _sizes_text(sizes: Sequence[Any], values: Sequence[Any], symbols: dict[str, int]) -> str:
    texts = []
    for size, value in zip(sizes, values, strict=True):
        if _is_symbolic(size):
            _add_symbols(symbol_expression(size), symbols, symbol_hint(size) if _is_symbolic(value) else value)
            texts.append(str(symbol_expression(size)))
        else:
            texts.append(str(int(size)))
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _add_symbols(expression: sympy.Basic, symbols: dict[str, int], hint: float | None) -> None:
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(str(symbol), int(hint) if expression == symbol and hint is not None else _HINT)


_HINT = 8
"""The value of symbols without a hint."""


def random_tensor(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str,
    lowest: float | None = None, highest: float | None = None,
) -> Tensor:  # fmt: skip
    """Returns a tensor of random numbers between two numbers; by default normal ones, or small integers."""
    tensor = torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device)
    if dtype is torch.bool:
        return tensor.copy_(torch.rand(tuple(sizes), device=device) < 0.5)
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(tuple(sizes), dtype=torch.complex64 if dtype.is_complex else torch.float32, device=device)
        if lowest is not None and highest is not None and not dtype.is_complex:
            drawn = drawn.clamp(-3, 3).add(3).div(6).mul(highest - lowest).add(lowest)
        return tensor.copy_(drawn)
    low, high = (0, 8) if lowest is None or highest is None else (int(lowest), int(highest) + 1)
    return tensor.copy_(torch.randint(low, high, tuple(sizes), device=device))


def with_symbolic_inputs(graph_module: GraphModule, build_inputs: Any, symbols: Mapping[str, int]) -> GraphModule:
    """Returns a graph whose nodes have fake values, for inputs whose sizes are symbols with these hints."""
    mode = fresh_fake_mode()
    numbers = {name: new_symbol(shape_env_of(mode), name, "int", hint) for name, hint in symbols.items()}
    with mode:
        inputs = build_inputs(**numbers)
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value
    return graph_module


# --- options ----------------------------------------------------------------------------------------------------------


def options_code(options: Options) -> tuple[str, tuple[str, ...]]:
    """Returns the options that are not at their default as code, and the names of those that code cannot build."""
    defaults, texts, omitted = Options(), [], []
    for item in dataclasses.fields(Options):
        value = getattr(options, item.name)
        if value == getattr(defaults, item.name) or item.name in ("debug", "dump", "compile_cache", "devices"):
            continue
        try:
            texts.append(f"{item.name}={_option_text(value)}")
        except ReproError:
            omitted.append(item.name)
    return f"fxwrap.Options({', '.join(texts)})", tuple(omitted)


def _option_text(value: object) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({_literal(sorted(value), {})})"
    return _literal(dict(value) if isinstance(value, Mapping) else value, {})

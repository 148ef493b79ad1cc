"""The calls of torch's operator database, as functions of a flat list of tensors, and their traced graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core as opinfo_core
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fxwrap.torch_compat import FakeTensorMode
from tests.opinfo.known_failures import UNINITIALISED

# For each sample, torch searches the whole stack for a unittest method, which takes most of the time.
for _module in (common_utils, opinfo_core):
    assert callable(_module.extract_test_fn)
    _module.extract_test_fn = lambda: None

DTYPES = (torch.float32, torch.int64, torch.bool)
"""The dtypes that the sweep uses, for operators that support them."""

_RESULTS = (Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)

FORMS = ("function", "inplace", "gradient")
"""The called form: the operator, its in-place method, or the gradients of its results."""

SEED = 42
"""The seed that the database's own functions for in-place random operators begin with."""


@dataclass(frozen=True)
class Case:
    """An operator of the database with a dtype, a form and a device."""

    operator: OpInfo
    dtype: torch.dtype
    form: str = "function"
    device: str = "cpu"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The argument of `case_of`."""
        return (self.name, self.dtype_name, self.form, self.device)

    @property
    def name(self) -> str:
        """The operator's name and its variant's, as torch's own tests write them."""
        return str(self.operator.formatted_name)

    @property
    def dtype_name(self) -> str:
        """The dtype's name without its module."""
        return str(self.dtype).removeprefix("torch.")

    def calls(self) -> Iterator[Call]:
        """Yields a call for each of the database's samples, the same ones in every run."""
        yield from map(self.call_of, self.samples())

    def samples(self) -> list[Call]:
        """Returns the calls of the function itself, one for each of the database's samples."""
        torch.manual_seed(SEED)
        function = self.operator.inplace_variant if self.form == "inplace" else self.operator.op
        calls = []
        for sample in self.operator.sample_inputs(self.device, self.dtype, requires_grad=False):
            flat, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            calls.append(Call(function, structure, tuple(flat), self.name not in UNINITIALISED))
        return calls

    def call_of(self, sample: Call) -> Call:
        """Returns the call for a sample: itself, or the gradients of its results."""
        return sample.gradient_call() if self.form == "gradient" else sample


def cases(dtypes: Sequence[torch.dtype] = DTYPES, form: str = "function", device: str = "cpu") -> list[Case]:
    """Returns a case for each operator of the database and each of the dtypes that it supports on the device."""
    result = []
    for operator in op_db:
        for dtype in dtypes:
            supported = operator.supported_dtypes(device)
            if form == "gradient":
                supported = operator.supported_backward_dtypes(device) if operator.supports_autograd else ()
            if dtype in supported and (form != "inplace" or operator.inplace_variant is not None):
                result.append(Case(operator, dtype, form, device))
    return result


def case_of(key: tuple[str, str, str, str]) -> Case:
    """Returns the case with a key."""
    name, dtype, form, device = key
    return Case(_operators()[name], getattr(torch, dtype), form, device)


@cache
def _operators() -> dict[str, OpInfo]:
    return {str(operator.formatted_name): operator for operator in op_db}


@dataclass(frozen=True)
class Call:
    """A call of an operator: a function with its flattened arguments, whose tensors can be replaced.

    If it is not `defined`, the elements of its results are unspecified.
    """

    function: Callable[..., Any]
    structure: TreeSpec
    arguments: tuple[Any, ...]
    defined: bool = True

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [item for item in self.arguments if isinstance(item, Tensor)]

    def run(self, tensors: Sequence[Tensor], wide: bool = False) -> list[Any]:
        """Calls the function with these tensors and returns its results, flat: tensors, numbers and None.

        With `wide`, an argument that asks for float32 asks for float64.
        """
        remaining = iter(tensors)
        flat = [
            next(remaining) if isinstance(item, Tensor) else _wide(item) if wide else item for item in self.arguments
        ]
        positional, keywords = tree_unflatten(flat, self.structure)
        results = tree_flatten(self.function(*positional, **keywords))[0]
        return [item for item in results if item is None or isinstance(item, _RESULTS)]

    def gradient_call(self) -> Call:
        """Returns the call that computes the gradients of the results, each multiplied with a random cotangent."""
        position = [index for index, item in enumerate(self.tensors) if item.dtype.is_floating_point]
        results = [item for item in self.run(self.tensors) if _is_floating(item)]
        cotangents = [torch.randn(item.shape, dtype=item.dtype, device=item.device) for item in results]

        def gradients(operands: list[Tensor], cotangents: list[Tensor]) -> Any:
            def forward(*floating: Tensor) -> list[Tensor]:
                replaced = list(operands)
                for index, item in zip(position, floating, strict=True):
                    replaced[index] = item
                return [item for item in self.run(replaced) if _is_floating(item)]

            _, pull_back = torch.func.vjp(forward, *[operands[index] for index in position])
            return pull_back(cotangents)

        flat, structure = tree_flatten(((self.tensors, cotangents), {}))
        return Call(gradients, structure, tuple(flat))

    def __str__(self) -> str:
        positional, keywords = tree_unflatten([_short(item) for item in self.arguments], self.structure)
        return ", ".join([*map(str, positional), *[f"{name}={item}" for name, item in keywords.items()]])


def traced(call: Call, mode: FakeTensorMode) -> GraphModule:
    """Returns a call's graph of ATen operators on fake tensors, functional except for mutations of its arguments."""
    fakes = [mode.from_tensor(item, static_shapes=True) for item in call.tensors]
    with mode, enable_python_dispatcher():
        # Composite operators are decomposed first, so that their mutations are functionalised too.
        decomposed = make_fx(lambda *tensors: call.run(tensors))(*fakes)
        graph: GraphModule = make_fx(torch.func.functionalize(Interpreter(decomposed).run))(*fakes)
    graph.graph.eliminate_dead_code()
    return graph


def new_mode() -> FakeTensorMode:
    """Returns the fake-tensor mode for calls whose graphs are concatenated."""
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def concatenate_graphs(graphs: Sequence[GraphModule]) -> GraphModule:
    """Returns one graph with the inputs and outputs of all graphs, in order."""
    root, graph = torch.nn.Module(), Graph()
    for number, part in enumerate(graphs):
        for index, node in enumerate(part.graph.find_nodes(op="placeholder")):
            graph.placeholder(f"input_{number}_{index}").meta = node.meta
    placeholders = iter(graph.find_nodes(op="placeholder"))
    results: list[Any] = []
    for number, part in enumerate(graphs):
        copies: dict[Node, Node] = {}
        for node in part.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(placeholders)
            elif node.op == "output":
                results += torch.fx.node.map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                name = f"{node.target}_{number}"
                setattr(root, name, getattr(part, node.target))
                copies[node].target = name
    graph.output(tuple(results))
    return GraphModule(root, graph)


def _is_floating(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype.is_floating_point


def _wide(item: Any) -> Any:
    return torch.float64 if item is torch.float32 else item


def _short(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    dense = item.layout is torch.strided and item.is_contiguous()
    return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}{'' if dense else ' strided'}"

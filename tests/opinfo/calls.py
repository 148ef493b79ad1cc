"""The calls of torch's operator database: each a function of a flat list of tensors, traced as a compiler gets it."""

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
from tests.opinfo.known import UNINITIALISED

# At each sample torch looks through the whole stack, with the text of its lines, for a unittest's method.
for _module in (common_utils, opinfo_core):
    assert callable(_module.extract_test_fn)
    _module.extract_test_fn = lambda: None

DTYPES = (torch.float32, torch.int64, torch.bool)
"""What the sweep runs operators with, where they take it."""

_RESULTS = (Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)

FORMS = ("function", "inplace", "gradient")
"""What is called: the operator, its method that writes its first operand, or the gradients of its results."""

SEED = 42
"""The seed that the database's own functions for in-place random operators begin with."""


@dataclass(frozen=True)
class Case:
    """An operator of the database with a dtype and a form of calling it."""

    operator: OpInfo
    dtype: torch.dtype
    form: str = "function"
    device: str = "cpu"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What `case_of` finds it by."""
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
        found = []
        for sample in self.operator.sample_inputs(self.device, self.dtype, requires_grad=False):
            flat, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            found.append(Call(function, structure, tuple(flat), self.name not in UNINITIALISED))
        return found

    def call_of(self, sample: Call) -> Call:
        """Returns the call that a sample is for: itself, or of the gradients of its results."""
        return sample.of_gradients() if self.form == "gradient" else sample


def cases(dtypes: Sequence[torch.dtype] = DTYPES, form: str = "function", device: str = "cpu") -> list[Case]:
    """Returns every operator of the database with each of the dtypes that it takes on a device, in this form."""
    found = []
    for operator in op_db:
        for dtype in dtypes:
            known = operator.supported_dtypes(device)
            if form == "gradient":
                known = operator.supported_backward_dtypes(device) if operator.supports_autograd else ()
            if dtype in known and (form != "inplace" or operator.inplace_variant is not None):
                found.append(Case(operator, dtype, form, device))
    return found


def case_of(key: tuple[str, str, str, str]) -> Case:
    """Returns the case with a key."""
    name, dtype, form, device = key
    return Case(_operators()[name], getattr(torch, dtype), form, device)


@cache
def _operators() -> dict[str, OpInfo]:
    return {str(operator.formatted_name): operator for operator in op_db}


@dataclass(frozen=True)
class Call:
    """A call of an operator: a function with its arguments, flat. Its tensors can be given anew.

    Where it is not `defined`, nothing is known of the elements of its results.
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
        given = iter(tensors)
        flat = [next(given) if isinstance(item, Tensor) else _wide(item) if wide else item for item in self.arguments]
        positional, keywords = tree_unflatten(flat, self.structure)
        results = tree_flatten(self.function(*positional, **keywords))[0]
        return [item for item in results if item is None or isinstance(item, _RESULTS)]

    def of_gradients(self) -> Call:
        """Returns the call that gives the gradients of the results, each multiplied with a random cotangent."""
        position = [index for index, item in enumerate(self.tensors) if item.dtype.is_floating_point]
        results = [item for item in self.run(self.tensors) if _is_floating(item)]
        cotangents = [torch.randn(item.shape, dtype=item.dtype, device=item.device) for item in results]

        def gradients(operands: list[Tensor], given: list[Tensor]) -> Any:
            def forward(*floating: Tensor) -> list[Tensor]:
                filled = list(operands)
                for index, item in zip(position, floating, strict=True):
                    filled[index] = item
                return [item for item in self.run(filled) if _is_floating(item)]

            _, pull_back = torch.func.vjp(forward, *[operands[index] for index in position])
            return pull_back(given)

        flat, structure = tree_flatten(((self.tensors, cotangents), {}))
        return Call(gradients, structure, tuple(flat))

    def __str__(self) -> str:
        positional, keywords = tree_unflatten([_short(item) for item in self.arguments], self.structure)
        return ", ".join([*map(str, positional), *[f"{name}={item}" for name, item in keywords.items()]])


def traced(call: Call, mode: FakeTensorMode) -> GraphModule:
    """Returns a call's graph of ATen operators, functional but for what it writes of its arguments, on fake tensors."""
    fakes = [mode.from_tensor(item, static_shapes=True) for item in call.tensors]
    with mode, enable_python_dispatcher():
        # Operators that are made of others are taken apart first: what these write has to be made functional too.
        taken_apart = make_fx(lambda *tensors: call.run(tensors))(*fakes)
        found: GraphModule = make_fx(torch.func.functionalize(Interpreter(taken_apart).run))(*fakes)
    found.graph.eliminate_dead_code()
    return found


def new_mode() -> FakeTensorMode:
    """Returns the mode of fake tensors for calls whose graphs are to be joined."""
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def joined(graphs: Sequence[GraphModule]) -> GraphModule:
    """Returns one graph that takes what the graphs take, one after the other, and gives what they give."""
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

"""The GraphModule that a program becomes, and its entry that takes the inputs in a list."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule

from fxwrap.converters.emitted import Boxed, Emitted
from fxwrap.converters.fx_code import BoxedCode
from fxwrap.errors import GraphModuleError
from fxwrap.lines import CheckLayout, SizeOf
from fxwrap.runtime import checks
from fxwrap.runtime.direct import INSTEAD
from fxwrap.runtime.library import left_when_it_raises
from fxwrap.runtime.replay import Replayed, owning
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import UnwrittenModule, graph_python_code
from fxwrap.wrapper_ir import Program, Value


class ProgramModule(UnwrittenModule):
    """An emitted program: an ordinary GraphModule to look at, rewrite, copy, split and run.

    Two things that GraphModule does give wrong numbers for a graph that allocates memory and writes to it, and raise:
    pickling, which traces the code again, and symbolic tracing. `meta["fxwrap"]` holds the program's name, header and
    kernels by hash.
    """

    def __reduce__(self) -> NoReturn:
        raise GraphModuleError(f"an emitted graph cannot be pickled: unpickling traces it symbolically. {INSTEAD}")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self.__reduce__()

    def __reduce_package__(self, _exporter: Any) -> NoReturn:
        self.__reduce__()


def boxed_entry(graph_module: GraphModule) -> Boxed:
    """Returns a function that runs a GraphModule on inputs in a list, which it empties; each goes at its last use."""
    unused = frozenset(node.name for node in graph_module.graph.find_nodes(op="placeholder") if not node.users)
    code = graph_python_code(graph_module.graph, BoxedCode(unused))
    namespace = dict(code.globals)
    exec(compile(code.src, f"<boxed {type(graph_module).__name__}>", "exec"), namespace)
    replayed = [item.memory for item in namespace.values() if isinstance(item, Replayed)]
    return owning(partial(namespace["forward"], graph_module), replayed)


class EmittedGraph(Emitted):
    """A program as a GraphModule that runs. `graph_module` may be rewritten until `boxed` is first asked for."""

    def __init__(self, program: Program, graph_module: GraphModule) -> None:
        super().__init__("", partial(_checked_entry, program, graph_module))
        self._made = graph_module

    @property
    def source(self) -> str:
        """The text of the graph as it is now."""
        return self.graph_module.code

    @cached_property
    def graph_module(self) -> GraphModule:
        """The module, whose code is written when it is first asked for."""
        if isinstance(self._made, UnwrittenModule):
            self._made.write()
        return self._made


def _checked_entry(program: Program, graph_module: GraphModule) -> Boxed:
    """Returns the boxed entry, which first refuses a wrong number or class of inputs, as no operator could."""
    run = boxed_entry(graph_module)
    if any(module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.enter_device.default)
           for module in graph_module.modules() if isinstance(module, GraphModule)):  # fmt: skip
        run = left_when_it_raises()(run)
    name, count = program.name, len(program.inputs)
    checked = _checked_inputs(program)
    numbers = [(position, item.name) for position, item in enumerate(program.inputs)
               if not isinstance(item.value, Value)]  # fmt: skip

    def call(inputs: list[Any]) -> Any:
        checks.check_count(name, count, len(inputs))
        for position, symbol in numbers:
            checks.check_number(inputs[position], symbol, symbol_kind(symbol))
        if not _PLAIN.issuperset(map(type, inputs)):
            for position, line in checked:
                if type(inputs[position]) not in _PLAIN:
                    _refuse(inputs[position], line)
        return run(inputs)

    return call


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _checked_inputs(program: Program) -> list[tuple[int, CheckLayout | SizeOf]]:
    """Returns the inputs that are checked, by position, each with the first line that does so."""
    positions = {item.name: position for position, item in enumerate(program.inputs)}
    found: dict[int, CheckLayout | SizeOf] = {}
    for line in program.body.lines:
        if isinstance(line, CheckLayout) or (isinstance(line, SizeOf) and line.rank):
            position = positions.get(line.tensor.name)
            if position is not None:
                found.setdefault(position, line)
    return list(found.items())


def _refuse(given: Any, line: CheckLayout | SizeOf) -> None:
    if isinstance(line, SizeOf):
        checks.check_rank(given, line.tensor.name, line.rank)
        return
    type_ = line.expected
    sizes: Any = type_.sizes
    strides: Any = type_.strides
    checks.check_layout(given, line.name or line.tensor.name, type_.dtype, sizes, strides, type_.device)


GraphFunction = Callable[..., Any]
"""What runs in the place of an emitted graph: called with the flat inputs, it returns the flat outputs."""


def boxed_function(function: GraphFunction) -> Boxed:
    """Returns the boxed entry of what an `on_graph` function returned: a GraphModule, a boxed or a flat function."""
    if isinstance(function, GraphModule):
        return boxed_entry(function)
    if getattr(function, "_boxed_call", False):
        return function

    def call(inputs: list[Any]) -> Any:
        given = tuple(inputs)
        inputs.clear()
        return function(*given)

    return call

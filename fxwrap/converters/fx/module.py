"""The GraphModule of an emitted program, and its boxed entry."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule

from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram
from fxwrap.converters.fx.codegen import BoxedCode
from fxwrap.errors import GraphModuleError
from fxwrap.lines import CheckLayout, SizeOf
from fxwrap.runtime import checks
from fxwrap.runtime.direct import SUPPORTED_ALTERNATIVES
from fxwrap.runtime.graph_capture.replay import GraphedFunction, bind_graph_lifetime
from fxwrap.runtime.library import exit_devices_on_error
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import LazyGraphModule, graph_python_code, is_boxed_call
from fxwrap.wrapper_ir import Program, Value


class ProgramModule(LazyGraphModule):
    """An emitted program as a GraphModule that can be read, rewritten, copied, split and run.

    Pickling and symbolic tracing raise: both would run the graph's allocations once and keep the memory as constants.
    `meta["fxwrap"]` has the program's name, header and kernels by hash.
    """

    def __reduce__(self) -> NoReturn:
        raise GraphModuleError(
            f"an emitted graph cannot be pickled: unpickling traces it symbolically. {SUPPORTED_ALTERNATIVES}"
        )

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        self.__reduce__()

    def __reduce_package__(self, _exporter: object) -> NoReturn:
        self.__reduce__()


def boxed_entry(graph_module: GraphModule) -> BoxedCallable:
    """Returns a function that runs a GraphModule on a list of inputs, empties it, and drops each after its last use."""
    unused = frozenset(node.name for node in graph_module.graph.find_nodes(op="placeholder") if not node.users)
    code = graph_python_code(graph_module.graph, BoxedCode(unused))
    namespace = dict(code.globals)
    exec(compile(code.src, f"<boxed {type(graph_module).__name__}>", "exec"), namespace)
    managers = [item.manager for item in namespace.values() if isinstance(item, GraphedFunction)]
    return bind_graph_lifetime(partial(namespace["forward"], graph_module), managers)


class EmittedGraph(EmittedProgram):
    """A program as a GraphModule that runs. `graph_module` may be rewritten until the first use of `boxed`."""

    def __init__(self, program: Program, graph_module: GraphModule) -> None:
        super().__init__("", partial(_checked_entry, program, graph_module))
        self._graph_module = graph_module

    @property
    def source(self) -> str:
        """The text of the current graph."""
        return self.graph_module.code

    @cached_property
    def graph_module(self) -> GraphModule:
        """The module; its code is generated on first use."""
        if isinstance(self._graph_module, LazyGraphModule):
            self._graph_module.write()
        return self._graph_module


def _checked_entry(program: Program, graph_module: GraphModule) -> BoxedCallable:
    """Returns the boxed entry behind checks of the number and classes of inputs, which operators cannot make."""
    run = boxed_entry(graph_module)
    if any(module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.enter_device.default)
           for module in graph_module.modules() if isinstance(module, GraphModule)):  # fmt: skip
        run = exit_devices_on_error()(run)
    name, count = program.name, len(program.inputs)
    checked = _checked_inputs(program)
    numbers = [(position, item.name) for position, item in enumerate(program.inputs)
               if not isinstance(item.value, Value)]  # fmt: skip

    def call(inputs: list[Any]) -> Any:
        checks.check_input_count(name, count, len(inputs))
        for position, symbol in numbers:
            checks.check_number(inputs[position], symbol, symbol_kind(symbol))
        if not _PLAIN.issuperset(map(type, inputs)):
            for position, line in checked:
                if type(inputs[position]) not in _PLAIN:
                    _raise_input_error(inputs[position], line)
        return run(inputs)

    return call


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _checked_inputs(program: Program) -> list[tuple[int, CheckLayout | SizeOf]]:
    """Returns the inputs with a check, by position, each with the first line that checks it."""
    positions = {item.name: position for position, item in enumerate(program.inputs)}
    checked: dict[int, CheckLayout | SizeOf] = {}
    for line in program.body.lines:
        if isinstance(line, CheckLayout) or (isinstance(line, SizeOf) and line.rank):
            position = positions.get(line.tensor.name)
            if position is not None:
                checked.setdefault(position, line)
    return list(checked.items())


def _raise_input_error(item: Any, line: CheckLayout | SizeOf) -> None:
    if isinstance(line, SizeOf):
        checks.check_rank(item, line.tensor.name, line.rank)
        return
    type_ = line.expected
    sizes: Any = type_.sizes
    strides: Any = type_.strides
    checks.check_layout(item, line.name or line.tensor.name, type_.dtype, sizes, strides, type_.device)


GraphFunction = Callable[..., Any]
"""A function that runs in place of an emitted graph: it takes the flat inputs and returns the flat outputs."""


def boxed_function(function: GraphFunction) -> BoxedCallable:
    """Returns the boxed entry of the result of `on_graph`: a GraphModule, a boxed function or a flat function."""
    if isinstance(function, GraphModule):
        return boxed_entry(function)
    if is_boxed_call(function):
        return function

    def call(inputs: list[Any]) -> Any:
        arguments = tuple(inputs)
        inputs.clear()
        return function(*arguments)

    return call

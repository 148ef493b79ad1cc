"""The GraphModule of an emitted program, and its boxed entry."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule

from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram, checks_inputs, has_complex_inputs
from fxwrap.converters.fx.codegen import BoxedCode
from fxwrap.converters.fx.regions import prepare_regions
from fxwrap.converters.interpreter import check_inputs
from fxwrap.errors import GraphModuleError
from fxwrap.runtime import checks
from fxwrap.runtime.device_operators import exit_devices_on_error
from fxwrap.runtime.graph_capture.replay import GraphedFunction, bind_graph_lifetime
from fxwrap.runtime.plain_inputs import SUPPORTED_ALTERNATIVES, with_plain_inputs
from fxwrap.runtime.unusual_inputs import InputCheck
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import LazyGraphModule, graph_python_code, is_boxed_call
from fxwrap.wrapper_ir import Program, Value


class ProgramModule(LazyGraphModule):
    """An emitted program as a GraphModule that can be read, rewritten, copied, split and run.

    Pickling and symbolic tracing raise: both would run the graph's allocations once and keep the memory as constants.
    `meta["fxwrap"]` has the program's name, header and kernels by hash.
    """

    def __reduce_ex__(self, *_arguments: object) -> NoReturn:
        raise GraphModuleError(
            f"an emitted graph cannot be pickled: unpickling traces it symbolically. {SUPPORTED_ALTERNATIVES}"
        )

    __reduce__ = __reduce_package__ = __reduce_ex__  # type: ignore[assignment]


def boxed_entry(graph_module: GraphModule, check: InputCheck | None = None) -> BoxedCallable:
    """Returns a function that runs a GraphModule on a list of inputs, empties it, and drops each after its last use.

    `check` checks the inputs of calls that do not bypass the dispatcher. Raises RegionError for a region whose graph
    was edited without `fxwrap.fx.update_region`.
    """
    prepare_regions(graph_module)
    unused = frozenset(node.name for node in graph_module.graph.find_nodes(op="placeholder") if not node.users)
    code = graph_python_code(graph_module.graph, BoxedCode(unused, check))
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
    """Returns the boxed entry behind checks that operators cannot make."""
    checked = checks_inputs(program)
    run = boxed_entry(graph_module, partial(check_inputs, program) if checked else None)
    if checked and has_complex_inputs(program):
        run = with_plain_inputs(run)  # operators read conjugates, but reject views of them as real numbers
    if any(module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.enter_device.default)
           for module in graph_module.modules() if isinstance(module, GraphModule)):  # fmt: skip
        run = exit_devices_on_error()(run)
    name, count = program.name, len(program.inputs)
    numbers = [(position, item.name) for position, item in enumerate(program.inputs)
               if not isinstance(item.value, Value)]  # fmt: skip

    def call(inputs: list[Any]) -> Any:
        checks.check_input_count(name, count, len(inputs))
        for position, symbol in numbers:
            checks.check_number(inputs[position], symbol, symbol_kind(symbol))
        return run(inputs)

    return call


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

"""The GraphModule that a program becomes, and its entry that takes the inputs in a list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Proxy
from torch.fx.graph import CodeGen

from fxwrap.converters.emitted import Boxed, Emitted
from fxwrap.errors import GraphModuleError
from fxwrap.lines import CheckLayout, SizeOf
from fxwrap.runtime import checks
from fxwrap.symbolic import symbol_kind
from fxwrap.torch_compat import graph_python_code
from fxwrap.wrapper_ir import Program, Value

_INSTEAD = (
    "Run it with torch.fx.Interpreter, copy it with copy.deepcopy, retrace it with make_fx, or keep the program's text "
    "(str(program)) and emit that again with fxwrap.to_fx; fxwrap.save, which is planned, will write it to a file"
)


def refuse_proxies(*inputs: Any) -> None:
    """Raises GraphModuleError when a graph is being traced symbolically."""
    if Proxy in map(type, inputs):
        reason = "symbolic_trace would run its allocations once and keep the memory as constants"
        raise GraphModuleError(f"an emitted graph cannot be traced symbolically: {reason}. {_INSTEAD}")


class FlatCode(CodeGen):
    """Torch's own code for a graph, which first refuses to be traced symbolically."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """Returns the head of the function."""
        head = super().gen_fn_def(free_vars, maybe_return_annotation, **options)
        names = input_names(free_vars)
        return f"{head}\n    refuse_proxies({', '.join(names)})" if names else head

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Returns what the head refers to."""
        return [("refuse_proxies", refuse_proxies)]


class _BoxedCode(CodeGen):
    """Code of a function that takes its inputs in a list and empties it, so that each is dropped at its last use."""

    def __init__(self, unused: frozenset[str]) -> None:
        super().__init__()
        self.unused = unused

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """Returns the head of the function."""
        names = input_names(free_vars)
        lines = [f"def {self._func_name}(self, inputs):"]
        if names:
            lines.append(f"{', '.join(names)}, = inputs")
        lines.append("inputs.clear()")
        dropped = [name for name in names if name in self.unused]
        if dropped:
            lines.append(f"del {', '.join(dropped)}")
        return "\n    ".join(lines)


def input_names(free_vars: list[str]) -> list[str]:
    """Returns the parameters' names from what torch.fx gives: "self", then each with its type and default."""
    return [text.split(":")[0].split("=")[0].strip() for text in free_vars if text != "self"]


class ProgramModule(GraphModule):
    """An emitted program: an ordinary GraphModule to look at, rewrite, copy, split and run.

    Two things that GraphModule does give wrong numbers for a graph that allocates memory and writes to it, and raise:
    pickling, which traces the code again, and symbolic tracing. `meta["fxwrap"]` holds the program's name, header and
    kernels by hash.
    """

    def __reduce__(self) -> NoReturn:
        raise GraphModuleError(f"an emitted graph cannot be pickled: unpickling traces it symbolically. {_INSTEAD}")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self.__reduce__()

    def __reduce_package__(self, _exporter: Any) -> NoReturn:
        self.__reduce__()


def boxed_entry(graph_module: GraphModule) -> Boxed:
    """Returns a function that runs a GraphModule on inputs in a list, which it empties; each goes at its last use."""
    unused = frozenset(node.name for node in graph_module.graph.find_nodes(op="placeholder") if not node.users)
    code = graph_python_code(graph_module.graph, _BoxedCode(unused))
    namespace = dict(code.globals)
    exec(compile(code.src, f"<boxed {type(graph_module).__name__}>", "exec"), namespace)
    return partial(namespace["forward"], graph_module)


class EmittedGraph(Emitted):
    """A program as a GraphModule that runs. `graph_module` may be rewritten until `boxed` is first asked for."""

    def __init__(self, program: Program, graph_module: ProgramModule) -> None:
        super().__init__(graph_module.code, partial(_checked_entry, program, graph_module))
        self.graph_module = graph_module


def _checked_entry(program: Program, graph_module: GraphModule) -> Boxed:
    """Returns the boxed entry, which first refuses a wrong number or class of inputs, as no operator could."""
    run = boxed_entry(graph_module)
    name, count = program.name, len(program.inputs)
    checked = _checked_inputs(program)
    numbers = [(position, item.name) for position, item in enumerate(program.inputs)
               if not isinstance(item.value, Value)]  # fmt: skip

    def call(inputs: list[Any]) -> Any:
        checks.check_count(name, count, len(inputs))
        for position, symbol in numbers:
            checks.check_number(inputs[position], symbol, symbol_kind(symbol))
        for position, line in checked:
            if type(inputs[position]) not in _PLAIN:
                _refuse(inputs[position], line)
        return run(inputs)

    return call


_PLAIN = (torch.Tensor, torch.nn.Parameter)


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

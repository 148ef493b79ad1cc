"""The provenance of lines: nodes of the input graph and lines of the model's source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxwrap.wrapper_ir.kernel_calls import KernelCalls


@dataclass(frozen=True, slots=True)
class Source:
    """A node of the compiled graph.

    `node` is its name, and `original` the name of its node in the graph of Dynamo or torch.export, if torch records it.
    `operator` is the ATen operator ("aten.mm"), `file` and `line` the location in the model's source, and `module` the
    path of the module in the model ("layers.0.attention"). `module_stack` has the path and class of each module that
    encloses the node, the outermost first, `function_stack` the name and qualified name of each function that the model
    called, and `original_operator` the ATen operator before its decomposition, if it is another. `partitioner_tag`
    tells forward from backward in joint graphs. `stack_trace` has all frames, as torch recorded them. Unknown fields
    are empty, or 0. `graph_id` is torch's `id` of the compiled graph, -1 where that graph is not in this process.
    """

    node: str
    operator: str = ""
    file: str = ""
    line: int = 0
    module: str = ""
    original: str = ""
    module_stack: tuple[tuple[str, str], ...] = ()
    function_stack: tuple[tuple[str, str], ...] = ()
    original_operator: str = ""
    partitioner_tag: str = ""
    stack_trace: str = ""
    graph_id: int = field(default=-1, repr=False, compare=False)

    @property
    def location(self) -> str:
        """The location as "file:line" without the file's folder, so that it is equal on all machines."""
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True)
class Origin:
    """The provenance of a line, which is ignored by equality.

    `sources` are the nodes whose results the line computes, in order; a fused kernel has several. `handle` identifies
    the line in its program: the name of the kernel or operator, and a number ("gelu_0:3"). `results` has the node
    of each value that the line writes, else of each that it defines, and the value's position among that node's
    results; it is empty where that is unknown, and for lines that were parsed or imported. `metadata` is that of
    tools other than fxwrap, for lines that were imported from an FX graph: the node's name and its entries, for
    each node of the line. `calls` are the operators that a launch computes, with operands by role, or in programs
    that were loaded their text, which `launched_calls` parses; None for other lines, for launches that compute a
    part of an operator, and in programs that were parsed.
    """

    sources: tuple[Source, ...] = ()
    handle: str = ""
    results: tuple[tuple[str, int], ...] = field(default=(), repr=False, compare=False)
    metadata: tuple[tuple[str, Mapping[str, Any]], ...] = field(default=(), repr=False, compare=False)
    calls: KernelCalls | str | None = field(default=None, repr=False, compare=False)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the input graph's nodes."""
        return tuple([source.node for source in self.sources if source.node])

    @property
    def operators(self) -> tuple[str, ...]:
        """The distinct ATen operators, in order."""
        return tuple(dict.fromkeys([source.operator for source in self.sources if source.operator]))

    @property
    def locations(self) -> tuple[str, ...]:
        """The distinct locations in the model's source as "file:line", in order."""
        return tuple(dict.fromkeys([source.location for source in self.sources if source.file]))

    @property
    def source_lines(self) -> tuple[str, ...]:
        """The distinct locations in the model's source as "file:line" with the full path, in order."""
        return tuple(dict.fromkeys([f"{source.file}:{source.line}" for source in self.sources if source.file]))

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the distinct modules of the model, in order."""
        return tuple(dict.fromkeys([source.module for source in self.sources if source.module]))

    def __str__(self) -> str:
        names, operators = ", ".join(self.nodes), ", ".join(self.operators)
        computed = f"{names}: {operators}" if names else operators
        handle = "" if self.handle.rpartition(":")[0] in self.operators else self.handle
        return "  ".join([part for part in (computed, self.location_text(), handle) if part])

    def location_text(self) -> str:
        """Returns the locations with each file's name once: "model.py:7, 9"."""
        numbers: dict[str, list[str]] = {}
        for file, _, line in [location.rpartition(":") for location in self.locations]:
            numbers.setdefault(file, []).append(line)
        return ", ".join([f"{file}:{', '.join(lines)}" for file, lines in numbers.items()])

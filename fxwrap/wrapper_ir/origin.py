"""Where a line came from: nodes of the input graph, and the places in the model that made them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """One node of the graph that was compiled.

    `node` is its name there and `original` the name of the node that it was made from in the graph that Dynamo or
    torch.export wrote, where torch says so; `operator` the ATen operator ("aten.mm"); `file` and `line` the place in
    the model's source, and `module` the path of the module in the model ("layers.0.attention"). What is not known is
    empty, a line 0.
    """

    node: str
    operator: str = ""
    file: str = ""
    line: int = 0
    module: str = ""
    original: str = ""

    @property
    def location(self) -> str:
        """The place as "file:line", without the file's folder: equal on all machines."""
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a line came from. Never part of equality.

    `sources` are the nodes whose results the line computes, in order: several for a fused kernel. `handle` is unique to
    the call in its program: the name of the kernel or operator, and its number ("gelu_0:3").
    """

    sources: tuple[Source, ...] = ()
    handle: str = ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the input graph's nodes."""
        return tuple([source.node for source in self.sources if source.node])

    @property
    def operators(self) -> tuple[str, ...]:
        """The different ATen operators, in order."""
        return tuple(dict.fromkeys([source.operator for source in self.sources if source.operator]))

    @property
    def locations(self) -> tuple[str, ...]:
        """The different places in the model's source as "file:line", in order."""
        return tuple(dict.fromkeys([source.location for source in self.sources if source.file]))

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the different modules of the model, in order."""
        return tuple(dict.fromkeys([source.module for source in self.sources if source.module]))

    def __str__(self) -> str:
        names, operators = ", ".join(self.nodes), ", ".join(self.operators)
        what = f"{names}: {operators}" if names else operators
        handle = "" if self.handle.rpartition(":")[0] in self.operators else self.handle
        return "  ".join([part for part in (what, self._places(), handle) if part])

    def _places(self) -> str:
        """Returns the places with each file's name once: "model.py:7, 9"."""
        numbers: dict[str, list[str]] = {}
        for file, _, line in [location.rpartition(":") for location in self.locations]:
            numbers.setdefault(file, []).append(line)
        return ", ".join([f"{file}:{', '.join(lines)}" for file, lines in numbers.items()])

"""How AOTAutograd runs a graph of Dynamo: once for the metadata of inputs and outputs, once to trace it.

Why: it runs the graph by a class of its own, for which there is no public replacement. Without that class, it runs the
graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch._aot_autograd import graph_capture_wrappers
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.utils._pytree import tree_map_only

ResultsOf = Callable[[Graph, FakeTensorMode], Any]


@contextmanager
def metadata_from_known_results(find: ResultsOf) -> Iterator[None]:
    """Lets AOTAutograd run only a part of a Dynamo graph where it collects metadata.

    `find` returns the nodes to execute and those whose example values are their results (`executed`, `known`), or None
    where all must run.
    """
    wrappers: Any = graph_capture_wrappers
    original = getattr(wrappers, "PropagateUnbackedSymInts", None)
    if original is not PropagateUnbackedSymInts:
        yield
        return

    class Interpreter(_MetadataInterpreter):
        find_results = staticmethod(find)

    wrappers.PropagateUnbackedSymInts = Interpreter
    try:
        yield
    finally:
        wrappers.PropagateUnbackedSymInts = original


class _MetadataInterpreter(PropagateUnbackedSymInts):
    """Runs a Dynamo graph on functional tensors: all of it while it is traced, else what its metadata depends on."""

    find_results: ResultsOf
    results: Any = None

    def run(self, *arguments: Any, **options: Any) -> Any:
        mode = detect_fake_mode()
        if get_proxy_mode() is None and mode is not None:
            self.results = self.find_results(self.graph, mode)
        return super().run(*arguments, **options)

    def run_node(self, n: Node) -> Any:
        if self.results is None or n in self.results.executed:
            return super().run_node(n)
        return tree_map_only(FakeTensor, _functional_like, n.meta["example_value"]) if n in self.results.known else None


def _functional_like(example: FakeTensor) -> FunctionalTensor:
    """Returns a functional tensor with the layout of a fake one, which needs a gradient if that one does."""
    with disable_functional_mode():
        fake = torch.empty_strided(
            example.shape, example.stride(), dtype=example.dtype, device=example.device,
            requires_grad=example.requires_grad,
        )  # fmt: skip
    return FunctionalTensor.to_functional(fake)

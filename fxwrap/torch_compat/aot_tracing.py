"""How AOTAutograd runs a graph of Dynamo: once for the metadata of inputs and outputs, once to trace it.

Why: it runs the graph by a class of its own, for which there is no public replacement. Without that class, it runs the
graph as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._functorch._aot_autograd import graph_capture_wrappers, graph_compile
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.utils._pytree import tree_map_only

from fxwrap.torch_compat.repeated_calls import RepeatedCalls
from fxwrap.torch_compat.structured_trace import traces_compiles

ResultsOf = Callable[[Graph, FakeTensorMode], Any]


@contextmanager
def metadata_from_known_results(find: ResultsOf) -> Iterator[None]:
    """Lets AOTAutograd run a part of a Dynamo graph where it collects metadata, and copy repeated calls of a trace.

    `find` returns the nodes to execute and those whose example values are their results (`executed`, `known`), those
    that may be copied (`repeatable`), and those that change how the following ones run (`modes`); or None where all
    must run.
    """
    wrappers: Any = graph_capture_wrappers
    original = getattr(wrappers, "PropagateUnbackedSymInts", None)
    if original is not PropagateUnbackedSymInts:
        yield
        return

    class Interpreter(_Interpreter):
        find_results = staticmethod(cache(find))  # for both runs

    wrappers.PropagateUnbackedSymInts = Interpreter
    try:
        yield
    finally:
        wrappers.PropagateUnbackedSymInts = original


@contextmanager
def without_unread_texts() -> Iterator[None]:
    """Lets AOTAutograd print its graphs only where a log or a structured trace of torch's shows them.

    Why: it prints each graph for its cache too, for the trace of a process that finds the graph there.
    """
    compiler: Any = graph_compile
    logs = [getattr(compiler, name, None) for name in ("aot_joint_log", "aot_graphs_log")]
    if traces_compiles() or any(log is None or log.isEnabledFor(logging.INFO) for log in logs):
        yield
        return
    originals = {name: getattr(compiler, name) for name in _PRINTERS if hasattr(compiler, name)}
    try:
        for name in originals:
            setattr(compiler, name, _PRINTERS[name])
        yield
    finally:
        for name, original in originals.items():
            setattr(compiler, name, original)


_PRINTERS: Mapping[str, Callable[..., object]] = {
    "_log_joint_graph": lambda *_: None,
    "_log_inference_graph": lambda *_: None,
    "_log_fw_bw_graphs": lambda *_: (None, None),
}
"""Replacements of functions that log graphs and return their texts."""


class _Interpreter(PropagateUnbackedSymInts):
    """Runs a Dynamo graph on functional tensors.

    For metadata it runs what that depends on. While a graph is traced, it copies the traces of calls that repeat
    earlier ones, and those of their backwards.
    """

    find_results: ResultsOf
    results: Any = None
    repeated: RepeatedCalls | None = None
    repeatable: frozenset[Node] = frozenset()

    def run(self, *arguments: Any, **options: Any) -> Any:
        fakes, proxies = detect_fake_mode(), get_proxy_mode()
        if fakes is not None:
            self.results = self.find_results(self.graph, fakes)
        if self.results is not None and proxies is not None:
            self.repeated = RepeatedCalls(proxies.tracer)
            # Autograd knows the bases of views that are results, which copies have none of.
            views = self.results.executed if torch.is_grad_enabled() else frozenset()
            self.repeatable = self.results.repeatable - views
        return super().run(*arguments, **options)

    def run_node(self, n: Node) -> Any:
        if self.results is None:
            return super().run_node(n)
        if self.repeated is not None:
            self.node = n
            return super().run_node(n)
        if n in self.results.executed:
            return super().run_node(n)
        return tree_map_only(FakeTensor, _functional_like, n.meta["example_value"]) if n in self.results.known else None

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        arguments = super().fetch_args_kwargs_from_env(n)
        if self.repeated is None or n in self.repeatable:
            return arguments
        return self.repeated.functional(arguments)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(super().call_function, target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(super().call_method, target, args, kwargs)

    def _call(self, call: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        if self.repeated is None:
            return call(target, args, kwargs)
        if self.node in self.repeatable:
            return self.repeated.run(target, args, kwargs, call)
        if self.node in self.results.modes:
            self.repeated.enter_state()
        return call(target, args, kwargs)


def _functional_like(example: FakeTensor) -> FunctionalTensor:
    """Returns a functional tensor with the layout of a fake one, which needs a gradient if that one does."""
    with disable_functional_mode():
        fake = torch.empty_strided(
            example.shape, example.stride(), dtype=example.dtype, device=example.device,
            requires_grad=example.requires_grad,
        )  # fmt: skip
    return FunctionalTensor.to_functional(fake)

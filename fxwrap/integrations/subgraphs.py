"""Compiling the subgraphs of a host that splits Dynamo's graph at attention, and saving them in the host's folder.

A subgraph is traced to ATen operators as it is: mutations stay mutations, and results that are views of inputs stay
views. So a saved program is all that a process needs, and no state of AOTAutograd is saved beside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from fxwrap.artifact import load_content, program_content
from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.compile import Compiled, compile_graph, record_loaded
from fxwrap.compile_cache import NotCacheable, content_key
from fxwrap.errors import ArtifactError, CacheError, FxwrapError
from fxwrap.options import Options
from fxwrap.runtime.cache_folder import read_cache_file, write_cache_file
from fxwrap.runtime.plain_inputs import with_traced_inputs
from fxwrap.torch_compat import (
    FakeTensor,
    accept_real_tensors,
    fresh_fake_mode,
    in_dispatched_fake_mode,
    one_compile_at_a_time,
    symbol_expression,
    without_fake_mode,
)

log = logging.getLogger("fxwrap.integrations")

SubgraphFunction: TypeAlias = Callable[..., Any]
"""A compiled subgraph: takes the flat inputs of the graph and returns its result, a tuple or a single value."""

FOLDER = "fxwrap"
"""The folder of saved subgraphs in a host's cache folder."""


@dataclass(frozen=True)
class Subgraph:
    """A compiled subgraph; `key` finds it in the host's folder in later processes, "" where it is not saved."""

    function: SubgraphFunction
    key: str = ""


class SubgraphCompiler:
    """Compiles subgraphs, equal ones once, and loads those that an earlier process saved in the same folder.

    Subgraphs are equal if their operators, inputs, symbols and options are, whatever the names of nodes and the places
    in the model's source. Any number of processes and threads may use a folder at once: files are named by content and
    written atomically.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is the host's cache folder; None compiles without saving."""
        self.folder = folder
        self._known: dict[str, Subgraph] = {}
        self._lock = threading.Lock()

    @one_compile_at_a_time
    def compile(
        self, graph: GraphModule, example_inputs: Sequence[object], options: Options, *,
        sizes: tuple[int, int] | None = None,
    ) -> Subgraph:  # fmt: skip
        """Returns a compiled subgraph, from this process, from the folder, or compiled now.

        Args:
            graph: a graph of Dynamo, or a part of one. It is not changed.
            example_inputs: a value for each placeholder, fake tensors and symbolic numbers or real ones.
            options: the options of the compile.
            sizes: the lowest and highest value of the first symbolic input, both inclusive.

        Raises the errors of `compile_graph`.
        """
        traced = trace_subgraph(graph, example_inputs)
        if sizes is not None and (symbol := _first_symbol(example_inputs)):
            options = options.replace(symbol_ranges={symbol: sizes, **options.symbol_ranges})
        try:
            key = content_key(traced, options)
        except NotCacheable as reason:
            log.info("a subgraph is not saved: %s", reason)
            return Subgraph(_function(compile_graph(traced, options=options, name="subgraph"), returns_tuple(graph)))
        with self._lock:
            known = self._known.get(key) or self._load(key)
            if known is None:
                known = self._compile(traced, options, key, returns_tuple(graph))
            self._known[key] = known
        return known

    def load(self, key: str) -> SubgraphFunction:
        """Returns a subgraph that was saved with this key. Raises ArtifactError for a missing or damaged file."""
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._read(key)
        return known.function

    def path(self, key: str) -> Path:
        """Returns the file of a saved subgraph."""
        return (self.folder or Path()) / FOLDER / f"{key}.fxw"

    def _load(self, key: str) -> Subgraph | None:
        """Returns a saved subgraph; None, with a log message, where it is missing or damaged."""
        if self.folder is None or not self.path(key).exists():
            return None
        try:
            return self._read(key)
        except ArtifactError as error:
            log.warning("a saved subgraph is unusable, and it is compiled again: %s", error)
            return None

    def _read(self, key: str) -> Subgraph:
        path = self.path(key)
        content = read_cache_file(path)
        if content is None:
            reason = "there is no such file, or another user can write it"
            raise ArtifactError(str(path), "", reason, "Delete the host's cache folder, which is then written again")
        with without_fake_mode():
            loaded = load_content(content, str(path))
            call = loaded.metadata.get("call")
            if not isinstance(call, dict) or type(call.get("returns_tuple")) is not bool or call.get("key") != key:
                raise ArtifactError(str(path), "manifest.json", "it is not the subgraph of this name", "Delete it")
            function = _function(loaded, call["returns_tuple"])
        record_loaded(loaded)
        return Subgraph(function, key)

    def _compile(self, traced: GraphModule, options: Options, key: str, is_tuple: bool) -> Subgraph:
        compiled = compile_graph(traced, options=options, name="subgraph")
        return Subgraph(_function(compiled, is_tuple), key if self._save(compiled, key, is_tuple) else "")

    def _save(self, compiled: Compiled, key: str, is_tuple: bool) -> bool:
        """Saves a subgraph; returns whether it could be saved, and logs why not."""
        if self.folder is None:
            return False
        try:
            with without_fake_mode():
                call = {"returns_tuple": is_tuple, "key": key}
                content = program_content(
                    compiled.content_to_save(), compiled.emitted, "a subgraph", call, has_bridge=True
                )
            write_cache_file(self.folder, f"{FOLDER}/{key}.fxw", content)
        except (FxwrapError, CacheError, OSError) as error:
            log.warning("a subgraph is not saved, and later processes compile it again: %s", error)
            return False
        return True


def trace_subgraph(graph: GraphModule, example_inputs: Sequence[object]) -> GraphModule:
    """Returns a graph of ATen operators that computes the same, mutations of inputs included.

    Gradients are not recorded. Fake inputs are traced in their own mode, so the result has their symbols.
    """

    def run(*inputs: object) -> object:
        return Interpreter(graph).run(*inputs)

    # Under Dynamo, `detect_fake_mode` returns the mode of its backend's inputs, which is another one.
    mode = next((item.fake_mode for item in example_inputs if isinstance(item, FakeTensor)), None) or fresh_fake_mode()
    inputs = [mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in example_inputs]
    with torch.no_grad(), preserve_node_meta(), in_dispatched_fake_mode(mode), accept_real_tensors(mode):
        return make_fx(run)(*inputs)


def returns_tuple(graph: GraphModule) -> bool:
    """Whether a graph returns a tuple or list, and not a single value."""
    return isinstance(graph.graph.output_node().args[0], tuple | list)


def _function(program: Compiled | LoadedProgram, is_tuple: bool) -> SubgraphFunction:
    function: SubgraphFunction = with_traced_inputs(program.flat)  # parameters of hosts may have classes of their own
    return function if is_tuple else lambda *inputs: function(*inputs)[0]


def _first_symbol(example_inputs: Sequence[object]) -> str:
    """Returns the name of the symbol that the first symbolic input is; "" where it is none."""
    for item in example_inputs:
        if isinstance(item, torch.SymInt):
            expression = symbol_expression(item)
            return str(expression) if expression.is_Symbol else ""
    return ""

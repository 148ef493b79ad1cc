"""A program that was loaded from a file: it runs as what was saved did."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxwrap.artifact.constants import ConstantLayout, read_tensor_file
from fxwrap.artifact.given import by_program_names, check_given, laid_out, overwrite
from fxwrap.artifact.saving import save_program
from fxwrap.converters.emitted import Boxed, Emitted, Flat
from fxwrap.converters.fx import EmittedGraph, to_fx
from fxwrap.emission import emit, explained
from fxwrap.errors import ArtifactError
from fxwrap.memory_planning import MemoryPlan
from fxwrap.wrapper_ir import ConstantStore, Program, program_key


def _graph(program: Program) -> EmittedGraph:
    """Returns a program as a graph, which loads none of torch's tracing unless it must."""
    try:
        return to_fx(program, tracing=False)
    except (RuntimeError, ArithmeticError, ValueError):  # the examples of numbers do not go together
        return to_fx(program)


def describe(graph_module: GraphModule, described: GraphModule) -> None:
    """Gives each node the `meta["val"]` that it has in another emission of the same program."""
    for node, other in zip(graph_module.graph.nodes, described.graph.nodes, strict=True):
        if "val" in other.meta:
            node.meta["val"] = other.meta["val"]
    for name, child in graph_module.named_children():
        if isinstance(child, GraphModule):
            describe(child, getattr(described, name))


class Loaded:
    """A program from a file. Call it with the flat inputs; it returns the tuple of flat outputs.

    It has what `Compiled` has: `flat`, `boxed`, `program`, `source`, `graph_module`, `plan`, `key`, `save`. `emitter`
    is the form that it runs in, `metadata` what the file says of itself: versions, inputs, ranges of symbols, devices,
    options. `rebuilt` says why compiled code in the file is not used, "" where it is.
    """

    def __init__(
        self,
        path: str,
        program: Program,
        emitter: str,
        layout: ConstantLayout,
        metadata: Mapping[str, Any],
        plan: MemoryPlan | None = None,
        rebuilt: str = "",
    ) -> None:
        self.path = path
        self.emitter = emitter
        self.metadata = metadata
        self.plan = plan
        self.rebuilt = rebuilt
        self._layout = layout
        self._program = program
        self._emitted: Emitted | None = None
        self._lock = threading.Lock()

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self._program

    @property
    def emitted(self) -> Emitted:
        """The program in the form that runs. Raises ArtifactError while constants are missing."""
        with self._lock:
            if self._emitted is None:
                self._require_constants()
                if self.emitter == "fx":
                    self._emitted = _graph(self._program)
                else:
                    self._emitted = emit(self._program, self.emitter)
            return self._emitted

    @property
    def source(self) -> str:
        """The text of the form that runs."""
        return self.emitted.source

    @cached_property
    def boxed(self) -> Boxed:
        """The boxed entry: it takes the inputs in a list, which it empties."""
        return explained(self.emitted.boxed, self.plan, self._program)

    @cached_property
    def flat(self) -> Flat:
        """The flat entry, without the call through this object."""
        return explained(self.emitted.flat, self.plan, self._program)

    def __call__(self, *inputs: Any) -> Any:
        return self.flat(*inputs)

    @cached_property
    def graph_module(self) -> GraphModule:
        """The program as an FX graph: what runs with the emitter "fx", made here on first use for the others.

        It may be rewritten until the first call. The fake tensors in its metadata are made here too: torch imports its
        tracing for that.
        """
        self._require_constants()
        whole, emitted = to_fx(self._program), self.emitted
        if not isinstance(emitted, EmittedGraph):
            return whole.graph_module
        describe(emitted.graph_module, whole.graph_module)
        return emitted.graph_module

    @property
    def key(self) -> str:
        """A hash, equal to that of what was saved."""
        return program_key(self._program, self.metadata["options"])

    def save(self, path: str | Path, *, constants: bool = True) -> None:
        """Saves the program again; see `fxwrap.save`."""
        if constants:
            self._require_constants()
        save_program(
            self._program, path, emitter=self.emitter, emitters=(self.emitter,), options=self.metadata["options"],
            plan=self.plan, constants=constants,
        )  # fmt: skip

    # --- constants --------------------------------------------------------------------------------------------------

    def load_constants(
        self, constants: Mapping[str, torch.Tensor] | str | Path, *, strict: bool = True, mmap: bool = True
    ) -> None:
        """Gives the program its constants: a mapping, or the path of a safetensors file.

        Args:
            constants: a tensor for each constant, by the program's name for it (`program.constants`) or the model's
                ("layers.0.weight"). One that is laid out as the program wants it, on its device, is not copied: later
                writes into it are seen. Constants that share memory may be given by the one that is all of it.
            strict: whether tensors that the program has no constant for are an error; else they are left out.
            mmap: whether the tensors of a safetensors file are the file's own memory, as `fxwrap.load` has it.

        Entries taken before (`flat`, `boxed`) keep the constants that they had. Raises ArtifactError that names what is
        missing, surplus, or of another dtype or size; the constants then stay as they were.
        """
        given, surplus = self._named(constants, mmap)
        check_given(self._layout, given, surplus if strict else (), self._refuse, all_of_them=True)
        tensors = laid_out(self._layout, given, self._devices(), self._refuse)
        with self._lock:
            self._program = self._program.replace(store=ConstantStore(tensors))
            self._emitted = None
            for name in ("boxed", "flat", "graph_module"):
                self.__dict__.pop(name, None)

    def update_constants(self, constants: Mapping[str, torch.Tensor] | str | Path) -> None:
        """Writes new numbers into some constants, in place: all that runs sees them from its next call on.

        Named as for `load_constants`. No call may run meanwhile. Raises ArtifactError for what does not fit, and writes
        nothing then.
        """
        self._require_constants()
        given, surplus = self._named(constants)
        check_given(self._layout, given, surplus, self._refuse, all_of_them=False)
        overwrite(self._program.store.tensors, given)

    def _named(
        self, constants: Mapping[str, torch.Tensor] | str | Path, mmap: bool = True
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        found = read_tensor_file(str(constants), mmap) if isinstance(constants, str | Path) else constants
        return by_program_names(found, [window.name for window in self._layout.windows], self._refuse)

    def _devices(self) -> dict[str, torch.device]:
        return {item.value.name: item.value.tensor_type.device for item in self._program.constants}

    def _refuse(self, reason: str, remedy: str) -> ArtifactError:
        return ArtifactError(self.path, "", reason, remedy)

    def _require_constants(self) -> None:
        missing = [item.value.name for item in self._program.constants
                   if item.value.name not in self._program.store.tensors]  # fmt: skip
        if missing:
            names = ", ".join([repr(name) for name in missing[:8]]) + (", ..." if len(missing) > 8 else "")
            raise self._refuse(
                f"it was saved without its {len(missing)} constants ({names})", "Give them by load_constants first"
            )

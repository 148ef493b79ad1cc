"""A program loaded from a file."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxwrap.artifact.constant_binding import bind_constants, check_constants, match_constant_names, overwrite
from fxwrap.artifact.constants import ConstantLayout, read_tensor_file
from fxwrap.artifact.saving import save_program
from fxwrap.converters.emission import emit, emit_interpreter, user_entry
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram, FlatCallable
from fxwrap.converters.fx import EmittedGraph, to_fx
from fxwrap.converters.intercepted_calls import call_as_graph
from fxwrap.converters.interpreter import UntrustedInterpreter
from fxwrap.errors import ArtifactError
from fxwrap.memory_planning import MemoryPlan
from fxwrap.signature import CallingConvention, StructuredProgram
from fxwrap.wrapper_ir import ConstantStore, Program, program_key


def _graph(program: Program) -> EmittedGraph:
    """Returns a program as a graph, without importing torch's tracing if possible."""
    try:
        return to_fx(program, fake_metadata=False)
    except (RuntimeError, ArithmeticError, ValueError):  # the example sizes are inconsistent
        return to_fx(program)


def copy_metadata(graph_module: GraphModule, source: GraphModule) -> None:
    """Copies `meta["val"]` of each node from another emission of the same program."""
    for node, other in zip(graph_module.graph.nodes, source.graph.nodes, strict=True):
        if "val" in other.meta:
            node.meta["val"] = other.meta["val"]
    for name, child in graph_module.named_children():
        if isinstance(child, GraphModule):
            copy_metadata(child, getattr(source, name))


class LoadedProgram(StructuredProgram):
    """A program from a file. Call it with the arguments of the model; it returns the model's result.

    It has the attributes of `Compiled`: `flat`, `boxed`, `program`, `source`, `graph_module`, `plan`, `key`, `inputs`,
    `outputs`, `convention`, `save`.
    `emitter` is the emitter that runs it, `metadata` the file's manifest: versions, inputs, symbols, devices, options.
    `recompile_reason` is why compiled code in the file is not used, "" if it is. With the `trust` "none" it has no
    `graph_module` and no `save`, which would turn its text into code.
    """

    def __init__(
        self,
        path: str,
        program: Program,
        emitter: str,
        layout: ConstantLayout,
        metadata: Mapping[str, Any],
        plan: MemoryPlan | None = None,
        recompile_reason: str = "",
        trust: str = "full",
        convention: CallingConvention | None = None,
    ) -> None:
        self._convention = convention or CallingConvention.of_flat(program)
        self.path = path
        self.trust = trust
        self.emitter = emitter
        self.metadata = metadata
        self.plan = plan
        self.recompile_reason = recompile_reason
        self._layout = layout
        self._program = program
        self._emitted: EmittedProgram | None = None
        self._lock = threading.Lock()

    @property
    def program(self) -> Program:
        """The program."""
        return self._program

    @property
    def convention(self) -> CallingConvention:
        """How arguments become the flat inputs, and the flat outputs the result."""
        return self._convention

    @property
    def emitted(self) -> EmittedProgram:
        """The emitted program. Raises ArtifactError while constants are missing."""
        with self._lock:
            if self._emitted is None:
                self._require_constants()
                if self.trust == "none":
                    self._emitted = emit_interpreter(self._program, UntrustedInterpreter)
                elif self.emitter == "fx":
                    self._emitted = _graph(self._program)
                else:
                    self._emitted = emit(self._program, self.emitter)
            return self._emitted

    @property
    def source(self) -> str:
        """The emitted text."""
        return self.emitted.source

    @cached_property
    def boxed(self) -> BoxedCallable:
        """The boxed entry: it takes a list of inputs, which it empties."""
        return user_entry(self.emitted.boxed, self._program, self.plan, boxed=True, group_sizes=self._group_sizes)

    @cached_property
    def flat(self) -> FlatCallable:
        """The flat entry, without the call through this object."""
        return user_entry(self.emitted.flat, self._program, self.plan, boxed=False, group_sizes=self._group_sizes)

    @property
    def _group_sizes(self) -> Mapping[str, int]:
        """The ranks of the process groups where the program was saved."""
        return {str(label): int(size) for label, size in self.metadata.get("groups", {}).items()}

    def _call_as_graph(self, inputs: Sequence[object]) -> Any:
        return call_as_graph(self._program, lambda: self.graph_module, tuple(inputs))

    def _repr_details(self) -> str:
        return f"from '{self.path}', emitter '{self.emitter}'"

    @cached_property
    def graph_module(self) -> GraphModule:
        """The program as an FX graph, emitted on first use; the emitter "fx" runs it.

        It may be rewritten until the first call. The first use also creates the fake tensors of its metadata, for which
        torch imports its tracing.
        """
        self._require_trust()
        self._require_constants()
        whole, emitted = to_fx(self._program), self.emitted
        if not isinstance(emitted, EmittedGraph):
            return whole.graph_module
        copy_metadata(emitted.graph_module, whole.graph_module)
        return emitted.graph_module

    @property
    def key(self) -> str:
        """The same hash as that of the saved program."""
        return program_key(self._program, self.metadata["options"])

    def save(self, path: str | Path, *, constants: bool = True) -> None:
        """Saves the program again; see `fxwrap.save`."""
        self._require_trust()
        if constants:
            self._require_constants()
        save_program(
            self._program, path, emitter=self.emitter, emitters=(self.emitter,), options=self.metadata["options"],
            plan=self.plan, constants=constants, group_sizes=self._group_sizes, step=self.metadata.get("step"),
            convention=self.convention,
        )  # fmt: skip

    # --- constants --------------------------------------------------------------------------------------------------

    def load_constants(
        self, constants: Mapping[str, torch.Tensor] | str | Path, *, strict: bool = True, mmap: bool = True
    ) -> None:
        """Binds the constants: a mapping, or the path of a safetensors file.

        Args:
            constants: a tensor per constant, by its name in the program (`program.constants`) or in the model
                ("layers.0.weight"). Tensors with the program's layout and device are not copied: later writes into them
                take effect. For constants that share memory, the one that covers all of it suffices.
            strict: raise for unexpected tensors instead of ignoring them.
            mmap: map a safetensors file into memory, as `fxwrap.load` does.

        Previous entries (`flat`, `boxed`) keep their constants. Raises ArtifactError with all missing and unexpected
        constants and those of another dtype or size; nothing is bound then.
        """
        tensors, unexpected = self._named(constants, mmap)
        check_constants(self._layout, tensors, unexpected if strict else (), self._error, require_all=True)
        bound = bind_constants(self._layout, tensors, self._devices(), self._error)
        with self._lock:
            self._program = self._program.replace(store=ConstantStore(bound))
            self._emitted = None
            for name in ("boxed", "flat", "graph_module", "_entry"):
                self.__dict__.pop(name, None)

    def update_constants(self, constants: Mapping[str, torch.Tensor] | str | Path) -> None:
        """Updates some constants in place; all entries use the new values from their next call on.

        Named as for `load_constants`. No call may be in progress. Raises ArtifactError for tensors that do not fit, and
        writes nothing then.
        """
        self._require_constants()
        tensors, unexpected = self._named(constants)
        check_constants(self._layout, tensors, unexpected, self._error, require_all=False)
        overwrite(self._program.store.tensors, tensors)

    def _named(
        self, constants: Mapping[str, torch.Tensor] | str | Path, mmap: bool = True
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        tensors = read_tensor_file(str(constants), mmap) if isinstance(constants, str | Path) else constants
        return match_constant_names(tensors, [window.name for window in self._layout.views], self._error)

    def _devices(self) -> dict[str, torch.device]:
        return {item.value.name: item.value.tensor_type.device for item in self._program.constants}

    def _error(self, reason: str, remedy: str) -> ArtifactError:
        return ArtifactError(self.path, "", reason, remedy)

    def _require_trust(self) -> None:
        if self.trust == "none":
            raise self._error("it was loaded with trust='none', and its text becomes no code", "Use the file itself")

    @property
    def missing_constants(self) -> list[str]:
        """The names of constants without a tensor."""
        names = [item.value.name for item in self._program.constants]
        return [name for name in names if name not in self._program.store.tensors]

    def _require_constants(self) -> None:
        missing = self.missing_constants
        if missing:
            names = ", ".join([repr(name) for name in missing[:8]]) + (", ..." if len(missing) > 8 else "")
            raise self._error(
                f"it was saved without its {len(missing)} constants ({names})", "Bind them with load_constants first"
            )

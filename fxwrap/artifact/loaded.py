"""A program loaded from a file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from fxwrap.artifact.constant_binding import bind_constants, check_constants, match_constant_names, overwrite
from fxwrap.artifact.constants import ConstantLayout, read_tensor_file
from fxwrap.artifact.savable import SavableProgram
from fxwrap.artifact.saving import SavedContent
from fxwrap.converters.emission import emit, emit_interpreter, explain_out_of_memory, user_entry
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram, FlatCallable
from fxwrap.converters.fx import EmittedGraph, to_fx
from fxwrap.converters.intercepted_calls import call_as_graph
from fxwrap.converters.interpreter import UntrustedInterpreter
from fxwrap.errors import ArtifactError
from fxwrap.memory_planning import MemoryPlan, out_of_memory_message
from fxwrap.signature import CallingConvention
from fxwrap.torch_compat import without_fake_mode
from fxwrap.wrapper_ir import ConstantStore, Program, program_key

EntryT = TypeVar("EntryT", bound=Callable[..., Any])


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


@dataclass(frozen=True)
class DeferredProgram:
    """A program whose emitted code a file has.

    Fields: `emitted` runs it; `read` reads the program and its memory plan; `has_plan` is whether it has one.
    """

    emitted: EmittedProgram
    read: Callable[[], tuple[Program, MemoryPlan | None]]
    has_plan: bool


class LoadedProgram(SavableProgram):
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
        program: Program | DeferredProgram,
        emitter: str,
        layout: ConstantLayout,
        metadata: Mapping[str, Any],
        plan: MemoryPlan | None = None,
        recompile_reason: str = "",
        trust: str = "full",
        convention: CallingConvention | None = None,
    ) -> None:
        self._convention = convention
        self.path = path
        self.trust = trust
        self.emitter = emitter
        self.metadata = metadata
        self.recompile_reason = recompile_reason
        self._layout = layout
        self._deferred = program if isinstance(program, DeferredProgram) else None
        self._read = None if isinstance(program, DeferredProgram) else (program, plan)
        self._emitted: EmittedProgram | None = None if self._deferred is None else self._deferred.emitted
        self._lock = threading.RLock()

    def _read_once(self) -> tuple[Program, MemoryPlan | None]:
        with self._lock:
            if self._read is None:
                assert self._deferred is not None
                with without_fake_mode():
                    self._read = self._deferred.read()
            return self._read

    @property
    def program(self) -> Program:
        """The program."""
        return self._read_once()[0]

    @property
    def plan(self) -> MemoryPlan | None:
        """The program's memory plan, if it has one."""
        return self._read_once()[1]

    @property
    def convention(self) -> CallingConvention:
        """How arguments become the flat inputs, and the flat outputs the result."""
        if self._convention is None:
            self._convention = CallingConvention.of_flat(self.program)
        return self._convention

    @property
    def emitted(self) -> EmittedProgram:
        """The emitted program. Raises ArtifactError while constants are missing."""
        with self._lock:
            if self._emitted is None:
                self._require_constants()
                if self.trust == "none":
                    self._emitted = emit_interpreter(self.program, UntrustedInterpreter)
                elif self.emitter == "fx":
                    self._emitted = _graph(self.program)
                else:
                    self._emitted = emit(self.program, self.emitter)
            return self._emitted

    @property
    def source(self) -> str:
        """The emitted text."""
        return self.emitted.source

    @cached_property
    def boxed(self) -> BoxedCallable:
        """The boxed entry: it takes a list of inputs, which it empties."""
        return self._entry_of(self.emitted.boxed, boxed=True)

    @cached_property
    def flat(self) -> FlatCallable:
        """The flat entry, without the call through this object."""
        return self._entry_of(self.emitted.flat, boxed=False)

    def _entry_of(self, entry: EntryT, *, boxed: bool) -> EntryT:
        if self._deferred is None:
            return user_entry(entry, self.program, self.plan, boxed=boxed, group_sizes=self._group_sizes)
        return explain_out_of_memory(entry, self._memory_advice) if self._deferred.has_plan else entry

    def _memory_advice(self) -> list[str]:
        return [] if self.plan is None else [out_of_memory_message(self.plan, self.program)]

    @property
    def _group_sizes(self) -> Mapping[str, int]:
        """The ranks of the process groups where the program was saved."""
        return {str(label): int(size) for label, size in self.metadata.get("groups", {}).items()}

    def _call_as_graph(self, inputs: Sequence[object]) -> Any:
        return call_as_graph(self.program, lambda: self.graph_module, tuple(inputs))

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
        whole, emitted = to_fx(self.program), self.emitted
        if not isinstance(emitted, EmittedGraph):
            return whole.graph_module
        copy_metadata(emitted.graph_module, whole.graph_module)
        return emitted.graph_module

    @property
    def key(self) -> str:
        """The same hash as that of the saved program."""
        return program_key(self.program, self.metadata["options"])

    def content_to_save(self, constants: bool = True) -> SavedContent:
        self._require_trust()
        if constants:
            self._require_constants()
        options, step = self.metadata["options"], self.metadata.get("step")
        return SavedContent(self.program, self.emitter, options, self.plan, self._group_sizes, step, self.convention)

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
            self._read = self.program.replace(store=ConstantStore(bound)), self.plan
            self._emitted = self._deferred = None
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
        overwrite(self.program.store.tensors, tensors)

    def _named(
        self, constants: Mapping[str, torch.Tensor] | str | Path, mmap: bool = True
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        tensors = read_tensor_file(str(constants), mmap) if isinstance(constants, str | Path) else constants
        return match_constant_names(tensors, [window.name for window in self._layout.views], self._error)

    def _devices(self) -> dict[str, torch.device]:
        return {item.value.name: item.value.tensor_type.device for item in self.program.constants}

    def _error(self, reason: str, remedy: str) -> ArtifactError:
        return ArtifactError(self.path, "", reason, remedy)

    def _require_trust(self) -> None:
        if self.trust == "none":
            raise self._error("it was loaded with trust='none', and its text becomes no code", "Use the file itself")

    @property
    def missing_constants(self) -> list[str]:
        """The names of constants without a tensor."""
        names = [item.value.name for item in self.program.constants]
        return [name for name in names if name not in self.program.store.tensors]

    def _require_constants(self) -> None:
        missing = self.missing_constants
        if missing:
            names = ", ".join([repr(name) for name in missing[:8]]) + (", ..." if len(missing) > 8 else "")
            raise self._error(
                f"it was saved without its {len(missing)} constants ({names})", "Bind them with load_constants first"
            )

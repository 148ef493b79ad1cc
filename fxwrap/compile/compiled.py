"""The result of a compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from torch.fx import GraphModule

from fxwrap.artifact import SavableProgram, SavedContent
from fxwrap.converters.emission import user_entry
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram, FlatCallable
from fxwrap.converters.exported import ExportedSignature
from fxwrap.converters.fx import EmittedGraph, to_fx
from fxwrap.converters.intercepted_calls import call_as_graph
from fxwrap.debugging import GraphCase, ProgramValues
from fxwrap.events import PassRan
from fxwrap.lowering import NodeCoverage
from fxwrap.memory_planning import MemoryPlan
from fxwrap.options import Options
from fxwrap.passes.provenance import Provenance, provenance
from fxwrap.signature import CallingConvention
from fxwrap.signature.exported import exported_convention
from fxwrap.torch_compat import FakeTensor
from fxwrap.tuning import FirstCallAutotuner
from fxwrap.wrapper_ir import Program, program_key

EntryT = TypeVar("EntryT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Stage:
    """A program after one step of the pipeline; `pass_name` names the step or the user's pass."""

    pass_name: str
    program: Program


@dataclass(frozen=True)
class CompileResult:
    """The result of one run of the pipeline.

    Fields:
        stages: the programs after each step that changed them; the last one runs.
        options: the options of the compile.
        emitted: the emitted program.
        coverage: for each call of the graph, whether it was fused or called, and the decline reason.
        plan: the memory plan, if the options asked for one.
        fake_inputs: the fake tensors of the graph's inputs by name, as far as they are known.
        passes: the runs of the user's passes.
    """

    stages: tuple[Stage, ...]
    options: Options
    emitted: EmittedProgram
    coverage: tuple[NodeCoverage, ...] = ()
    plan: MemoryPlan | None = None
    fake_inputs: Mapping[str, FakeTensor] = field(default_factory=dict)
    passes: tuple[PassRan, ...] = ()

    @property
    def program(self) -> Program:
        return self.stages[-1].program

    @cached_property
    def values(self) -> ProgramValues | None:
        check = self.options.check_values
        return None if check is None else ProgramValues(self.program, check)

    def boxed(self) -> BoxedCallable:
        return self._checked(user_entry(self.emitted.boxed, self.program, self.plan, boxed=True))

    def flat(self) -> FlatCallable:
        return self._checked(user_entry(self.emitted.flat, self.program, self.plan, boxed=False))

    def _checked(self, entry: EntryT) -> EntryT:
        return entry if self.values is None else self.values.checking(entry)

    @cached_property
    def provenance(self) -> Provenance:
        return provenance(self.program)

    @cached_property
    def graph_module(self) -> GraphModule:
        emitted = self.emitted
        if not isinstance(emitted, EmittedGraph):
            emitted = to_fx(self.program, fake_inputs=self.fake_inputs, form=self.options.fx_form)
        return emitted.graph_module


class Compiled(EmittedProgram, SavableProgram):
    """A compiled graph.

    A call takes the arguments of the exported program or module, by position or name, and returns its result. That of a
    GraphModule takes its inputs, and returns the tuple of outputs. `flat` takes the flat inputs and returns the tuple
    of flat outputs, `boxed` takes the inputs in a list and clears the list. With `autotune="first_call"`, the program
    and all that depends on it change once, at the end of the first call. `cached` is whether the result came from the
    compile cache; its only stage is then "cache". `is_reproducible` is whether the cache may keep it: the compile gave
    no warning, and the first call does not compile again.
    """

    is_reproducible: bool = True

    def __init__(
        self,
        result: CompileResult,
        *,
        signature: ExportedSignature | None = None,
        recompile: Callable[[Mapping[str, int]], Compiled] | None = None,
        case: GraphCase | None = None,
        cached: bool = False,
    ) -> None:
        """`signature` is that of the exported program that was compiled, or None for a GraphModule.

        `recompile` compiles the graph for the sizes of the first call, after that call; see `FirstCallAutotuner`.
        `case` has all forms of the graph, with the option `debug`.
        """
        self.options = result.options
        self.cached = cached
        self.signature = signature
        self.case = case
        self._result = result
        self._first_call: FirstCallAutotuner | None = None
        if recompile is None:
            super().__init__("", result.boxed, result.flat)
            return

        def replace_result(symbols: Mapping[str, int]) -> Compiled:
            recompiled = recompile(symbols)
            recompiled.boxed, recompiled.flat  # noqa: B018  builds them before anything changes
            self._result = recompiled._result
            return recompiled

        entries = EmittedProgram("", result.boxed, result.flat)
        first = self._first_call = FirstCallAutotuner(self.program, entries, replace_result)
        super().__init__("", lambda: first.boxed, lambda: first.flat)

    __call__ = SavableProgram.__call__

    def with_emitted(self, emitted: EmittedProgram) -> Compiled:
        """Returns the compiled graph with another emitted program, such as one that also records its calls."""
        return Compiled(replace(self._result, emitted=emitted), signature=self.signature)

    def _call_as_graph(self, inputs: Sequence[object]) -> Any:
        return call_as_graph(self.program, lambda: self.graph_module, tuple(inputs))

    @cached_property
    def convention(self) -> CallingConvention:
        """How arguments become the flat inputs, and the flat outputs the result."""
        if self.signature is None:
            return CallingConvention.of_flat(self.program)
        return exported_convention(self.signature.module_call_graph, self.signature.inputs)

    def _repr_html_(self) -> str:
        """Returns the program in colours, which notebooks show; a `CompileRecord` is shown as its report."""
        return self.program._repr_html_()

    def _repr_details(self) -> str:
        return f"emitter '{self.options.emitter}'"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The programs after each step that changed them; the last one runs."""
        return self._result.stages

    @property
    def emitted(self) -> EmittedProgram:
        """The emitted program."""
        return self._result.emitted

    @property
    def source(self) -> str:
        """The text of the emitted program."""
        return self._result.emitted.source

    @property
    def coverage(self) -> tuple[NodeCoverage, ...]:
        """For each call of the graph, whether it was fused or called, and the decline reason."""
        return self._result.coverage

    @property
    def passes(self) -> tuple[PassRan, ...]:
        """The runs of the user's passes: whether each changed anything, and the matches and near misses of rewrites.

        Empty if the program came from the compile cache.
        """
        return self._result.passes

    @property
    def plan(self) -> MemoryPlan | None:
        """The program's memory plan, if the options asked for one."""
        return self._result.plan

    @property
    def values(self) -> ProgramValues | None:
        """Statistics of each line's tensors in the latest call, with the option `check_values`."""
        return self._result.values

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self._result.program

    @property
    def fake_inputs(self) -> Mapping[str, FakeTensor]:
        """The fake tensors of the graph's inputs by name, as far as they are known."""
        return self._result.fake_inputs

    @property
    def provenance(self) -> Provenance:
        """The origins of each kernel launch and operator call in the model's source."""
        return self._result.provenance

    @property
    def graph_module(self) -> GraphModule:
        """The program as an FX graph: the one that runs with the emitter "fx", else one emitted on first use.

        The caller may rewrite a graph that runs, so reading it turns off `autotune="first_call"`.
        """
        if self._first_call is not None and isinstance(self.emitted, EmittedGraph):
            self._first_call.skip_tuning()
        return self._result.graph_module

    def content_to_save(self, constants: bool = True) -> SavedContent:
        return SavedContent(
            self.program, self.options.emitter, self.options.text(), self.plan, convention=self.convention
        )

    @property
    def key(self) -> str:
        """A hash of the program, up to the names of values and origins, and of the options."""
        return program_key(self.program, self.options.text())

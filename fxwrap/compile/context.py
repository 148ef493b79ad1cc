"""The inputs of a compile, and the results of its steps so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from fxwrap.compile.compiled import Compiled
from fxwrap.compile.kernels import KernelFailure
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.exported import ExportedSignature
from fxwrap.converters.fx import EmittedGraph
from fxwrap.devices import CPU, CUDA
from fxwrap.events import EventLog
from fxwrap.fx_passes import GraphSource, PreparedGraph
from fxwrap.lowering import NodeCoverage
from fxwrap.memory_planning import MemoryPlan
from fxwrap.options import MatmulKernels, Options
from fxwrap.torch_compat import FakeTensor
from fxwrap.tuning import Tuner, has_gpu
from fxwrap.wrapper_ir import Ownership, Program


@dataclass(frozen=True)
class CompileContext:
    """The inputs of a compile. Its attempts differ in `declined_nodes` only.

    Fields:
        prepared: the graph after the FX passes, or the program of a graph that fxwrap emitted.
        options: the options, with their devices resolved.
        ownership: the ownership of inputs, by position.
        static_inputs: positions of inputs whose address never changes.
        fake_inputs: fake tensors of the inputs by name, for the metadata of emitted FX graphs.
        compiled_by_key: earlier results, which equal programs share.
        tuner: selects the configurations of kernels; None without autotuning.
        declined_nodes: nodes that become extern calls, by name, with the reason.
        graphs: the imported graph, and those after FX passes, by the name of the pass, for the option `debug`.
        signature: that of the exported program that is compiled, None for a GraphModule.
        events: the log of the compile.
        compile_region: compiles a part of the graph, with matmuls as kernels ("auto") or as library calls; None where
            no matmuls are timed.
        is_region: whether the graph is such a part: its matmuls are kernels where timing could choose these, and
            nothing is chosen again.
        lowered: the lowered graph of these inputs, if it was lowered before.
    """

    prepared: PreparedGraph | Program
    options: Options
    ownership: Mapping[int, Ownership]
    static_inputs: frozenset[int]
    fake_inputs: Mapping[str, FakeTensor]
    compiled_by_key: Mapping[str, Compiled] | None = None
    tuner: Tuner | None = None
    declined_nodes: Mapping[str, str] = field(default_factory=dict)
    graphs: Sequence[tuple[str, GraphSource]] = ()
    signature: ExportedSignature | None = None
    events: EventLog = field(default_factory=lambda: EventLog("program"))
    compile_region: Callable[[GraphModule, MatmulKernels], Callable[..., object]] | None = None
    is_region: bool = False
    lowered: CompileState | None = None

    @property
    def chooses_matmuls(self) -> bool:
        """Whether matmuls are timed as kernels beside library calls."""
        has_tuner = self.tuner is not None and self.autotunes_now and self.compile_region is not None
        return has_tuner and self.options.matmul_kernels == "auto" and not self.is_region

    @property
    def tuned_devices(self) -> frozenset[str]:
        """The types of devices on which matmuls are timed beside the library's."""
        if self.tuner is None or not self.autotunes_now or self.compile_region is None:
            return frozenset()
        is_cpu_timed = self.options.cpu_kernels == CPU.kernel_language
        return frozenset([*([CPU.device_type] if is_cpu_timed else []), *([CUDA.device_type] if has_gpu() else [])])

    @property
    def autotunes_now(self) -> bool:
        """Whether kernels are timed during the compile; always with `check_memory`, which has one entry only."""
        return self.options.autotune is True or self.options.check_memory


@dataclass(frozen=True)
class CompileState:
    """The results of the steps so far.

    Fields:
        program: the current program.
        coverage: for each call of the graph, whether it was fused or called, and the decline reason.
        declined_nodes: nodes that became extern calls although they have lowering rules, by name, with the reason.
        warnings: the warnings that mention any of them.
        plan: the memory plan.
        graph: the emitted graph, if the user's passes rewrite it.
        emitted: the emitted program.
        failures: the kernels that failed to compile.
    """

    program: Program
    coverage: tuple[NodeCoverage, ...] = ()
    declined_nodes: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    plan: MemoryPlan | None = None
    graph: EmittedGraph | None = None
    emitted: EmittedProgram | None = None
    failures: tuple[KernelFailure, ...] = ()

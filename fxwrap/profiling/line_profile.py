"""`profile`: the time, bytes and operations of each line of a compiled function, beside the limits of its device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxwrap.artifact.loaded import LoadedProgram
from fxwrap.comparison import Arguments, RunConfig, normalize_arguments
from fxwrap.compile import Compiled, compile_graph, effective_emitter, inspect, make_backend
from fxwrap.converters.emission import emit
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.errors import ProfileError
from fxwrap.lines import Launch
from fxwrap.options import Options
from fxwrap.passes.communication import size_values
from fxwrap.passes.profile_ranges import insert_profile_ranges, ranged_lines
from fxwrap.profiling.limits import DeviceLimits, device_limits, queues_work
from fxwrap.profiling.timing import RangeSeconds, range_seconds
from fxwrap.profiling.work import Work, line_work
from fxwrap.report import LineTime
from fxwrap.signature import CallingConvention, StructuredProgram
from fxwrap.symbolic import Number
from fxwrap.torch_compat import compiled_function
from fxwrap.wrapper_ir import LineBase, Program, TensorType, defined, hints_with_fallback, reads, writes


@dataclass(frozen=True)
class LineProfile:
    """A line that computes, in one run.

    Fields:
        graph: the position of its graph in `Profile.graphs`.
        handle: the handle of the line: the kernel or operator, and a number.
        operators, locations: the operators that it computes, and their lines in the model's source.
        is_kernel: whether it launches a generated kernel.
        calls: how often it runs in one run of the function.
        seconds: the median time, on the device where that has a clock of its own.
        bytes: the bytes that it reads and writes; see `Work`.
        flops: the floating-point operations, 0 where unknown.
        limit_seconds: the time at the device's limits: that of its bytes or of its operations, the longer one.
    """

    graph: int
    handle: str
    operators: tuple[str, ...]
    locations: tuple[str, ...]
    is_kernel: bool
    calls: float
    seconds: float
    bytes: int
    flops: int
    limit_seconds: float

    @property
    def gain_seconds(self) -> float:
        """The seconds that a run would save with this line at the device's limit."""
        return max(self.seconds - self.limit_seconds, 0.0)

    @property
    def bytes_per_s(self) -> float:
        """The achieved bandwidth."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_s(self) -> float:
        """The achieved operations per second."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """The result of `profile`. It prints as a table.

    `lines` have the largest `gain_seconds` first. `seconds` is the median time of a run without a profiler, `graphs`
    are the names of the compiled graphs that ran, `limits` the bytes and operations per second of each device.
    """

    lines: tuple[LineProfile, ...]
    seconds: float
    graphs: tuple[str, ...]
    limits: Mapping[str, tuple[float, Mapping[str, float]]]

    @property
    def other_seconds(self) -> float:
        """The time outside of these lines: allocations, Python, torch.compile's guards."""
        return max(self.seconds - sum([line.seconds for line in self.lines]), 0.0)

    def times(self, graph: int = 0) -> dict[str, LineTime]:
        """Returns the times of the lines of one graph by handle, for its report (`CompileRecord.write_report`)."""
        return {
            line.handle: LineTime(line.seconds, line.limit_seconds, line.bytes, line.flops)
            for line in self.lines if line.graph == graph
        }  # fmt: skip

    def to_json(self) -> str:
        """Returns the fields as JSON, with the rates and gains of lines."""
        rows = [
            {
                **asdict(line), "gain_seconds": line.gain_seconds, "bytes_per_s": line.bytes_per_s,
                "flops_per_s": line.flops_per_s,
            }
            for line in self.lines
        ]  # fmt: skip
        content = {"seconds": self.seconds, "other_seconds": self.other_seconds, "graphs": self.graphs}
        return json.dumps({**content, "limits": self.limits, "lines": rows}, indent=1)

    def __str__(self) -> str:
        return "\n".join(_table(self))


def _table(profile: Profile) -> Iterator[str]:
    yield f"{profile.seconds * 1e6:,.1f} us a run; outside of these lines {profile.other_seconds * 1e6:,.1f} us"
    for device, (bandwidth, dtypes) in profile.limits.items():
        rates = ", ".join([f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in dtypes.items() if rate])
        yield f"limits of {device}: {bandwidth / 1e9:,.1f} GB/s" + (f", {rates}" if rates else "")
    yield f"{'gain us':>9} {'time us':>9} {'calls':>5} {'MB':>9} {'GB/s':>8} {'GFLOP/s':>8} {'limit':>6}  line"
    for line in profile.lines:
        at_limit = f"{100 * line.limit_seconds / line.seconds:.0f}%" if line.seconds else ""
        flops = f"{line.flops_per_s / 1e9:.1f}" if line.flops else ""
        graph = f"{profile.graphs[line.graph]}/" if len(profile.graphs) > 1 else ""
        what = "  ".join([part for part in (", ".join(line.operators), ", ".join(line.locations)) if part])
        yield (
            f"{line.gain_seconds * 1e6:9.1f} {line.seconds * 1e6:9.1f} {line.calls:5.0f} {line.bytes / 1e6:9.3f} "
            f"{line.bytes_per_s / 1e9:8.2f} {flops:>8} {at_limit:>6}  {graph}{line.handle}  {what}"
        ).rstrip()


@dataclass
class _Graph:
    """A graph that runs: its program with ranges, and the sizes of its last run."""

    program: Program
    sizes: dict[str, Number]


def profile(
    function: Any,
    inputs: object = (),
    *,
    options: Options | Mapping[str, object] | None = None,
    training: bool = False,
    repeats: int = 10,
    dynamic: bool | None = None,
) -> Profile:
    """Runs a compiled function and returns the time, bytes and operations of each line, beside its device's limits.

    The program is emitted again, by the same emitter, with a range for the profiler around each line that computes (the
    option `profile_ranges`). A line's time on a GPU is that between CUDA events, else that of the host. The function
    runs `2 * repeats + 3` times; state that it mutates changes as often. Kernels of programs from a cache or file have
    no loop IR: their bytes are those of their tensors, and their operations are unknown.

    Args:
        function: the result of `torch.compile(..., backend="fxwrap")`, a `Compiled` or loaded program, or a function or
            module, which is compiled.
        inputs: the positional arguments in a tuple or list, the keyword arguments in a mapping, or one tensor.
        options: as for `torch.compile`; by default those that the function was compiled with.
        training: whether to run the backward, with fixed random cotangents.
        repeats: the number of timed runs.
        dynamic: as for `torch.compile`, for a function that is compiled here.

    Raises ProfileError for a function of which fxwrap compiled no graph.
    """
    if repeats < 1:
        raise ProfileError(f"repeats is at least 1, not {repeats}")
    arguments = normalize_arguments(inputs)
    graphs: list[_Graph] = []
    if isinstance(function, Compiled | LoadedProgram):
        run: Callable[..., object] = _RangedProgram(function, graphs)
    elif callable(function):
        root, chosen = _root_and_options(function, options)
        backend = make_backend(
            chosen.replace(profile_ranges=True, on_graph=None, compile_cache=False), _recorder(graphs)
        )
        run = torch.compile(_with_own_code(root), backend=backend, dynamic=dynamic)
    else:
        raise ProfileError(f"an object of type {type(function).__name__} cannot be profiled; pass a compiled function")
    with _preserved_gradients(function, arguments):
        return _measure(run, arguments, graphs, training=training, repeats=repeats)


def _with_own_code(root: Any) -> Callable[..., object]:
    """Returns a function that calls another one: Dynamo's limit of recompiles counts the compiles of a code object."""

    def call(*arguments: object, **keywords: object) -> object:
        return root(*arguments, **keywords)

    call.__code__ = call.__code__.replace()
    return call


@contextmanager
def _preserved_gradients(function: object, arguments: Arguments) -> Iterator[None]:
    """Restores the gradients of parameters and inputs, to which a backward adds."""
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    tensors = [item for item in (*parameters, *arguments.named().values()) if isinstance(item, torch.Tensor)]
    leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def _root_and_options(function: Any, options: Options | Mapping[str, object] | None) -> tuple[Any, Options]:
    """Returns the function that torch.compile wrapped, and the options of its graphs."""
    target = compiled_function(function)
    if options is not None:
        chosen = options if isinstance(options, Options) else Options.from_mapping(options)
    elif target is None:
        chosen = Options()
    else:
        records = [record.compiled for record in inspect(function)]
        chosen = next((item.options for item in records if isinstance(item, Compiled)), Options())
    return (function if target is None else target.root), chosen


def _recorder(graphs: list[_Graph]) -> Callable[..., Compiled]:
    """Returns `compile_graph`, which adds each graph with ranges to a list."""

    def compile_with(graph: GraphModule, example_inputs: Sequence[object], **arguments: Any) -> Compiled:
        compiled = compile_graph(graph, example_inputs, **arguments)
        return compiled.with_emitted(_recorded(compiled.program, compiled.emitted, graphs))

    return compile_with


def _recorded(program: Program, emitted: EmittedProgram, graphs: list[_Graph]) -> EmittedProgram:
    """Returns an emitted program whose runs note their sizes."""
    graph = _Graph(program, {})
    graphs.append(graph)

    def entry(inputs: list[object]) -> object:
        if not graph.sizes:
            graph.sizes = hints_with_fallback(program, size_values(program, inputs))
        return emitted.boxed(inputs)

    return EmittedProgram(emitted.source, lambda: entry)


class _RangedProgram(StructuredProgram):
    """A compiled graph with ranges, emitted by the same emitter."""

    def __init__(self, compiled: Compiled | LoadedProgram, graphs: list[_Graph]) -> None:
        emitter = effective_emitter(compiled.options) if isinstance(compiled, Compiled) else compiled.emitter
        has_ranges = bool(ranged_lines(compiled.program))
        self._program = compiled.program if has_ranges else insert_profile_ranges(compiled.program)
        self._convention = compiled.convention
        self._emitted = _recorded(self._program, emit(self._program, emitter), graphs)

    @property
    def program(self) -> Program:
        return self._program

    @property
    def convention(self) -> CallingConvention:
        return self._convention

    @property
    def flat(self) -> Callable[..., Any]:
        return self._emitted.flat

    def _call_as_graph(self, inputs: Sequence[object]) -> Any:
        raise ProfileError("a graph cannot be profiled inside a transform of torch.func")

    def _repr_details(self) -> str:
        return "with ranges"


def _measure(
    run: Callable[..., object], arguments: Arguments, graphs: list[_Graph], *, training: bool, repeats: int
) -> Profile:
    config = RunConfig(0, training)
    config.run(run, arguments)  # compiles
    if not graphs:
        raise ProfileError("fxwrap compiled no graph of it; TORCH_LOGS=graph_breaks shows why")
    named = [ranged_lines(graph.program) for graph in graphs]
    names = list(dict.fromkeys([name for lines in named for name in lines]))
    total, seconds = range_seconds(lambda: config.run(run, arguments), names, repeats)
    devices: dict[str, DeviceLimits] = {}
    rows: list[LineProfile] = []
    for number, (graph, lines) in enumerate(zip(graphs, named, strict=True)):
        for name, line in lines.items():
            limits = devices.setdefault(str(device := _device(line)), device_limits(device))
            sizes = graph.sizes or hints_with_fallback(graph.program)
            rows.append(_line_profile(number, name, line, seconds[name], line_work(line, graph.program, sizes), limits))
    rows.sort(key=lambda row: -row.gain_seconds)
    reached = {name: (limits.bytes_per_s, limits.measured_flops) for name, limits in devices.items()}
    return Profile(tuple(rows), total, tuple([graph.program.name for graph in graphs]), reached)


def _line_profile(
    graph: int, name: str, line: LineBase, seconds: RangeSeconds, work: Work, limits: DeviceLimits
) -> LineProfile:
    limit = work.bytes / limits.bytes_per_s
    rate = limits.flops_per_s(work.dtype) if work.flops else 0.0
    if rate:
        limit = max(limit, work.flops / rate)
    calls = seconds.calls
    scaled = replace(work, bytes=round(work.bytes * calls), flops=round(work.flops * calls))
    origin = line.origin
    return LineProfile(
        graph=graph, handle=name.partition("  ")[0], operators=() if origin is None else origin.operators,
        locations=() if origin is None else origin.locations, is_kernel=isinstance(line, Launch), calls=calls,
        seconds=seconds.device or seconds.host, bytes=scaled.bytes, flops=scaled.flops, limit_seconds=limit * calls,
    )  # fmt: skip


def _device(line: LineBase) -> torch.device:
    """Returns the device that runs a line, the CPU if it has no tensors; the host may have some of its operands."""
    values = (*reads(line), *writes(line), *defined(line))
    devices = [value.type.device for value in values if isinstance(value.type, TensorType)]
    return next(filter(queues_work, devices), next(iter(devices), torch.device("cpu")))

"""The options of a compile: one frozen value, which every step reads."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from os import PathLike, fspath
from typing import Any, Generic, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from fxwrap.devices import CPU, DEVICE_SPECS, FX, DeviceSpec, check_languages, registered_specs
from fxwrap.errors import OptionError
from fxwrap.options.names import check_overload, overload_names, overload_or_kernel_names
from fxwrap.options.symbols import check_symbol_hints, check_symbol_ranges
from fxwrap.options.user_pass import Pass, normalize_passes

Emitter: TypeAlias = Literal["python", "cpp", "fx", "interpreter"]
EMITTERS: tuple[Emitter, ...] = get_args(Emitter)
"""The emitters whose output can run."""

Planner: TypeAlias = Literal["auto", "greedy_by_size", "greedy_by_duration", "squeaky_wheel", "best_fit", "search"]
PLANNERS: tuple[Planner, ...] = get_args(Planner)
"""The algorithms of offset assignment in memory pools."""

MatmulKernels: TypeAlias = Literal["auto", "library", "generated"]

FIRST_CALL: Literal["first_call"] = "first_call"
"""The value of the option `autotune` that times kernels at a program's first call."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True, "dependent_launch": True},
    "max-autotune": {"autotune": True, "cuda_graphs": True, "dependent_launch": True},
    "max-autotune-no-cudagraphs": {"autotune": True},
}
"""The options of each `mode` of torch.compile."""


@dataclass(frozen=True)
class Options:
    """The options of a compile. Unknown names and invalid values raise OptionError.

    Fields:
        emitter: the emitter whose output runs.
        check_inputs: whether direct calls check dtype, device, sizes and strides of every input. Under torch.compile
            Dynamo's guards check them.
        verify: whether programs are verified after the user's passes and at the end, not after lowering alone.
        decompositions: operator overload -> function; None means fxwrap's own table.
        preserve_ops: overloads ("aten.gelu.default") that stay calls: never decomposed, never fused.
        partitioner: partitions the joint graph of training; None means torch's min-cut partitioner.
        lowerings: overload name -> lowering function; they have priority over fxwrap's lowering rules.
        passes: the user's passes, by point: `Pass` objects, names of registered passes, or functions (with a warning,
            since caches cannot tell functions apart), in a list or in lists by pass point. Always a tuple of `Pass`.
        symbol_ranges: symbol name -> (lowest, highest), both inclusive; narrows the range in the graph.
        symbol_hints: symbol name -> a typical value, instead of the traced value and torch's `hint_override`. Kernels
            are configured and memory is planned for it. A hint outside the symbol's range is clamped; one is negative
            only if `symbol_ranges` has negative numbers. An integer symbol without a hint counts as 8192, or less in
            memory planning.
        on_graph: under torch.compile, receives each emitted FX graph and its `GraphInfo`; its result runs.
        fx_form: the form of FX graphs: "in_place", in which kernels write memory that the graph allocates, or
            "functional", in which they return new tensors, inputs are written at the end, and memory is not planned
            before `fxwrap.fx.in_place`.
        fuse: whether to generate fused kernels; without, every operator is a call.
        freeze: whether parameters, buffers and constants are taken to stay as they are: inference on a CPU converts
            weights to the library's layout once (prepacking), beside the weights themselves, and folds batch norms into
            convolutions. A write that torch's version counters show converts a weight again; one through `.data` is not
            seen.
        layout: "auto" makes tensors around convolutions channels-last where a cost model expects a gain, and converts
            inputs; "preserve" does not change layouts.
        output_strides: "eager" keeps the strides of eager outputs, by copies if necessary; "any" allows the fastest
            strides, as TorchInductor does: padded rows, channels-last.
        cpu_kernels: the language of kernels for the CPU; "triton" runs in Triton's interpreter, slowly.
        fallback: when a kernel cannot be generated or compiled, "warn" calls its operators and warns once; "error"
            raises.
        runtime_asserts: whether the program checks the conditions that the graph asserts (`torch._check`,
            `torch._assert_async`, those of torch.export). Without, a violated condition may cause an out-of-bounds
            read.
        cuda_graphs: whether parts of the program are captured as CUDA graphs: at the second call with the same sizes,
            and replayed from then on. Does not change programs for the CPU.
        cuda_graph_limit: the number of captured CUDA graphs for each part of a program, for different sizes or while
            earlier results are in use; the least recently used one is freed.
        cuda_graph_exclude: overloads ("aten.mm.default") and kernels that are never captured.
        autotune: whether to time several configurations of each Triton kernel on its GPU, and kernels of matmuls with
            few rows beside the library's calls on GPUs and CPUs; the cache folder keeps the choices. True times them at
            compile time, for the traced sizes or hints; "first_call" at the first call, for its sizes, unbacked ones
            included.
        matmul_kernels: which matmuls are generated kernels, that fuse with the operators around them: "auto" those for
            which the device's kernels are known to be faster (`DeviceSpec.matmuls.generated_rows`); "library" none;
            "generated" all that a printer can schedule.
        combo_kernels: whether small, similar, independent kernel launches become one launch, on devices with
            `DeviceSpec.combo_kernel_bytes` (GPUs).
        dependent_launch: whether a generated kernel may start, and read weights, before the kernel launched before it
            has ended (programmatic dependent launch), on GPUs of compute capability 9.0 or more. Modes with CUDA graphs
            turn it on. Emitted FX graphs launch one kernel after the other.
        bucket_collectives: whether small collectives of one kind that can run together become one, on devices with
            `DeviceSpec.collectives.bytes_per_s`.
        collective_speeds: the latency of collectives in seconds, and their bytes per second, by the name of a process
            group; buckets have at most ten times their product. By default those that the group's ranks measure when
            they first run a program, and until then those of the device.
        overlap_collectives: whether collectives start earlier, and their results are awaited later, so that other lines
            run meanwhile.
        overlap_memory_slack: the fraction by which overlap may raise the peak memory (0.02 for 2%).
        reorder_for_peak_memory: whether some lines run earlier where that lowers the peak memory.
        memory_planning: how allocations share memory. "none"; "reuse": later allocations reuse freed memory; or pools:
            "auto" (the best of the fast algorithms, and a search for small programs with wasted memory), or one
            algorithm: see `assign_offsets`. "default" is "auto" for emitted C++ on devices with
            `DeviceSpec.prefers_memory_pools` (GPUs), without `cuda_graphs`, in programs that own none of their inputs,
            as a backward does; else "none".
        memory_slack: the fraction by which the peak with pools may exceed the peak without (0.02 for 2%), for fewer
            allocations.
        check_memory: runs the program in the interpreter and checks its memory: allocations and freed memory are filled
            with NaN or a pattern, and MemoryCheckError names a line that uses memory twice.
        profile_ranges: whether each line that computes is in a range for profilers (torch.profiler, and NVTX under
            `torch.autograd.profiler.emit_nvtx`) with its handle, operators and source lines; see `fxwrap.profile`.
        debug: "bisect" compares each call with the graph, operator by operator and in float64, and raises
            DivergenceError with the first wrong line; see `fxwrap.bisect`. Results are not cached.
        check_values: observes the tensors that each line computes: "nan" raises NonFiniteError for the first line with
            NaN, "inf" also for infinities, with its line in the model's source; "stats" collects minimum, maximum,
            mean, NaN and infinities of each line; see `Compiled.values`. CUDA graphs are not captured.
        dump: a folder into which each graph writes its FX graph, the program after each step, kernels, emitted text,
            plan, provenance, events and a report; see `fxwrap.compiles`. The environment variable FXWRAP_DUMP is its
            default. It changes neither results nor cache keys; graphs are compiled, not loaded from a cache.
        compile_cache: whether results are loaded from and stored in the cache folder. The environment variable
            FXWRAP_COMPILE_CACHE=0 turns it off for a process.
        kernels: the form of generated kernels: "text" in the device's kernel language, or "subgraph": regions, the ATen
            operators that each kernel computes, which a compiler of the caller's may compile.
        choose_kernel_form: chooses the form of each kernel: a function that takes its `regions.Region` and returns
            "text", "subgraph" or "call", which calls its operators one by one. Kernels without a region are text.
        devices: the capabilities of each device type; by default the devices registered at compile time. Operators on
            other devices are called.
    """

    emitter: Emitter = "python"
    check_inputs: bool = True
    verify: bool = True
    decompositions: Mapping[Any, Callable[..., object]] | None = None
    preserve_ops: frozenset[str] = frozenset()
    partitioner: Callable[..., object] | None = None
    lowerings: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    symbol_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    symbol_hints: Mapping[str, int] = field(default_factory=dict)
    on_graph: Callable[..., Any] | None = None
    fx_form: Literal["in_place", "functional"] = "in_place"
    fuse: bool = True
    freeze: bool = False
    layout: Literal["auto", "preserve"] = "auto"
    output_strides: Literal["eager", "any"] = "eager"
    cpu_kernels: Literal["cpp", "triton"] = "cpp"
    fallback: Literal["warn", "error"] = "warn"
    runtime_asserts: bool = True
    cuda_graphs: bool = False
    cuda_graph_limit: int = 8
    cuda_graph_exclude: frozenset[str] = frozenset()
    autotune: bool | Literal["first_call"] = False
    matmul_kernels: MatmulKernels = "auto"
    combo_kernels: bool = True
    dependent_launch: bool = False
    bucket_collectives: bool = True
    collective_speeds: Mapping[str, tuple[float, float]] | None = None
    overlap_collectives: bool = True
    overlap_memory_slack: float = 0.0
    reorder_for_peak_memory: bool = True
    memory_planning: Literal["default", "none", "reuse"] | Planner = "default"
    memory_slack: float = 0.0
    check_memory: bool = False
    debug: Literal["bisect"] | None = None
    check_values: Literal["nan", "inf", "stats"] | None = None
    compile_cache: bool = True
    profile_ranges: bool = False
    dump: str | None = None
    kernels: Literal["text", "subgraph"] = "text"
    choose_kernel_form: Callable[..., str] | None = None
    devices: tuple[DeviceSpec, ...] | None = None

    def __post_init__(self) -> None:
        for name, convert in _CONVERSIONS.items():
            object.__setattr__(self, name, convert(getattr(self, name)))
        for name, accepts in _type_checks():
            if not accepts(getattr(self, name)):
                raise OptionError(f"option {name!r} takes {_accepted_text(name)}, not {getattr(self, name)!r}")
        for overload in self.lowerings:
            check_overload("lowerings", overload)
        check_symbol_ranges(self.symbol_ranges)
        check_symbol_hints(self.symbol_hints, self.symbol_ranges)
        for name in ("memory_slack", "overlap_memory_slack"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"option '{name}' is a number from 0 to 1, not {getattr(self, name)!r}")
        for name, speed in (self.collective_speeds or {}).items():
            _check_speed(name, speed)
        if self.debug is not None and self.on_graph is not None:
            raise OptionError("option 'debug' checks compiled graphs, which the option 'on_graph' replaces")
        if self.cuda_graph_limit < 1:
            raise OptionError(f"option 'cuda_graph_limit' is at least 1, not {self.cuda_graph_limit!r}")

    def passes_at(self, point: str) -> tuple[Pass, ...]:
        """Returns the user's passes at a pass point, in order."""
        return tuple([item for item in self.passes if item.at == point])

    @property
    def cacheable(self) -> bool:
        """Whether `text` identifies the passes: each of them has a key."""
        return all(item.key is not None for item in self.passes)

    @property
    def observes(self) -> bool:
        """Whether calls observe the values of lines, for which the compile's process is needed."""
        return self.debug is not None or self.check_values is not None

    def resolve_devices(self) -> Options:
        """Returns the options with the registered devices, if they name none themselves.

        Raises DeviceError for a device whose kernel language is not registered.
        """
        if self.devices is None:
            return dataclasses.replace(self, devices=registered_specs())
        check_languages(self.devices)
        return self

    def device_specs(self) -> dict[str, DeviceSpec]:
        """Returns the capabilities of each device type; with kernels as subgraphs, those of the language "fx"."""
        specs = self._registered_specs()
        if self.kernels == "text":
            return specs
        return {
            name: dataclasses.replace(spec, kernel_language=FX.name) if spec.kernel_language else spec
            for name, spec in specs.items()
        }

    def _registered_specs(self) -> dict[str, DeviceSpec]:
        return {spec.device_type: spec for spec in (registered_specs() if self.devices is None else self.devices)}

    def kernel_language(self, spec: DeviceSpec) -> str:
        """Returns the kernel language of a device; `cpu_kernels` replaces C++."""
        return self.cpu_kernels if spec.kernel_language == CPU.kernel_language else spec.kernel_language

    def text_language(self, device_type: str) -> str:
        """Returns the language of kernels as text on a device type."""
        return self.kernel_language(self._registered_specs()[device_type])

    def replace(self, **changes: Any) -> Options:
        """Returns a copy with some options changed. Raises OptionError for an unknown name."""
        return dataclasses.replace(self, **_check_known_options(changes))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Returns the options for torch.compile's `mode` and `options`; `options` has priority over the mode.

        Raises OptionError for an unknown mode or option.
        """
        if mode is not None and mode not in MODES:
            raise OptionError(f"unknown mode {mode!r}; known modes: {', '.join(MODES)}")
        return cls(**_check_known_options({**MODES[mode or "default"], **(options or {})}))

    def text(self) -> str:
        """Returns the options that are not at their default, as sorted `name=value` pairs: equal options, equal text.

        Functions appear as module and qualified name. `compile_cache` and `dump` are omitted: they change no results.
        """
        parts = []
        for name in sorted(type(self).__dataclass_fields__.keys() - {"compile_cache", "dump"}):
            value = getattr(self, name)
            if value != getattr(_DEFAULTS, name) and not (name == "devices" and value == DEVICE_SPECS):
                parts.append(f"{name}={_describe(value)}")
        return " ".join(parts)


def _check_speed(name: str, speed: Any) -> None:
    if len(speed) != 2 or not all(type(item) in (int, float) and item >= 0 for item in speed):
        raise OptionError(f"option 'collective_speeds' takes (seconds, bytes per second), not {speed!r} for '{name}'")


@cache
def _type_checks() -> tuple[tuple[str, Callable[[object], bool]], ...]:
    """Returns a predicate for each option, from its annotation. It does not check the elements of collections."""
    return tuple([(name, _type_check(annotation)) for name, annotation in get_type_hints(Options).items()])


def _type_check(annotation: Any) -> Callable[[object], bool]:
    choices: set[str] = set()
    classes: list[Any] = []
    for alternative in _alternatives(annotation):
        origin = get_origin(alternative) or alternative
        if origin is Literal:
            choices.update(get_args(alternative))
        elif origin is float:
            classes += [int, float]
        else:
            classes.append(origin)
    accepted = tuple(classes)

    def accepts(value: object) -> bool:
        if isinstance(value, str):
            return value in choices or str in accepted
        if isinstance(value, bool):
            return bool in accepted
        return isinstance(value, accepted)

    return accepts


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _accepted_text(name: str) -> str:
    shown = [text for alternative in _alternatives(get_type_hints(Options)[name]) for text in _shown(alternative)]
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _shown(annotation: Any) -> list[str]:
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return [repr(choice) for choice in get_args(annotation)]
    names = {
        bool: "a bool",
        int: "an integer",
        float: "a number",
        collections.abc.Callable: "a function",
        str: "a path",
    }
    return [] if origin is types.NoneType else [names.get(origin, f"a {origin.__name__.lower()}")]


def _as_devices(devices: object) -> tuple[DeviceSpec, ...] | None:
    if devices is None:
        return None
    if not isinstance(devices, tuple | list) or not all(isinstance(item, DeviceSpec) for item in devices):
        raise OptionError(f"option 'devices' takes DeviceSpecs, not {devices!r}; devices.register takes type names")
    return tuple(devices)


_CONVERSIONS: Mapping[str, Callable[[Any], object]] = {
    "preserve_ops": partial(overload_names, "preserve_ops"),
    "cuda_graph_exclude": partial(overload_or_kernel_names, "cuda_graph_exclude"),
    "devices": _as_devices,
    "dump": lambda path: fspath(path) if isinstance(path, PathLike) else path,
    "passes": normalize_passes,
}


def _check_known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    known = [item.name for item in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise OptionError(f"unknown option {name!r}{hint}; known options: {', '.join(known)}")
    return dict(options)


def _describe(value: object) -> str:
    match value:
        case Mapping():
            return "{" + ", ".join(sorted(f"{_describe(key)}: {_describe(item)}" for key, item in value.items())) + "}"
        case frozenset():
            return "{" + ", ".join(sorted(map(_describe, value))) + "}"
        case tuple():
            return "(" + ", ".join(map(_describe, value)) + ")"
        case Pass():
            return value.text()
        case DeviceSpec():
            return value.text()
        case str() | int() | float() | bool() | None:
            return str(value)
        case _:
            return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


_DEFAULTS = Options()


State = TypeVar("State")
Context = TypeVar("Context")


@dataclass(frozen=True)
class Step(Generic[State, Context]):
    """One step of a pipeline over some state (a graph, a program).

    Fields:
        name: the name in stages, errors and logs.
        description: one line of what the step does.
        run: maps the state before the step and the pipeline's context to the state after it. Returns the same state
            if the step changes nothing.
        option: the option that turns the step on, as users write it; "" for a step that always runs.
        enabled: whether the step runs with the options of a compile; by default, unless the option is False.
    """

    name: str
    description: str
    run: Callable[[State, Context], State]
    option: str = ""
    enabled: Callable[[Options], bool] | None = None

    def is_enabled(self, options: Options) -> bool:
        """Whether the step runs with these options."""
        return getattr(options, self.option, None) is not False if self.enabled is None else self.enabled(options)


def enabled_steps(steps: Iterable[Step[State, Context]], options: Options) -> Iterator[Step[State, Context]]:
    """Yields the steps that the options turn on, in order."""
    return (step for step in steps if step.is_enabled(options))

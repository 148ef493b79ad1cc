"""The options of a compile: one frozen value, passed to every step that reads it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .device_registry import check_languages, registered_specs
from .device_spec import CPU, DEVICE_SPECS, DeviceSpec
from .errors import OptionError
from .pass_spec import Pass, passes_of

EMITTERS = ("python", "cpp", "fx", "interpreter")
"""The names of the converters that can run a program."""

PLANNERS = ("auto", "greedy_by_size", "greedy_by_duration", "best_fit", "search")
"""The names of the algorithms that give memory offsets in pools."""

FIRST_CALL = "first_call"
"""The value of the option `autotune` for which kernels are timed at a program's first call."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"autotune": True, "cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"autotune": True},
}
"""What each `mode` of torch.compile means in options."""


@dataclass(frozen=True)
class Options:
    """What a caller may choose. Unknown names and values raise OptionError, with the known ones.

    Fields:
        emitter: which converter's output runs: "python", "cpp", "fx" or "interpreter".
        check_inputs: whether direct calls check dtype, device, sizes and strides of every input. Under torch.compile
            Dynamo's guards have checked them already.
        verify: whether the program is verified after each pass.
        decompositions: operator overload -> function; None means fxwrap's own table.
        keep: overloads ("aten.gelu.default") that stay calls of their own: never decomposed, never fused.
        partitioner: splits the joint graph of training; None means torch's min-cut partitioner.
        lowerings: overload name -> lowering function, before fxwrap's own.
        passes: the user's own passes: `Pass` objects, names of registered ones, or functions (with a warning, since
            caches cannot tell them apart), in a list or in lists by the point where they run: "fx_before_lowering",
            "ir_before_planning", "ir_before_emission", "fx_emitted". Always a tuple of `Pass`.
        symbol_ranges: symbol name -> (lowest, highest), both inclusive, narrower than what the graph says.
        symbol_hints: symbol name -> a typical value, in place of what the graph was traced with and of torch's
            `hint_override`: kernels are cut and timed, and memory is planned, for it. One outside the symbol's range
            counts as its nearest end. A whole number without any hint is taken to be 8192, less where memory is.
        on_graph: under torch.compile, receives each emitted FX graph and what is known about it; what it returns runs.
        fuse: generate fused kernels; without, every operator is a call.
        layout: "auto" has convolutions read and give channels-last tensors where that is estimated to pay, and what is
            computed from them follow; inputs are converted. "keep" leaves layouts as they are.
        output_strides: "eager" has outputs lie in memory as eager's do, if need be by a copy; with "any" they may have
            the strides that are quickest, as TorchInductor gives them: rows apart, channels last.
        cpu_kernels: the language of kernels for the CPU: "cpp", or "triton" (in Triton's interpreter, slowly).
        fallback: what happens where a kernel cannot be generated or compiled: "warn" calls the operators instead and
            warns once, "error" raises.
        runtime_asserts: whether the conditions that a graph asserts (`torch._check`, `torch._assert_async`, those of
            torch.export) are checked when it runs. Without, they are trusted: a program may read outside of a tensor
            when one does not hold.
        cuda_graphs: cut out of a program what a GPU can record (CUDA graphs): it is recorded at the second call for the
            same sizes and replayed from then on. Programs for the CPU alone stay as they are.
        cuda_graph_limit: how many recordings of each part of a program are kept, for other sizes or since results of
            the others are in use; the one that was used the longest ago makes room.
        keep_out_of_graphs: overloads ("aten.mm.default") and kernels that are never recorded.
        autotune: time several ways to cut each Triton kernel on its GPU; the cache folder keeps the choices. True times
            them when a graph is compiled, for the sizes or hints that it was traced with; "first_call" at the first
            call, for that call's sizes, those that are computed in it included.
        join_launches: whether launches of small kernels that are alike, and do not need each other's results, become
            one, on devices where `DeviceSpec.joined_launches` says what is small (GPUs).
        reorder_for_peak_memory: whether lines run in another order where that holds less memory at the worst moment.
        memory_planning: how allocations share memory: "none"; "reuse", freed memory serves a later allocation; or in
            pools: "auto" (the best of the quick algorithms, and a search where they waste memory and the program is
            small), or one algorithm by name: see `assign_offsets`. "default" is "auto" where emitted C++ runs on a
            device of which `DeviceSpec.pools` says so (GPUs) without `cuda_graphs`, in programs that give back none of
            their inputs, as a backward does; else "none".
        memory_slack: by what part of the peak without pools the one with pools may exceed it (0.02 for 2%), for fewer
            allocations. By default it never does.
        check_memory: run the program line by line, whatever the emitter, with its memory watched: it is filled with NaN
            or a pattern when it is given and taken, and MemoryCheckError names a line where memory is in use twice.
        compile_cache: whether a graph that was compiled before, in any process, is taken from the cache folder, and
            what is compiled is kept there. The environment variable FXWRAP_COMPILE_CACHE=0 turns it off for a process.
        devices: what is known of each device type; by default what is registered when a graph is compiled. Operators on
            other devices are called.
    """

    emitter: str = "python"
    check_inputs: bool = True
    verify: bool = True
    decompositions: Mapping[Any, Callable[..., Any]] | None = None
    keep: frozenset[str] = frozenset()
    partitioner: Callable[..., Any] | None = None
    lowerings: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    symbol_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    symbol_hints: Mapping[str, int] = field(default_factory=dict)
    on_graph: Callable[..., Any] | None = None
    fuse: bool = True
    layout: str = "auto"
    output_strides: str = "eager"
    cpu_kernels: str = "cpp"
    fallback: str = "warn"
    runtime_asserts: bool = True
    cuda_graphs: bool = False
    cuda_graph_limit: int = 8
    keep_out_of_graphs: frozenset[str] = frozenset()
    autotune: bool | str = False
    join_launches: bool = True
    reorder_for_peak_memory: bool = False
    memory_planning: str = "default"
    memory_slack: float = 0.0
    check_memory: bool = False
    compile_cache: bool = True
    devices: tuple[DeviceSpec, ...] | None = None

    def __post_init__(self) -> None:
        if self.emitter not in EMITTERS:
            raise OptionError(f"there is no emitter {self.emitter!r}; the known ones are {', '.join(EMITTERS)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise OptionError(f"option {name!r} is {' or '.join(choices)}, not {getattr(self, name)!r}")
        for name, kind in _KINDS.items():
            given = getattr(self, name)
            if not isinstance(given, kind):
                raise OptionError(f"option {name!r} takes a {kind.__name__}, not {given!r}")
        for name in ("on_graph", "partitioner"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise OptionError(f"option {name!r} takes a function, not {getattr(self, name)!r}")
        if not isinstance(self.autotune, bool) and self.autotune != FIRST_CALL:
            raise OptionError(f"option 'autotune' is True, False or {FIRST_CALL!r}, not {self.autotune!r}")
        for name, hint in self.symbol_hints.items():
            if type(hint) is not int:
                raise OptionError(f"option 'symbol_hints' takes whole numbers, not {hint!r} for '{name}'")
        slack: Any = self.memory_slack
        if isinstance(slack, bool) or not isinstance(slack, int | float) or not 0 <= slack <= 1:
            raise OptionError(f"option 'memory_slack' is a number from 0 to 1, not {slack!r}")
        limit: Any = self.cuda_graph_limit
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise OptionError(f"option 'cuda_graph_limit' is a whole number from 1 on, not {limit!r}")
        object.__setattr__(self, "keep", frozenset(self.keep))
        object.__setattr__(self, "keep_out_of_graphs", frozenset(self.keep_out_of_graphs))
        object.__setattr__(self, "devices", _specs(self.devices))
        object.__setattr__(self, "passes", passes_of(self.passes))

    def passes_at(self, point: str) -> tuple[Pass, ...]:
        """Returns the passes that run at a point, in order."""
        return tuple([item for item in self.passes if item.at == point])

    @property
    def cacheable(self) -> bool:
        """Whether `text` says all that a cache outside must know of the passes: each of them has a key."""
        return all(item.key is not None for item in self.passes)

    def with_devices(self) -> Options:
        """Returns the options with the devices that are registered now, if they name none themselves.

        Raises DeviceError for a device whose kernel language nobody has registered.
        """
        if self.devices is None:
            return dataclasses.replace(self, devices=registered_specs())
        check_languages(self.devices)
        return self

    def device_specs(self) -> dict[str, DeviceSpec]:
        """Returns what is known of each device type, by type."""
        specs = registered_specs() if self.devices is None else self.devices
        return {spec.device_type: spec for spec in specs}

    def kernel_language(self, spec: DeviceSpec) -> str:
        """Returns the language of kernels for a device: its own, but for C++, which `cpu_kernels` may replace."""
        return self.cpu_kernels if spec.kernel_language == CPU.kernel_language else spec.kernel_language

    def replace(self, **changes: Any) -> Options:
        """Returns a copy with some options changed. Raises OptionError for a name that is no option."""
        return dataclasses.replace(self, **_known(changes))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Returns the options for torch.compile's `mode` and `options`; what `options` says wins over the mode.

        Raises OptionError for an unknown mode or option.
        """
        if mode is not None and mode not in MODES:
            raise OptionError(f"there is no mode {mode!r}; the known ones are {', '.join(MODES)}")
        return cls(**_known({**MODES[mode or "default"], **(options or {})}))

    def text(self) -> str:
        """Returns the options that are not at their default, as sorted `name=value` pairs: equal options, equal text.

        Functions stand by module and qualified name. `compile_cache` is left out: what comes out is the same.
        """
        default = type(self).__dataclass_fields__
        parts = []
        for name in sorted(default.keys() - {"compile_cache"}):
            given = getattr(self, name)
            if given != getattr(_DEFAULTS, name) and not (name == "devices" and given == DEVICE_SPECS):
                parts.append(f"{name}={_describe(given)}")
        return " ".join(parts)


_KINDS: Mapping[str, type] = {
    "check_inputs": bool,
    "verify": bool,
    "runtime_asserts": bool,
    "lowerings": Mapping,
    "symbol_ranges": Mapping,
    "symbol_hints": Mapping,
    "fuse": bool,
    "cuda_graphs": bool,
    "join_launches": bool,
    "reorder_for_peak_memory": bool,
    "check_memory": bool,
    "compile_cache": bool,
}

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "layout": ("auto", "keep"),
    "output_strides": ("eager", "any"),
    "cpu_kernels": ("cpp", "triton"),
    "fallback": ("warn", "error"),
    "memory_planning": ("default", "none", "reuse", *PLANNERS),
}


def _specs(given: Any) -> tuple[DeviceSpec, ...] | None:
    """Returns the option `devices` as a tuple."""
    items = given if isinstance(given, tuple | list) else None
    if given is not None and (items is None or not all(isinstance(item, DeviceSpec) for item in items)):
        raise OptionError(f"option 'devices' takes DeviceSpecs, not {given!r}; names of types are for devices.register")
    return None if items is None else tuple(items)


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    known = [item.name for item in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"there is no option {name!r}{hint} The known ones are {', '.join(known)}")
    return dict(options)


def _describe(given: Any) -> str:
    if isinstance(given, Mapping):
        return "{" + ", ".join(sorted(f"{_describe(key)}: {_describe(item)}" for key, item in given.items())) + "}"
    if isinstance(given, frozenset):
        return "{" + ", ".join(sorted(map(_describe, given))) + "}"
    if isinstance(given, tuple):
        return "(" + ", ".join(map(_describe, given)) + ")"
    if isinstance(given, Pass):
        return given.text()
    if isinstance(given, DeviceSpec):
        return given.device_type if given in DEVICE_SPECS else given.text()
    if isinstance(given, str | int | float | bool | None):
        return str(given)
    return f"{getattr(given, '__module__', '?')}.{getattr(given, '__qualname__', type(given).__qualname__)}"


_DEFAULTS = Options()

"""The registry of kernel languages and device types, with the functions that print, compile and run for them.

Each registration replaces one immutable table by another. A compile reads its devices once; printers, compilers and
launchers are found by the kernel's language, also for loaded programs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from fxwrap.devices.spec import DeviceSpec, KernelLanguage
from fxwrap.errors import DeviceError, FxwrapError

Launcher: TypeAlias = Callable[..., object]
"""`launcher(grid, *tensors, *outs, *scalars)`; without the grid in a gridless language."""

AllocateFunction: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""`allocate(sizes, strides, dtype)` returns an uninitialised tensor."""

Printer: TypeAlias = Callable[[Any], Sequence[Callable[[], Any]]]
"""Maps a `printers.KernelRequest` to functions that print it, one per configuration, the default first."""

LineHandlers: TypeAlias = Mapping[str, Callable[[Any, Any], None]]
"""`handler(converter, line)` of an extension line, by emitter."""


@dataclass(frozen=True, eq=False)
class KernelRuntime:
    """Functions that compile and load the kernels of a language.

    Fields:
        load: `load(source, signature, options)` returns the launcher of a kernel. Raises FxwrapError on failure.
        precompile: `precompile(kernels)` may compile several kernels together, for `load` to find.
        compile: `compile(uses)` compiles kernels for their devices and returns the error or None of each; operators
            replace a kernel that fails.
        warm_up: `warm_up(device_type)` runs before the lowering of a graph that may have many kernels on such devices.
        compile_ahead: `compile_ahead(use)` may start the compilation of a kernel that `compile` will probably get, and
            returns at once.
    """

    load: Callable[[str, tuple[str, ...], tuple[tuple[str, Any], ...]], Launcher]
    precompile: Callable[[Sequence[Any]], None] | None = None
    compile: Callable[[Sequence[Any]], Sequence[FxwrapError | None]] | None = None
    warm_up: Callable[[str], None] | None = None
    compile_ahead: Callable[[Any], None] | None = None


@dataclass(frozen=True, eq=False)
class KernelCombiner:
    """Horizontal fusion of a language's kernels into combo kernels, from their loop IR.

    Kernels are `printers.PrintedKernel`s, whose `scheduled` is the loop IR that the language's printer stored there.

    Fields:
        group_key: `group_key(kernel)` returns a key that combinable kernels share; None for others.
        combine: `combine(kernels, positions, name)` returns one kernel that does the work of independent kernels, which
            share a key or fit together. `positions` has, for each kernel, the position of each of its parameters among
            those of the combo kernel: its inputs, outputs and scalars, in this order. `name` describes the kernel.
        leaves_idle: `leaves_idle(kernel, spec)` returns whether a large kernel has too few programs to occupy a device,
            each of which runs long beside the selection of its kernel.
        fits_together: `fits_together(kernels, spec)` returns whether a device runs all programs of small kernels at
            once, and one launch can run them, although they do not share a key.
    """

    group_key: Callable[[Any], Hashable]
    combine: Callable[[Sequence[Any], Sequence[Sequence[int]], str], Any]
    leaves_idle: Callable[[Any, DeviceSpec], bool] = lambda kernel, spec: False
    fits_together: Callable[[Sequence[Any], DeviceSpec], bool] = lambda kernels, spec: False


@dataclass(frozen=True, eq=False)
class DeviceRuntime:
    """Functions that run programs on a device type; torch's public functions replace missing ones where it has them.

    Fields:
        kernels: compiles and loads kernels of the device's language.
        allocator: `allocator(device)` returns the fastest `allocate(sizes, strides, dtype)`, equivalent to
            `torch.empty_strided`, which emitted C++ uses.
        guard: `guard(device)` is a context manager that makes a device current.
        current_stream: `current_stream(device)` returns the driver's handle of the current stream.
        stream: `stream(device, number)` is a context manager that makes a stream and its device current.
        stream_id: `stream_id(device, number)` returns torch's id of a stream, for emitted C++.
        record_event: `record_event(device, stream, event)` returns an event recorded on a stream, by its number (0 is
            the current one). `event` is the number of the model's event, or 0.
        wait_event: `wait_event(event, device, stream)` makes a stream wait for a recorded event.
        record_stream: `record_stream(tensor, device, stream)` delays the reuse of a freed tensor's memory until the
            present work of a stream is done.
        random_state: `random_state(device)` returns the generator's state, a uint8 tensor on the CPU.
        set_random_state: `set_random_state(device, state)` sets it.
        graph_capturer: `graph_capturer(device)` returns a `runtime.graph_capture.replay.GraphCapturer`.
        read_limits: `read_limits(device)` returns fields of `DeviceSpec` that differ between devices of the type, by
            name, as a device of this machine has them; none where the machine has no such device.
    """

    kernels: KernelRuntime | None = None
    allocator: Callable[[torch.device], AllocateFunction] | None = None
    guard: Callable[[torch.device], AbstractContextManager[object]] | None = None
    current_stream: Callable[[torch.device], int] | None = None
    stream: Callable[[torch.device, int], AbstractContextManager[object]] | None = None
    stream_id: Callable[[torch.device, int], int] | None = None
    record_event: Callable[[torch.device, int, int], object] | None = None
    wait_event: Callable[[object, torch.device, int], None] | None = None
    record_stream: Callable[[torch.Tensor, torch.device, int], None] | None = None
    random_state: Callable[[torch.device], torch.Tensor] | None = None
    set_random_state: Callable[[torch.device, torch.Tensor], None] | None = None
    graph_capturer: Callable[[torch.device], Any] | None = None
    read_limits: Callable[[torch.device], Mapping[str, int]] | None = None


@dataclass(frozen=True, eq=False)
class RegisteredLanguage:
    """A registered kernel language: traits, runtime, printer of generated kernels and combiner, where it has them."""

    traits: KernelLanguage
    kernels: KernelRuntime
    printer: Printer | None = None
    combiner: KernelCombiner | None = None


@dataclass(frozen=True, eq=False)
class RegisteredDevice:
    """A registered device type: spec, runtime, and the handlers of its extension lines by class and emitter."""

    spec: DeviceSpec
    runtime: DeviceRuntime
    lines: Mapping[type, LineHandlers] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _RegistryTables:
    languages: Mapping[str, RegisteredLanguage] = field(default_factory=dict)
    devices: Mapping[str, RegisteredDevice] = field(default_factory=dict)


class _Registry:
    """Holds the tables. They are replaced, never changed, so readers need no lock."""

    def __init__(self) -> None:
        self.tables = _RegistryTables()
        self.lock = threading.RLock()


_REGISTRY = _Registry()


# --- registration ---------------------------------------------------------------------------------------------------


def register_language(traits: KernelLanguage, kernels: KernelRuntime, printer: Printer | None = None) -> None:
    """Registers a kernel language that belongs to no device. Raises FxwrapError for a name that is registered."""
    with _REGISTRY.lock:
        tables = _REGISTRY.tables
        if traits.name in tables.languages:
            raise FxwrapError(f"the kernel language '{traits.name}' is registered; give yours another name")
        languages = {**tables.languages, traits.name: RegisteredLanguage(traits, kernels, printer)}
        _REGISTRY.tables = replace(tables, languages=languages)


def register(
    spec: DeviceSpec,
    *,
    printer: Printer | None = None,
    combiner: KernelCombiner | None = None,
    runtime: DeviceRuntime | None = None,
    language: KernelLanguage | None = None,
    lines: Mapping[type, LineHandlers] | None = None,
) -> None:
    """Registers a device type for all later compiles.

    Args:
        spec: its capabilities.
        printer: prints kernels of the loop IR in `spec.kernel_language`. Without one, that language must be registered
            or "".
        combiner: combines printed kernels into combo kernels.
        runtime: runs programs on it. Required, with `kernels`, for a printer.
        language: traits of the printed language; by default those of one with launch grids.
        lines: extension lines with their handlers by emitter ("python", "cpp", "fx", "interpreter"). An emitter without
            a handler runs the core lines that the line expands to.

    Raises DeviceError for a registered type or language, an unknown language, and a printer without `kernels`.
    """
    with _REGISTRY.lock:
        if spec.device_type in _REGISTRY.tables.devices:
            remedy = "To replace it temporarily, use `with fxwrap.devices.scoped_registration(...)`"
            raise DeviceError(spec.device_type, "it is registered already", remedy)
        _add(RegisteredDevice(spec, runtime or DeviceRuntime(), dict(lines or {})), printer, combiner, language)


@contextmanager
def scoped_registration(
    spec: DeviceSpec,
    *,
    printer: Printer | None = None,
    combiner: KernelCombiner | None = None,
    runtime: DeviceRuntime | None = None,
    language: KernelLanguage | None = None,
    lines: Mapping[type, LineHandlers] | None = None,
) -> Iterator[None]:
    """Registers a device type, or replaces one, until the end of a `with` block: for tests and experiments.

    Takes and raises the same as `register`. All threads see it. Compiled programs keep the launchers that they loaded.
    """
    with _REGISTRY.lock:
        before = _REGISTRY.tables
        device = RegisteredDevice(spec, runtime or DeviceRuntime(), dict(lines or {}))
        _add(device, printer, combiner, language, replaces=True)
    try:
        yield
    finally:
        with _REGISTRY.lock:
            _REGISTRY.tables = before


def _add(
    device: RegisteredDevice,
    printer: Printer | None,
    combiner: KernelCombiner | None,
    language: KernelLanguage | None,
    replaces: bool = False,
) -> None:
    tables, spec = _REGISTRY.tables, device.spec
    name, languages = spec.kernel_language, dict(tables.languages)
    if language is not None and language.name != name:
        reason = f"its spec has the kernel language '{name}', and `language` is '{language.name}'"
        raise DeviceError(spec.device_type, reason, "Use the same name in both")
    if printer is not None:
        if name in languages and not replaces:
            reason = f"the kernel language '{name}' is registered already"
            raise DeviceError(spec.device_type, reason, "Omit `printer` to share it, or use another name")
        registered = _make_language(device, printer, language)
        languages[name] = replace(registered, combiner=combiner)
    elif name and name not in languages:
        raise unknown_language_error(spec)
    _REGISTRY.tables = _RegistryTables(languages, {**tables.devices, spec.device_type: device})


def _make_language(device: RegisteredDevice, printer: Printer, traits: KernelLanguage | None) -> RegisteredLanguage:
    spec, kernels = device.spec, device.runtime.kernels
    if not spec.kernel_language:
        reason = "it has a printer, but its spec has no kernel language"
        raise DeviceError(spec.device_type, reason, "Set DeviceSpec(kernel_language=...)")
    if kernels is None:
        reason = f"it has a printer, but no launcher for kernels in '{spec.kernel_language}'"
        remedy = "Pass `runtime=DeviceRuntime(kernels=KernelRuntime(load=...))` with the printer"
        raise DeviceError(spec.device_type, reason, remedy)
    return RegisteredLanguage(traits or KernelLanguage(spec.kernel_language), kernels, printer)


def unknown_language_error(spec: DeviceSpec) -> DeviceError:
    """Returns the error for a device whose kernel language is not registered."""
    known = ", ".join([f"'{name}'" for name, item in _REGISTRY.tables.languages.items() if item.printer is not None])
    remedy = (
        f'Use a registered one ({known}), or "" for no kernels, or register its printer and launcher: '
        "fxwrap.devices.register(spec, printer=..., runtime=...)"
    )
    return DeviceError(spec.device_type, f"there is no kernel language '{spec.kernel_language}'", remedy)


# --- queries --------------------------------------------------------------------------------------------------------


def registered_specs() -> tuple[DeviceSpec, ...]:
    """Returns the specs of all registered device types."""
    return tuple([device.spec for device in _REGISTRY.tables.devices.values()])


def registered_spec(device_type: str) -> DeviceSpec | None:
    """Returns the spec of a device type; None for an unregistered one."""
    device = _REGISTRY.tables.devices.get(device_type)
    return None if device is None else device.spec


def check_languages(specs: Sequence[DeviceSpec]) -> None:
    """Raises DeviceError for a spec whose kernel language has no printer."""
    for spec in specs:
        language = find_language(spec.kernel_language)
        if spec.kernel_language and (language is None or language.printer is None):
            raise unknown_language_error(spec)


def find_language(name: str) -> RegisteredLanguage | None:
    """Returns a registered kernel language; None for an unregistered one."""
    return _REGISTRY.tables.languages.get(name)


def language_traits(name: str) -> KernelLanguage:
    """Returns the traits of a kernel language; the most conservative ones for an unregistered language."""
    language = find_language(name)
    return KernelLanguage(name, raw_pointer_arguments=False) if language is None else language.traits


def get_language(name: str) -> RegisteredLanguage:
    """Returns a registered kernel language. Raises FxwrapError, with the known ones, for another."""
    language = find_language(name)
    if language is None:
        *others, last = [f"'{known}'" for known in _REGISTRY.tables.languages]
        raise FxwrapError(
            f"there is no launcher for kernels in '{name}', only for {', '.join(others)} and {last}. "
            "Import the package that registers their device (fxwrap.devices.register)"
        )
    return language


def device_runtime(device_type: str) -> DeviceRuntime:
    """Returns the runtime of a device type; one without functions for an unregistered type."""
    device = _REGISTRY.tables.devices.get(device_type)
    return DeviceRuntime() if device is None else device.runtime


def missing_function_error(device_type: str, name: str) -> DeviceError:
    """Returns the error for a function that neither the device's runtime nor torch has."""
    reason = f"its runtime has no function '{name}', which this program needs"
    return DeviceError(device_type, reason, f"Register the device with runtime=DeviceRuntime({name}=...)")


def registered_lines() -> tuple[type, ...]:
    """Returns the extension line classes of all registered devices."""
    return tuple(dict.fromkeys([line for device in _REGISTRY.tables.devices.values() for line in device.lines]))


def line_handlers(emitter: str) -> dict[Any, Callable[[Any, Any], None]]:
    """Returns an emitter's handlers of extension lines, by class."""
    lines = [item for device in _REGISTRY.tables.devices.values() for item in device.lines.items()]
    return {line: handlers[emitter] for line, handlers in lines if emitter in handlers}

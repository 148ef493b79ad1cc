"""The registry of kernel languages and device types: what is told of them, and the functions that do their work.

One immutable table is replaced by another whenever something is registered. A compile takes its devices from there
once; what prints, compiles and launches a kernel is found by its language, also in a program that was loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from fxwrap.device_spec import DeviceSpec, KernelLanguage
from fxwrap.errors import DeviceError, FxwrapError

Launcher: TypeAlias = Callable[..., Any]
"""`launcher(grid, *tensors, *outs, *numbers)`; without the grid in a language whose kernels are called once."""

Allocate: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""`allocate(sizes, strides, dtype)`: a tensor that nobody has written."""

Printer: TypeAlias = Callable[[Any], Sequence[Callable[[], Any]]]
"""Takes a `printers.KernelRequest`; gives what prints it in each way worth a try, the best guess first, or nothing."""

Handlers: TypeAlias = Mapping[str, Callable[[Any, Any], None]]
"""What writes or runs a vendor's line, `handler(converter, line)`, by emitter."""


@dataclass(frozen=True, eq=False)
class KernelRuntime:
    """How the kernels of a language are run.

    Fields:
        load: `load(source, signature, options)` gives the launcher of a kernel. Raises FxwrapError where it cannot.
        prepare: `prepare(kernels)` compiles several together, so that `load` finds them; it need not.
        compile: `compile(uses)` compiles kernels for the devices they will run on, and gives for each the error that it
            failed with, or None: the operators of one that fails are called instead.
        begin: `begin(device_type)` is called when the compile of a graph begins that may have many kernels of the
            language on such devices, before it is lowered.
    """

    load: Callable[[str, tuple[str, ...], tuple[tuple[str, Any], ...]], Launcher]
    prepare: Callable[[Sequence[Any]], None] | None = None
    compile: Callable[[Sequence[Any]], Sequence[FxwrapError | None]] | None = None
    begin: Callable[[str], None] | None = None


@dataclass(frozen=True, eq=False)
class Joiner:
    """How kernels of a language become one, so that one launch runs several. Kernels are `printers.PrintedKernel`s.

    Fields:
        joinable: `joinable(kernel)` gives what kernels that can be joined have in common; None for one that cannot be.
        join: `join(kernels, shared, name)` gives one kernel that does what all do, none of which needs what another
            writes. For each parameter, `shared` says whether all launches pass the same: the new kernel has one
            parameter for it then, else one for each launch, in their order. Numbers are shared. `name` says what it
            does.
    """

    joinable: Callable[[Any], Hashable]
    join: Callable[[Sequence[Any], Sequence[bool], str], Any]


@dataclass(frozen=True, eq=False)
class DeviceRuntime:
    """What runs programs on a device type. What is left out is done by torch's public functions, where it has them.

    Fields:
        kernels: how kernels of the device's language are run.
        allocator: `allocator(device)` gives the device's cheapest `allocate(sizes, strides, dtype)`. It means what
            `torch.empty_strided` does, which emitted C++ uses.
        guard: `guard(device)` makes a device the current one of its type until the end of a `with` block.
        current_stream: `current_stream(device)` gives the handle of the current stream, an int as the driver has it.
        stream: `stream(device, number)` makes a stream current, and its device, until the end of a `with` block.
        stream_id: `stream_id(device, number)` gives a stream's number in torch, an int, which emitted C++ needs.
        record_event: `record_event(device, stream, event)` gives an event that is recorded after the work so far of a
            stream by its number, 0 for the current one. `event` is the number of one of the model's own, or 0.
        wait_event: `wait_event(event, device, stream)` makes a stream wait for what `record_event` gave.
        record_stream: `record_stream(tensor, device, stream)` keeps a tensor's memory from being used again, when it is
            freed, before the work so far of a stream is done.
        random_state: `random_state(device)` gives the generator's state, a uint8 tensor on the CPU.
        set_random_state: `set_random_state(device, state)` sets it.
        recorder: `recorder(device)` gives what records work on a device and replays it, a `runtime.replay.Recorder`.
    """

    kernels: KernelRuntime | None = None
    allocator: Callable[[torch.device], Allocate] | None = None
    guard: Callable[[torch.device], AbstractContextManager[Any]] | None = None
    current_stream: Callable[[torch.device], int] | None = None
    stream: Callable[[torch.device, int], AbstractContextManager[Any]] | None = None
    stream_id: Callable[[torch.device, int], int] | None = None
    record_event: Callable[[torch.device, int, int], Any] | None = None
    wait_event: Callable[[Any, torch.device, int], None] | None = None
    record_stream: Callable[[torch.Tensor, torch.device, int], None] | None = None
    random_state: Callable[[torch.device], torch.Tensor] | None = None
    set_random_state: Callable[[torch.device, torch.Tensor], None] | None = None
    recorder: Callable[[torch.device], Any] | None = None


@dataclass(frozen=True, eq=False)
class Language:
    """A registered kernel language: its facts, its printer if kernels are generated in it, and how they run.

    `joiner` says how one launch runs several kernels, if it can.
    """

    facts: KernelLanguage
    kernels: KernelRuntime
    printer: Printer | None = None
    joiner: Joiner | None = None


@dataclass(frozen=True, eq=False)
class Device:
    """A registered device type: its facts, its runtime half, and what its own lines become, by class and emitter."""

    spec: DeviceSpec
    runtime: DeviceRuntime
    lines: Mapping[type, Handlers] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Tables:
    languages: Mapping[str, Language] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)


class _Registry:
    """Holds the tables. They are never changed, only replaced, so that a reader needs no lock."""

    def __init__(self) -> None:
        self.tables = _Tables()
        self.lock = threading.RLock()


_REGISTRY = _Registry()


# --- registering ----------------------------------------------------------------------------------------------------


def register_language(facts: KernelLanguage, kernels: KernelRuntime, *, printer: Printer | None = None) -> None:
    """Registers a kernel language that is no device's own. Raises FxwrapError for one that is registered."""
    with _REGISTRY.lock:
        tables = _REGISTRY.tables
        if facts.name in tables.languages:
            raise FxwrapError(f"the kernel language '{facts.name}' is registered; give yours another name")
        languages = {**tables.languages, facts.name: Language(facts, kernels, printer)}
        _REGISTRY.tables = replace(tables, languages=languages)


def register(
    spec: DeviceSpec,
    *,
    printer: Printer | None = None,
    joiner: Joiner | None = None,
    runtime: DeviceRuntime | None = None,
    language: KernelLanguage | None = None,
    lines: Mapping[type, Handlers] | None = None,
) -> None:
    """Makes a device type known; every compile from then on knows it.

    Args:
        spec: the facts about it.
        printer: prints kernels of the loop IR in `spec.kernel_language`. Left out, the language is one that is
            registered, or "".
        joiner: says how one launch runs several of the kernels that are printed; without one, none does.
        runtime: what runs programs on it. With a printer it must have `kernels`.
        language: facts about the language that is printed; by default those of one that is launched over a grid.
        lines: the vendor's own lines, and what writes or runs each by emitter ("python", "cpp", "fx", "interpreter").
            An emitter that has nothing for a line runs the core lines that it expands to.

    Raises DeviceError for a type or a language that is registered, a language that nobody has registered, and a printer
    without `kernels`.
    """
    with _REGISTRY.lock:
        if spec.device_type in _REGISTRY.tables.devices:
            remedy = "To replace it for a while, use `with fxwrap.devices.registered(...)`"
            raise DeviceError(spec.device_type, "it is registered already", remedy)
        _add(spec, printer, joiner, runtime, language, lines, False)


@contextmanager
def registered(
    spec: DeviceSpec,
    *,
    printer: Printer | None = None,
    joiner: Joiner | None = None,
    runtime: DeviceRuntime | None = None,
    language: KernelLanguage | None = None,
    lines: Mapping[type, Handlers] | None = None,
) -> Iterator[None]:
    """Registers a device type, in the place of one that is, until the end of a `with` block: for tests and trials.

    It takes and raises what `register` does. It is seen by all threads. What was compiled before or within keeps the
    launchers that it has loaded.
    """
    with _REGISTRY.lock:
        before = _REGISTRY.tables
        _add(spec, printer, joiner, runtime, language, lines, True)
    try:
        yield
    finally:
        with _REGISTRY.lock:
            _REGISTRY.tables = before


def _add(
    spec: DeviceSpec,
    printer: Printer | None,
    joiner: Joiner | None,
    runtime: DeviceRuntime | None,
    language: KernelLanguage | None,
    lines: Mapping[type, Handlers] | None,
    over: bool,
) -> None:
    tables, runtime = _REGISTRY.tables, runtime or DeviceRuntime()
    name, languages = spec.kernel_language, dict(tables.languages)
    if language is not None and language.name != name:
        reason = f"its spec says that its kernels are in '{name}', and the language given is '{language.name}'"
        raise DeviceError(spec.device_type, reason, "Give both the same name")
    if printer is not None:
        printed = _language(spec, printer, runtime, language, languages.get(name), over)
        languages[name] = replace(printed, joiner=joiner)
    elif name and name not in languages:
        raise unknown_language(spec)
    devices = {**tables.devices, spec.device_type: Device(spec, runtime, dict(lines or {}))}
    _REGISTRY.tables = _Tables(languages, devices)


def _language(
    spec: DeviceSpec,
    printer: Printer,
    runtime: DeviceRuntime,
    facts: KernelLanguage | None,
    known: Language | None,
    over: bool,
) -> Language:
    if not spec.kernel_language:
        reason = "it has a printer, and its spec does not say of which kernel language"
        raise DeviceError(spec.device_type, reason, "Say it: DeviceSpec(kernel_language=...)")
    if known is not None and not over:
        reason = f"the kernel language '{spec.kernel_language}' is there already"
        raise DeviceError(spec.device_type, reason, "Leave out `printer` to share it, or give yours another name")
    if runtime.kernels is None:
        reason = f"nothing can launch what its printer writes in '{spec.kernel_language}'"
        remedy = "Give `runtime=DeviceRuntime(kernels=KernelRuntime(load=...))` with the printer"
        raise DeviceError(spec.device_type, reason, remedy)
    return Language(facts or KernelLanguage(spec.kernel_language), runtime.kernels, printer)


def unknown_language(spec: DeviceSpec) -> DeviceError:
    """Returns the error for a device whose kernel language nobody has registered."""
    known = ", ".join([f"'{name}'" for name, item in _REGISTRY.tables.languages.items() if item.printer is not None])
    reason = f"there is no kernel language '{spec.kernel_language}'"
    remedy = (
        f"Name one that is registered ({known}), or \"\" for no kernels, or register its printer and launcher: "
        "fxwrap.devices.register(spec, printer=..., runtime=...)"
    )
    return DeviceError(spec.device_type, reason, remedy)


# --- asking ---------------------------------------------------------------------------------------------------------


def registered_specs() -> tuple[DeviceSpec, ...]:
    """Returns the specs of all device types that are registered."""
    return tuple([device.spec for device in _REGISTRY.tables.devices.values()])


def registered_spec(device_type: str) -> DeviceSpec | None:
    """Returns the spec of a device type; None for one that nobody has registered."""
    device = _REGISTRY.tables.devices.get(device_type)
    return None if device is None else device.spec


def check_languages(specs: Sequence[DeviceSpec]) -> None:
    """Raises DeviceError for a spec whose kernel language cannot be printed."""
    for spec in specs:
        found = _REGISTRY.tables.languages.get(spec.kernel_language)
        if spec.kernel_language and (found is None or found.printer is None):
            raise unknown_language(spec)


def find_language(name: str) -> Language | None:
    """Returns a registered kernel language; None for one that nobody has registered."""
    return _REGISTRY.tables.languages.get(name)


def language_facts(name: str) -> KernelLanguage:
    """Returns the facts about a kernel language; of one that nobody has registered, those that promise nothing."""
    found = _REGISTRY.tables.languages.get(name)
    return KernelLanguage(name, only_addresses=False) if found is None else found.facts


def language_named(name: str) -> Language:
    """Returns a registered kernel language. Raises FxwrapError, with the known ones, for another."""
    found = _REGISTRY.tables.languages.get(name)
    if found is None:
        *others, last = [f"'{name}'" for name in _REGISTRY.tables.languages]
        raise FxwrapError(
            f"there is no launcher for kernels in '{name}', only for {', '.join(others)} and {last}. "
            "Import the package that registers the device they are for (fxwrap.devices.register)"
        )
    return found


def runtime_of(device_type: str) -> DeviceRuntime:
    """Returns the runtime half of a device type; one without functions for a type that nobody has registered."""
    device = _REGISTRY.tables.devices.get(device_type)
    return DeviceRuntime() if device is None else device.runtime


def missing_function(device_type: str, name: str) -> DeviceError:
    """Returns the error for a function that a device's runtime half lacks and torch does not have either."""
    reason = f"its runtime has no function '{name}', and this program needs one"
    return DeviceError(device_type, reason, f"Register the device with runtime=DeviceRuntime({name}=...)")


def registered_lines() -> tuple[type, ...]:
    """Returns the classes of vendors' lines that devices were registered with."""
    return tuple(dict.fromkeys([line for device in _REGISTRY.tables.devices.values() for line in device.lines]))


def line_handlers(emitter: str) -> dict[Any, Callable[[Any, Any], None]]:
    """Returns what an emitter does with vendors' lines, by class, for those that say so."""
    found = [item for device in _REGISTRY.tables.devices.values() for item in device.lines.items()]
    return {line: handlers[emitter] for line, handlers in found if emitter in handlers}

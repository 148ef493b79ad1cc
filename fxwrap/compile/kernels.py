"""Compilation of a program's kernels before it runs, so that failed ones can be replaced by operator calls."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from fxwrap.converters.emitted_program import EmittedProgram, kernel_uses
from fxwrap.devices import DeviceSpec, find_language, language_traits
from fxwrap.errors import FusionWarning, FxwrapError, NativeBuildError
from fxwrap.events import EventLog, KernelFailed, KernelsCompiled, WarningIssued
from fxwrap.garbage_collection import collect_in_pause
from fxwrap.lines import Launch
from fxwrap.loop_ir import accessed_bytes
from fxwrap.options import Options
from fxwrap.printers import KernelPrinter, KernelRequest, PrintedKernel
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernels
from fxwrap.runtime.native import build_bridge, find_prebuilt_program, precompile_cpp
from fxwrap.runtime.triton.compile import KernelUse
from fxwrap.wrapper_ir import Program


@dataclass(frozen=True)
class KernelFailure:
    """A kernel that failed to compile.

    Fields:
        kernel: its name.
        error: the compiler's error.
        nodes: names of the graph nodes of its launches; empty if a launch has no origin, so that no operator can
            replace it.
        operators: names of the operators that it computes.
    """

    kernel: str
    error: FxwrapError
    nodes: frozenset[str]
    operators: tuple[str, ...]


def warm_up_kernel_compilers(graph: GraphModule, options: Options) -> None:
    """Starts the kernel compilers while a graph is lowered, if the graph is large enough to have many kernels."""
    nodes = graph.graph.nodes
    if not options.fuse or sum([node.op == "call_function" for node in nodes]) < _MANY_CALLS:
        return
    values = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    specs = options.device_specs()
    for device_type in sorted({value.device.type for value in values if isinstance(value, torch.Tensor)}):
        spec = specs.get(device_type)
        language = None if spec is None else find_language(options.kernel_language(spec))
        if language is not None and language.kernels.warm_up is not None:
            language.kernels.warm_up(device_type)


_MANY_CALLS = 24


def print_and_compile_ahead(print_kernel: KernelPrinter, options: Options) -> KernelPrinter:
    """Returns a printer of kernels whose compilers start while the rest of the graph is lowered, where they can.

    `compile_kernels_ahead` starts those of kernels that may become parts of combo kernels, and of kernels with scalars
    that have no typical values before the program is complete.
    """
    specs = options.device_specs()
    printed_before = set[PrintedKernel]()

    def printer(request: KernelRequest) -> PrintedKernel:
        printed = print_kernel(request)
        spec = specs.get(request.device.type)
        start = _ahead_compiler(printed.language, spec, options)
        scalars, numbers = [entry for entry in printed.signature if not entry.startswith("*")], request.numbers
        if numbers is None or len(numbers) != len(scalars):
            return printed
        if start is None or spec is None or printed in printed_before:
            return printed
        printed_before.add(printed)
        if not options.combo_kernels or accessed_bytes(request.kernel, request.hint) > spec.combo_kernel_bytes:
            text = KernelText.of(printed)
            start(KernelUse(text, request.device, numbers))
        return printed

    return printer


def compile_kernels_ahead(program: Program, options: Options) -> None:
    """Starts the compilers of a program's kernels, where they can, while memory is planned and code is emitted.

    `compile_program_kernels` waits for them. Kernels whose compilers run already do not start again.
    """
    specs = options.device_specs()
    for use in kernel_uses(program).values():
        start = _ahead_compiler(use.kernel.language, specs.get(use.device.type), options)
        if start is not None:
            start(use)


def _ahead_compiler(name: str, spec: DeviceSpec | None, options: Options) -> Callable[[KernelUse], None] | None:
    """Returns what starts a language's compiler; None if it compiles nothing ahead, or launches change its texts later.

    The texts of kernels that may start before their predecessors end are final after all other steps.
    """
    language = find_language(name)
    changes_later = options.dependent_launch and spec is not None and spec.supports_dependent_launch
    return None if language is None or changes_later else language.kernels.compile_ahead


def compile_program_kernels(
    program: Program, emitted: EmittedProgram, emitter: str, events: EventLog
) -> list[KernelFailure]:
    """Compiles all kernels of a program for its emitter, and records it; returns those that fail.

    C++ kernels are linked into emitted C++, so that is built as a whole. Raises NativeBuildError if the build fails and
    no kernel is the reason.
    """
    if emitter == "cpp" and find_prebuilt_program(emitted.source) is not None:
        return []
    start, launches = time.perf_counter(), dict[str, list[Launch]]()
    for line in program.lines():
        if isinstance(line, Launch):
            launches.setdefault(line.kernel, []).append(line)
    events.begin_kernels(len(launches))
    uses = kernel_uses(program)
    linked = {
        name: use
        for name, use in uses.items()
        if emitter == "cpp" and language_traits(use.kernel.language).links_into_cpp
    }
    others = {name: use for name, use in uses.items() if name not in linked}
    with ThreadPoolExecutor(1) as executor:
        if emitter == "cpp" and others:
            executor.submit(precompile_cpp, emitted.source)  # the build below raises its errors
        if uses:
            collect_in_pause()  # while workers and the C++ compiler run
        failures = _compile(others, launches)  # before the build, which also links compiled Triton kernels
    if linked and not _try_build(emitted):
        failures += _compile(linked, launches)
        if not failures:
            _ = emitted.boxed  # raises the error of the build, since no kernel is its reason
    if uses:
        failed = tuple([failure.kernel for failure in failures])
        events.record(KernelsCompiled(tuple(uses), failed, time.perf_counter() - start))
    return failures


def _compile(uses: Mapping[str, KernelUse], launches: Mapping[str, Sequence[Launch]]) -> list[KernelFailure]:
    errors = zip(uses, compile_kernels(tuple(uses.values())), strict=True)
    return [_failure(name, error, launches[name]) for name, error in errors if error is not None]


def _try_build(emitted: EmittedProgram) -> bool:
    try:
        _ = emitted.boxed
    except NativeBuildError:
        build_bridge()  # raises if there is no C++ compiler: then no fallback helps
        return False
    return True


def _failure(kernel: str, error: FxwrapError, launches: Sequence[Launch]) -> KernelFailure:
    origins = [line.origin for line in launches if line.origin is not None]
    nodes = frozenset([node for origin in origins for node in origin.nodes])
    has_origins = len(origins) == len(launches) and all(origin.nodes for origin in origins)
    operators = dict.fromkeys([name for origin in origins for name in origin.operators])
    return KernelFailure(kernel, error, nodes if has_origins else frozenset(), tuple(operators))


def warn_kernel_failures(failures: Sequence[KernelFailure], events: EventLog) -> None:
    """Warns once of kernels that failed to compile, with their operators and the reasons."""
    kernels = _abbreviate([f"@{failure.kernel}" for failure in failures])
    operators = _abbreviate([name for failure in failures for name in failure.operators])
    reasons = _abbreviate([str(failure.error).strip() for failure in failures], "\n", 2)
    for failure in failures:
        events.record(KernelFailed(failure.kernel, failure.operators, str(failure.error)))
    text = f"the kernels {kernels} cannot be compiled, and their operators ({operators}) are called instead: {reasons}"
    events.record(WarningIssued(FusionWarning.__name__, text))
    warnings.warn(text, FusionWarning, stacklevel=3)


def _abbreviate(items: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """Returns the distinct items in one text, with the number of omitted ones."""
    distinct = list(dict.fromkeys(items))
    omitted = [f"and {len(distinct) - most} more"] if len(distinct) > most else []
    return separator.join([*distinct[:most], *omitted])

"""Kernels of a program, compiled before it runs: what fails is known while operators can still take its place."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import sympy
import torch
from torch.fx import GraphModule

from fxwrap.converters.emitted import Emitted
from fxwrap.device_registry import find_language, language_facts
from fxwrap.errors import FusionWarning, FxwrapError, NativeBuildError
from fxwrap.lines import Launch
from fxwrap.options import Options
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import compile_kernels
from fxwrap.runtime.native import build_bridge, compile_ahead, provided_program
from fxwrap.runtime.triton_compile import KernelUse
from fxwrap.symbolic import Scalar, evaluate
from fxwrap.wrapper_ir import Program, Value, typical_values

log = logging.getLogger("fxwrap.kernels")


@dataclass(frozen=True)
class KernelFailure:
    """A kernel of a program that cannot be compiled: its name, what was raised, and the launches' graph nodes.

    `nodes` is empty where a launch does not say which nodes it is for, so that nothing can take the kernel's place.
    `operators` are the operators it computes, as its launches name them.
    """

    kernel: str
    error: FxwrapError
    nodes: frozenset[str]
    operators: tuple[str, ...]


def begin_kernels(graph: GraphModule, options: Options) -> None:
    """Has what compiles kernels get ready while a graph is lowered, where there may be many of them."""
    nodes = graph.graph.nodes
    if not options.fuse or sum([node.op == "call_function" for node in nodes]) < _MANY_CALLS:
        return
    values = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    specs = options.device_specs()
    for device_type in sorted({value.device.type for value in values if isinstance(value, torch.Tensor)}):
        spec = specs.get(device_type)
        language = None if spec is None else find_language(options.kernel_language(spec))
        if language is not None and language.kernels.begin is not None:
            language.kernels.begin(device_type)


_MANY_CALLS = 24
"""Calls of a graph from which on it is expected to have many kernels."""


def compile_program_kernels(program: Program, emitted: Emitted, emitter: str) -> list[KernelFailure]:
    """Compiles all kernels of a program for the emitter that will run it; returns those that fail.

    Emitted C++ has its C++ kernels linked in, so there the whole is built. Raises NativeBuildError where that fails and
    no kernel is the reason.
    """
    if emitter == "cpp" and provided_program(emitted.source) is not None:
        return []  # its library has all that it needs
    launches: dict[str, list[Launch]] = {}
    for line in program.lines():
        if isinstance(line, Launch):
            launches.setdefault(line.kernel, []).append(line)
    values = typical_values(program)
    uses = {name: _use(program, lines[0], values) for name, lines in launches.items()}
    linked = {
        name: use for name, use in uses.items() if emitter == "cpp" and language_facts(use.kernel.language).linked
    }
    others = {name: use for name, use in uses.items() if name not in linked}
    with ThreadPoolExecutor(1) as beside:
        if emitter == "cpp" and others:
            beside.submit(compile_ahead, emitted.source)  # what it raises, the build raises again
        failures = _compile(others, launches)  # before the whole is built: what Triton compiles is linked in too
    if linked and not _builds(emitted):
        failures += _compile(linked, launches)
        if not failures:
            _ = emitted.boxed  # fails again, for another reason than a kernel
    return failures


def _compile(uses: Mapping[str, KernelUse], launches: Mapping[str, Sequence[Launch]]) -> list[KernelFailure]:
    errors = zip(uses, compile_kernels(tuple(uses.values())), strict=True)
    return [_failure(name, error, launches[name]) for name, error in errors if error is not None]


def _builds(emitted: Emitted) -> bool:
    try:
        _ = emitted.boxed
    except NativeBuildError:
        build_bridge()  # fails where there is no compiler, which emitted C++ cannot do without
        return False
    return True


def _use(program: Program, launch: Launch, values: Mapping[str, Scalar]) -> KernelUse:
    """Returns a kernel with numbers such as a launch will have."""
    kernel = program.kernel(launch.kernel)
    numbers = [item for item in launch.arguments if not isinstance(item, Value)]
    tensors = [item for item in (*launch.outs, *launch.arguments) if isinstance(item, Value)]
    return KernelUse(
        KernelText(kernel.language, kernel.source, kernel.signature, kernel.options),
        tensors[0].tensor_type.device if tensors else torch.device("cpu"),
        tuple([evaluate(item, values) if isinstance(item, sympy.Basic) else item for item in numbers]),
    )


def _failure(kernel: str, error: FxwrapError, launches: Sequence[Launch]) -> KernelFailure:
    origins = [line.origin for line in launches if line.origin is not None]
    nodes = frozenset([node for origin in origins for node in origin.nodes])
    known = len(origins) == len(launches) and all(origin.nodes for origin in origins)
    operators = dict.fromkeys([name for origin in origins for name in origin.operators])
    return KernelFailure(kernel, error, nodes if known else frozenset(), tuple(operators))


def warn_of(failures: Sequence[KernelFailure]) -> None:
    """Warns once of kernels that could not be compiled: which, of which operators, and why."""
    kernels = _listed([f"@{failure.kernel}" for failure in failures])
    operators = _listed([name for failure in failures for name in failure.operators])
    reasons = _listed([str(failure.error).strip() for failure in failures], "\n", 2)
    for failure in failures:
        log.info("the kernel @%s failed, and its operators are called: %s", failure.kernel, failure.error)
    warnings.warn(
        f"the kernels {kernels} cannot be compiled, and their operators ({operators}) are called instead: {reasons}",
        FusionWarning,
        stacklevel=3,
    )


def _listed(items: Sequence[str], between: str = ", ", most: int = 8) -> str:
    """Returns different items in one text, and how many were left out."""
    found = list(dict.fromkeys(items))
    left_out = [f"and {len(found) - most} more"] if len(found) > most else []
    return between.join([*found[:most], *left_out])

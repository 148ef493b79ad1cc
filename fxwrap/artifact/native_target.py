"""Programs for processes without Python: their description for the C runtime, and reasons why one cannot run there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fxwrap.artifact.user_kernels import reason_for_python
from fxwrap.converters.cpp.library import LAUNCH_OPERATOR, EmittedCpp, ReplayedFunction, is_launched_by_python
from fxwrap.devices import language_traits
from fxwrap.lines import Launch
from fxwrap.lines.operands import block_device, communicating_groups
from fxwrap.runtime.triton.binaries import compiled_variants
from fxwrap.symbolic import SymbolInfo
from fxwrap.torch_compat import is_python_operator, operator_overload, torch_schema
from fxwrap.wrapper_ir import OpaqueType, Program, reads

_STREAM_OPERATORS = ("stream_id", "record_event", "wait_event", "record_stream")
_WEIGHT_OPERATORS = (
    "prepacked_linear", "prepacked_int8_linear", "biased_linear", "frozen_convolution", "frozen_convolution_",
    "frozen_grouped_mm",
)  # fmt: skip
_MATMUL_OPERATORS = ("to_host", "grouped_matmul", "grouped_products", "gelu_matmul")
_ALSO_NATIVE = frozenset({
    f"fxwrap::{name}" for name in (*_STREAM_OPERATORS, *_WEIGHT_OPERATORS, *_MATMUL_OPERATORS)
})  # fmt: skip
"""Operators of fxwrap's that the bridge registers in a process without Python (`cuda/stream_operators.cpp`,
`libraries/prepacked.cpp`, `libraries/grouped_matmuls.cpp`, `libraries/matmuls.cpp`)."""

TARGETS = ("any", "native")
"""The values of `fxwrap.save(target=...)`."""


def native_entry(program: Program, emitted: EmittedCpp, library: Callable[[EmittedCpp], str]) -> dict[str, object]:
    """Returns the manifest's description of a program for the C runtime; `library` returns the entry of a library."""
    operators = dict.fromkeys([target for unit in emitted.units() for target in unit.operators])
    return {
        "engine": emitted.engine,
        "library": library(emitted),
        "operators": [_operator_entry(target) for target in operators],
        "constant_devices": [
            str(item.value.tensor_type.device)
            for item in program.constants
            if not isinstance(item.value.type, OpaqueType)
        ],
        "functions": [_function_entry(function, library) for function in emitted.functions],
        "obstacles": list(native_obstacles(program, emitted)),
    }


def _function_entry(function: ReplayedFunction, library: Callable[[EmittedCpp], str]) -> dict[str, object]:
    """Returns the description of a captured function, whose compiled code is a program of its own."""
    return {
        "name": function.line.function,
        "device": str(block_device(function.block)),
        "library": library(function.emitted),
        "max_captures": function.line.max_captures,
        "static_operands": function.line.operand_positions(function.line.static_operands),
        "mutated_operands": function.line.operand_positions(function.line.writes),
        "functions": [_function_entry(nested, library) for nested in function.emitted.functions],
    }


def native_obstacles(program: Program, emitted: EmittedCpp) -> Iterable[str]:
    """Yields the reasons why a program needs Python, each with the name of the item."""
    units = emitted.units()
    operators = dict.fromkeys([target for unit in units for target in unit.operators if target != LAUNCH_OPERATOR])
    for name, overload in map(_qualified, operators):
        full = f"{name}.{overload}" if overload else name
        if is_python_operator(full) and full not in _ALSO_NATIVE:
            yield f"the operator '{full}' is implemented in Python"
    yield from _kernels_of_python(program)
    for item in program.inputs:
        if not isinstance(item.value, SymbolInfo) and isinstance(item.value.type, OpaqueType):
            yield f"the input '{item.name}' is an object of {item.value.type.name}"
    for value in reads(program.body.lines[-1]):
        if isinstance(value.type, OpaqueType):
            yield f"the output '{value.name}' is an object of {value.type.name}"
    for function in [function for unit in units for function in unit.functions]:
        if communicating_groups(function.block, dict(program.functions)):
            yield f"the CUDA graph of @{function.line.function} contains collectives: compile with cuda_graphs=False"
    for kernel in dict.fromkeys([kernel for unit in units for kernel in unit.triton_kernels]):
        if not compiled_variants(kernel):
            remedy = "call the program once before it is saved, or name architectures"
            yield f"the kernel {kernel.symbol} has no compiled code: {remedy}"


def _kernels_of_python(program: Program) -> Iterable[str]:
    """Yields a reason for each kernel that Python launches."""
    launches = [(line, program.kernel(line.kernel)) for line in program.lines() if isinstance(line, Launch)]
    for kernel in dict.fromkeys([kernel for line, kernel in launches if is_launched_by_python(line, kernel)]):
        if language_traits(kernel.language).user_defined:
            yield f"the model's own Triton kernel @{kernel.name} is launched by Python: {reason_for_python(kernel)}"
        else:
            yield f"the kernel @{kernel.name} in '{kernel.language}' is launched by Python"


def _operator_entry(target: str) -> dict[str, str]:
    name, overload = _qualified(target)
    return {"name": name, "overload": overload, "schema": str(torch_schema(operator_overload(target)))}


def _qualified(target: str) -> tuple[str, str]:
    """Returns the schema's name and overload name of "namespace.name.overload"."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    return f"{namespace}::{name}", "" if overload == "default" else overload

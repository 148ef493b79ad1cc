"""Programs for processes without Python: their description for the C runtime, and reasons why one cannot run there."""

from __future__ import annotations

from collections.abc import Iterable

from fxwrap.converters.cpp.library import EmittedCpp
from fxwrap.runtime.triton.binaries import compiled_variants
from fxwrap.symbolic import SymbolInfo
from fxwrap.torch_compat import is_python_operator, operator_overload, torch_schema
from fxwrap.wrapper_ir import OpaqueType, Program, reads

_ALSO_NATIVE = frozenset({f"fxwrap::{name}" for name in ("stream_id", "record_event", "wait_event", "record_stream")})
"""Operators of fxwrap's that the bridge registers in a process without Python (`cuda/stream_operators.cpp`)."""

TARGETS = ("any", "native")
"""The values of `fxwrap.save(target=...)`."""


def native_entry(program: Program, emitted: EmittedCpp, library: str) -> dict[str, object]:
    """Returns the manifest's description of a program for the C runtime; `library` is the entry of its library."""
    return {
        "engine": emitted.engine,
        "library": library,
        "operators": [_operator_entry(target) for target in emitted.operators],
        "constant_devices": [
            str(item.value.tensor_type.device)
            for item in program.constants
            if not isinstance(item.value.type, OpaqueType)
        ],
        "obstacles": list(native_obstacles(program, emitted)),
    }


def native_obstacles(program: Program, emitted: EmittedCpp) -> Iterable[str]:
    """Yields the reasons why a program needs Python, each with the name of the item."""
    for name, overload in map(_qualified, emitted.operators):
        full = f"{name}.{overload}" if overload else name
        if is_python_operator(full) and full not in _ALSO_NATIVE:
            yield f"the operator '{full}' is implemented in Python"
    for item in program.inputs:
        if not isinstance(item.value, SymbolInfo) and isinstance(item.value.type, OpaqueType):
            yield f"the input '{item.name}' is an object of {item.value.type.name}"
    for value in reads(program.body.lines[-1]):
        if isinstance(value.type, OpaqueType):
            yield f"the output '{value.name}' is an object of {value.type.name}"
    for function in emitted.replayed_functions:
        yield f"the CUDA graph of @{function} is captured and replayed by Python: compile with cuda_graphs=False"
    for kernel in emitted.triton_kernels:
        if not compiled_variants(kernel):
            yield f"the kernel {kernel.symbol} has no compiled code: call the program once before it is saved"


def _operator_entry(target: str) -> dict[str, str]:
    name, overload = _qualified(target)
    return {"name": name, "overload": overload, "schema": str(torch_schema(operator_overload(target)))}


def _qualified(target: str) -> tuple[str, str]:
    """Returns the schema's name and overload name of "namespace.name.overload"."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    return f"{namespace}::{name}", "" if overload == "default" else overload

"""The rules that kernels of the loop IR obey."""

from __future__ import annotations

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir.body_operations import (
    ASSERT_ERRORS,
    Compute,
    Constant,
    DeviceAssert,
    IndexValue,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    Store,
    SymbolicScalar,
    combine_spec,
    indices,
    operands,
    operation_dtype,
    print_operation,
)
from fxwrap.loop_ir.kernel import Buffer, Kernel, KernelError
from fxwrap.loop_ir.operations import (
    HALF_PRECISION,
    KERNEL_DTYPES,
    OPERATIONS,
    POSITION_RESULTS,
    REDUCTIONS,
    SCANS,
    STORE_MODES,
)


def verify_kernel(kernel: Kernel) -> Kernel:
    """Returns the kernel if it is valid, else raises KernelError naming the operation."""
    buffers = {buffer.name: buffer for buffer in (*kernel.inputs, *kernel.outputs)}
    if len(buffers) != len(kernel.inputs) + len(kernel.outputs):
        raise KernelError("two buffers of the kernel have the same name")
    written = {buffer.name for buffer in kernel.outputs}
    allowed = {*kernel.axes, *kernel.reduced}
    for position, operation in enumerate(kernel.operations):
        reason = _violation(kernel, position, operation, buffers, written)
        if reason is None and any(not index.axes() <= allowed for index in indices(operation)):
            reason = "its index has an axis that the kernel does not have"
        if reason is not None:
            raise KernelError(f"operation %{position} = {print_operation(operation)}: {reason}")
    return kernel


def _violation(
    kernel: Kernel, position: int, operation: Operation, buffers: dict[str, Buffer], written: set[str]
) -> str | None:
    used = operands(operation)
    if any(not 0 <= operand < position for operand in used):
        return "it uses an operation that does not precede it"
    if any(isinstance(kernel.operations[operand], Store | DeviceAssert) for operand in used):
        return "a store has no value"
    types = [operation_dtype(kernel.operations[operand]) for operand in used]
    match operation:
        case Load():
            buffer = buffers.get(operation.buffer)
            return None if buffer is not None and buffer.dtype is operation.dtype else "there is no such buffer"
        case Constant() | SymbolicScalar() | IndexValue():
            return None if operation.dtype in KERNEL_DTYPES else f"kernels have no {operation.dtype}"
        case Compute():
            return _compute_violation(operation, types)
        case Reduce() | Scan():
            return _combine_violation(kernel, operation, types)
        case ReductionResult():
            source = kernel.operations[operation.operation]
            if not isinstance(source, Reduce | Scan) or not 0 <= operation.position < combine_spec(source).results:
                return "there is no such result"
            expected = torch.int64 if (source.kind, operation.position) in POSITION_RESULTS else source.dtype
            return None if operation.dtype is expected else f"its result is {expected}"
        case Store():
            if operation.buffer not in written or buffers[operation.buffer].dtype is not types[0]:
                return "there is no output of this name and dtype"
            return None if operation.mode in STORE_MODES else f"there is no mode {operation.mode}"
        case DeviceAssert():
            if operation.error not in ASSERT_ERRORS:
                return f"there is no error {operation.error}"
            return None if types[0] is torch.bool else f"its condition is {types[0]}"
        case _:
            assert_never(operation)


def _compute_violation(operation: Compute, types: list[torch.dtype]) -> str | None:
    spec = OPERATIONS.get(operation.name)
    if spec is None:
        return f"there is no operation {operation.name}"
    if len(types) != spec.operands:
        return f"it takes {spec.operands} operands, not {len(types)}"
    if operation.name == "where":
        if types[0] is not torch.bool:
            return f"its condition is {types[0]}"
        types = types[1:]
    if any(dtype is not types[0] for dtype in types):
        return f"its operands have different dtypes: {', '.join(map(str, types))}"
    if not spec.domain.accepts(types[0]):
        return f"it does not take {types[0]}"
    expected = {"same": types[0], "bool": torch.bool, "declared": operation.dtype}[spec.result]
    return None if operation.dtype is expected else f"its result is {expected}"


def _combine_violation(kernel: Kernel, operation: Reduce | Scan, types: list[torch.dtype]) -> str | None:
    if operation.kind not in (REDUCTIONS if isinstance(operation, Reduce) else SCANS):
        return f"there is no such combination as {operation.kind}"
    spec = combine_spec(operation)
    if isinstance(operation, Reduce) and operation.axes:
        ordered = tuple([axis for axis in kernel.reduced if axis in operation.axes])
        if operation.axes != ordered:
            return "it reduces axes that are no reduced axes of the kernel, or in another order"
        if kernel.scans:
            return "a kernel with scans reduces all reduced axes"
    if isinstance(operation, Reduce) and operation.operand_precision is not None:
        if operation.kind != "sum" or operation.operand_precision not in HALF_PRECISION:
            return "sums alone have factors of another dtype, which is one of half precision"
    if not kernel.reduced or (isinstance(operation, Scan) and len(kernel.reduced) != 1):
        return f"the kernel has {len(kernel.reduced)} reduced axes"
    if len(types) != spec.operands or not spec.domain.accepts(types[0]):
        return f"it does not take {', '.join(map(str, types))}"
    return None if operation.dtype is types[0] else f"its result is {types[0]}"

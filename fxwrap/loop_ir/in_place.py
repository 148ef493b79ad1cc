"""Kernels that overwrite an input: which outputs may reuse an input's memory."""

from __future__ import annotations

from dataclasses import replace

from fxwrap.loop_ir.kernel import Kernel, Load, Operation, Store


def in_place_candidates(kernel: Kernel, output: str) -> tuple[str, ...]:
    """Returns the inputs whose memory an output may reuse, according to the kernel's accesses.

    Every load of such an input is of the element that the same iteration stores. No later stage follows the store,
    because it could load the input again. Dtypes are equal; callers check that the buffers have equal sizes.
    """
    stores = [(position, item) for position, item in enumerate(kernel.operations) if isinstance(item, Store)]
    own = [(position, item) for position, item in stores if item.buffer == output]
    if len(own) != 1 or own[0][1].mode != "set" or own[0][1].mask is not None:
        return ()
    position, store = own[0]
    varies = kernel.varying[position]
    if kernel.scans or (varies and kernel.stages[position] < max(kernel.stages[other] for other, _ in stores)):
        return ()
    dtype = next(buffer.dtype for buffer in kernel.outputs if buffer.name == output)
    candidates = []
    for buffer in kernel.inputs:
        loads = [
            (other, item) for other, item in enumerate(kernel.operations)
            if isinstance(item, Load) and item.buffer == buffer.name
        ]  # fmt: skip
        same = all(load.index == store.index and kernel.varying[other] == varies for other, load in loads)
        if buffer.dtype is dtype and loads and same:
            candidates.append(buffer.name)
    return tuple(candidates)


def reinplace_output(kernel: Kernel, source: str, output: str) -> Kernel:
    """Returns the kernel with an input removed, and its loads reading from an output's buffer."""

    def moved(operation: Operation) -> Operation:
        if isinstance(operation, Load) and operation.buffer == source:
            return replace(operation, buffer=output)
        return operation

    inputs = tuple([buffer for buffer in kernel.inputs if buffer.name != source])
    return replace(kernel, inputs=inputs, operations=tuple([moved(item) for item in kernel.operations]))

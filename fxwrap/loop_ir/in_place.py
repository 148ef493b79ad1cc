"""Kernels that write over what they read: which outputs may take an input's memory."""

from __future__ import annotations

from dataclasses import replace

from fxwrap.loop_ir.kernel import Kernel, Load, Operation, Store


def may_overwrite(kernel: Kernel, output: str) -> tuple[str, ...]:
    """Returns the inputs in whose memory an output may be written, as far as the kernel's accesses say.

    Every load of such an input is of the element that the same iteration stores, and no later stage follows the store:
    it may load again what depends on reduced axes. Dtypes are equal; that the buffers are equally large is for the
    caller to see to.
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
    found = []
    for buffer in kernel.inputs:
        loads = [
            (other, item) for other, item in enumerate(kernel.operations)
            if isinstance(item, Load) and item.buffer == buffer.name
        ]  # fmt: skip
        same = all(load.index == store.index and kernel.varying[other] == varies for other, load in loads)
        if buffer.dtype is dtype and loads and same:
            found.append(buffer.name)
    return tuple(found)


def overwriting(kernel: Kernel, source: str, output: str) -> Kernel:
    """Returns the kernel in which an input's elements are read from an output's buffer, and the input is gone."""

    def moved(operation: Operation) -> Operation:
        if isinstance(operation, Load) and operation.buffer == source:
            return replace(operation, buffer=output)
        return operation

    inputs = tuple([buffer for buffer in kernel.inputs if buffer.name != source])
    return replace(kernel, inputs=inputs, operations=tuple([moved(item) for item in kernel.operations]))

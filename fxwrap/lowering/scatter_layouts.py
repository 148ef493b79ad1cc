"""Layouts of tensors that kernels combine values into: those of the values, so that stores are contiguous as loads are.

Interpolations of channels-last images have gradients in this layout, which are added to a new tensor of zeros. In rows
of channels, an addition is of whole vectors; in rows of a plane, each element of a vector is in a sector of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from fxwrap.loop_ir import Axis, Index, IndirectIndex, Kernel, Load, Store, contiguity_scores, stride_magnitude
from fxwrap.lowering.fusion.definitions import Definition, Scattered, fills_a_copy
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan
from fxwrap.lowering.kernel_schedules import KernelSchedules

_MIN_ROW = 16
"""The fewest values of a row whose layout a tensor takes."""


def lay_out_scatters(schedules: KernelSchedules, kernels: Sequence[KernelPlan]) -> KernelSchedules:
    """Returns the schedules of a graph with other layouts of the tensors that kernels combine values into.

    These are tensors that only kernels read, with an initial value that is computed for them.
    """
    scatters_of = [[item.definition for item in kernel.members if fills_a_copy(item.definition)] for kernel in kernels]
    uses = Counter([scatter.initial for scatters in scatters_of for scatter in scatters])
    for kernel, scatters in zip(kernels, scatters_of, strict=True):
        if len(scatters) != 1 or uses[scatters[0].initial] > 1 or not schedules.is_massively_parallel(kernel):
            continue
        fake = schedules.definitions.fake(scatters[0])
        dim = _contiguous_dim(schedules, schedules.built(kernel), fake) if _is_free(schedules, scatters[0]) else None
        if fake is None or dim is None:
            continue
        order, results = [*[other for other in range(fake.dim()) if other != dim], dim], schedules.definitions.results
        other_layout = {
            definition: replace(results[scatters[0]], fake=_in_order(fake, order))
            for definition in (scatters[0], scatters[0].initial)
        }
        definitions = replace(schedules.definitions, results={**results, **other_layout})
        schedules = replace(schedules, definitions=definitions)
    return schedules


def _is_free(schedules: KernelSchedules, scatter: Scattered) -> bool:
    """Whether no call reads a combined tensor, and nothing but its kernel the initial one, which is computed."""
    plan, results = schedules.plan, schedules.definitions.results
    own: tuple[Definition, ...] = (scatter, scatter.initial)
    if scatter.mode == "set" or not plan.external.isdisjoint(own) or scatter not in results:
        return False
    is_own = scatter.initial in plan.definitions and plan.readers[scatter.initial] <= {scatter}
    aliases = schedules.definitions.storages.aliases_of
    return is_own and not plan.definitions[scatter.initial].reads and all({*aliases(item)} <= {*own} for item in own)


def _contiguous_dim(schedules: KernelSchedules, kernel: Kernel, fake: torch.Tensor | None) -> int | None:
    """Returns the dimension of a tensor along which values are combined into it at no computed index, if not the last.

    Of several ones, it is the one along which most values are contiguous, or nearest to each other where a tile has
    those of another axis that are.
    """
    if fake is None or not all(type(size) is int for size in fake.shape):  # no comparison of strides adds guards
        return None
    stores = [item.index for item in kernel.operations if isinstance(item, Store) and item.mode != "set"]
    loads = [position for position, item in enumerate(kernel.operations) if isinstance(item, Load)]
    indices = [item.index for item in kernel.operations if isinstance(item, Load)]
    scores, hint = contiguity_scores(kernel, schedules.hint, loads), schedules.hint
    has_tile = any(score and hint(axis.size) >= _MIN_ROW for axis, score in scores.items())
    dims = dict[int, tuple[int, int]]()
    for axis in kernel.axes:
        strides = {_stride(kernel, index, axis) for index in stores}
        step = strides.pop() if len(strides) == 1 else None
        if step == 1:
            return None
        distance = sum(stride_magnitude(index.stride(axis), hint) for index in indices)
        for dim, stride in enumerate(fake.stride()):
            is_row = step is not None and stride == step and min(hint(axis.size), fake.shape[dim]) >= _MIN_ROW
            if is_row and (scores.get(axis, 0) or has_tile):
                dims[dim] = (scores.get(axis, 0), -distance)
    return max(dims, key=dims.__getitem__, default=None)


def _stride(kernel: Kernel, index: Index, axis: Axis) -> int | None:
    """Returns the fixed step of an index along an axis, None where the axis changes computed indices in it."""
    stride, computed = index.stride(axis), [atom for atom in index.atoms() if isinstance(atom, IndirectIndex)]
    if stride is None or any(axis in kernel.value_axes[atom.operation] for atom in computed):
        return None
    return stride.constant


def _in_order(fake: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Returns a fake tensor of the same sizes in memory of its own, whose dimensions have this order in it."""
    sizes = [fake.shape[dim] for dim in order]
    return fake.new_empty(sizes).permute([order.index(dim) for dim in range(fake.dim())])

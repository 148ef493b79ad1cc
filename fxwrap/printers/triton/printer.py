"""The entry of the Triton printer, and kernels with the configuration that they are printed with.

`print_triton` prints a kernel in a configuration: `candidates.py` returns those of a kernel, and the class of each
selects the printer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from typing_extensions import assert_never

from fxwrap.loop_ir import Kernel, find_contraction
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.printers.triton.candidates import configurations
from fxwrap.printers.triton.contractions import DotPrinter
from fxwrap.printers.triton.group_blocks import GroupBlockPrinter
from fxwrap.printers.triton.interleaved import InterleavedPrinter
from fxwrap.printers.triton.kernel_text import BodyParameters, IntegerSlots, TritonKernelText
from fxwrap.printers.triton.narrow_indices import narrow_indirect_indices
from fxwrap.printers.triton.one_hot import SelectedElement, select_one_hot_elements
from fxwrap.printers.triton.operations import collapse_bool_casts
from fxwrap.printers.triton.row_group_sums import print_grouped_sums
from fxwrap.printers.triton.row_loads import RowLoadPrinter
from fxwrap.printers.triton.row_parts import RowPartPrinter
from fxwrap.printers.triton.shared_elements import ContractionLoadPrinter, order_reduced_axes
from fxwrap.printers.triton.streaming import StreamingTritonPrinter
from fxwrap.printers.triton.tiling import (
    Configuration,
    DotConfiguration,
    GroupBlockConfiguration,
    GroupSumConfiguration,
    RowPartConfiguration,
    StreamingConfiguration,
    TileConfiguration,
    TiledConfiguration,
)


class _ContractionTilePrinter(ContractionLoadPrinter, RowLoadPrinter):
    """Prints a contraction as a reduction of products, without dots."""


@dataclass(frozen=True, eq=False)
class ScheduledKernel:
    """A loop IR kernel with the configuration of tiles and the limits of symbols that `source` was printed with."""

    kernel: Kernel
    configuration: TiledConfiguration
    limits: Mapping[str, int]
    source: str = ""

    def text(self, parameters: BodyParameters) -> TritonKernelText:
        """Prints the kernel."""
        kernel = order_reduced_axes(narrow_indirect_indices(collapse_bool_casts(self.kernel)))
        match self.configuration:
            case TileConfiguration():
                return self._tile_text(kernel, self.configuration, parameters)
            case GroupBlockConfiguration():
                return GroupBlockPrinter(kernel, self.configuration, self.limits, parameters).print()
            case DotConfiguration():
                return DotPrinter(kernel, self.configuration, self.limits, parameters).print()
            case GroupSumConfiguration():
                return print_grouped_sums(kernel, self.configuration, self.limits, parameters)
            case RowPartConfiguration():
                return RowPartPrinter(kernel, self.configuration, self.limits, parameters).print()
            case _:
                assert_never(self.configuration)

    def _tile_text(
        self, kernel: Kernel, configuration: TileConfiguration, parameters: BodyParameters
    ) -> TritonKernelText:
        selected: dict[int, SelectedElement] = {}
        if not configuration.looped and len(configuration.tile(kernel).dimensions) == 1:
            kernel, selected = select_one_hot_elements(kernel)  # each program has one row
        printer = InterleavedPrinter if find_contraction(kernel) is None else _ContractionTilePrinter
        return printer(kernel, configuration, self.limits, parameters, selected).print()

    @cached_property
    def template(self) -> tuple[TritonKernelText, list[int]]:
        """The text with a slot for each integer of index arithmetic and without comments, and the slots' values."""
        slots = IntegerSlots()
        return self.text(BodyParameters(slots, comments=frozenset())), slots.values


def print_triton(
    kernel: Kernel, configuration: Configuration | None = None, limits: Mapping[str, int] | None = None, name: str = ""
) -> PrintedKernel:
    """Returns a kernel as Triton source with its one-dimensional launch grid.

    Args:
        kernel: the kernel.
        configuration: the blocks, warps and stages; by default the first one of `configurations`.
        limits: upper bounds of symbols by name. They decide whether 32-bit indices suffice.
        name: a description of the computation. The function's name appends digits of a hash of its text.

    Raises KernelError for atomic stores of dtypes and modes that GPUs have no instruction for, and for a streaming
    reduction whose factors are no matrices.
    """
    configuration, limits = configuration or configurations(kernel)[0], limits or {}
    if isinstance(configuration, StreamingConfiguration):
        return StreamingTritonPrinter(collapse_bool_casts(kernel), configuration, limits).print().printed(name)
    scheduled = ScheduledKernel(kernel, configuration, limits)
    printed = scheduled.text(BodyParameters()).printed(name)
    return replace(printed, scheduled=replace(scheduled, source=printed.source))

"""Loops of kernels with scans: a running value that each element updates, in order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from fxwrap.loop_ir import Scan, Store
from fxwrap.printers.cpp.loop_plan import SCAN_BLOCK, LoopPlan
from fxwrap.printers.cpp.loops import loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES, print_size
from fxwrap.printers.cpp.reductions import ReductionPrinter
from fxwrap.printers.cpp.rows import RowPrinter
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues

_COMBINE: Final[Mapping[str, str]] = {"cumsum": "sum", "cumprod": "prod", "logcumsumexp": "logaddexp"}


def _accumulator_type(operation: Scan, dtype: torch.dtype) -> str:
    """Returns the C++ type of the running value: sums and products of float32 use float64, as torch's do."""
    is_widened = dtype is torch.float32 and operation.kind in _COMBINE
    return CPP_TYPES[torch.float64 if is_widened else dtype]


def _initial_value(operation: Scan, dtype: torch.dtype) -> tuple[str, str]:
    """Returns the C++ type of the running value and its initial value. `dtype` is the operand's."""
    value = _accumulator_type(operation, dtype)
    match operation.kind:
        case "cumsum" | "cumprod":
            return value, f"{value}({int(operation.kind == 'cumprod')})"
        case "logcumsumexp":
            return value, f"Limits<{value}>::lowest"
        case _:
            bound = "lowest" if operation.kind == "cummax" else "highest"
            return f"IndexedValue<{value}>", f"IndexedValue<{value}>{{Limits<{value}>::{bound}, 0}}"


class ScanPrinterBase(ReductionPrinter):
    """Base of the printers of kernels with scans. Every pass over the reduced axes initialises the running values."""

    def __init__(self, plan: LoopPlan, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(plan, writer, origin_comments)
        self.statements.scan = self.scan
        self.initialized: set[int] = set()

    @abstractmethod
    def running(self, position: int) -> str:
        """Returns the running value of a scan, within a loop."""

    @abstractmethod
    def initialize_running_value(self, position: int, kind: str, name: str, start: str) -> str:
        """Returns the statement that initialises a running value of a C++ type, or resets that of an earlier pass."""

    def scan_at(self, position: int) -> Scan:
        """Returns the scan at a position."""
        operation = self.kernel.operations[position]
        assert isinstance(operation, Scan)
        return operation

    def stage_sinks(self) -> list[tuple[list[int], list[Store]]]:
        """Also separates the reductions that need no scan: their passes are vectorised and split."""
        passes: list[tuple[list[int], list[Store]]] = []
        for reductions, stores in super().stage_sinks():
            ordered = [item for item in reductions if self.needed_scans(self.operands_of(item), {})]
            independent = [item for item in reductions if item not in ordered]
            if independent and (ordered or stores):
                passes.append((independent, []))
                independent = []
            passes.append((independent or ordered, stores))
        return passes

    def needed_scans(self, targets: Sequence[int], known: EmittedValues) -> list[int]:
        """Returns the scans that a pass over the reduced axes needs for its targets."""
        reduced = dict.fromkeys(self.kernel.reductions, "")
        needed = sorted(self.kernel.backward_slice(targets, {**reduced, **known}))
        return [position for position in needed if isinstance(self.kernel.operations[position], Scan)]

    def initialize_scans(self, targets: Sequence[int], known: EmittedValues) -> list[int]:
        """Writes the initial values of the scans that a pass needs for its targets, and returns the scans."""
        scans = self.needed_scans(targets, known)
        for position in scans:
            operation = self.scan_at(position)
            kind, start = _initial_value(operation, self.statements.dtype(operation.operands[0]))
            name = f"{self.statements.name(position)}_running"
            self.writer.line(self.initialize_running_value(position, kind, name, start))
            self.initialized.add(position)
        return scans

    def print_varying_asserts(self, known: EmittedValues) -> None:
        """Also writes the initial values of the scans that the assertions need."""
        self.initialize_scans([used for item in self.varying_asserts() for used in self.operands_of(item)], known)
        super().print_varying_asserts(known)

    def scan(self, position: int, known: EmittedValues) -> str:
        """Writes the step of a scan at one element; returns the text of its result there."""
        operation, running = self.scan_at(position), self.running(position)
        dtype, value = self.statements.dtype(operation.operands[0]), known[operation.operands[0]]
        comment = self.statements.comment(operation)
        if operation.kind in _COMBINE:
            operand = f"{_accumulator_type(operation, dtype)}({value})"
            self.writer.line(f"{running} = combine::{_COMBINE[operation.kind]}({running}, {operand});{comment}")
            return self.statements.declare(position, f"{CPP_TYPES[dtype]}({running})")
        self.writer.line(f"{self.indexed_step(position, value)};{comment}")
        return running

    def indexed_step(self, position: int, value: str) -> str:
        """Returns the step of a scan whose running value is an element with its position."""
        running = self.running(position)
        return f"{running} = {self.scan_at(position).kind}_step({running}, {value}, {self.position_text()})"


class RowScanPrinter(ScanPrinterBase, RowPrinter):
    """A kernel that scans along its rows: each parallel iteration is a row, whose scans are computed in order."""

    def select_row_buffers(self) -> set[int]:
        """Returns no values: later passes scan again."""
        return set()

    def print_stage(self, reductions: list[int], stores: list[Store], known: EmittedValues) -> None:
        """Writes one pass over the row, in order if it needs a scan."""
        targets = self.targets(reductions, stores)
        self.hoist_invariants(targets, known)
        scans = self.initialize_scans(targets, known)
        kinds = [self.scan_at(position).kind for position in scans]
        if len(kinds) == 1 and kinds[0] in ("cumsum", "cumprod") and not reductions and not self.plan.serial:
            self.print_blockwise_scan(scans[0], stores, known)
            return
        self.in_order = self.plan.serial or bool(scans)
        super().print_stage(reductions, stores, known)
        self.in_order = self.plan.serial

    def print_blockwise_scan(self, position: int, stores: list[Store], known: EmittedValues) -> None:
        """Writes loops over blocks of a row: the operand of a sum or product, the scan, the uses of its results."""
        (lane,), operation = self.kernel.reduced, self.scan_at(position)
        value = operation.operands[0]
        dtype, name = self.statements.dtype(value), self.statements.name(position)
        kind, _ = _initial_value(operation, dtype)
        size, first = print_size(lane.size), f"{lane.name}_0"
        with self.writer.nest([f"for (int64_t {first} = 0; {first} < {size}; {first} += {SCAN_BLOCK})"]):
            self.writer.line(f"const int64_t count = fxwrap::min<int64_t>({SCAN_BLOCK}, {size} - {first});")
            block_type = CPP_TYPES[dtype] if operation.kind == "cumsum" else kind
            self.writer.line(f"{block_type} {name}_block[{SCAN_BLOCK}];")
            head = loop_head(lane, first, f"{first} + count")
            element = f"{name}_block[{lane.name} - {first}]"
            with self.writer.nest([head], self.simd()):
                inner = dict(known)
                self.statements.write([value], inner)
                self.writer.line(f"{element} = {inner[value]};")
            neutral = f"{block_type}({int(operation.kind == 'cumprod')})"
            arguments = f"{name}_block, count, {name}_running, {neutral}, combine::{_COMBINE[operation.kind]}"
            self.writer.line(f"scan_block({arguments});{self.statements.comment(operation)}")
            with self.writer.nest([head], self.simd()):
                element = element if block_type == CPP_TYPES[dtype] else f"{CPP_TYPES[dtype]}({element})"
                self.write_stores(stores, {**known, position: element})

    def running(self, position: int) -> str:
        """Returns the running value of a row."""
        return f"{self.statements.name(position)}_running"

    def initialize_running_value(self, position: int, kind: str, name: str, start: str) -> str:
        """Returns the statement that initialises a row's running value."""
        return f"{name} = {start};" if position in self.initialized else f"{kind} {name} = {start};"

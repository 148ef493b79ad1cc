"""Scans: a running value that each element combines with, in order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from fxwrap.loop_ir import Scan, Store
from fxwrap.printers.cpp.body import Known, Statements, Writer
from fxwrap.printers.cpp.index_text import size_text
from fxwrap.printers.cpp.loops import ReductionPrinter
from fxwrap.printers.cpp.plan import SCAN_BLOCK, Plan
from fxwrap.printers.cpp.types import CPP_TYPES, literal

_COMBINE: Final[Mapping[str, str]] = {"cumsum": "sum", "cumprod": "prod", "logcumsumexp": "logaddexp"}


def running_dtype(operation: Scan, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the running value: long sums and products of float32 run in float64, as torch's do."""
    return torch.float64 if dtype is torch.float32 and operation.kind in ("cumsum", "cumprod") else dtype


def scan_start(operation: Scan, dtype: torch.dtype) -> tuple[str, str]:
    """Returns the C++ type of the running value, and what it begins with. `dtype` is the operand's."""
    value = CPP_TYPES[running_dtype(operation, dtype)]
    match operation.kind:
        case "cumsum" | "cumprod":
            return value, f"{value}({int(operation.kind == 'cumprod')})"
        case "logcumsumexp":
            return value, f"Limits<{value}>::lowest"
        case _:
            bound = "lowest" if operation.kind == "cummax" else "highest"
            return f"Best<{value}>", f"Best<{value}>{{Limits<{value}>::{bound}, 0}}"


def scan_step(statements: Statements, place: int, running: str, known: Known, position: str) -> str:
    """Writes the step of a scan at one element, and returns the text of its result there."""
    operation = statements.kernel.operations[place]
    assert isinstance(operation, Scan)
    dtype = statements.dtype(operation.operands[0])
    value, comment = known[operation.operands[0]], statements.comment(operation)
    if operation.kind in _COMBINE:
        kind = CPP_TYPES[running_dtype(operation, dtype)]
        operand = f"{kind}({value})"
        statements.writer.line(f"{running} = combine::{_COMBINE[operation.kind]}({running}, {operand});{comment}")
        text = f"{CPP_TYPES[dtype]}({running})"
        return statements.declare(place, text)
    step = "last_larger" if operation.kind == "cummax" else "last_smaller"
    statements.writer.line(f"{running} = {step}({running}, {value}, {position});{comment}")
    return running


class ScanningPrinter(ReductionPrinter):
    """What kernels with scans share: running values, which every pass over the reduced axes begins again."""

    def __init__(self, plan: Plan, writer: Writer, origins: bool) -> None:
        super().__init__(plan, writer, origins)
        self.statements.scan = self.scan
        self.begun: set[int] = set()

    @abstractmethod
    def running(self, place: int) -> str:
        """Returns the running value of a scan, within a loop."""

    @abstractmethod
    def begin(self, kind: str, name: str, start: str, *, again: bool) -> str:
        """Returns the statement that begins a running value of a C++ type, again if an earlier pass has begun it."""

    def begin_scans(self, targets: Sequence[int], known: Known) -> bool:
        """Writes what begins the scans that a pass needs for its targets; returns whether there are any."""
        scans = [
            (place, operation)
            for place in self.statements.needed(targets, known)
            if isinstance(operation := self.kernel.operations[place], Scan)
        ]
        for place, operation in scans:
            kind, start = scan_start(operation, self.statements.dtype(operation.operands[0]))
            name = f"{self.statements.name(place)}_running"
            self.writer.line(self.begin(kind, name, start, again=place in self.begun))
            self.begun.add(place)
        return bool(scans)

    def begin_requirements(self, known: Known) -> None:
        """Writes what begins the scans that requirements need."""
        places = [place for place, _ in self.requirements if self.plan.varying[place]]
        self.begin_scans([used for place in places for used in self.statements.operands_of(place)], known)

    def scan(self, place: int, known: Known) -> str:
        """Writes a step of a scan."""
        return scan_step(self.statements, place, self.running(place), known, self.position_text())


class ScanPrinter(ScanningPrinter):
    """A kernel that scans along its rows: each parallel iteration is a row, gone through in order."""

    def print(self) -> None:
        """Writes the loops."""
        with self.nest([self.head(axis) for axis in self.kernel.axes], self.parallel()):
            known: Known = {}
            if self.blocked():
                self.print_blocks(known)
                return
            for reductions, stores in self.stage_sinks():
                self.print_stage(reductions, stores, known)
            self.begin_requirements(known)
            self.print_requirements(known)
            if self.final_stores():
                self.write_stores(self.final_stores(), known)

    def blocked(self) -> bool:
        """Whether the kernel is one sum or product along its rows, which goes in blocks of vectors."""
        kinds = [item.kind for item in self.kernel.operations if isinstance(item, Scan)]
        alone = len(kinds) == 1 and kinds[0] in ("cumsum", "cumprod") and not self.kernel.reductions
        return alone and not self.requirements and not self.plan.serial

    def print_blocks(self, known: Known) -> None:
        """Writes loops over blocks of a row: what is scanned, the scan, then what its results are used for."""
        (place,), lane = self.kernel.scans, self.kernel.reduced[0]
        operation = self.kernel.operations[place]
        assert isinstance(operation, Scan)
        value = operation.operands[0]
        dtype, name = self.statements.dtype(value), self.statements.name(place)
        kind, start = scan_start(operation, dtype)
        stores = [store for position, store in self.placed_stores() if self.plan.varying[position]]
        self.write_fixed([value, *self.targets([], stores)], known)
        self.writer.line(f"{kind} {name}_running = {start};")
        size, first = size_text(lane.size), f"{lane.name}_0"
        with self.nest([f"for (int64_t {first} = 0; {first} < {size}; {first} += {SCAN_BLOCK})"]):
            self.writer.line(f"const int64_t count = fxwrap::min<int64_t>({SCAN_BLOCK}, {size} - {first});")
            self.writer.line(f"{CPP_TYPES[dtype]} {name}_block[{SCAN_BLOCK}];")
            head = f"for (int64_t {lane.name} = {first}; {lane.name} < {first} + count; ++{lane.name})"
            element = f"{name}_block[{lane.name} - {first}]"
            with self.nest([head], self.simd()):
                inner = dict(known)
                self.statements.write([value], inner)
                self.writer.line(f"{element} = {inner[value]};")
            neutral = literal(int(operation.kind == "cumprod"), dtype)
            combine = f"combine::{_COMBINE[operation.kind]}"
            comment = self.statements.comment(operation)
            self.writer.line(f"scan_block({name}_block, count, {name}_running, {neutral}, {combine});{comment}")
            with self.nest([head], self.simd()):
                self.write_stores(stores, {**known, place: element})
        if self.final_stores():
            self.write_stores(self.final_stores(), known)

    def print_stage(self, reductions: list[int], stores: list[Store], known: Known) -> None:
        """Writes one pass over the row."""
        targets = self.targets(reductions, stores)
        if not targets:
            return
        self.write_fixed(targets, known)
        self.begin_scans(targets, known)
        for place in reductions:
            kind, name = self.result_type(place), self.statements.name(place)
            self.writer.line(f"{kind} {name}_running = {self.start_of(place)};")
        with self.nest([self.head(axis) for axis in self.kernel.reduced]):
            inner = dict(known)
            values = [store.value for store in stores]
            self.statements.write(targets, inner, keep=values if len(values) > 1 else ())
            for place in reductions:
                self.accumulate(place, inner)
            for store in stores:
                self.statements.store(store, inner)
        for place in reductions:
            self.finish(place, f"{self.statements.name(place)}_running", known)

    def accumulate(self, place: int, known: Known) -> None:
        """Writes the step of a reduction."""
        running = f"{self.statements.name(place)}_running"
        value = known[self.statements.operands_of(place)[0]]
        kind = self.result_type(place)
        operand = f"{kind}{{{value}, {self.position_text()}}}" if kind.startswith("Best") else value
        self.writer.line(f"{running} = {self.combine(place)}({running}, {operand});")

    def running(self, place: int) -> str:
        """Returns the running value of a row."""
        return f"{self.statements.name(place)}_running"

    def begin(self, kind: str, name: str, start: str, *, again: bool) -> str:
        """Returns the statement that begins a row's running value."""
        return f"{name} = {start};" if again else f"{kind} {name} = {start};"

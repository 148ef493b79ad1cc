"""Memory over the lines of a program, for Perfetto and for torch's memory visualiser."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxwrap.devices import registered_spec
from fxwrap.errors import ExpressionError
from fxwrap.lines import Let, PoolSlice
from fxwrap.memory_planning.live_ranges import LiveRange, MemoryOwner, program_live_ranges
from fxwrap.symbolic import Number, evaluate, evaluate_size
from fxwrap.wrapper_ir import LineBase, Program, defined, hints_with_fallback, live_bytes, print_line, used

_LINE_US = 1000
"""A trace shows each line as a millisecond: a program has an order of lines, but no times."""

_FIRST_ADDRESS = 1 << 40


@dataclass(frozen=True)
class MemoryTrace:
    """The live memory of a program over the lines of its body, in bytes, as memory planning counts it.

    Sizes are rounded up to the alignment of their device, so that the peak of `live` is that of the program's plan
    (`MemoryPlan.body.peak`). Symbols have the values of `values`, else those of their hints.
    """

    program: Program
    values: Mapping[str, Number]

    @classmethod
    def of(cls, program: Program, values: Mapping[str, Number] | None = None) -> MemoryTrace:
        """Returns the trace of a program, for the values of symbols by name."""
        numbers = hints_with_fallback(program, values)
        for line in program.body.lines:
            if isinstance(line, Let) and line.symbol.name not in (values or {}):
                with suppress(ExpressionError, ArithmeticError, ValueError):  # then it has its hint
                    numbers[line.symbol.name] = evaluate(line.expr, numbers)
        return cls(program, numbers)

    @cached_property
    def ranges(self) -> tuple[LiveRange, ...]:
        """The live ranges of buffers: inputs, constants, allocations, results of operators, and pools as a whole."""
        return program_live_ranges(self.program)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The live bytes at each line, with the peak of the blocks and functions that it runs."""
        own = self._sums([(item.first, item.end, evaluate_size(item.size, self.values)) for item in self.ranges])
        rounded = self._sums([(item.first, item.end, self.bytes_of(item)) for item in self.ranges])
        total = live_bytes(self.program, self.values).at_line
        inner = [max(0, all_ - outer) for all_, outer in zip(total, own, strict=False)]
        return tuple([outer + nested for outer, nested in zip(rounded, inner, strict=False)])

    def bytes_of(self, item: LiveRange) -> int:
        """Returns the bytes of a buffer, rounded up."""
        spec = registered_spec(item.device.type)
        step = 1 if spec is None else spec.alignment
        return -(-evaluate_size(item.size, self.values) // step) * step

    def _sums(self, spans: Sequence[tuple[int, int, int]]) -> list[int]:
        """Returns the sums of spans (first, end, bytes) at each line, and 0 after the last."""
        changes = [0] * (len(self.program.body.lines) + 1)
        for first, end, size in spans:
            changes[first] += size
            changes[end] -= size
        sums, total = list[int](), 0
        for change in changes:
            total += change
            sums.append(total)
        return sums

    # --- Perfetto ---------------------------------------------------------------------------------------------------

    def perfetto(self) -> str:
        """Returns trace events as JSON, which ui.perfetto.dev and chrome://tracing open.

        A counter track has the live bytes, and one the bytes in use of each pool; with several devices, each has one. A
        slice for each line has its text and origin. A line takes a millisecond.
        """
        return json.dumps({"traceEvents": [*self._names(), *self._counters(), *self._slices()]})

    def _names(self) -> Iterator[dict[str, Any]]:
        title = f"fxwrap: program {self.program.name}"
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}
        yield {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "lines"}}

    def _counters(self) -> Iterator[dict[str, Any]]:
        yield from _counter("live bytes", [*self.live, 0])
        devices = dict.fromkeys([str(item.device) for item in self.ranges])
        for device in devices if len(devices) > 1 else ():
            spans = [(item.first, item.end, self.bytes_of(item)) for item in self.ranges if str(item.device) == device]
            yield from _counter(f"live bytes on {device}", self._sums(spans))
        for pool, spans in self._slices_of_pools().items():
            yield from _counter(f"bytes in use of {pool}", self._sums(spans))

    def _slices_of_pools(self) -> dict[str, list[tuple[int, int, int]]]:
        """Returns the spans of the buffers in each pool, from their slice to their last use."""
        slice_of: dict[str, str] = {}  # by the names of slices and of their views
        last: dict[str, int] = {}
        for position, line in enumerate(self.program.body.lines):
            for value in defined(line):
                base = line.alias_of(value)
                if isinstance(line, PoolSlice):
                    slice_of[value.name] = value.name
                elif base is not None and base.name in slice_of:
                    slice_of[value.name] = slice_of[base.name]
            last |= {slice_of[value.name]: position for value in used(line) if value.name in slice_of}
        spans: dict[str, list[tuple[int, int, int]]] = {}
        for position, line in enumerate(self.program.body.lines):
            if isinstance(line, PoolSlice):
                size = evaluate_size(line.result.tensor_type.storage_bytes, self.values)
                end = last.get(line.result.name, position) + 1
                spans.setdefault(line.pool.name, []).append((position, end, size))
        return spans

    def _slices(self) -> Iterator[dict[str, Any]]:
        for position, line in enumerate(self.program.body.lines):
            handle = "" if line.origin is None else line.origin.handle
            yield {
                "ph": "X", "pid": 1, "tid": 1, "name": handle or line.opcode, "cat": line.opcode,
                "ts": position * _LINE_US, "dur": _LINE_US,
                "args": {
                    "line": position, "text": print_line(line).partition("\n")[0], "origin": str(line.origin or ""),
                    "live bytes": self.live[position],
                },
            }  # fmt: skip

    # --- torch's memory visualiser ----------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Returns a memory snapshot, which pytorch.org/memory_viz and `torch.cuda._memory_viz` read.

        Its format, which torch defines, is a pickle of plain data; fxwrap only writes it. Each buffer is an allocation
        whose frames are its line and the lines of the model's source; a pool is one allocation. Devices are numbered in
        the order of their first buffers.
        """
        devices = list(dict.fromkeys([str(item.device) for item in self.ranges]))
        content = {
            "segments": [self._segment(number, device) for number, device in enumerate(devices)],
            "device_traces": [self._events(device) for device in devices],
            "allocator_settings": {},
            "external_annotations": [],
        }
        return pickle.dumps(content, protocol=4)

    def _events(self, device: str) -> list[dict[str, Any]]:
        origins = {value.name: line for line in self.program.body.lines for value in defined(line)}
        events: list[tuple[int, bool, dict[str, Any]]] = []
        address = _FIRST_ADDRESS
        for item in self.ranges:
            if str(item.device) != device:
                continue
            size = self.bytes_of(item)
            frames = self._frames(item, origins.get(item.name))
            event = {"addr": address, "size": size, "stream": 0, "frames": frames}
            events.append((item.first, True, {"action": "alloc", **event, "time_us": item.first * _LINE_US}))
            if item.owner is not MemoryOwner.CALLER or item.end < len(self.program.body.lines):
                for action in ("free_requested", "free_completed"):
                    events.append((item.end, False, {"action": action, **event, "time_us": item.end * _LINE_US}))
            address += max(size, 512)
        return [event for _, _, event in sorted(events, key=lambda item: item[:2])]

    def _segment(self, number: int, device: str) -> dict[str, Any]:
        total = sum([max(self.bytes_of(item), 512) for item in self.ranges if str(item.device) == device])
        return {
            "device": number, "address": _FIRST_ADDRESS, "total_size": total, "allocated_size": 0, "active_size": 0,
            "requested_size": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [],
            "blocks": [{"address": _FIRST_ADDRESS, "size": total, "requested_size": 0, "state": "inactive",
                        "frames": []}],
        }  # fmt: skip

    def _frames(self, item: LiveRange, line: LineBase | None) -> list[dict[str, Any]]:
        names = ", ".join([f"%{name}" for name in item.names])
        frames = [{"name": names, "filename": f"@{self.program.name}", "line": item.first}]
        for source in () if line is None or line.origin is None else line.origin.sources:
            frames.append({"name": source.operator or source.node, "filename": source.file, "line": source.line})
        return frames


def _counter(name: str, values: Sequence[int]) -> Iterator[dict[str, Any]]:
    before = -1
    for position, value in enumerate(values):
        if value != before:
            yield {"ph": "C", "pid": 1, "name": name, "ts": position * _LINE_US, "args": {"bytes": value}}
        before = value

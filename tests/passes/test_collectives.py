"""Bucketing and overlap of collectives: one golden file a rule, limits of size and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import fxwrap
from fxwrap.devices import CPU
from fxwrap.lines import StartCollective
from fxwrap.passes.bucket_collectives import bucket_collectives
from fxwrap.passes.overlap_collectives import overlap_collectives
from fxwrap.wrapper_ir import Program, live_bytes
from tests.support.golden import check_golden, read_section, sections

GOLDENS = Path(__file__).parent / "golden"
PASSES: dict[str, Callable[[Program], Program]] = {
    "bucket_collectives": lambda program: bucket_collectives(program, {"cpu": CPU}),
    "overlap_collectives": overlap_collectives,
}
GATHER = "_c10d_functional.all_gather_into_tensor.default"
RULES = [(name, path.stem) for name in PASSES for path in sorted(GOLDENS.glob(f"{name}_*.txt"))]


def input_of(rule: str) -> Program:
    return fxwrap.verify(fxwrap.parse(read_section(GOLDENS / f"{rule}.txt", "input")))


def starts(program: Program) -> int:
    return sum(isinstance(line, StartCollective) for line in program.lines())


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_golden_text(name: str, rule: str, update_golden: bool) -> None:
    path = GOLDENS / f"{rule}.txt"
    program = input_of(rule)
    result = fxwrap.verify(PASSES[name](program))
    text = sections([("input", read_section(path, "input")), (f"after {name}", str(result))])
    check_golden(path, text, update_golden)
    if name == "overlap_collectives":
        assert live_bytes(result).peak <= live_bytes(program).peak
        assert starts(result) == starts(program)


def test_golden_files_exist() -> None:
    assert len(RULES) >= 8


def test_memory_of_padded_parts_does_not_count_for_buckets() -> None:
    """Ranks that pad nothing bucket alike: with their operands these results would exceed the peak and the limit."""
    names = range(4)
    lines = "".join(
        f"  %p{n} = extern.call @aten.constant_pad_nd.default(%a{n}, [0, 1]) : f32[4]@cpu\n"
        f'  %g{n} = collective.start @{GATHER}(%p{n}, 2, "0") group="0" : f32[8]@cpu\n'
        f'  %w{n} = collective.wait(%g{n}) group="0" : f32[8]@cpu\n'
        f"  memory.free(%p{n})\n"
        f"  %s{n} = extern.call @aten.sum.default(%w{n}) : f32[]@cpu\n"
        f"  memory.free(%g{n})\n"
        for n in names
    )
    inputs, results = [", ".join([item.format(n) for n in names]) for item in ("%a{}: borrowed f32[3]@cpu", "%s{}")]
    program = fxwrap.verify(fxwrap.parse(f"program @p({inputs}) {{\n{lines}  control.return({results})\n}}\n"))
    spec = dataclasses.replace(
        CPU, collectives=dataclasses.replace(CPU.collectives, latency_s=128 / 10, bytes_per_s=1.0)
    )
    assert starts(fxwrap.verify(bucket_collectives(program, {"cpu": spec}))) == 1


def test_a_bucket_has_at_most_the_bytes_of_the_device() -> None:
    program = input_of("bucket_collectives_gathers_are_coalesced")  # results of 32 bytes each
    for limit, expected in ((31, 2), (63, 2), (64, 1)):
        spec = dataclasses.replace(
            CPU, collectives=dataclasses.replace(CPU.collectives, latency_s=limit / 10, bytes_per_s=1.0)
        )
        assert spec.collectives.bucket_bytes == limit
        assert starts(bucket_collectives(program, {"cpu": spec})) == expected
        default = {"cpu": dataclasses.replace(CPU, collectives=dataclasses.replace(CPU.collectives, bytes_per_s=1e9))}
        assert starts(bucket_collectives(program, default, {"0": (limit / 10, 1.0)})) == expected  # of the group
        assert starts(bucket_collectives(program, default, {"1": (limit / 10, 1.0)})) == 1
    assert bucket_collectives(program, {}) is program
    never = {"cpu": dataclasses.replace(CPU, collectives=dataclasses.replace(CPU.collectives, bytes_per_s=0.0))}
    assert bucket_collectives(program, never, {"0": (1.0, 1e9)}) is program


def test_gathers_without_a_coalesced_form_stay() -> None:
    program = input_of("bucket_collectives_gathers_are_coalesced")
    spec = dataclasses.replace(CPU, collectives=dataclasses.replace(CPU.collectives, coalesced=frozenset()))
    assert bucket_collectives(program, {"cpu": spec}) is program


def test_complex_tensors_are_not_in_buckets() -> None:
    """Coalesced forms do not take them."""
    text = read_section(GOLDENS / "bucket_collectives_gathers_are_coalesced.txt", "input").replace("f32", "c64")
    program = fxwrap.verify(fxwrap.parse(text))
    assert "c64" in text and bucket_collectives(program, {"cpu": CPU}) is program


MEMORY = """program @p(%x: owned f32[{size}]@cpu, %a: borrowed f32[512]@cpu) {{
  %y = extern.call @aten.sin.default(%x) : f32[{size}]@cpu
  memory.free(%x)
  %s = extern.call @aten.sum.default(%y) : f32[]@cpu
  memory.free(%y)
  %g = collective.start @_c10d_functional.all_gather_into_tensor.default(%a, 2, "0") group="0" : f32[1024]@cpu
  %wg = collective.wait(%g) group="0" : f32[1024]@cpu
  %t = extern.call @aten.mul.Tensor(%wg, %s) : f32[1024]@cpu
  memory.free(%g)
  memory.free(%s)
  control.return(%t)
}}
"""


def test_prefetch_stays_within_the_peak_and_the_slack() -> None:
    for size, slack, moves in ((1024, 0.0, False), (1024, 0.5, True), (8, 0.0, True)):
        program = fxwrap.verify(fxwrap.parse(MEMORY.format(size=size)))
        result = fxwrap.verify(overlap_collectives(program, slack=slack))
        assert isinstance(result.body.lines[0], StartCollective) == moves
        assert live_bytes(result).peak <= live_bytes(program).peak * (1 + slack)


def test_the_line_at_the_peak_runs_beside_a_later_collective() -> None:
    program = input_of("overlap_collectives_the_line_at_the_peak_runs_beside_a_later_collective")
    activation = 256 * 8 * 4
    assert live_bytes(overlap_collectives(program)).peak <= live_bytes(program).peak - activation + 1024

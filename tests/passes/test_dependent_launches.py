"""Programmatic dependent launches: which launches may be dependent, and what their kernels read before they wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxwrap.devices import CUDA, DeviceSpec
from fxwrap.lines import CORE_LINES, Launch
from fxwrap.passes.dependent_launches import insert_dependent_launches
from fxwrap.printers import Signal, pipelined_bytes
from fxwrap.wrapper_ir import KernelDefinition, Program, early_reads, parse_program, print_program, verify

SOURCE = """import triton
import triton.language as tl


@triton.jit
def fxwrap_add(in0_ptr, in1_ptr, out0_ptr, X_BLOCK: tl.constexpr):
    p0 = tl.program_id(0) * X_BLOCK + tl.arange(0, X_BLOCK)
    in0 = tl.load(in0_ptr + p0)
    in1 = tl.load(in1_ptr + p0)
    tl.store(out0_ptr + p0, in0 + in1)
"""
F = "f32[64]@cuda:0"


def program_of(lines: str, language: str = "triton", functions: str = "") -> Program:
    """A program of launches of @k, with weights %v and %w and a mutable cache %c."""
    inputs = f"%x: borrowed {F}, %v: borrowed {F}, %w: borrowed {F}, %c: mutable {F}, %g: borrowed f32[64]@cuda:1"
    body = "".join([f"  {line.strip()}\n" for line in lines.strip().splitlines()])
    options = (("X_BLOCK", 64), ("num_warps", 4))
    kernels = [KernelDefinition(name, language, SOURCE, ("*f32",) * 3, options) for name in ("k", "other")]
    program = parse_program(f"program @p({inputs}) {{\n{body}}}\n{functions}", CORE_LINES)
    return program.replace(kernels=tuple(kernels))


def transformed(lines: str, language: str = "triton", functions: str = "") -> Program:
    """The program with dependent launches, which is valid and has a text that parses to it."""
    program = verify(insert_dependent_launches(verify(program_of(lines, language, functions)), {"cuda": CUDA}))
    assert insert_dependent_launches(program, {"cuda": CUDA}) is program
    assert parse_program(print_program(program), CORE_LINES) == program
    return program


def dependent(program: Program) -> list[bool]:
    return [line.dependent for line in program.lines() if isinstance(line, Launch)]


def early(program: Program, name: str = "k") -> tuple[int, ...] | None:
    return early_reads(program.kernel(name))


CHAIN = f"""%a = memory.alloc() : {F}
kernel.launch @k(%x, %w) outs=(%a)
%b = memory.alloc() : {F}
kernel.launch @k(%a, %w) outs=(%b)
memory.free(%a)
%y = memory.alloc() : {F}
kernel.launch @k(%b, %v) outs=(%y)
memory.free(%b)
control.return(%y)"""


def test_launches_after_a_launch_are_dependent_and_read_weights_early() -> None:
    program = transformed(CHAIN)
    assert dependent(program) == [False, True, True]
    assert early(program) == (1,)
    assert program.kernel("k").source.count("wait_for_launches()") == 2  # the helper and its call
    assert "in1_early = tl.load(in1_ptr + p0)\n    wait_for_launches()" in program.kernel("k").source
    assert early(program, "other") is None


@pytest.mark.parametrize(
    ("first", "before", "after", "signal"),
    [
        (1, 1, 4000, Signal.AT_START),
        (1, 4000, 1, Signal.AT_START),
        (4000, 1, 4000, Signal.AFTER_WAIT),
        (4000, 1, 1, Signal.AFTER_WAIT),
        (400, 1, 300, Signal.AT_START),
        (400, 100, 300, Signal.AT_START),
        (600, 1, 500, Signal.AFTER_WAIT),
        (4000, 4000, 1, Signal.AFTER_WAIT),
        ("s0", 1, 1, Signal.AFTER_WAIT),
        (1, 4000, 4000, Signal.AT_END),
        (1, 4000, 10_000, Signal.AT_START),
        (4000, 4000, 10_000, Signal.AFTER_WAIT),
        (1, "s0", 1, Signal.AT_END),
        (1, 4000, "s0", Signal.AT_END),
    ],
)
def test_the_next_kernel_starts_early_where_its_programs_spread(
    first: int | str, before: int | str, after: int | str, signal: Signal
) -> None:
    """Programs of a launch, of the ones before and after it, and when its kernel signals."""
    lines = f"""%a = memory.alloc() : {F}
        kernel.launch @other(%x, %w) outs=(%a) grid=(1, 1, 1)
        kernel.launch @other(%x, %w) outs=(%a) grid=({first}, 1, 1)
        kernel.launch @k(%a, %w) outs=(%c) grid=({before}, 1, 1)
        %y = memory.alloc() : {F}
        kernel.launch @other(%a, %v) outs=(%y) grid=({after}, 1, 1)
        memory.free(%a)
        control.return(%y)"""
    source = insert_dependent_launches(program_of(lines), {"cuda": CUDA}).kernel("k").source
    assert signal_of(source) is signal


LOOP = """import triton
import triton.language as tl


@triton.jit
def fxwrap_sum(in0_ptr, in1_ptr, out0_ptr, X_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, LOOP_STAGES: tl.constexpr):
    p0 = tl.program_id(0) * X_BLOCK + tl.arange(0, X_BLOCK)[:, None]
    total = tl.zeros((X_BLOCK, 1), tl.float32)
    for start in tl.range(0, 4096, R_BLOCK, num_stages=LOOP_STAGES):
        r0 = start + tl.arange(0, R_BLOCK)[None, :]
        if start < 2048:
            row = tl.load(in0_ptr + p0 * 4096 + r0)
        else:
            row = tl.load(in1_ptr + p0 * 4096 + r0)
        total += tl.sum(row, 1, keep_dims=True)
    scale = tl.load(in1_ptr + p0)
    tl.store(out0_ptr + p0, total * scale)
"""


def signal_beside(lines: str, other: KernelDefinition, spec: DeviceSpec = CUDA) -> Signal:
    """The signal of kernel `k` in a program whose other kernel is `other`."""
    program = program_of(lines)
    program = insert_dependent_launches(program.replace(kernels=(program.kernel("k"), other)), {"cuda": spec})
    return signal_of(program.kernel("k").source)


@pytest.mark.parametrize(
    ("after", "signal"), [(264, Signal.AT_START), (400, Signal.AFTER_WAIT), (528, Signal.AT_START)]
)
def test_launches_that_start_early_need_room_in_shared_memory(after: int, signal: Signal) -> None:
    """Four programs fit a processor, of which two are of a launch before; the parts of more than four are small."""
    options = (("LOOP_STAGES", 4), ("R_BLOCK", 128), ("X_BLOCK", 16), ("num_warps", 1))
    assert pipelined_bytes(LOOP, ("*f32",) * 3, options) == 3 * 2 * 16 * 128 * 4
    assert pipelined_bytes(LOOP, ("*f32",) * 3, (*options[1:], ("LOOP_STAGES", 1))) == 0
    lines = f"""%a = memory.alloc() : {F}
        kernel.launch @k(%x, %w) outs=(%a)
        kernel.launch @other(%x, %w) outs=(%a) grid=(264, 1, 1)
        kernel.launch @k(%a, %w) outs=(%c)
        %y = memory.alloc() : {F}
        kernel.launch @other(%a, %v) outs=(%y) grid=({after}, 1, 1)
        memory.free(%a)
        control.return(%y)"""
    assert signal_beside(lines, KernelDefinition("other", "triton", LOOP, ("*f32",) * 3, options)) is signal


@pytest.mark.parametrize(
    ("after", "registers", "of_processor", "signal"),
    [(264, 256, 65536, Signal.AT_START), (264, 128, 65536, Signal.AT_END), (264, 170, 65536, Signal.AT_END),
     (396, 170, 65536, Signal.AT_START), (264, 128, 32768, Signal.AT_START), (264, 256, 131072, Signal.AT_END)],
)  # fmt: skip
def test_a_launch_that_takes_all_registers_in_one_wave_starts_early(
    after: int, registers: int, of_processor: int, signal: Signal
) -> None:
    """Wherever a program of the launch before ends, there is room for one: no processor gets more than another."""
    options = (("X_BLOCK", 64), ("maxnreg", registers), ("num_warps", 4))
    lines = f"""%a = memory.alloc() : {F}
        kernel.launch @k(%x, %w) outs=(%a) grid=(896, 1, 1)
        %y = memory.alloc() : {F}
        kernel.launch @other(%a, %v) outs=(%y) grid=({after}, 1, 1)
        memory.free(%a)
        control.return(%y)"""
    other = KernelDefinition("other", "triton", SOURCE, ("*f32",) * 3, options)
    assert signal_beside(lines, other, replace(CUDA, registers=of_processor)) is signal


@pytest.mark.parametrize(
    ("after", "registers", "signal"),
    [(300, 64, Signal.AT_START), (300, 128, Signal.AFTER_WAIT), (600, 128, Signal.AT_START)],
)
def test_launches_that_small_ones_let_start_need_registers(after: int, registers: int, signal: Signal) -> None:
    """Those of the large launch count, too, unless it has many programs: these start where others end."""
    options = (("X_BLOCK", 64), ("maxnreg", registers), ("num_warps", 4))
    lines = f"""%a = memory.alloc() : {F}
        kernel.launch @other(%x, %w) outs=(%a) grid=(300, 1, 1)
        kernel.launch @other(%x, %w) outs=(%a) grid=(300, 1, 1)
        kernel.launch @k(%a, %w) outs=(%c)
        kernel.launch @k(%a, %w) outs=(%c)
        %y = memory.alloc() : {F}
        kernel.launch @other(%a, %v) outs=(%y) grid=({after}, 1, 1)
        memory.free(%a)
        control.return(%y)"""
    assert signal_beside(lines, KernelDefinition("other", "triton", SOURCE, ("*f32",) * 3, options)) is signal


MUCH, LITTLE = 4096, 1024
"""Elements of a program of four warps, so that a thread loads 128 and 32 bytes before it waits."""


@pytest.mark.parametrize(
    ("after", "block", "signal"),
    [(528, MUCH, Signal.AT_START), (4000, MUCH, Signal.AT_START), (500, MUCH, Signal.AFTER_WAIT),
     (4000, LITTLE, Signal.AFTER_WAIT)],
)  # fmt: skip
def test_many_programs_that_load_much_early_start_beside_others(after: int, block: int, signal: Signal) -> None:
    """Behind a small launch, which they let start at once, although registers do not suffice for all of them."""
    options = (("X_BLOCK", block), ("num_warps", 4))
    lines = f"""%a = memory.alloc() : {F}
        kernel.launch @other(%x, %w) outs=(%a) grid=(4000, 1, 1)
        kernel.launch @k(%a, %w) outs=(%c)
        %y = memory.alloc() : {F}
        kernel.launch @other(%c, %v) outs=(%y) grid=({after}, 1, 1)
        memory.free(%a)
        control.return(%y)"""
    assert signal_beside(lines, KernelDefinition("other", "triton", SOURCE, ("*f32",) * 3, options)) is signal


@pytest.mark.parametrize(
    ("grids", "warps", "block", "limit", "registers"),
    [((384, 384), 4, MUCH, 128, 168), ((256, 256), 4, MUCH, 128, 255), ((264, 264), 4, MUCH, 168, 255),
     ((128, 128), 4, MUCH, 128, 128), ((600, 600), 4, MUCH, 128, 128), ((384, 256), 4, MUCH, 128, 128),
     ((384, 384), 4, LITTLE, 128, 128), ((384, 384), 4, MUCH, 0, 0), ((792, 792), 2, MUCH // 2, 128, 168),
     ((896, 896), 2, MUCH // 2, 128, 128)],
)  # fmt: skip
def test_programs_of_one_wave_take_all_registers(
    grids: tuple[int, int], warps: int, block: int, limit: int, registers: int
) -> None:
    """Those of a processor's part, if they load much early: else they run beside programs of other launches.

    A processor runs a multiple of four warps: it has room for six or eight programs of two warps, not for seven.
    """
    options = [("X_BLOCK", block), *([("maxnreg", limit)] if limit else []), ("num_warps", warps)]
    lines = f"""%a = memory.alloc() : {F}
        kernel.launch @k(%x, %w) outs=(%a) grid=(896, 1, 1)
        kernel.launch @other(%a, %w) outs=(%c) grid=({grids[0]}, 1, 1)
        %y = memory.alloc() : {F}
        kernel.launch @other(%c, %v) outs=(%y) grid=({grids[1]}, 1, 1)
        memory.free(%a)
        control.return(%y)"""
    program = program_of(lines)
    other = KernelDefinition("other", "triton", SOURCE, ("*f32",) * 3, tuple(sorted(options)))
    program = insert_dependent_launches(program.replace(kernels=(program.kernel("k"), other)), {"cuda": CUDA})
    assert dict(program.kernel("other").options).get("maxnreg", 0) == registers
    assert registers == limit or signal_of(program.kernel("k").source) is Signal.AT_START


def test_a_kernel_signals_when_all_its_launches_may() -> None:
    """The first of a chain may at its start, the second, behind a large one, after its wait."""
    lines = f"""%a = memory.alloc() : {F}
        kernel.launch @k(%x, %w) outs=(%a)
        kernel.launch @other(%a, %w) outs=(%c) grid=(4000, 1, 1)
        kernel.launch @k(%c, %w) outs=(%a)
        %y = memory.alloc() : {F}
        kernel.launch @other(%a, %v) outs=(%y) grid=(4000, 1, 1)
        memory.free(%a)
        control.return(%y)"""
    program = insert_dependent_launches(program_of(lines), {"cuda": CUDA})
    assert [signal_of(program.kernel(name).source) for name in ("k", "other")] == [Signal.AFTER_WAIT, Signal.AT_START]


def signal_of(source: str) -> Signal:
    """When a waiting kernel lets the next one start."""
    before, after = source[source.rindex("@triton.jit") :].split("    wait_for_launches()\n")
    if "    launch_dependents()\n" in before:
        return Signal.AT_START
    return Signal.AFTER_WAIT if after.startswith("    launch_dependents()\n") else Signal.AT_END


def test_other_devices_and_languages_are_unchanged() -> None:
    for language in ("user_triton", "cpp"):
        program = program_of(CHAIN, language)
        assert insert_dependent_launches(program, {"cuda": CUDA}) is program
    program = program_of(CHAIN)
    assert insert_dependent_launches(program, {"cpu": CUDA}) is program


def test_what_a_chain_writes_is_not_read_early() -> None:
    """Also through views, and memory before the chain may have been written."""
    program = transformed(f"""kernel.launch @k(%x, %w) outs=(%c)
        %half = memory.view(%c) : f32[64]@cuda:0
        %y = memory.alloc() : {F}
        kernel.launch @k(%w, %half) outs=(%y)
        control.return(%y)""")
    assert dependent(program) == [False, True] and early(program) == (0,)
    program = transformed(f"""extern.mutate @aten.mul_.Scalar(%c, 2.0) writes=(%c)
        %a = memory.alloc() : {F}
        kernel.launch @k(%x, %w) outs=(%a)
        %y = memory.alloc() : {F}
        kernel.launch @k(%a, %c) outs=(%y)
        memory.free(%a)
        control.return(%y)""")
    assert dependent(program) == [False, True] and early(program) == (1,)


BETWEEN = {
    "call": "%t = extern.call @aten.relu.default(%x) : f32[64]@cuda:0\nmemory.free(%t)",
    "mutation": "extern.mutate @aten.mul_.Scalar(%c, 2.0) writes=(%c)",
    "zeros": "%t = memory.workspace() zeroed=true : u8[64]@cuda:0\nmemory.free(%t)",
    "device": 'device.enter() device="cuda:0"\ndevice.exit() device="cuda:0"',
    "empty grid": "kernel.launch @k(%v, %w) outs=(%c) grid=(0, 1, 1)",
    "other device": "%t = memory.alloc() : f32[64]@cuda:1\nkernel.launch @k(%g, %g) outs=(%t)\nmemory.free(%t)",
}


@pytest.mark.parametrize("name", BETWEEN)
def test_chains_end_at_other_work(name: str) -> None:
    lines = CHAIN.replace("%b = memory.alloc", f"{BETWEEN[name]}\n%b = memory.alloc", 1)
    program = transformed(lines)
    second = [line for line in program.lines() if isinstance(line, Launch) and line.outs[0].name == "b"]
    if name == "empty grid":
        assert second[0].dependent and early(program) == (1,)  # the first launch has started in any case
    else:
        assert not second[0].dependent


def test_a_chain_begins_with_a_launch_that_is_never_empty() -> None:
    lines = CHAIN.replace("outs=(%a)", "outs=(%a) grid=(0, 1, 1)", 1)
    assert dependent(transformed(lines)) == [False, False, True]


def test_blocks_and_functions_have_chains_of_their_own() -> None:
    function = f"""function @f(%p: {F}, %q: {F}) {{
  %d = memory.alloc() : {F}
  kernel.launch @k(%p, %q) outs=(%d)
  %e = memory.alloc() : {F}
  kernel.launch @k(%d, %q) outs=(%e)
  memory.free(%d)
  control.yield(%e)
}}
"""
    program = transformed(
        f"""%a = memory.alloc() : {F}
        kernel.launch @k(%x, %w) outs=(%a)
        %y = control.call @f(%a, %w) : {F}
        memory.free(%a)
        control.return(%y)""",
        functions=function,
    )
    assert dependent(program) in ([False, False, True], [False, True, False]) and early(program) == (1,)

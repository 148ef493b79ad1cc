"""The canonical form and the key of programs: blind to names, origins and the place of frees, to nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings

from fxwrap.lines import CORE_LINES, Free
from fxwrap.wrapper_ir import (
    Block,
    Origin,
    Program,
    Source,
    canonicalize_program,
    parse_program,
    print_program,
    program_key,
    verify,
)
from tests.support.long_form import sample_size
from tests.support.samples import EXTENSIONS, SAMPLES
from tests.support.strategies.programs import RandomProgram, random_programs


def _parse(text: str) -> Program:
    return parse_program(text, (*CORE_LINES, *EXTENSIONS))


def _rename_in(line: str) -> str:
    line = re.sub(r"%(\w+)", r"%renamed_\1", line)
    return re.sub(r"(?<!dtype\()\b(uf|[sunfb])(\d+)\b(?!\[)", r"\g<1>7\2", line)


def _renamed(program: Program) -> Program:
    """The same program with other names of values, symbols, functions and kernels."""
    text, mark, kernels = print_program(program).partition("\nkernel @")
    lines = [line if "note.comment" in line else _rename_in(line) for line in text.split("\n")]
    text = "\n".join(lines) + mark + kernels
    for name in [kernel.name for kernel in program.kernels] + [name for name, _ in program.functions]:
        text = re.sub(rf"@{name}\b", f"@other_{name}", text)
    return _parse(text)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_canonical_form_verifies_and_is_its_own(name: str) -> None:
    form = canonicalize_program(SAMPLES[name].program())
    verify(form)
    assert canonicalize_program(form) == form
    assert print_program(canonicalize_program(form)) == print_program(form)


@pytest.mark.parametrize("name", SAMPLES)
def test_renaming_preserves_form_and_key(name: str) -> None:
    program = SAMPLES[name].program()
    other = _renamed(program)
    assert other != program or name == "empty"
    assert print_program(canonicalize_program(other)) == print_program(canonicalize_program(program))
    assert program_key(other) == program_key(program)


@settings(max_examples=sample_size(100))
@given(random_programs())
def test_the_canonical_form_of_a_random_program_verifies(random: RandomProgram) -> None:
    form = canonicalize_program(random.program)
    verify(form)
    assert canonicalize_program(form) == form


@settings(max_examples=sample_size(50))
@given(random_programs())
def test_renaming_preserves_the_key_of_random_programs(random: RandomProgram) -> None:
    assert program_key(_renamed(random.program)) == program_key(random.program)


def test_origins_are_dropped() -> None:
    program = SAMPLES["mlp"].program()
    marked = [line.replace(origin=Origin((Source("node"),))) for line in program.body.lines]
    other = program.replace(body=Block((), tuple(marked)))
    assert program_key(other) == program_key(program)
    assert all(line.origin is None for line in canonicalize_program(other).lines())


def test_a_free_moves_to_the_last_use() -> None:
    program = _parse(
        """
program @frees(%x: borrowed f32[4]@cpu, %unused: owned f32[4]@cpu) {
  %b = extern.call @aten.sin.default(%x) : f32[4]@cpu
  %a = extern.call @aten.cos.default(%x) : f32[4]@cpu
  %view = memory.view(%b) : f32[2, 2]@cpu
  %c = extern.call @aten.add.Tensor(%a, %view) : f32[4]@cpu
  note.comment() text="late"
  memory.free(%unused)
  memory.free(%a)
  memory.free(%b)
  control.return(%c)
}
"""
    )
    assert print_program(canonicalize_program(program)) == (
        """\
program @program(%v0: borrowed f32[4]@cpu, %v1: owned f32[4]@cpu) {
  memory.free(%v1)
  %v2 = extern.call @aten.sin.default(%v0) : f32[4]@cpu
  %v3 = extern.call @aten.cos.default(%v0) : f32[4]@cpu
  %v4 = memory.view(%v2) : f32[2, 2]@cpu
  %v5 = extern.call @aten.add.Tensor(%v3, %v4) : f32[4]@cpu
  memory.free(%v2)
  memory.free(%v3)
  note.comment() text="late"
  control.return(%v5)
}
"""
    )


def test_collective_operands_are_freed_after_the_wait() -> None:
    program = _parse(
        """
program @flight(%x: borrowed f32[4]@cpu) {
  %a = extern.call @aten.cos.default(%x) : f32[4]@cpu
  %s = collective.start @_c10d_functional.all_reduce.default(%a, "sum", "0") group="0" : f32[4]@cpu
  %r = collective.wait(%s) group="0" : f32[4]@cpu
  %b = extern.call @aten.sin.default(%r) : f32[4]@cpu
  memory.free(%a)
  memory.free(%s)
  control.return(%b)
}
"""
    )
    lines = verify(canonicalize_program(program)).body.lines
    assert [line.root.name for line in lines if isinstance(line, Free)] == ["v1", "v2"]
    assert [type(line).opcode for line in lines[2:4]] == ["collective.wait", "memory.free"]


def test_equal_kernels_are_merged_and_unused_ones_removed() -> None:
    program = SAMPLES["mlp"].program()
    (kernel,) = program.kernels
    twin = type(kernel)("twin", kernel.language, kernel.source, kernel.signature, kernel.options)
    unused = type(kernel)("unused", kernel.language, kernel.source + "\n", kernel.signature, kernel.options)
    more = program.replace(kernels=(unused, twin, kernel))
    assert canonicalize_program(more) == canonicalize_program(program)
    assert [item.name for item in canonicalize_program(more).kernels] == ["kernel0"]


CHANGES = {
    "element type": ("mlp", "%buf1 = memory.alloc() : f32[s0, 4]", "%buf1 = memory.alloc() : i32[s0, 4]"),
    "stride": ("mlp", "f32[s0, 4 | 1, s0]", "f32[s0, 4]"),
    "attribute": ("scatter_and_index_put", "include_self=false", "include_self=true"),
    "operator": ("owned_inputs", "aten.exp.out", "aten.sin.out"),
    "operand": ("exact_scalars", "9007199254740993", "9007199254740992"),
    "float operand": ("exact_scalars", "1e-300", "1e-301"),
    "ownership": ("mutated_inputs_and_constants", "%seen: mutable", "%seen: owned"),
    "constant": ("mutated_inputs_and_constants", "%weight: f32", "%weight: mutable f32"),
    "range": ("mlp", "range=(2, 4096)", "range=(2, 4098)"),
    "hint": ("mlp", "hint=6", "hint=8"),
    "divisor": ("mlp", "divisible=2", "divisible=3"),
    "header": ("mlp", "emitter=python", "emitter=cpp"),
    "operand order": ("shared_function", "@layer(%two_1, %two_w)", "@layer(%two_x, %two_w)"),
    "effects": ("types", 'communicate("0")', 'communicate("1")'),
}


@pytest.mark.parametrize("what", CHANGES)
def test_any_other_change_changes_the_key(what: str) -> None:
    name, before, after = CHANGES[what]
    text = SAMPLES[name].full_text()
    assert before in text
    assert program_key(_parse(text.replace(before, after))) != program_key(_parse(text))


@pytest.mark.parametrize("change", [{"source": "other"}, {"language": "cuda"}, {"options": (("BLOCK", 8),)}])
def test_another_kernel_changes_the_key(change: dict[str, object]) -> None:
    program = SAMPLES["mlp"].program()
    (kernel,) = program.kernels
    fields = {name: getattr(kernel, name) for name in ("name", "language", "source", "signature", "options")}
    changed = type(kernel)(**{**fields, **change})
    assert changed.hash != kernel.hash
    assert program_key(program.replace(kernels=(changed,))) != program_key(program)


def test_options_and_target_are_part_of_the_key() -> None:
    program = SAMPLES["mlp"].program()
    keys = {
        program_key(program),
        program_key(program, "a"),
        program_key(program, "", "a"),
        program_key(program, "a", "a"),
    }
    assert len(keys) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)


def test_constant_payloads_are_preserved() -> None:
    program = SAMPLES["mutated_inputs_and_constants"].program()
    tensors = canonicalize_program(program).store.tensors
    assert [tensors[name] is tensor for name, tensor in zip(("v3", "v4", "v5"), program.store.tensors.values())] == [
        True
    ] * 3


FUNCTIONS = """
program @p(%x: borrowed f32[4]@cpu) {
  %a = control.call @second(%x) : f32[4]@cpu
  %b = control.call @first(%x) : f32[4]@cpu
  control.return(%a, %b)
}
function @first(%f: f32[4]@cpu) {
  %f1 = extern.call @aten.sin.default(%f) : f32[4]@cpu
  control.yield(%f1)
}
function @inner(%i: f32[4]@cpu) {
  %i1 = extern.call @aten.cos.default(%i) : f32[4]@cpu
  control.yield(%i1)
}
function @unused(%u: f32[4]@cpu) {
  %u1 = extern.call @aten.exp.default(%u) : f32[4]@cpu
  control.yield(%u1)
}
function @second(%s: f32[4]@cpu) {
  %s1 = control.call @inner(%s) : f32[4]@cpu
  control.yield(%s1)
}
"""


def test_functions_are_in_call_order_and_unused_ones_removed() -> None:
    program = verify(_parse(FUNCTIONS))
    canonical = verify(canonicalize_program(program))
    targets = [block.lines[0].target if hasattr(block.lines[0], "target") else "" for _, block in canonical.functions]
    assert targets == ["aten.cos.default", "", "aten.sin.default"]
    functions = dict(program.functions)
    other = program.replace(functions=tuple([(name, functions[name]) for name in ("inner", "second", "first")]))
    assert program_key(verify(other)) == program_key(program)

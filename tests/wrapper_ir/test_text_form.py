"""The text form: every program reads back equal, and every line's docstring shows a line of it."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from hypothesis import given, settings

from fxwrap.lines import CORE_LINES
from fxwrap.torch_compat import DTYPE_NAMES
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Origin,
    Program,
    ScalarType,
    Source,
    TensorType,
    Value,
    parse_program,
    print_literal,
    print_program,
    print_type,
    verify,
)
from tests.support.long_form import sample_size
from tests.support.samples import EXTENSIONS, SAMPLES
from tests.support.strategies.programs import RandomProgram, random_programs

ALL_LINES = (*CORE_LINES, *EXTENSIONS)


def parse(text: str) -> Program:
    return parse_program(text, ALL_LINES)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_round_trip(name: str) -> None:
    program = SAMPLES[name].program()
    text = print_program(program)
    again = parse(text)
    assert again == program
    assert print_program(again) == text


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_verifies(name: str) -> None:
    assert verify(SAMPLES[name].program()) is SAMPLES[name].program()


def test_samples_hold_two_instances_of_every_line() -> None:
    counts = dict.fromkeys(ALL_LINES, 0)
    for sample in SAMPLES.values():
        for line in sample.program().lines():
            counts[type(line)] += 1
    assert {cls.opcode: count for cls, count in counts.items() if count < 2} == {}


@settings(max_examples=sample_size(100))
@given(random_programs())
def test_random_programs_round_trip_and_verify(random: RandomProgram) -> None:
    program = random.program
    assert parse(print_program(verify(program))) == program


def _example(cls: type[LineBase]) -> str:
    """The text after `Example:` in a docstring: in back quotes, or as an indent_statements block."""
    doc = inspect.getdoc(cls)
    assert doc is not None and "Example:" in doc, f"{cls.__name__} has no example"
    after = doc.split("Example:", 1)[1]
    inline = re.fullmatch(r"\s*`([^`]+)`\s*", after)
    return inline[1] if inline else inspect.cleandoc(after)


def _program_around(line: str) -> str:
    """A program in which the operands of a line are inputs: enough to parse it."""
    own = set(re.findall(r"%(\w+)", line.partition("=")[0])) if re.match(r"\s*[%\[]", line) else set()
    own |= set(re.findall(r"%(\w+):", line)) | set(re.findall(r"(?m)^\s+%(\w+) =", line))
    inputs = sorted(set(re.findall(r"%(\w+)", line)) - own)
    types = {"done": "opaque<Event>", "flag": "bool[]@cpu", "index": "i64[4]@cpu"}
    declared = ", ".join(f"%{name}: borrowed {types.get(name, 'f32[4, 8]@cpu')}" for name in inputs)
    return f"program @example({declared}) {{\n{line}\n}}\n"


@pytest.mark.parametrize("cls", ALL_LINES, ids=lambda cls: cls.opcode)
def test_a_docstring_holds_one_example_of_its_line(cls: type[LineBase]) -> None:
    program = parse(_program_around(_example(cls)))
    (line,) = program.body.lines
    assert type(line) is cls
    assert parse(print_program(program)) == program


def test_every_element_type_of_torch_has_a_name() -> None:
    dtypes = {item for item in vars(torch).values() if isinstance(item, torch.dtype)}
    assert dtypes == set(DTYPE_NAMES)
    assert len(set(DTYPE_NAMES.values())) == len(DTYPE_NAMES)


def test_a_type_omits_defaults() -> None:
    device = torch.device("cuda:1")
    assert print_type(TensorType(torch.float32, (4, 8), (8, 1), device)) == "f32[4, 8]@cuda:1"
    assert print_type(TensorType(torch.float32, (4, 8), (1, 4), device)) == "f32[4, 8 | 1, 4]@cuda:1"
    assert print_type(TensorType(torch.float32, (4, 8), (8, 1), device, 3)) == "f32[4, 8 | | 3]@cuda:1"
    assert print_type(TensorType(torch.float32, (), (), device, 3)) == "f32[ | | 3]@cuda:1"
    assert print_type(ScalarType("int")) == "int"


@pytest.mark.parametrize(
    "literal",
    [
        None, True, 0, -7, 2**70, 0.1, -0.0, 1e300, float("inf"), float("-inf"), complex(0.5, -2.0),
        "a\"b\\c\n\u00e9\u2028",
        (), ((1, 2), None, (True,)), torch.float16, torch.device("cuda", 3), torch.strided, torch.sparse_coo,
        torch.channels_last,
    ],
)  # fmt: skip
def test_literals_round_trip(literal: object) -> None:
    text = f"program @p() {{\n  control.return({print_literal(literal)})\n}}\n"
    (line,) = parse(text).body.lines
    (again,) = line.values  # type: ignore[attr-defined]
    assert again == literal
    assert type(again) is type(literal)
    assert print_literal(again) == print_literal(literal)


def test_unsupported_literals_are_rejected() -> None:
    with pytest.raises(TypeError, match="the IR has no text form for object"):
        print_literal(object())


def test_origins_are_printed_as_comments_and_are_not_read() -> None:
    from_text = SAMPLES["mlp"].program()
    first, *others = from_text.body.lines
    origin = Origin((Source("mm", "aten.mm", "/m/model.py", 7), Source("relu", "aten.relu", "/m/model.py", 8)))
    marked = from_text.replace(body=Block((), (first.replace(origin=origin), *others)))
    text = print_program(marked, origins=True)
    assert "hint=6 divisible=2 dim=0  # mm, relu: aten.mm, aten.relu  model.py:7, 8" in text
    assert marked == from_text
    assert parse(text) == from_text


def test_values_are_equal_by_name_and_type() -> None:
    cpu = torch.device("cpu")
    first = Value("x", TensorType.contiguous(torch.float32, (4,), cpu))
    assert first == Value("x", TensorType.contiguous(torch.float32, (4,), cpu))
    assert first != Value("x", TensorType.contiguous(torch.float32, (5,), cpu))

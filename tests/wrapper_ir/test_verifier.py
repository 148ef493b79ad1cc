"""One program for each rule of the verifier and each check of a line by itself, in `negative/`, with its error.

A file holds the IR text, a line `--- error`, and the whole text of the error. `--update-golden` rewrites the latter.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fxwrap.errors import VerifyError
from fxwrap.lines import CORE_LINES, Comment, Return
from fxwrap.wrapper_ir import Block, Input, LineBase, Program, TensorType, Value, parse_program, verifier, verify
from tests.support.golden import check_golden

NEGATIVE = sorted((Path(__file__).parent / "negative").glob("*.txt"))
_MARK = "--- error\n"


def _error_of(text: str) -> VerifyError:
    program = parse_program(text, CORE_LINES)
    with pytest.raises(VerifyError) as caught:
        verify(program)
    return caught.value


@pytest.mark.parametrize("path", NEGATIVE, ids=lambda path: path.stem)
def test_a_broken_rule_is_named_with_its_place(path: Path, update_golden: bool) -> None:
    text = path.read_text().partition(_MARK)[0]
    check_golden(path, f"{text}{_MARK}{_error_of(text)}\n", update_golden)


@pytest.mark.parametrize("path", NEGATIVE, ids=lambda path: path.stem)
def test_negative_files_are_named_after_their_rule(path: Path) -> None:
    assert path.stem.partition("_")[0] == _error_of(path.read_text().partition(_MARK)[0]).rule


def test_every_documented_rule_has_a_negative_program() -> None:
    documented = set(re.findall(r"`(\w+)`", (verifier.__doc__ or "").partition("\n- ")[2]))
    broken = {path.stem.partition("_")[0] for path in NEGATIVE}
    by_construction = {"name"}  # the text form cannot hold such a name
    assert broken | by_construction == documented


def test_every_line_check_has_a_negative_program() -> None:
    tested = {path.stem.partition("_")[2].split("__")[0].replace("_", ".", 1) for path in NEGATIVE}
    checked = {cls.opcode for cls in CORE_LINES if cls.verify_self is not LineBase.verify_self}
    checked |= {cls.opcode for cls in CORE_LINES if cls.verify_kernel is not LineBase.verify_kernel}
    checked |= {cls.opcode for cls in CORE_LINES if cls.verify_function is not LineBase.verify_function}
    assert checked - tested == set()


def _with_inputs(program: Program, *values: Value) -> Program:
    return program.replace(inputs=tuple(Input(value) for value in values))


_MATRIX = TensorType.contiguous(torch.float32, (4, 8), torch.device("cpu"))
_RETURN = Program("p", (), Block((), (Return(()),)))


def test_an_unprintable_name_is_rejected() -> None:
    with pytest.raises(VerifyError, match=r"\[name\] %x-y is not a name"):
        verify(_with_inputs(_RETURN, Value("x-y", _MATRIX)))


def test_a_redefined_value_is_rejected() -> None:
    with pytest.raises(VerifyError, match=r"\[redefined\] %x is defined twice"):
        verify(_with_inputs(_RETURN, Value("x", _MATRIX), Value("x", _MATRIX)))


def test_a_field_of_the_wrong_class_is_rejected() -> None:
    body = Block((), (Comment(3), Return(())))  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match=r"\[line\] 'text' of note.comment takes str, not int"):
        verify(_RETURN.replace(body=body))


def test_a_value_used_with_another_type_is_rejected() -> None:
    other = TensorType.contiguous(torch.float32, (8, 4), torch.device("cpu"))
    program = _RETURN.replace(body=Block((), (Return((Value("x", other),)),)))
    with pytest.raises(VerifyError, match=r"\[type\] %x is used with another type"):
        verify(_with_inputs(program, Value("x", _MATRIX)))

"""One program for each rule of the verifier and each check of a line by itself, in `negative/`, with its error.

A file holds the IR text, a line `--- error`, and the whole text of the error. `--update-golden` rewrites the latter.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxwrap.errors import VerifyError
from fxwrap.lines import CORE_LINES
from fxwrap.wrapper_ir import Block, LineBase, parse_program, verifier, verify
from tests.golden import check_golden
from tests.samples import SAMPLES

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
def test_a_file_is_named_after_the_rule_that_it_breaks(path: Path) -> None:
    assert path.stem.partition("_")[0] == _error_of(path.read_text().partition(_MARK)[0]).rule


def test_every_documented_rule_has_a_negative_program() -> None:
    documented = set(re.findall(r"`(\w+)`", (verifier.__doc__ or "").partition("\n- ")[2]))
    broken = {path.stem.partition("_")[0] for path in NEGATIVE}
    by_construction = {"name"}  # the text form cannot hold such a name
    assert broken | by_construction == documented


def test_every_check_of_a_line_by_itself_has_a_negative_program() -> None:
    tested = {path.stem.partition("_")[2].split("__")[0].replace("_", ".", 1) for path in NEGATIVE}
    checked = {cls.opcode for cls in CORE_LINES if cls.verify_self is not LineBase.verify_self}
    checked |= {cls.opcode for cls in CORE_LINES if cls.verify_target is not LineBase.verify_target}
    assert checked - tested == set()


def test_a_name_that_the_text_cannot_hold_is_refused() -> None:
    program = SAMPLES["input_as_output"].program()
    item = program.inputs[0]
    renamed = item.value.__class__("x-y", item.value.type)  # type: ignore[union-attr, call-arg]
    with pytest.raises(VerifyError, match=r"\[name\] %x-y is no name"):
        verify(program.replace(inputs=(type(item)(renamed), *program.inputs[1:])))


def test_a_field_of_a_wrong_class_is_refused_in_a_program_made_by_hand() -> None:
    program = SAMPLES["input_as_output"].program()
    call = SAMPLES["aliases"].program().body.lines[0]
    wrong = call.replace(stream="fast")
    with pytest.raises(VerifyError, match=r"\[line\] 'stream' of extern.call takes int, not str"):
        verify(program.replace(body=Block((), (wrong, *program.body.lines))))


def test_a_value_used_with_another_type_is_refused() -> None:
    program = SAMPLES["extension"].program()
    alloc, *others = program.body.lines
    other_type = SAMPLES["input_as_output"].program().inputs[0].value.type  # type: ignore[union-attr]
    changed = alloc.replace(result=type(alloc.result)("staging", other_type))  # type: ignore[attr-defined]
    with pytest.raises(VerifyError, match=r"\[type\] %staging is used with another type"):
        verify(program.replace(body=Block((), (changed, *others))))

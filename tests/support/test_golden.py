"""The harness of golden files itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.golden import check_golden, read_section, sections

_TEXT = sections([("input", "a\nb\n"), ("after fuse", "c"), ("python", "d\n")])


def test_sections_follow_the_pipeline_order() -> None:
    assert _TEXT == "--- input\na\nb\n--- after fuse\nc\n--- python\nd\n"


def test_a_missing_file_fails_and_prints_the_text(tmp_path: Path) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"no golden file case\.txt; run with --update-golden.*\n--- input\na"
    ):
        check_golden(tmp_path / "case.txt", _TEXT, False)


def test_an_update_writes_what_is_then_accepted(tmp_path: Path) -> None:
    path = tmp_path / "new" / "case.txt"
    check_golden(path, _TEXT, True)
    assert path.read_text() == _TEXT
    check_golden(path, _TEXT, False)


def test_a_difference_fails_and_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "case.txt"
    path.write_text(_TEXT)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)case.txt differs.*\n-c\n\+x\n"):
        check_golden(path, _TEXT.replace("c\n", "x\n"), False)


def test_a_section_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "case.txt"
    path.write_text(_TEXT)
    assert read_section(path, "input") == "a\nb\n"
    assert read_section(path, "after fuse") == "c\n"
    with pytest.raises(pytest.fail.Exception, match="has no section '--- cpp'"):
        read_section(path, "cpp")

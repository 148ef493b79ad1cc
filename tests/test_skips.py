"""Each skip has a reason of tests/conftest.py, which says where it is allowed; a skip for another one is a failure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest

TESTS = Path(__file__).parent
_SKIPS = {"pytest.skip": 0, "pytest.mark.skip": 0, "pytest.mark.skipif": None, "pytest.importorskip": None}
"""Functions with a reason, and its position if it may be a positional argument."""


def skip_reasons(source: str) -> Iterator[tuple[int, str]]:
    """Yields the lines and the texts of the reasons for which a module's tests are skipped; "" where there is none."""
    if "skip" not in source:  # most modules: to parse all takes seconds
        return
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in _SKIPS:
            position = _SKIPS[ast.unparse(call.func)]
            reasons = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
            reasons += call.args[position : position + 1] if position is not None else []
            yield call.lineno, "".join([ast.unparse(reason) for reason in reasons])


def test_reasons_are_constants() -> None:
    texts = {name for name, value in vars(conftest).items() if name.isupper() and isinstance(value, str)}
    others = [
        f"{path.relative_to(TESTS)}:{line}: {reason}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, reason in skip_reasons(path.read_text())
        if reason not in texts
    ]
    assert not others, others


@pytest.mark.parametrize(
    "source",
    [
        '@pytest.mark.skipif(machine != "x86_64", reason="other")\ndef test() -> None: ...',
        'def test() -> None:\n    pytest.skip("other")',
        'pytest.importorskip("numpy", reason="other")',
        'pytestmark = pytest.mark.skip("other")',
    ],
)
def test_each_form_of_a_skip_is_noticed(source: str) -> None:
    assert [reason for _, reason in skip_reasons(source)] == ["'other'"]


@pytest.mark.parametrize("source", ['pytest.importorskip("numpy")', "pytest.skip()", "pytest.mark.skipif(condition)"])
def test_a_skip_without_a_reason_is_noticed(source: str) -> None:
    assert [*skip_reasons(source)] == [(1, "")]


def test_a_processor_is_a_reason_on_others_only() -> None:
    assert (conftest.NO_X86 in conftest.ALLOWED_SKIPS) != conftest.ON_X86

"""Golden files: the printed stages of a pipeline, stored beside the test and compared as a whole.

A file shows `--- input`, then `--- after <pass>` and `--- python` sections in the order of the pipeline. A missing file
fails the test and prints the text; `pytest --update-golden` writes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import pytest


def sections(stages: Iterable[tuple[str, str]]) -> str:
    """Returns the text of a golden file from pairs of title and text: `("input", ...)`, `("after fuse", ...)`, ..."""
    return "".join(f"--- {title}\n{text.rstrip()}\n" for title, text in stages)


def read_section(path: Path, title: str) -> str:
    """Returns the text of one section of a golden file, such as its input. Fails when there is none."""
    parts = f"\n{path.read_text()}".split("\n--- ")
    for part in parts:
        head, _, text = part.partition("\n")
        if head == title:
            return text.rstrip() + "\n"
    pytest.fail(f"{path.name} has no section '--- {title}'")


def check_golden(path: Path, text: str, update: bool) -> None:
    """Compares text with a golden file, or writes it when `update` is true. Fails when they differ or it is missing."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    if not path.exists():
        pytest.fail(f"there is no golden file {path.name}; run with --update-golden to write this one:\n{text}")
    expected = path.read_text()
    if expected != text:
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "printed", lineterm="")
        pytest.fail(f"{path.name} differs (run with --update-golden to accept):\n" + "\n".join(lines))

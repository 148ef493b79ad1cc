"""Texts and snippets in documents: each text is what fxwrap prints, and each Python snippet runs.

A fenced block after `<!-- printed: NAME -->` shows the text NAME. `pytest --update-golden` writes the current texts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tests.support.golden import check_golden

ROOT = Path(__file__).parents[2]
_PRINTED = re.compile(r"(<!-- printed: (\w+) -->\n```\w*\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)
_SNIPPET = re.compile(r"(<!-- printed: \w+ -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def check_printed(document: str, texts: Mapping[str, str], update: bool) -> None:
    """Compares the printed blocks of a document with texts by name, or writes them; every text must be shown."""
    path = ROOT / document
    shown = {match[2] for match in _PRINTED.finditer(path.read_text())}
    assert shown == set(texts)
    filled = _PRINTED.sub(lambda match: match[1] + abbreviated(texts[match[2]]) + match[4], path.read_text())
    check_golden(path, filled, update)


def abbreviated(text: str) -> str:
    """Returns a text with shortened hashes, and without the `; x = None` that torch.fx appends."""
    text = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1...", text.strip("\n"))
    return re.sub(r";  [\w= ]+ = None$", "", text, flags=re.MULTILINE) + "\n"


def section(text: str, first: str, last: str) -> str:
    """Returns the lines of a text from the first that contains `first` to the next that contains `last`."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if first in line)
    end = next(number for number in range(start, len(lines)) if last in lines[number])
    return "\n".join(lines[start : end + 1])


def run_snippets(document: str, **assumed: object) -> dict[str, object]:
    """Runs the Python snippets of a document in order in one namespace, and returns it; printed blocks are left out.

    The namespace begins with some names, for documents whose snippets leave out the model.
    """
    module = sys.modules["document"] = ModuleType("document")  # Dynamo may import the module of what it traces
    names = vars(module)
    names.update(assumed)
    for match in _SNIPPET.finditer((ROOT / document).read_text()):
        if match[1] is None:
            exec(compile(match[2], f"<{document}>", "exec"), names)
    return names

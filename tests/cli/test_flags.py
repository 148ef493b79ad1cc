"""Each command with flags that it refuses, and with each of its JSON forms; a closed pipe is no error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxwrap
from fxwrap.cli import main
from tests.support.long_form import long_only

MODEL = """
import torch

def scale(x):
    return x * 3

scale.example_inputs = (torch.ones(2),)
"""

REFUSED = {
    "show TARGET --coverage --origins": "--origins: coverage is no program, so it has no effect",
    "show TARGET --coverage --color always": "--color: coverage is no program",
    "show TARGET --provenance --origins": "--origins: provenance is JSON",
    "show TARGET --json --color always": "--color: JSON has no colours",
    "show TARGET --dot --color never": "--color: a drawing has a form of its own",
    "show TARGET --graph -1": "unknown graph -1; known graphs: 0 (inference)",
    "show TARGET --graph x": "invalid int value: 'x'",
    "show TARGET --option emitter=nope": "option 'emitter' takes",
    "show TARGET --option nope=1": "unknown option 'nope'",
    "show TARGET --option fuse": "--option takes NAME=VALUE, not 'fuse'",
    "show saved.fxw --provenance --origins": "--origins: provenance is JSON",
    "show saved.fxw --coverage": "was compiled before it was saved",
    "emit TARGET -o x.py --color always": "--color: a file has no colours",
    "emit TARGET --option emitter=cpp": "--option emitter: --emitter decides it here, so it has no effect",
    "emit TARGET --emitter nope": "invalid choice: 'nope'",
    "emit TARGET -o missing/x.py": "cannot write 'missing/x.py': the folder 'missing' does not exist; create it first",
    "emit saved.fxw": "is a saved program; only show, inspect, run, sign and export-cmake take one",
    "plan TARGET --option memory_planning=auto": "--option memory_planning: --algorithm decides it here",
    "plan TARGET --algorithm nope": "invalid choice: 'nope'",
    **{f"plan TARGET --{flag} missing/x": "the folder 'missing' does not exist" for flag in ("json", "svg", "trace",
                                                                                             "snapshot")},
    "plan saved.fxw": "is a saved program",
    "report TARGET -o missing/x.html": "the folder 'missing' does not exist",
    "report TARGET --graph 0": "unrecognized arguments: --graph 0",
    "compare TARGET --repeats -1": "takes a whole number from 0 on, not '-1'",
    "compare TARGET --option emitter=cpp": "--option emitter: --emitter decides it here",
    "compare TARGET --json missing/x.json": "the folder 'missing' does not exist",
    "compare TARGET --html missing/x.html": "the folder 'missing' does not exist",
    "compare TARGET --tolerance x": "invalid float value: 'x'",
    "compare saved.fxw": "is a saved program",
    "bisect TARGET --repro missing/x.py": "the folder 'missing' does not exist",
    "bisect TARGET --emitter cpp": "unrecognized arguments: --emitter cpp",
    "bisect saved.fxw": "is a saved program",
    "passes extra": "unrecognized arguments: extra",
    "inspect saved.fxw --json": "unrecognized arguments: --json",
    "inspect missing.fxw": "file 'missing.fxw' does not exist",
    "inspect .": "'.' is a folder, not a file",
    "run saved.fxw --inputs inputs.pt --seed 3": "--seed: the inputs are those of 'inputs.pt', so it has no effect",
    "run saved.fxw -o missing/x.pt": "the folder 'missing' does not exist",
    "run saved.fxw --emitter nope": "invalid choice: 'nope'",
    "sign": "the following arguments are required: --key",
    "sign saved.fxw --key missing.key": "the key file 'missing.key'",
    "export-cmake saved.fxw": "the following arguments are required: DIR",
    "conformance": "the following arguments are required: --device",
    "conformance --device nope": "device 'nope' is not registered",
    "conformance --device cpu --jobs 0": "takes a whole number from 1 on, not '0'",
    "conformance --device cpu --group nope": "invalid choice: 'nope'",
    "conformance --device cpu --import missing_module": "cannot import 'missing_module'",
    "conformance --device cpu --json missing/x.json": "the folder 'missing' does not exist",
    "build --package a --runtime b": "--package and --runtime write different files",
    "nothing": "invalid choice: 'nothing'",
    "show TARGET --cover": "unrecognized arguments: --cover",
}  # fmt: skip
"""Command lines with the message of each, before which nothing is printed or written."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a saved program."""
    path = tmp_path_factory.mktemp("flags")
    (path / "flagged_model.py").write_text(MODEL)
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    options = fxwrap.Options(emitter="interpreter", fuse=False)
    fxwrap.compile_graph(exported, options=options).save(path / "saved.fxw")
    return path


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in that folder."""
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("line", REFUSED)
def test_flags_that_do_not_apply_are_refused(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = set(os.listdir(folder))
    try:
        code = main(line.replace("TARGET", "flagged_model.py:scale").split())
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and REFUSED[line] in err, (code, out, err)
    assert set(os.listdir(folder)) - {"__pycache__"} == files - {"__pycache__"}  # Python's, of the model's import


@pytest.mark.parametrize("line", ["show TARGET --json", "show TARGET --provenance", "show TARGET --provenance --json",
                                  "show TARGET --coverage --json", "show TARGET --stages --json",
                                  "show saved.fxw --json", "show saved.fxw --provenance",
                                  "bisect TARGET --option emitter=interpreter --json"])  # fmt: skip
def test_json_is_valid(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.replace("TARGET", "flagged_model.py:scale").split()) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("line", ["plan TARGET", "compare TARGET --repeats 0 --emitter interpreter"])
def test_files_of_json_are_valid(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.json"
    assert main([*line.replace("TARGET", "flagged_model.py:scale").split(), "--json", str(path)]) == 0
    assert json.loads(path.read_text())


ALSO_PRINTED = (("show", "--help"), ("--version",))
"""Command lines whose text argparse prints, as that of --help."""


@pytest.mark.parametrize("arguments", [("passes",), long_only(("--help",)), *map(long_only, ALSO_PRINTED)])
def test_a_closed_pipe_is_no_error(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fxwrap", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")

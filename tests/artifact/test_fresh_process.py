"""A process that never saw the model loads its program and runs it, without a compiler and without torch's tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.errors import ArtifactError
from fxwrap.lines import Call, Launch
from fxwrap.passes.partition import partition
from fxwrap.runtime.native import binary_target, unusable
from fxwrap.wrapper_ir import LineBase
from tests.artifact.apart import run_apart
from tests.artifact.programs import batch, compiled
from tests.artifact.test_bad_files import archive_of, entries_of, with_manifest
from tests.capture import capture_graphs
from tests.models import SHALLOW


def test_programs_run_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {}
    inputs: dict[str, Sequence[Any]] = {}
    for emitter, dynamic in (("python", False), ("cpp", True), ("fx", False), ("fx", True)):
        name = f"{emitter}-{dynamic}"
        saved = compiled(emitter, dynamic)
        saved.program.store.tensors["b_calls"].zero_()
        saved.save(tmp_path / f"{name}.fxw")
        inputs[name] = (batch(9 if dynamic else 4),)
        wanted[name] = saved(*inputs[name])
    for name, emitter in (("gpt2", "cpp"), ("resnet", "python")):
        (captured,) = capture_graphs(SHALLOW[name], training=False)
        saved = fxwrap.compile_graph(captured.graph_module, name=name, options=fxwrap.Options(emitter=emitter))
        saved.save(tmp_path / f"{name}.fxw")
        inputs[name], wanted[name] = captured.inputs, saved(*captured.inputs)
    parts, inputs["parts"] = in_parts(), (batch(4),)
    fxwrap.save(parts, tmp_path / "parts.fxw", emitters=["cpp"])
    wanted["parts"] = fxwrap.run(parts, list(inputs["parts"]))
    found = run_apart(tmp_path, inputs)
    assert found.tracing == {name: [] for name in wanted}
    for name, results in wanted.items():
        torch.testing.assert_close(found.results[name], results, rtol=0, atol=0)


def in_parts() -> fxwrap.Program:
    """The small program cut into functions that would be replayed on a GPU, with kernels in them and around them."""

    def judge(line: LineBase) -> torch.device | str:
        return "a product" if isinstance(line, Call) else torch.device("cpu")

    compiled("cpp").program.store.tensors["b_calls"].zero_()
    cut = partition(compiled("cpp").program, judge, fewest=1)
    replayed = [name for name, block in cut.functions if any(isinstance(line, Launch) for line in block.lines)]
    assert replayed
    return cut


def test_the_code_of_functions_that_are_replayed_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "parts.fxw"
    fxwrap.save(in_parts(), path, emitters=["cpp"])
    entries = entries_of(path.read_bytes())
    described = json.loads(entries["manifest.json"])["binaries"]["programs"]
    assert len(described) > 1 and len({item["entry"] for item in described}) == len(described)
    assert fxwrap.load(path, binaries="required").rebuilt == ""

    def change(manifest: dict[str, Any]) -> None:
        manifest["binaries"]["programs"].pop()

    path.write_bytes(archive_of(with_manifest(entries, change)))
    with pytest.raises(ArtifactError, match="of another text"):
        fxwrap.load(path, binaries="required")


def test_compiled_code_is_required_or_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.fxw"
    compiled("cpp").save(path)
    monkeypatch.setattr("fxwrap.artifact.binaries.unusable", lambda target: "it is for another machine")
    with pytest.raises(ArtifactError, match="another machine"):
        fxwrap.load(path, binaries="required")
    for choice, reason in (("auto", "it is for another machine"), ("ignored", "they were not asked for")):
        loaded = fxwrap.load(path, binaries=choice)
        assert loaded.rebuilt == reason
        loaded.update_constants({"calls": torch.tensor(3)})
        compiled("cpp").program.store.tensors["b_calls"].fill_(3)
        torch.testing.assert_close(loaded(batch()), compiled("cpp")(batch()))


@pytest.mark.parametrize("emitter", ["cpp", "python"])
def test_code_compiled_from_another_text_is_not_used(emitter: str, tmp_path: Path) -> None:
    """As where a file is loaded on another device, or by a version that emits another text."""
    path = tmp_path / "small.fxw"
    compiled(emitter).save(path)
    entries = entries_of(path.read_bytes())

    def change(manifest: dict[str, Any]) -> None:
        manifest["binaries"].update({"programs": [{"source": "0"}], "kernels": {"symbols": ["kernel_0"]}})

    path.write_bytes(archive_of(with_manifest(entries, change)))
    assert "of another text" in fxwrap.load(path).rebuilt
    with pytest.raises(ArtifactError, match="of another text"):
        fxwrap.load(path, binaries="required")


def test_what_compiled_code_depends_on() -> None:
    here = binary_target()
    assert unusable(here) == "" and json.loads(json.dumps(here)) == here
    for name in ("torch", "python", "bridge", "machine"):
        assert f"it is for {name} 'other'" in unusable({**here, name: "other"})
    assert "C library 99.1" in unusable({**here, "libc": "99.1"})
    assert unusable({**here, "libc": "1.0"}) == ""
    assert "instructions that this processor lacks: avx4096" in unusable({**here, "instructions": ["avx4096"]})
    assert unusable({**here, "instructions": here["instructions"][:3]}) == ""

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
from fxwrap.lines import ExternCall, Launch
from fxwrap.passes.partition import partition
from fxwrap.runtime.native import binary_target, incompatibility_reason
from fxwrap.wrapper_ir import LineBase
from tests.artifact.archives import archive_of, entries_of, with_manifest
from tests.artifact.fresh_process import run_in_fresh_process
from tests.artifact.programs import batch, compiled
from tests.support.capture import capture_graphs
from tests.support.long_form import LONG
from tests.support.models import SHALLOW


def test_programs_run_without_a_compiler(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {}
    inputs: dict[str, Sequence[Any]] = {}
    for emitter, dynamic in (("python", False), ("cpp", True), ("fx", False), ("fx", True)):
        name = f"{emitter}-{dynamic}"
        saved = compiled(emitter, dynamic)
        saved.program.store.tensors["b_calls"].zero_()
        saved.save(tmp_path / f"{name}.fxw")
        inputs[name] = (batch(9 if dynamic else 4),)
        wanted[name] = saved(*inputs[name])
    for name, emitter in (("gpt2", "cpp"), ("resnet", "python"))[: 2 if LONG else 1]:
        (captured,) = capture_graphs(SHALLOW[name], training=False)
        saved = fxwrap.compile_graph(captured.graph_module, name=name, options=fxwrap.Options(emitter=emitter))
        saved.save(tmp_path / f"{name}.fxw")
        inputs[name], wanted[name] = captured.inputs, saved(*captured.inputs)
    parts, inputs["parts"] = partitioned(), (batch(4),)
    fxwrap.save(parts, tmp_path / "parts.fxw", emitters=["cpp"])
    wanted["parts"] = fxwrap.run(parts, list(inputs["parts"]))
    report = run_in_fresh_process(tmp_path, inputs)
    assert report.tracing == {name: [] for name in wanted}
    for name, results in wanted.items():
        torch.testing.assert_close(report.results[name], results, rtol=0, atol=0)


def partitioned() -> fxwrap.Program:
    """The small program, partitioned into functions that a GPU would replay, with kernels inside and outside."""

    def can_capture(line: LineBase) -> torch.device | str:
        return "a product" if isinstance(line, ExternCall) else torch.device("cpu")

    compiled("cpp").program.store.tensors["b_calls"].zero_()
    cut = partition(compiled("cpp").program, can_capture, min_calls=1)
    replayed = [name for name, block in cut.functions if any(isinstance(line, Launch) for line in block.lines)]
    assert replayed
    return cut


def test_code_of_captured_functions_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "parts.fxw"
    fxwrap.save(partitioned(), path, emitters=["cpp"])
    entries = entries_of(path.read_bytes())
    described = json.loads(entries["manifest.json"])["binaries"]["programs"]
    assert len(described) > 1 and len({item["entry"] for item in described}) == len(described)
    assert fxwrap.load(path, binaries="required").recompile_reason == ""

    def change(manifest: dict[str, Any]) -> None:
        manifest["binaries"]["programs"].pop()

    path.write_bytes(archive_of(with_manifest(entries, change)))
    with pytest.raises(ArtifactError, match="emits another source"):
        fxwrap.load(path, binaries="required")


def test_compiled_code_is_required_or_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "small.fxw"
    compiled("cpp").save(path)
    monkeypatch.setattr("fxwrap.runtime.native.incompatibility_reason", lambda target: "it is for another machine")
    with pytest.raises(ArtifactError, match="another machine"):
        fxwrap.load(path, binaries="required")
    for choice, reason in (("auto", "it is for another machine"), ("ignored", "binaries='ignored'")):
        caplog.clear()
        loaded = fxwrap.load(path, binaries=choice)
        wanted = [f"{path}: compiling its code: it is for another machine"] if choice == "auto" else []
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == wanted
        assert loaded.recompile_reason == reason
        loaded.update_constants({"calls": torch.tensor(3)})
        compiled("cpp").program.store.tensors["b_calls"].fill_(3)
        torch.testing.assert_close(loaded(batch()), compiled("cpp")(batch()))


@pytest.mark.parametrize("emitter", ["cpp", "python"])
def test_stale_compiled_code_is_not_used(emitter: str, tmp_path: Path) -> None:
    """As where a file is loaded on another device, or by a version that emits another text."""
    path = tmp_path / "small.fxw"
    compiled(emitter).save(path)
    entries = entries_of(path.read_bytes())

    def change(manifest: dict[str, Any]) -> None:
        manifest["binaries"].update({"programs": [{"source": "0"}], "kernels": {"symbols": ["kernel_0"]}})

    path.write_bytes(archive_of(with_manifest(entries, change)))
    assert "emits another source" in fxwrap.load(path).recompile_reason
    with pytest.raises(ArtifactError, match="emits another source"):
        fxwrap.load(path, binaries="required")


def test_dependencies_of_compiled_code() -> None:
    here = binary_target()
    assert incompatibility_reason(here) == "" and json.loads(json.dumps(here)) == here
    for name in ("interface", "machine"):
        assert f"it is for {name} 'other'" in incompatibility_reason({**here, name: "other"})
    assert "C library 99.1" in incompatibility_reason({**here, "libc": "99.1"})
    assert incompatibility_reason({**here, "libc": "1.0"}) == ""
    assert "instructions that this processor lacks: avx4096" in incompatibility_reason(
        {**here, "instructions": ["avx4096"]}
    )
    assert incompatibility_reason({**here, "instructions": here["instructions"][:3]}) == ""

"""Saving and loading preserves the program, its origins, its memory plan and its results."""

from __future__ import annotations

import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.artifact.archive import MANIFEST, MANIFEST_HASH
from fxwrap.errors import ArtifactError, InputError, OptionError
from fxwrap.options import EMITTERS
from tests.artifact.programs import batch, compiled
from tests.support.sample import contents
from tests.support.samples import EXTENSIONS, SAMPLES


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_loaded_program_returns_the_same_results(emitter: str, dynamic: bool, tmp_path: Path) -> None:
    saved = compiled(emitter, dynamic)
    saved.save(tmp_path / "small.fxw")
    for chosen in (None, "python"):
        loaded = fxwrap.load(tmp_path / "small.fxw", emitter=chosen)
        assert loaded.emitter == (chosen or emitter)
        assert loaded.program == saved.program and loaded.key == saved.key
        for size in (4, 7) if dynamic else (4,):
            calls, inputs = saved.program.store.tensors["b_calls"].clone(), [batch(size)]
            loaded.update_constants({"calls": calls})
            torch.testing.assert_close(loaded(*inputs), saved(*inputs), rtol=0, atol=0)
            torch.testing.assert_close(loaded.boxed(inputs)[0] - 1, saved.flat(batch(size))[0] - 1, rtol=0, atol=0)
            assert inputs == []
    with pytest.raises(InputError):
        loaded(batch(4).double())


@pytest.mark.parametrize("name", SAMPLES)
def test_every_line_survives(name: str, tmp_path: Path) -> None:
    program = SAMPLES[name].program()
    if name == "object_as_constant":
        with pytest.raises(ArtifactError, match=r"constant 'k' is an object of .*\.Counter, which a file cannot hold"):
            fxwrap.save(program, tmp_path / "sample.fxw")
        return
    fxwrap.save(program, tmp_path / "sample.fxw", constants=SAMPLES[name].cpu_runnable)
    if name == "types":
        with pytest.raises(ArtifactError, match=r"operators that are not registered: vendor\.mixed"):
            fxwrap.load(tmp_path / "sample.fxw", extensions=EXTENSIONS)
        return
    loaded = fxwrap.load(tmp_path / "sample.fxw", emitter="interpreter", extensions=EXTENSIONS)
    assert loaded.program == program and loaded.program.header == program.header
    assert [line.origin for line in loaded.program.lines()] == [line.origin for line in program.lines()]
    if SAMPLES[name].cpu_runnable:
        torch.manual_seed(1)
        results = loaded(*SAMPLES[name].inputs(seed=3))
        torch.manual_seed(1)
        wanted = fxwrap.run(program, SAMPLES[name].inputs(seed=3))
        torch.testing.assert_close(contents(results), contents(wanted), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in SAMPLES if SAMPLES[name].cpu_runnable])
def test_a_graph_loaded_without_tracing_modules_is_the_same(name: str) -> None:
    program = SAMPLES[name].program()
    whole, light = (fxwrap.to_fx(program, fake_metadata=fake_metadata).graph_module for fake_metadata in (True, False))
    assert [(node.name, node.target) for node in whole.graph.nodes] == [
        (node.name, node.target) for node in light.graph.nodes
    ]
    assert whole.code == light.code


def test_origins_and_sources_survive(tmp_path: Path) -> None:
    saved = compiled("cpp")
    saved.save(tmp_path / "small.fxw")
    loaded = fxwrap.load(tmp_path / "small.fxw")
    assert loaded.source == saved.source
    assert [line.origin for line in loaded.program.lines()] == [line.origin for line in saved.program.lines()]
    assert any(line.origin and "aten.gelu" in line.origin.operators for line in loaded.program.lines())


def test_a_plan_survives_and_explains_out_of_memory_errors(tmp_path: Path) -> None:
    saved = compiled("python", memory_planning="auto")
    saved.save(tmp_path / "small.fxw")
    loaded = fxwrap.load(tmp_path / "small.fxw")
    assert saved.plan is not None and loaded.plan == saved.plan
    torch.testing.assert_close(loaded(batch()) - 1, saved(batch()) - 1)


def test_equal_programs_produce_identical_files(tmp_path: Path) -> None:
    saved = compiled("cpp")
    before = {name: tensor.clone() for name, tensor in saved.program.store.tensors.items()}
    saved.save(tmp_path / "one.fxw")
    fxwrap.save(saved, tmp_path / "two.fxw")
    fxwrap.load(tmp_path / "one.fxw").save(tmp_path / "three.fxw")
    content = (tmp_path / "one.fxw").read_bytes()
    assert (tmp_path / "two.fxw").read_bytes() == content == (tmp_path / "three.fxw").read_bytes()
    torch.testing.assert_close(dict(saved.program.store.tensors), before)


def test_a_loaded_program_is_saved_with_the_arguments_of_a_compiled_one(tmp_path: Path) -> None:
    """For a host without Python, and with compiled code for other emitters."""
    saved = compiled("cpp")
    saved.save(tmp_path / "one.fxw", target="native", emitters=["python", "cpp"])
    content = (tmp_path / "one.fxw").read_bytes()
    fxwrap.load(tmp_path / "one.fxw").save(tmp_path / "two.fxw", target="native", emitters=["python", "cpp"])
    fxwrap.save(fxwrap.load(tmp_path / "one.fxw"), tmp_path / "three.fxw", target="native", emitters=["python", "cpp"])
    assert (tmp_path / "two.fxw").read_bytes() == content == (tmp_path / "three.fxw").read_bytes()
    for subject in (saved, fxwrap.load(tmp_path / "one.fxw")):
        with pytest.raises(OptionError, match="unknown target 'c'; known: any, native"):
            subject.save(tmp_path / "bad.fxw", target="c")
        with pytest.raises(OptionError, match="unknown architecture '90'"):
            subject.save(tmp_path / "bad.fxw", architectures=["90"])


def test_a_rewritten_graph_can_be_saved(tmp_path: Path) -> None:
    graph = compiled("fx", fuse=False).graph_module
    fxwrap.save(graph, tmp_path / "graph.fxw")
    (gelu,) = [node for node in graph.graph.nodes if node.target == torch.ops.aten.gelu.default]
    gelu.target = torch.ops.aten.relu.default
    graph.recompile()
    fxwrap.save(graph, tmp_path / "rewritten.fxw")
    calls = torch.zeros((), dtype=torch.int64)
    results = {}
    for name in ("graph", "rewritten"):
        loaded = fxwrap.load(tmp_path / f"{name}.fxw")
        assert loaded.emitter == "fx"
        loaded.update_constants({"b_calls": calls})
        (results[name],) = loaded(batch())
    weight, bias = (compiled().program.store.tensors[name].detach() for name in ("p_weight", "p_bias"))
    hidden = batch() @ weight + bias
    torch.testing.assert_close(results["graph"], torch.nn.functional.gelu(hidden) @ weight.t() + 1)
    torch.testing.assert_close(results["rewritten"], hidden.relu() @ weight.t() + 1)


def test_the_graph_of_a_loaded_program_runs_and_has_metadata(tmp_path: Path) -> None:
    compiled("fx", fuse=False).save(tmp_path / "small.fxw")
    loaded = fxwrap.load(tmp_path / "small.fxw")
    loaded.update_constants({"calls": torch.zeros((), dtype=torch.int64)})
    graph = loaded.graph_module
    assert all(node.meta["val"].fake_mode is not None for node in graph.graph.find_nodes(op="placeholder"))
    (gelu,) = [node for node in graph.graph.nodes if node.target == torch.ops.aten.gelu.default]
    assert gelu.meta["val"].device == torch.device("cpu")
    gelu.target = torch.ops.aten.relu.default
    graph.recompile()
    weight, bias = (loaded.program.store.tensors[name] for name in ("p_weight", "p_bias"))
    torch.testing.assert_close(loaded(batch()), (batch() @ weight + bias).relu() @ weight.t() + 1)


def test_the_file_is_a_zip_archive_that_other_tools_read(tmp_path: Path) -> None:
    saved = compiled("cpp")
    saved.save(tmp_path / "small.fxw")
    with zipfile.ZipFile(tmp_path / "small.fxw") as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        text = archive.read("program.ir").decode()
        kernels = {name: archive.read(name).decode() for name in names if name.startswith("kernels/")}
        assert "aten.mm.default" in archive.read("graph.py").decode()
    assert fxwrap.parse(text) == saved.program.replace(kernels=())
    assert {kernel.source for kernel in saved.program.kernels} == set(kernels.values())
    assert {MANIFEST, MANIFEST_HASH} <= set(names) and not any(name.endswith(("pickle", ".pkl")) for name in names)
    metadata = fxwrap.load(tmp_path / "small.fxw").metadata
    assert metadata["written_by"]["torch"] == version("torch")
    assert metadata["devices"] == ["cpu"] and [item["shape"] for item in metadata["signature"]["inputs"]] == [[4, 16]]


def test_ranges_of_symbols_are_in_the_manifest_and_hold(tmp_path: Path) -> None:
    compiled("python", dynamic=True).save(tmp_path / "small.fxw")
    loaded = fxwrap.load(tmp_path / "small.fxw")
    (symbol,) = [info for name, info in loaded.metadata["symbols"].items() if name.startswith("s")]
    assert symbol["range"] == [0, 64]
    with pytest.raises(InputError):
        loaded(batch(65))


def test_selected_emitters_have_compiled_code_in_the_file(tmp_path: Path) -> None:
    program = compiled().program
    fxwrap.save(program, tmp_path / "none.fxw")
    fxwrap.save(program, tmp_path / "both.fxw", emitters=["cpp", "python"])
    for emitter in EMITTERS:
        assert fxwrap.load(tmp_path / "both.fxw", emitter=emitter, binaries="required").recompile_reason == ""
        assert "no compiled code" in fxwrap.load(tmp_path / "none.fxw", emitter=emitter).recompile_reason
    assert fxwrap.load(tmp_path / "both.fxw").emitter == "cpp"


def test_a_program_without_kernels_and_constants(tmp_path: Path) -> None:
    inputs = [torch.randn(3, 3)]
    fxwrap.save(fxwrap.lower(make_fx(lambda x: x @ x)(*inputs), inputs), tmp_path / "plain.fxw")
    loaded = fxwrap.load(tmp_path / "plain.fxw", binaries="required")
    torch.testing.assert_close(loaded(*inputs)[0] if isinstance(loaded(*inputs), tuple) else loaded(*inputs),
                               inputs[0] @ inputs[0])  # fmt: skip

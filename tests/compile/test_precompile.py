"""torch's precompilation: what one process compiles, another one loads, without a compiler."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, AOTAutogradCachePickler
from torch.compiler._cache import CacheArtifactManager

import fxwrap
from fxwrap.artifact import binaries
from fxwrap.compile.precompile import load_graph
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.cpp.library import EmittedCpp
from fxwrap.errors import ArtifactError, OptionError
from fxwrap.runtime.native import build_bridge
from fxwrap.wrapper_ir import Program
from tests.compile import precompiled
from tests.compile.precompiled import AOT_NAMES, EMITTERS, Classifier, aot_compile, batch
from tests.support.child_processes import child_environment, run_python


@pytest.fixture(scope="module")
def torch_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of its own for the caches of torch and fxwrap, which are on."""
    folder = tmp_path_factory.mktemp("caches")
    (folder / "fxwrap").mkdir()
    bridge = build_bridge().folder
    (folder / "fxwrap" / bridge.name).symlink_to(bridge)
    with pytest.MonkeyPatch.context() as patch, CacheArtifactManager.with_fresh_cache():
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))
        patch.setenv("FXWRAP_CACHE_DIR", str(folder / "fxwrap"))
        patch.setenv("FXWRAP_COMPILE_CACHE", "1")
        settings = {"enable_aot_compile": True} if hasattr(dynamo_config, "enable_aot_compile") else {}
        torch.compiler.reset()
        with dynamo_config.patch(settings):
            yield folder
        torch.compiler.reset()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a process, with empty caches and without a compiler, which loads what another one saved."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "path").mkdir()
    saved = run_process("save", folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "torch-save"))
    results = run_process(
        "load", folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "torch"), FXWRAP_CACHE_DIR=str(folder / "fxwrap"),
        PATH=str(folder / "path"),
    )  # fmt: skip
    code_generators = {"save": saved["code_generators"], "load": results["code_generators"]}
    return {**results, "code_generators": code_generators, "folder": str(folder)}


def run_process(action: str, folder: Path, **environment: str) -> dict[str, Any]:
    """Runs the script that saves and loads, in a process of its own; returns its results."""
    whole = child_environment(FXWRAP_COMPILE_CACHE="1", **environment)
    whole.pop("CXX", None)  # torch's keys contain it
    done = run_python(["-m", "tests.compile.precompiled", action, folder], whole)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def check_loaded(result: dict[str, Any], graphs: int) -> None:
    """Checks that graphs were loaded and nothing was compiled, with right results."""
    assert result["error"] < 1e-5
    wanted = {"compiled": 0, "loaded": graphs, "received": 0, "shared": 0, "timeouts": 0, "compiler_runs": 0}
    assert result["counts"] == wanted


@pytest.mark.parametrize("name", AOT_NAMES)
def test_aot_compiled_functions(loaded: dict[str, Any], name: str) -> None:
    check_loaded(loaded[name], 2 if name.endswith("training") else 1)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_cache_artifacts(loaded: dict[str, Any], emitter: str) -> None:
    check_loaded(loaded[f"cached-{emitter}"], 3)


def test_the_bridge_is_saved_once(loaded: dict[str, Any]) -> None:
    """Each graph's entry in torch's cache had it: more than a megabyte on disk and, for artifacts, in memory."""
    folder = Path(loaded["folder"])
    sizes = [path.stat().st_size for path in (folder / "torch-save" / "aotautograd").glob("*/*") if path.is_file()]
    assert max(sorted(sizes)[: 2 * len(EMITTERS)]) < 300_000  # a forward, a forward and a backward; others are of files
    results = run_process(
        "load_caches", folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "torch-2"),
        FXWRAP_CACHE_DIR=str(folder / "fxwrap-2"), PATH=str(folder / "path"),
    )  # fmt: skip
    for emitter in EMITTERS:
        check_loaded(results[f"cached-{emitter}"], 3)


def test_caching_precompile(loaded: dict[str, Any]) -> None:
    check_loaded(loaded["precompiled"], 3)


def test_code_generators_of_inductor_are_not_imported(loaded: dict[str, Any]) -> None:
    """torch's keys and its partitioner would."""
    assert loaded["code_generators"] == {"save": False, "load": False}


def compiles_of(options: dict[str, Any]) -> int:
    """Returns the number of graphs that a compile of the model lowered."""
    torch.compiler.reset()
    model = Classifier()
    before = fxwrap.compile_counts()
    compiled = torch.compile(model, backend="fxwrap", options=options)
    assert precompiled.inference_error(compiled, model, 5) < 1e-5
    return (fxwrap.compile_counts() - before).compiled


def test_options_are_in_the_key(torch_caches: Path) -> None:
    assert compiles_of({"fuse": False, "compile_cache": False}) == 1  # the cache is not even written
    assert compiles_of({"fuse": False}) == 1
    loads = fxwrap.compile_counts().loaded
    counted = counters["aot_autograd"]["autograd_cache_hit"]
    assert compiles_of({"fuse": False}) == 0
    assert (fxwrap.compile_counts().loaded, counters["aot_autograd"]["autograd_cache_hit"]) == (loads + 1, counted + 1)
    assert compiles_of({"fuse": False, "combo_kernels": False}) == 1


def test_one_hash_is_the_key(torch_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 hashes each input and setting again to describe them in a debug message."""
    hashed: list[object] = []
    get_hash = AOTAutogradCachePickler.get_hash

    def counted(pickler: AOTAutogradCachePickler, item: Any) -> str:
        hashed.append(item)
        return get_hash(pickler, item)

    monkeypatch.setattr(AOTAutogradCachePickler, "get_hash", counted)
    assert compiles_of({"memory_planning": "none"}) == 1
    assert len(hashed) == 1


def test_an_entry_has_the_code_that_was_emitted(torch_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not emitted again to be saved."""
    again: list[str] = []

    def counted(program: Program) -> EmittedCpp:
        again.append(program.name)
        return to_cpp(program)

    monkeypatch.setattr(binaries, "to_cpp", counted)
    saved = counters["aot_autograd"]["autograd_cache_saved"]
    assert compiles_of({"memory_planning": "none", "emitter": "cpp"}) == 1
    assert counters["aot_autograd"]["autograd_cache_saved"] == saved + 1
    assert again == []


def test_graphs_of_one_float_are_not_cached(torch_caches: Path) -> None:
    """AOTAutograd's cache has no guards on floats: the second float of a new process got the graph of another one."""

    def filled(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, torch.full((2,), scale)

    for _process in range(2):
        torch.compiler.reset()
        compiled = torch.compile(filled, backend="fxwrap")
        for scale in (3.5, 4.25, 7.0):
            torch.testing.assert_close(compiled(torch.ones(3), scale), filled(torch.ones(3), scale))


def test_folders_of_other_users_are_not_read(torch_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch_caches / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    compiles_of({"layout": "preserve"})
    assert not (shared / "aotautograd").exists()


def test_errors_while_a_backward_is_saved(torch_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave torch's setting, which decides how entries of all backends are saved, as it was."""

    def fail(*_arguments: object) -> str:
        raise ValueError("no guards today")

    torch.compiler.reset()
    model = Classifier()
    compiled = torch.compile(model, backend="fxwrap", options={"layout": "preserve"})
    loss = compiled(batch(5)).sum()
    with monkeypatch.context() as patch:
        patch.setattr(AOTAutogradCache, "generate_guards_expression", fail)
        with pytest.raises(ValueError, match="no guards today"):
            loss.backward()
    assert not functorch_config.bundled_autograd_cache
    saved = counters["aot_autograd"]["autograd_cache_saved"]
    torch.compiler.reset()
    assert precompiled.training_error(compiled, model, 5) < 1e-5
    assert counters["aot_autograd"]["autograd_cache_saved"] == saved + 1
    assert not functorch_config.bundled_autograd_cache


class GraphContent:
    """Stands for a compiled graph in a pickle."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> tuple[object, ...]:
        return load_graph, (self.content,)


def graph_content() -> bytes:
    """Returns the bytes of a compiled graph in torch's cache."""
    model = Classifier()
    function = aot_compile(model, {"emitter": "interpreter"})
    entry = function._artifacts.compiled_fn._function.serialize()
    content: bytes = entry.compiled_fw.result.__reduce__()[1][0]
    return content


def test_damaged_content(torch_caches: Path) -> None:
    with torch.no_grad():
        content = graph_content()
    assert content.count(b"aten.") > 0
    for damaged in (content.replace(b"aten.", b"aten,", 1), content[: len(content) // 2], b"PK", b"abcdefgh"):
        with pytest.raises(ArtifactError, match="a precompiled graph"):
            pickle.loads(pickle.dumps(GraphContent(damaged)))


@pytest.mark.parametrize("option", ["on_graph", "check_memory"])
def test_refused_options(torch_caches: Path, option: str) -> None:
    value: Any = (lambda graph, _info: graph) if option == "on_graph" else True
    emitter = {"emitter": "fx"} if option == "on_graph" else {}
    with pytest.raises(OptionError, match=f"cannot save graphs with the option '{option}'"):
        aot_compile(Classifier(), {option: value, **emitter})


def test_a_first_compile_does_not_wait_for_the_bridge_to_be_saved(
    torch_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[object] = []

    def content(*arguments: object, **_keywords: object) -> bytes:
        saved.append(arguments)
        raise ArtifactError("", "", "it is not saved here", "")

    monkeypatch.setattr("fxwrap.compile.precompile.program_content", content)
    x = torch.rand(5)
    for bridge, count in ((None, 0), (Path(), 1)):
        monkeypatch.setattr("fxwrap.compile.precompile.find_bridge", lambda bridge=bridge: bridge)
        torch.compiler.reset()
        assert torch.equal(torch.compile(lambda x: x.sin() * 3.0, backend="fxwrap")(x), x.sin() * 3.0)
        assert len(saved) == count

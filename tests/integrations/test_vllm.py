"""vLLM's compiler interface: subgraphs of a split model, compiled once where they are equal, and loaded later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.errors import ArtifactError, OptionError
from fxwrap.integrations import vllm as adapter
from tests.integrations import piecewise, vllm_interface
from tests.integrations.vllm_interface import Range
from tests.support.child_processes import run_python

LAYERS = 4
ANY_SIZE = Range(1, 512)

LOADED = """
import json, sys
from pathlib import Path
import torch
import fxwrap
from tests.integrations import piecewise, vllm_interface
from tests.support.child_processes import run_python
with vllm_interface.installed():
    compiler = vllm_interface.resolve_obj_by_qualname("fxwrap.integrations.vllm.make_compiler")()
    folder = Path(sys.argv[1])
    compiler.initialize_cache(str(folder))
    calls = torch.load(folder / "calls.pt", weights_only=False)
    with torch.inference_mode():
        functions = [compiler.load(tuple(handle), None, [], 0, None) for handle, _, _ in calls]
        errors = [max((a - b).abs().max().item() for a, b in zip(function(*inputs), results))
                  for function, (_, inputs, results) in zip(functions, calls)]
print(json.dumps({"errors": errors, "counts": vars(fxwrap.compile_counts())}))
"""


@dataclass
class Host:
    """A model that vLLM's compiler has compiled: `handles` are those of its subgraphs, `calls` their inputs and
    results in the first call."""

    folder: Path
    compiler: Any
    model: piecewise.Decoder
    compiled: Any
    handles: list[Any]
    calls: list[Any]
    counts: Any


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Dynamo keeps what it has compiled, of which `host` is a part."""


@pytest.fixture(scope="module", autouse=True)
def interface() -> Iterator[None]:
    """vLLM's interface, importable as vLLM."""
    with vllm_interface.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXWRAP_COMPILE_CACHE", "0")
        yield


def make_compiler(folder: Path | None) -> Any:
    """Returns a compiler as vLLM makes it."""
    compiler = vllm_interface.resolve_obj_by_qualname("fxwrap.integrations.vllm.make_compiler")()
    assert isinstance(compiler, vllm_interface.CompilerInterface)  # vLLM asserts it too
    compiler.initialize_cache("" if folder is None else str(folder), folder is None)
    return compiler


def recorded(function: Any, handle: Any, calls: list[Any]) -> Any:
    """Returns a function that records its handle, inputs and results."""

    def call(*inputs: Any) -> Any:
        results = function(*inputs)
        calls.append((handle, inputs, tuple([item.clone() for item in results])))  # attention writes into one of them
        return results

    return call


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, interface: None) -> Host:
    folder = tmp_path_factory.mktemp("vllm")
    compiler, handles, calls = make_compiler(folder), list[Any](), list[Any]()

    def compile_pieces(pieces: piecewise.Pieces) -> None:
        for name in pieces.names:
            function, handle = compiler.compile(pieces.piece(name), pieces.fake_inputs(name), {}, ANY_SIZE)
            handles.append(handle)
            vars(pieces.whole)[name] = recorded(function, handle, calls)

    torch.compiler.reset()
    model, before = piecewise.Decoder(LAYERS), fxwrap.compile_counts()
    without_guards = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # as vLLM compiles
    compiled = torch.compile(model, backend=piecewise.backend(compile_pieces), fullgraph=True, options=without_guards)
    with torch.inference_mode():
        compiled(*piecewise.inputs(8))
    return Host(folder, compiler, model, compiled, handles, calls[:], fxwrap.compile_counts() - before)


def test_equal_subgraphs_are_compiled_once(host: Host) -> None:
    first, *between, last = host.handles
    assert len(between) == LAYERS - 1 and len({first, last, *between}) == 3
    assert host.counts.compiled == 3
    assert sorted(path.name for path in (host.folder / "fxwrap").iterdir()) == sorted(
        Path(path).name for _, path in {first, last, *between}
    )


@pytest.mark.parametrize("tokens", [1, 2, 9, 64])
def test_results_equal_those_of_eager(host: Host, tokens: int) -> None:
    ids, positions = torch.randint(100, (tokens,)), torch.arange(tokens)
    before = fxwrap.compile_counts()
    with torch.inference_mode():
        assert (host.compiled(ids, positions) - host.model(ids, positions)).abs().max() < 1e-5
    assert fxwrap.compile_counts() == before  # vLLM compiles all sizes of a range at once


def test_another_process_loads_without_compiling(host: Host) -> None:
    torch.save(host.calls, host.folder / "calls.pt")
    done = run_python(["-c", LOADED, host.folder])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["errors"]) == LAYERS + 1 and max(result["errors"]) < 1e-5
    counts = result["counts"]
    assert (counts["compiled"], counts["loaded"], counts["compiler_runs"]) == (0, 3, 0)


def graph_of(function: Any, *inputs: torch.Tensor) -> Any:
    """Returns Dynamo's graph of a function. Dynamo keeps what it has compiled, of which `host` is a part."""
    graphs = list[Any]()
    with torch.inference_mode():
        torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(*inputs)
    return graphs[0]


def examples(graph: Any) -> list[Any]:
    return [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]


def test_compiling_again_loads_from_the_folder(host: Host, tmp_path: Path) -> None:
    graph = graph_of(lambda x: x.exp() + 1, torch.rand(5, 3))
    (first, handle), (second, again) = [
        make_compiler(tmp_path).compile(graph, examples(graph), {}, Range(5, 5)) for _ in range(2)
    ]
    assert handle == again and first is not second
    x = torch.rand(5, 3)
    for function in (first, second):
        torch.testing.assert_close(function(x)[0], x.exp() + 1)


def test_single_sizes_are_compiled_for_their_size(tmp_path: Path) -> None:
    x = torch.rand(8, 3)
    torch._dynamo.mark_dynamic(x, 0)
    graph = graph_of(lambda x: x.exp().sum(0) * x.shape[0], x)
    symbolic = examples(graph)
    concrete = [4, torch.empty(4, 3)]
    compiler = make_compiler(tmp_path)
    for values, sizes, size in ((symbolic, Range(2, 64), 7), (concrete, Range(4, 4), 4)):
        function, handle = compiler.compile(graph, values, {}, sizes)
        x = torch.rand(size, 3)
        torch.testing.assert_close(function(size, x)[0], x.exp().sum(0) * size)
        assert handle is not None
    assert len(list((tmp_path / "fxwrap").iterdir())) == 2


def test_mutations_and_views_of_inputs(tmp_path: Path) -> None:
    def step(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache[:2].copy_(x)
        return cache[1:], x.relu()

    graph = graph_of(step, torch.zeros(4, 3), torch.rand(2, 3))
    _, handle = make_compiler(tmp_path).compile(graph, examples(graph), {}, Range(1, 8))
    function = make_compiler(tmp_path).load(handle, graph, [], 0, Range(1, 8))
    cache, x = torch.zeros(4, 3), torch.randn(2, 3)
    view, positive = function(cache, x)
    assert torch.equal(cache[:2], x) and torch.equal(positive, x.relu())
    assert view.data_ptr() == cache[1:].data_ptr()


def test_constants_are_in_the_key_and_in_the_file(tmp_path: Path) -> None:
    compiler, handles = make_compiler(tmp_path), []
    for factor in (2.0, 3.0):
        table = torch.full((600,), factor)  # above the size that other keys contain
        graph = torch.fx.symbolic_trace(Scaled(table))
        function, handle = compiler.compile(graph, [torch.empty(600)], {}, Range(1, 8))
        handles.append(handle)
        for loaded in (function, make_compiler(tmp_path).load(handle, graph, [], 0, Range(1, 8))):
            assert torch.equal(loaded(torch.ones(600)), table)
    assert handles[0] != handles[1]


class Scaled(torch.nn.Module):
    """Multiplies by a table of its own, and returns a single tensor."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


def test_nothing_is_saved_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = graph_of(lambda x: x.exp() + 1, torch.rand(5, 3))
    function, handle = make_compiler(None).compile(graph, examples(graph), {}, Range(5, 5))
    assert handle is None and not list(tmp_path.iterdir())
    torch.testing.assert_close(function(torch.ones(5, 3))[0], torch.ones(5, 3).exp() + 1)


def config(**options: Any) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config={"fxwrap": options}))


def test_hash_has_the_options() -> None:
    compiler = make_compiler(None)
    assert compiler.compute_hash(config()) == compiler.compute_hash(config(fuse=True))
    assert compiler.compute_hash(config()) != compiler.compute_hash(config(fuse=False))
    with pytest.raises(OptionError, match="unknown option 'fused'"):
        compiler.compute_hash(config(fused=True))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "truncated|damaged|not a"),
        (lambda path: path.chmod(0o666), "another user can write it"),
    ],
)
def test_unusable_files(tmp_path: Path, damage: Any, reason: str) -> None:
    graph = graph_of(lambda x: x.exp() + 1, torch.rand(5, 3))
    _, handle = make_compiler(tmp_path).compile(graph, examples(graph), {}, Range(5, 5))
    damage(Path(handle[1]))
    with pytest.raises(ArtifactError, match=reason):
        make_compiler(tmp_path).load(handle, graph, [], 0, Range(5, 5))
    function, again = make_compiler(tmp_path).compile(graph, examples(graph), {}, Range(5, 5))
    assert again == handle
    torch.testing.assert_close(function(torch.ones(5, 3))[0], torch.ones(5, 3).exp() + 1)
    make_compiler(tmp_path).load(handle, graph, [], 0, Range(5, 5))


def test_platform_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, name in ((None, None), ("lora", None), ("lora, fxwrap", "fxwrap.integrations.vllm.FxwrapPlatform")):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if chosen is not None:
            monkeypatch.setenv("VLLM_PLUGINS", chosen)
        assert adapter.activate() == name
    platform = vllm_interface.resolve_obj_by_qualname("fxwrap.integrations.vllm.FxwrapPlatform")
    assert issubclass(platform, vllm_interface.CpuPlatform)
    assert platform().get_compile_backend() == "fxwrap.integrations.vllm.make_compiler"
    assert platform.simple_compile_backend == "inductor"  # of functions that vLLM compiles itself

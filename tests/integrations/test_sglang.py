"""SGLang's platform hook: its piecewise backend compiles the subgraphs of a split model."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fxwrap
from fxwrap.integrations import sglang as adapter
from tests.integrations import piecewise, sglang_interface

LAYERS = 3


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's interface, importable as SGLang; each test is a process without compiled subgraphs."""
    monkeypatch.setenv("FXWRAP_COMPILE_CACHE", "0")
    adapter._compiler_of.cache_clear()
    with sglang_interface.installed():
        yield
    for cached in (adapter._platform_class, adapter._piecewise_backend_class, adapter._compiler_of):
        cached.cache_clear()


def compile_model(folder: Path) -> tuple[float, fxwrap.CompileCounts]:
    """Compiles a model as SGLang does; returns the largest error of its results, and the counts."""
    platform = pkgutil.resolve_name("fxwrap.integrations.sglang.FxwrapPlatform")()
    assert isinstance(platform, sglang_interface.CudaSRTPlatform)
    torch.manual_seed(0)
    model, before = piecewise.Decoder(LAYERS), fxwrap.compile_counts()

    def compile_pieces(pieces: piecewise.Pieces) -> None:
        for index, name in enumerate(pieces.names):
            graph = pieces.piece(name)
            vars(pieces.whole)[name] = sglang_interface.make_backend(
                platform, graph, str(folder), index, len(pieces.names)
            )

    compiled = torch.compile(model, backend=piecewise.backend(compile_pieces), fullgraph=True)
    errors = []
    with torch.inference_mode():
        for tokens in (8, 3):
            inputs = piecewise.inputs(tokens)
            errors.append((compiled(*inputs) - model(*inputs)).abs().max().item())
    return max(errors), fxwrap.compile_counts() - before


def test_subgraphs_are_compiled_once_and_loaded_later(tmp_path: Path) -> None:
    error, counts = compile_model(tmp_path)
    assert error < 1e-5 and (counts.compiled, counts.loaded) == (3, 0)
    torch.compiler.reset()
    adapter._compiler_of.cache_clear()
    error, counts = compile_model(tmp_path)
    assert error < 1e-5 and (counts.compiled, counts.loaded, counts.compiler_runs) == (0, 3, 0)


def test_platform_names_the_backend_of_functions() -> None:
    platform = pkgutil.resolve_name("fxwrap.integrations.sglang.FxwrapPlatform")()
    assert platform.get_compile_backend() == "fxwrap" and platform.get_compile_backend("npugraph_ex") == "fxwrap"
    assert platform.device_name == "cuda"


def test_platform_is_chosen_by_name_on_machines_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fxwrap.integrations.sglang.FxwrapPlatform"
    for chosen, has_gpu, wanted in (
        ("", True, None),
        ("other", True, None),
        ("fxwrap", False, None),
        ("fxwrap", True, name),
    ):
        monkeypatch.setenv("SGLANG_PLATFORM", chosen)
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert adapter.activate() == wanted

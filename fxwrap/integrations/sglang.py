"""SGLang: a compiler for its piecewise graphs, and the platform plugin that selects it.

Written for `sglang/srt/platforms/interface.py` and `sglang/srt/compilation/` of SGLang 0.5.23, whose compilers are a
closed list: the platform's piecewise backend compiles instead. SGLang is imported when it calls a function of this
module.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.compilation.cuda_piecewise_backend import CUDAPiecewiseBackend
    from sglang.srt.platforms.interface import SRTPlatform

    from fxwrap.integrations.subgraphs import SubgraphCompiler

PLUGIN = "fxwrap"
"""The name of the plugin in the environment variable `SGLANG_PLATFORM`."""


def activate() -> str | None:
    """Returns the name of the platform if `SGLANG_PLATFORM` selects fxwrap, on a machine with a GPU.

    SGLang calls it to find its platform.
    """
    chosen = os.environ.get("SGLANG_PLATFORM") == PLUGIN
    return f"{__name__}.FxwrapPlatform" if chosen and torch.cuda.is_available() else None


def __getattr__(name: str) -> object:
    if name == "FxwrapPlatform":
        return _platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _platform_class() -> type[SRTPlatform]:
    """Returns SGLang's platform for CUDA or ROCm, with fxwrap as its compiler."""
    if torch.version.hip is None:
        from sglang.srt.platforms.cuda import CudaSRTPlatform as Base
    else:
        from sglang.srt.platforms.rocm import RocmSRTPlatform as Base

    class FxwrapPlatform(Base):  # type: ignore[misc]
        """SGLang's platform with fxwrap as its compiler."""

        def get_compile_backend(self, mode: str | None = None) -> str:
            return PLUGIN

        def get_piecewise_backend_cls(self) -> type[CUDAPiecewiseBackend]:
            return _piecewise_backend_class()

    return FxwrapPlatform


@cache
def _piecewise_backend_class() -> type[CUDAPiecewiseBackend]:
    from sglang.srt.compilation.cuda_piecewise_backend import CUDAPiecewiseBackend

    from fxwrap.options import Options

    class FxwrapPiecewiseBackend(CUDAPiecewiseBackend):  # type: ignore[misc]
        """Compiles one subgraph for all numbers of tokens; SGLang captures its calls as CUDA graphs."""

        def __init__(
            self,
            graph: torch.fx.GraphModule,
            compile_config: Any,
            inductor_config: dict[str, Any],
            graph_pool: Any,
            piecewise_compile_index: int,
            total_piecewise_compiles: int,
            sym_shape_indices: list[int],
            compiled_graph_for_general_shape: Any,
            sglang_backend: Any,
        ) -> None:
            manager = sglang_backend.compiler_manager
            compiler = _compiler_of("" if manager.disable_cache else manager.cache_dir)
            inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
            super().__init__(
                graph, compile_config, inductor_config, graph_pool, piecewise_compile_index, total_piecewise_compiles,
                sym_shape_indices, compiler.compile(graph, inputs, Options()).function, sglang_backend,
            )  # fmt: skip

    return FxwrapPiecewiseBackend


@cache
def _compiler_of(folder: str) -> SubgraphCompiler:
    """Returns the compiler of a cache folder of SGLang; that of "" saves nothing."""
    from fxwrap.integrations.subgraphs import SubgraphCompiler

    return SubgraphCompiler(Path(folder) if folder else None)

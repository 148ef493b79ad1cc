"""vLLM: a compiler for its piecewise graphs, and the platform plugin that selects it.

Written for `vllm/compilation/compiler_interface.py` and `vllm/platforms/__init__.py` of vLLM 0.33.0. vLLM is imported
when it calls a function of this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

if TYPE_CHECKING:
    from vllm.compilation.compiler_interface import CompilerInterface
    from vllm.config import VllmConfig
    from vllm.config.utils import Range
    from vllm.platforms import Platform

PLUGIN = "fxwrap"
"""The name of the plugin in the environment variable `VLLM_PLUGINS`, and of the options in vLLM's configuration."""


def activate() -> str | None:
    """Returns the name of the platform if `VLLM_PLUGINS` names fxwrap: vLLM calls it to find its platform."""
    chosen = os.environ.get("VLLM_PLUGINS", "").split(",")
    return f"{__name__}.FxwrapPlatform" if PLUGIN in [name.strip() for name in chosen] else None


def make_compiler() -> CompilerInterface:
    """Returns the compiler of one model: vLLM resolves and calls the name that its platform returns.

    Its handles are (key, path) of files in `fxwrap/` in vLLM's cache folder.
    """
    compiler: CompilerInterface = _compiler_class()()
    return compiler


def __getattr__(name: str) -> object:
    if name == "FxwrapPlatform":
        return _platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _platform_class() -> type[Platform]:
    """Returns vLLM's own platform of this machine, with fxwrap as its compiler."""
    from vllm.platforms import builtin_platform_plugins
    from vllm.platforms.interface import UnspecifiedPlatform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    names = [name for detect in builtin_platform_plugins.values() if (name := detect()) is not None]
    base = resolve_obj_by_qualname(names[0]) if names else UnspecifiedPlatform

    class FxwrapPlatform(base):  # type: ignore[misc, valid-type]
        """vLLM's platform with fxwrap as its compiler."""

        @classmethod
        def get_compile_backend(cls) -> str:
            return f"{__name__}.make_compiler"

    return FxwrapPlatform


@cache
def _compiler_class() -> type[CompilerInterface]:
    from vllm.compilation.compiler_interface import CompilerInterface

    from fxwrap.compile_cache import backend_key
    from fxwrap.integrations.subgraphs import SubgraphCompiler
    from fxwrap.options import Options

    def options_of(config: Mapping[str, Any]) -> Options:
        return Options.from_mapping(config.get(PLUGIN))

    class FxwrapCompiler(CompilerInterface):  # type: ignore[misc]
        """Compiles vLLM's subgraphs."""

        name = PLUGIN

        def __init__(self) -> None:
            self._subgraphs = SubgraphCompiler()

        def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
            self._subgraphs = SubgraphCompiler(None if disable_cache else Path(cache_dir))

        def compute_hash(self, vllm_config: VllmConfig) -> str:
            return backend_key(options_of(vllm_config.compilation_config.inductor_compile_config), ())

        def compile(
            self,
            graph: GraphModule,
            example_inputs: Sequence[object],
            compiler_config: Mapping[str, Any] | None,
            compile_range: Range,
            key: str | None = None,
        ) -> tuple[Callable[..., Any], tuple[str, str] | None]:
            sizes = (compile_range.start, compile_range.end)
            compiled = self._subgraphs.compile(graph, example_inputs, options_of(compiler_config or {}), sizes=sizes)
            handle = (compiled.key, str(self._subgraphs.path(compiled.key))) if compiled.key else None
            return compiled.function, handle

        def load(
            self,
            handle: tuple[str, str],
            graph: GraphModule,
            example_inputs: Sequence[object],
            graph_index: int,
            compile_range: Range,
        ) -> Callable[..., Any]:
            return self._subgraphs.load(handle[0])

    return FxwrapCompiler

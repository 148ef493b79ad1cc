"""torch's precompilation: caches of AOTAutograd, `aot_compile` and `torch._dynamo.config.caching_precompile`.

Why: torch has no public interface by which a backend's results get into its caches and its precompiled files. All
imports of Dynamo are inside functions (see `dynamo.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from fxwrap.torch_compat.precompiled import PrecompiledGraph

_KEY_ATTRIBUTE = "_fxwrap_key"


def is_aot_compiling() -> bool:
    """Whether `aot_compile` or `torch.compiler.precompile` compiles the graph, to save it into a file."""
    from torch._functorch import config

    return bool(config.force_autograd_cache)


def is_precompiling() -> bool:
    """Whether torch saves the graph that is compiled, with the code of its caller: see `caching_precompile` too."""
    from torch._dynamo import config

    return is_aot_compiling() or bool(config.caching_precompile)


@contextmanager
def autograd_cache(graph_module: torch.fx.GraphModule, key: str) -> Iterator[None]:
    """Lets AOTAutograd's cache keep compiled graphs under a key that contains `key`.

    Why: AOTAutograd's key ignores backends and their options. It covers the attributes of Dynamo's module.
    """
    setattr(graph_module, _KEY_ATTRIBUTE, key)
    try:
        yield
    finally:
        delattr(graph_module, _KEY_ATTRIBUTE)


def cacheable_compiler(compile_graph: Callable[..., PrecompiledGraph]) -> Callable[..., Any]:
    """Returns a compiler of graphs whose results AOTAutograd looks up in its cache first."""
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler

    from fxwrap.torch_compat import precompiled

    precompiled.bundle_precompiled_graphs()
    precompiled.hash_no_inductor_backends(_KEY_ATTRIBUTE)
    if TorchVersion("2.12") > torch.__version__:
        precompiled.describe_no_keys(_KEY_ATTRIBUTE)
    compiler: Callable[..., Any] = SerializableAOTDispatchCompiler(precompiled.PrecompiledGraph, compile_graph)
    return compiler


def autograd_cache_folder() -> Path:
    """Returns the folder from which AOTAutograd unpickles compiled graphs."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    return Path(AOTAutogradCache._get_tmp_dir())


def cache_bypass(reason: str) -> Exception:
    """Returns the error with which a graph is left out of AOTAutograd's cache, without a warning."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    error: Exception = BypassAOTAutogradCache(reason)
    return error


def precompiled_graph(
    build: Callable[[], Callable[[list[object]], object]], content: Callable[[], bytes], load: Callable[[bytes], Any]
) -> PrecompiledGraph:
    """Returns a compiled graph that torch can pickle: as `load`, a function of a module, and its bytes.

    `build` returns the boxed entry, at the first call or when torch has loaded the graph. `content` returns the bytes,
    or raises an error for a graph that cannot be saved.
    """
    from fxwrap.torch_compat.precompiled import PrecompiledGraph

    return PrecompiledGraph(build, content, load)


def serializable_callable(function: Callable[..., Any], plain_inputs: Sequence[int]) -> Callable[..., Any]:
    """Returns AOTAutograd's function in a form that `aot_compile` saves; it makes some inputs plain tensors."""
    from fxwrap.torch_compat.precompiled import PrecompiledCallable

    return PrecompiledCallable(function, plain_inputs)


def record_cache_artifact(key: str, content: bytes) -> None:
    """Adds an entry of AOTAutograd's cache, which no graph has, to what `torch.compiler.save_cache_artifacts` saves.

    Why: loading artifacts of other kinds needs their registration first, and fxwrap may be imported later.
    """
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheArtifact
    from torch.compiler._cache import CacheArtifactManager

    CacheArtifactManager.record_artifact(AOTAutogradCacheArtifact.type(), key, content)


def read_cache_artifact(key: str) -> bytes | None:
    """Returns the content of an entry that `torch.compiler.load_cache_artifacts` loaded, or None."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    folder = Path(AOTAutogradCache._get_tmp_dir_for_key(key))
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return files[0].read_bytes() if files else None

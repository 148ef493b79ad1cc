"""SGLang's platforms and piecewise backend, as far as fxwrap uses them.

Read from SGLang 0.5.23: `sglang/srt/platforms/cuda.py`, `sglang/srt/platforms/interface.py` (the hooks
`get_compile_backend` and `get_piecewise_backend_cls`), `sglang/srt/compilation/cuda_piecewise_backend.py`,
`sglang/srt/compilation/backend.py` (`make_backend`, and `CompilerManager` with its folder).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


class CudaSRTPlatform:
    """SGLang's platform for CUDA."""

    device_name = "cuda"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "inductor"

    def get_piecewise_backend_cls(self) -> type | None:
        return None


class CUDAPiecewiseBackend:
    """Runs a compiled subgraph; the real one captures CUDA graphs of its calls."""

    def __init__(
        self, graph: Any, compile_config: Any, inductor_config: dict[str, Any], graph_pool: Any,
        piecewise_compile_index: int, total_piecewise_compiles: int, sym_shape_indices: list[int],
        compiled_graph_for_general_shape: Any, sglang_backend: Any,
    ) -> None:  # fmt: skip
        self.compiled_graph_for_general_shape = compiled_graph_for_general_shape

    def __call__(self, *args: Any) -> Any:
        return self.compiled_graph_for_general_shape(*args)


def make_backend(platform: Any, graph: Any, folder: str, index: int, total: int) -> Any:
    """Returns the piecewise backend of a subgraph that the compiler "eager" has compiled."""
    manager = SimpleNamespace(cache_dir=folder, disable_cache=False)
    backend_class = platform.get_piecewise_backend_cls()
    return backend_class(
        graph, SimpleNamespace(), {}, None, index, total, [], graph, SimpleNamespace(compiler_manager=manager)
    )


@contextmanager
def installed() -> Iterator[None]:
    """Makes the interface importable as SGLang."""
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.platforms": {},
        "sglang.srt.platforms.cuda": {"CudaSRTPlatform": CudaSRTPlatform},
        "sglang.srt.compilation": {},
        "sglang.srt.compilation.cuda_piecewise_backend": {"CUDAPiecewiseBackend": CUDAPiecewiseBackend},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]

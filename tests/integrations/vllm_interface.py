"""vLLM's interface for compilers and platforms, as far as fxwrap uses it.

Read from vLLM 0.33.0: `vllm/compilation/compiler_interface.py` (CompilerInterface), `vllm/config/utils.py` (Range),
`vllm/platforms/__init__.py` (the plugins), `vllm/platforms/interface.py` (Platform), `vllm/utils/import_utils.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class CompilerInterface:
    """The base class that vLLM requires of a compiler; the methods have its signatures."""

    name: str

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        """Names the cache folder."""

    def compute_hash(self, vllm_config: Any) -> str:
        return ""

    def compile(
        self, graph: Any, example_inputs: list[Any], compiler_config: dict[str, Any], compile_range: Any,
        key: str | None = None,
    ) -> tuple[Callable[..., Any] | None, Any | None]:  # fmt: skip
        return None, None

    def load(
        self, handle: Any, graph: Any, example_inputs: list[Any], graph_index: int, compile_range: Any
    ) -> Callable[..., Any]:
        raise NotImplementedError("caching is not supported")


@dataclass(frozen=True)
class Range:
    """A range of sizes, both ends inclusive."""

    start: int
    end: int

    def is_single_size(self) -> bool:
        return self.start == self.end


class Platform:
    """vLLM's platform of a machine."""

    simple_compile_backend = "inductor"

    @classmethod
    def get_compile_backend(cls) -> str:
        return cls.simple_compile_backend


class CpuPlatform(Platform):
    """The platform of a machine without GPUs."""


class UnspecifiedPlatform(Platform):
    """The platform of a machine that no plugin knows."""


def resolve_obj_by_qualname(name: str) -> Any:
    """Returns an object by its module and name, as vLLM resolves names."""
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)


@contextmanager
def installed(builtin: str | None = "vllm.platforms.cpu.CpuPlatform") -> Iterator[None]:
    """Makes the interface importable as vLLM; `builtin` is the platform that vLLM finds on this machine."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.compilation": {},
        "vllm.compilation.compiler_interface": {"CompilerInterface": CompilerInterface},
        "vllm.platforms": {"builtin_platform_plugins": {"cuda": lambda: None, "cpu": lambda: builtin}},
        "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
        "vllm.platforms.interface": {"UnspecifiedPlatform": UnspecifiedPlatform},
        "vllm.utils": {},
        "vllm.utils.import_utils": {"resolve_obj_by_qualname": resolve_obj_by_qualname},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                del sys.modules[name]
            else:
                sys.modules[name] = previous

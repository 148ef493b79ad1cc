"""A process that compiles a model and lets torch save it, and one that loads all of it and compiles nothing.

Both are this script: torch's keys contain the name of the module that imported torch first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config as dynamo_config

import fxwrap
from tests.support.long_form import LONG

EMITTERS = ("python", "cpp", "fx", "interpreter") if LONG else ("fx",)
AOT_NAMES = ("aot-python-training", "aot-cpp-inference", "aot-fx-training", "aot-interpreter-inference")[
    : None if LONG else 2
]
"""Outside the long form each emitter but the interpreter is loaded in one of the ways."""


class Classifier(torch.nn.Module):
    """A small model whose weights are the same in each process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        return self.layers(x).softmax(-1)


def batch(size: int, *, dynamic: bool = False) -> torch.Tensor:
    """Returns an input of the model, with a dynamic first dimension if asked for."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return x


def save_tensor_guards(guards: list[object]) -> list[bool]:
    """Keeps the guards that torch can save."""
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in guards]  # type: ignore[attr-defined]


def inference_error(
    compiled: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, size: int, *, dynamic: bool = False
) -> float:
    """Returns the largest difference of the results to eager ones."""
    with torch.no_grad():
        return (compiled(batch(size, dynamic=dynamic)) - model(batch(size))).abs().max().item()


def training_error(
    compiled: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, size: int, *, dynamic: bool = False
) -> float:
    """Returns the largest difference of the gradients to eager ones."""

    def gradients(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        function(batch(size, dynamic=dynamic)).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    pairs = list(zip(gradients(compiled), gradients(model), strict=True))
    assert pairs
    return max([(actual - wanted).abs().max().item() for actual, wanted in pairs])


def compiled_model(emitter: str) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the model, and its compiled form."""
    model = Classifier()
    return model, torch.compile(model, backend="fxwrap", options={"emitter": emitter})


def load_aot(folder: Path, name: str) -> dict[str, object]:
    """Loads a file of `aot_compile` and calls it for two sizes."""
    model, before = Classifier(), fxwrap.compile_counts()
    with (folder / f"{name}.pt").open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    error = training_error if name.endswith("training") else inference_error
    errors = [error(lambda x: loaded(model, x), model, size) for size in (5, 7)]
    return {"error": max(errors), "counts": vars(fxwrap.compile_counts() - before)}


def load_cached(emitter: str, *, dynamic: bool = True) -> dict[str, object]:
    """Compiles the model, with torch's caches loaded."""
    before = fxwrap.compile_counts()
    model, compiled = compiled_model(emitter)
    kinds = (inference_error, training_error)
    errors = [
        error(compiled, model, size, dynamic=dynamic) for error in kinds for size in ((5, 7) if dynamic else (5,))
    ]
    return {"error": max(errors), "counts": vars(fxwrap.compile_counts() - before)}


def aot_compile(model: torch.nn.Module, options: dict[str, Any]) -> Any:
    """Returns the compiled forward method of a model, in torch's form that can be saved."""
    options = {"guard_filter_fn": save_tensor_guards, **options}
    compiled = torch.compile(model, backend="fxwrap", fullgraph=True, options=options)
    return compiled.forward.aot_compile(((batch(5, dynamic=True),), {}))


def load_precompiled() -> dict[str, object]:
    """Compiles the model with `caching_precompile`: Dynamo's entries are loaded too."""
    torch.compiler.reset()
    with dynamo_config.patch(caching_precompile=True):
        return load_cached("python", dynamic=False)


def save(folder: Path) -> None:
    """Compiles the model in each way, and saves it with torch."""
    for name in AOT_NAMES:
        _, emitter, mode = name.split("-")
        with torch.set_grad_enabled(mode == "training"):
            aot_compile(Classifier(), {"emitter": emitter}).save_compiled_function(str(folder / f"{name}.pt"))
    for emitter in EMITTERS:
        load_cached(emitter)
    load_precompiled()
    with dynamo_config.patch(caching_precompile=True):
        artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    (folder / "caches.bin").write_bytes(artifacts[0])


def load(folder: Path) -> dict[str, dict[str, object]]:
    """Returns the errors and counts of all that was saved in the folder."""
    results = {name: load_aot(folder, name) for name in AOT_NAMES}
    torch.compiler.load_cache_artifacts((folder / "caches.bin").read_bytes())
    results |= {f"cached-{emitter}": load_cached(emitter) for emitter in EMITTERS}
    results["precompiled"] = load_precompiled()
    return results


def load_caches(folder: Path) -> dict[str, dict[str, object]]:
    """Returns the errors and counts of what torch's caches contain."""
    torch.compiler.load_cache_artifacts((folder / "caches.bin").read_bytes())
    return {f"cached-{emitter}": load_cached(emitter) for emitter in EMITTERS}


def imported_code_generators() -> bool:
    """Whether this process has imported those of TorchInductor."""
    return "torch._inductor.select_algorithm" in sys.modules


def main() -> None:
    """Saves into a folder or loads from it; prints the results, and what was imported, as JSON."""
    if hasattr(dynamo_config, "enable_aot_compile"):
        dynamo_config.enable_aot_compile = True
    results: dict[str, object] = {}
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]))
    elif sys.argv[1] == "load_caches":
        results |= load_caches(Path(sys.argv[2]))
    else:
        results |= load(Path(sys.argv[2]))
    print(json.dumps({**results, "code_generators": imported_code_generators()}))


if __name__ == "__main__":
    main()

"""Files that one release of torch saves and another one runs, from Python and from C, without compiling them again.

`python -m tests.artifact.other_releases save FOLDER` writes programs with their inputs and results, and the signatures
of all operators of ATen. `... check FOLDER` runs in the environment of another release: it loads each file with
`binaries="required"` for both emitters, opens it in C, compares the results, and lists the operators that programs
cannot bring along. `make other-releases PYTHONS="PATH PATH"` does both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxwrap
from fxwrap.artifact import SavedContent, save_program
from fxwrap.errors import ArtifactError
from fxwrap.runtime.native import build_runtime
from tests.artifact.native_host import drive, read_result, tensor_commands

REMOVED = "cholesky"
"""The program with an operator that torch 2.14 removed."""


class Kernels(nn.Module):
    """Fused kernels of the CPU: no operator is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin() * 2, -1) + x.mean(0)


class Operators(nn.Module):
    """Operators of many kinds of signatures, and constants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.conv = nn.Linear(16, 16), nn.LayerNorm(16), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.norm(self.linear(x))[None])[0]
        y = nn.functional.scaled_dot_product_attention(y[None], x[None], x[None])[0]
        values, indices = torch.sort(y, -1)
        return torch.cat([values.cumsum(-1), y.gather(-1, indices)]).index_select(0, torch.arange(4)) + y.var(
            -1, keepdim=True
        )


class Loop(nn.Module):
    """Control flow and a size that changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() @ y.sum(0), lambda y: y.sum(1) - 1, (x,))


class Removed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.cholesky.default(x @ x.T + 100 * torch.eye(4)).sum(0)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "kernels": (Kernels, True), "operators": (Operators, False), "loop": (Loop, True), REMOVED: (Removed, False),
}  # fmt: skip
"""The module of each program, and whether its lines are fused."""


def save(folder: Path) -> None:
    """Saves the programs with this release of torch."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    rows = {"loop": ({0: torch.export.Dim("rows", min=2, max=64)},)}
    results = {"x": x}
    for name, (module, fuse) in PROGRAMS.items():
        exported = torch.export.export(module().eval(), (x,), dynamic_shapes=rows.get(name))
        options = fxwrap.Options(emitter="cpp", fuse=fuse)
        compiled = fxwrap.compile_graph(exported, name=name, options=options)
        path = folder / f"{name}.fxw"
        save_program(SavedContent(compiled.program, "cpp"), path, emitters=["python"], target="native")
        with torch.no_grad():
            results[name] = compiled.flat(x)[0]
    save_file(results, folder / "results.safetensors")
    (folder / "operators.json").write_text(json.dumps(signatures()))


def signatures() -> dict[str, str]:
    """Returns the signatures of ATen's operators by their names."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    texts = {}
    for full in names:
        name, _, overload = full.partition(".")
        texts[full] = str(torch._C._get_schema(name, overload))
    return texts


def check(folder: Path) -> int:
    """Runs the programs with this release of torch; returns the number of failures."""
    build_runtime()  # the bridge is for one release
    results, failures = load_file(folder / "results.safetensors"), 0
    for name in PROGRAMS:
        for way, run in (("cpp", in_python), ("python", in_python), ("C", in_c)):
            outcome = run(folder / f"{name}.fxw", results["x"], results[name], way)
            refused = name == REMOVED and not hasattr(torch.ops.aten, "cholesky")
            good = outcome == "equal" or (refused and "cholesky" in outcome)
            failures += not good
            print(f"torch {torch.__version__}: {name}, {way}: {outcome}{'' if good else '   FAILED'}")
    print(f"torch {torch.__version__}: operators that files do not bring along: {', '.join(lost_operators(folder))}")
    return failures


def in_python(path: Path, x: torch.Tensor, wanted: torch.Tensor, emitter: str) -> str:
    """Returns "equal", or the refusal of a file."""
    try:
        with torch.no_grad():
            return compare(fxwrap.load(path, emitter=emitter, binaries="required").flat(x)[0], wanted)
    except ArtifactError as error:
        return str(error)


def in_c(path: Path, x: torch.Tensor, wanted: torch.Tensor, _way: str) -> str:
    """Returns "equal", or the error of the C runtime."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = drive("open", path, *tensor_commands(folder, [x]), "run", folder / "out")
        return done.lines[0] if done.code else compare(read_result(folder / "out.0", wanted), wanted)


def compare(result: Any, wanted: torch.Tensor) -> str:
    """Returns "equal", or the error of a result: another release may have other kernels."""
    error = ((result - wanted).norm() / wanted.norm()).item()
    return "equal" if error < 1e-5 else f"the result differs by {error}"


def lost_operators(folder: Path) -> list[str]:
    """Returns the saved operators that this release lacks, or has with a signature that is not backward compatible."""
    here, lost = signatures(), []
    for name, text in json.loads((folder / "operators.json").read_text()).items():
        if name not in here:
            lost.append(name)
            continue
        own = torch._C._get_schema(*name.partition(".")[::2])
        if here[name] != text and not own.is_backward_compatible_with(torch._C.parse_schema(text)):
            lost.append(name)
    return sorted(lost)


if __name__ == "__main__":
    command, target = sys.argv[1:]
    sys.exit(save(Path(target)) if command == "save" else check(Path(target)))

"""A model compiled, saved to one file, and run by a process that never sees the model, nor torch's tracing, nor a
compiler. Then the same program without its weights, which are given to it later and replaced while it serves.

Run it with `python examples/save_and_load.py`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

import fxwrap
from fxwrap.errors import ArtifactError

SERVER = """
import sys, time, torch, fxwrap
start = time.perf_counter()
program = fxwrap.load(sys.argv[1], binaries="required")
(result,) = program(torch.ones(4, 32))
print(f"first result {1000 * (time.perf_counter() - start):.0f} ms after load was called; emitter {program.emitter}")
print("torch's tracing was loaded:", "torch._dynamo" in sys.modules)
torch.save(result, sys.argv[2])
"""


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.second(nn.functional.gelu(self.first(x))), -1)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.ones(4, 32)
    graph = torch.export.export(model, (x,))
    compiled = fxwrap.compile_graph(graph, name="model", options=fxwrap.Options(emitter="cpp"))

    # One file: the program's text, its kernels, compiled code, weights, and a manifest with the hash of every entry.
    compiled.save(folder / "model.fxw")
    with zipfile.ZipFile(folder / "model.fxw") as file:
        for entry in file.infolist():
            shown = entry.filename if len(entry.filename) < 40 else f"{entry.filename[:24]}...{entry.filename[-4:]}"
            print(f"  {entry.file_size:>8} bytes  {shown}")

    # Another process runs it.
    command = [sys.executable, "-c", SERVER, str(folder / "model.fxw"), str(folder / "result.pt")]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
    torch.testing.assert_close(torch.load(folder / "result.pt"), model(x))

    # Without weights the file is small, and one file serves any weights of these types.
    compiled.save(folder / "no_weights.fxw", constants=False)
    served = fxwrap.load(folder / "no_weights.fxw")
    served.load_constants(model.state_dict())
    torch.testing.assert_close(served(x)[0], model(x))
    better = Model().eval()
    served.update_constants(better.state_dict())
    torch.testing.assert_close(served(x)[0], better(x))
    try:
        served.update_constants({"first.weight": torch.ones(3)})
    except ArtifactError as error:
        print(f"refused: {error.reason}")

    # What was saved is data: any emitter takes it, and it prints.
    print(fxwrap.load(folder / "model.fxw", emitter="fx").graph_module.code.strip().splitlines()[0])
    print(str(served.program).splitlines()[0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))

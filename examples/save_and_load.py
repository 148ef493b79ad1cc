"""Compile a model, save it to one file, and run it in a process without the model, tracing or a compiler. Then save the
program without its weights, load weights later, and update them.

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
result = program(torch.ones(4, 32))
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

    # Without weights the file is small, and serves any weights of the same types.
    compiled.save(folder / "no_weights.fxw", constants=False)
    served = fxwrap.load(folder / "no_weights.fxw")
    served.load_constants(model.state_dict())
    torch.testing.assert_close(served(x), model(x))
    updated = Model().eval()
    served.update_constants(updated.state_dict())
    torch.testing.assert_close(served(x), updated(x))
    try:
        served.update_constants({"first.weight": torch.ones(3)})
    except ArtifactError as error:
        print(f"rejected: {error.reason}")

    # A saved program is data: it can be printed, and emitted by any emitter.
    print(fxwrap.load(folder / "model.fxw", emitter="fx").graph_module.code.strip().splitlines()[0])
    print(str(served.program).splitlines()[0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))

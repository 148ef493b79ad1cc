"""Host time of a call of GPT-2 from C++: fxwrap's runtime beside AOTInductor's, and fxwrap's calls from Python.

The layers are small, so that the host's work dominates; one thread. Both sides run in one C++ process, in interleaved
rounds. With `--full`, the model has its real size (497 MB), for the time from opening the file to the first result.

    python benchmarks/native_calls.py [--layers 12] [--full] [--rounds 15] [--record]
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import fxwrap
from benchmarks.results import Report, add_record_option
from fxwrap.runtime.native import build_runtime, find_compiler


class Logits(torch.nn.Module):
    """GPT-2's logits."""

    def __init__(self, layers: int, full: bool) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        small = {} if full else {"n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False, **small)).eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits


def build_host(folder: Path) -> Path:
    """Compiles the C++ side."""
    root, runtime, source = Path(torch.__file__).parent, build_runtime(), Path(__file__).with_suffix(".cpp")
    include = [f"-I{runtime / 'include'}", "-isystem", f"{root / 'include'}",
               "-isystem", f"{root / 'include/torch/csrc/api/include'}"]  # fmt: skip
    links = [f"-L{runtime}", f"-L{root / 'lib'}", "-lfxwrap_runtime", "-ltorch", "-ltorch_cpu", "-lc10",
             f"-Wl,-rpath,{runtime}", f"-Wl,-rpath,{root / 'lib'}"]  # fmt: skip
    command = [*find_compiler().command, "-std=c++20", "-O2", *include, str(source), *links, "-o", str(folder / "host")]
    subprocess.run(command, check=True)
    return folder / "host"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    add_record_option(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.arange(4).remainder(50).reshape(1, 4)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        program = torch.export.export(Logits(chosen.layers, chosen.full), (ids,))
        compiled = fxwrap.compile_graph(program, name="gpt2", options=fxwrap.Options(emitter="cpp"))
        compiled.save(folder / "gpt2.fxw", target="native")
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "gpt2.pt2"))
        sizes = {side: (folder / f"gpt2.{side}").stat().st_size for side in ("fxw", "pt2")}
        calls = 1 if chosen.full else chosen.calls
        command = [build_host(folder), folder / "gpt2.fxw", folder / "gpt2.pt2", 1, 4, chosen.rounds, calls]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
        print(done.stdout)
        command[-2] = 1  # more processes that open the files
        others = [subprocess.run([*map(str, command)], capture_output=True, text=True, check=True) for _ in range(4)]
        starts = [[*map(float, re.findall(r"([\d.]+) s\b", run.stdout))] for run in (done, *others)]
        opened, first, other = map(statistics.median, zip(*starts))
        rounds = [[float(x) for x in line.split()[1:]] for line in done.stdout.splitlines() if line.startswith("round")]
        python = []
        for _ in range(chosen.rounds):
            start = time.perf_counter()
            for _ in range(calls):
                compiled.flat(ids)
            python.append((time.perf_counter() - start) / calls * 1e6)
    report = Report("native_calls", chosen, note="one thread; C++ sides interleaved, Python afterwards")
    ours, theirs = zip(*rounds)
    report.add(
        {
            "layers": chosen.layers,
            "C++ call, us": round(statistics.median(ours), 1),
            "AOTInductor's, us": round(statistics.median(theirs), 1),
            "ratio": round(statistics.median([a / b for a, b in rounds]), 2),
            "open, s": opened,
            "first result, s": first,
            "AOTInductor's first result, s": other,
            "Python call, us": round(statistics.median(python), 1),
            "file, MB": round(sizes["fxw"] / 1e6, 1),
            "AOTInductor's file, MB": round(sizes["pt2"] / 1e6, 1),
        },
        {"rounds": rounds, "python": python, "starts": starts},
    )


if __name__ == "__main__":
    main()

"""Runs the C runtime under sanitizers of threads and addresses: `make sanitize`.

The runtime and the test driver are compiled with a sanitizer; libtorch is not. Errors in the runtime
are reported; reports from within libraries that are not compiled with it are suppressed by the name of the library.

    python -m tests.artifact.sanitize [--threads 16] [--calls 100000] [--openings 32] [--sanitizers thread,address]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import fxwrap
from fxwrap.runtime.native import build_runtime, find_compiler
from fxwrap.runtime.native.runtime_library import runtime_definitions, runtime_sources
from tests.artifact.native_host import SOURCE, described, tensor_commands
from tests.artifact.programs import batch
from tests.artifact.test_native_host import compile_affine

SUPPRESSIONS = "\n".join(
    [
        f"{kind}:{library}"
        for kind in ("race", "called_from_lib")
        for library in ("libtorch_cpu.so", "libgomp.so", "libc10.so")
    ]
)


def build(sanitizer: str, folder: Path) -> Path:
    """Compiles the runtime and the driver with a sanitizer; returns the driver."""
    compiler, runtime = find_compiler(), build_runtime()
    headers = [f"-I{runtime / 'include'}", f"-I{runtime_sources()[0].parents[1]}"]
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", *headers]
    shared = ["-shared", "-fPIC", "-fvisibility=hidden", *runtime_definitions(), *map(str, runtime_sources())]
    (folder / "libfxwrap_bridge.so").symlink_to(runtime / "libfxwrap_bridge.so")
    library = folder / "libfxwrap_runtime.so"
    subprocess.run([*compiler.command, *flags, *shared, "-ldl", "-o", library], check=True)
    links = [f"-L{folder}", "-lfxwrap_runtime", f"-Wl,-rpath,{folder}"]
    subprocess.run([*compiler.command, *flags, str(SOURCE), *links, "-o", folder / "driver"], check=True)
    return folder / "driver"


def run(sanitizer: str, chosen: argparse.Namespace, folder: Path) -> bool:
    """Runs calls, replacements and openings in threads, and some errors; returns whether the sanitizer was silent."""
    driver, path = build(sanitizer, folder), folder / "affine.fxw"
    compile_affine(None).save(path, target="native")
    suppressions = folder / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    options = f"suppressions={suppressions} ignore_noninstrumented_modules=1 detect_leaks=0 exitcode=66"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TSAN_OPTIONS": options.replace("detect_leaks=0", "")}
    environment["ASAN_OPTIONS"] = "detect_leaks=0:exitcode=66"
    tensors = tensor_commands(folder, [batch()])
    old = {name: tensor.detach() for name, tensor in fxwrap.load(path).program.store.tensors.items()}
    swaps = [word for name, tensor in old.items() for word in ("old_constant", name, *described(folder, tensor))]
    for name, tensor in old.items():
        swaps += ["constant", name, *described(folder, torch.randn_like(tensor))]
    damaged = folder / "damaged.fxw"
    damaged.write_bytes(path.read_bytes()[:4000])
    runs: list[list[object]] = [
        ["open", path, *tensors, *swaps, "call_in_threads", chosen.threads, chosen.calls // chosen.threads],
        [*tensors, "open_in_threads", chosen.openings, path],
        ["open", damaged],
        ["open", path, *tensor_commands(folder, [torch.randn(3, 3)]), "run", folder / "out"],
    ]
    silent = True
    for words in runs:
        done = subprocess.run([driver, *map(str, words)], env=environment, capture_output=True, text=True, check=False)
        fine = (
            done.returncode in (0, 3)
            and "Sanitizer" not in done.stderr
            and "wrong 0" in done.stdout + " wrong 0" * (done.returncode == 3)
        )
        silent = silent and fine
        print(sanitizer, "ok" if fine else f"failed ({done.returncode})", done.stdout.strip().splitlines()[:1])
        if not fine:
            print(done.stderr[-4000:])
    return silent


def main(arguments: list[str]) -> int:
    """Returns 0 if every sanitizer was silent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--openings", type=int, default=32)
    parser.add_argument("--sanitizers", default="thread,address")
    chosen = parser.parse_args(arguments)
    results = []
    for sanitizer in chosen.sanitizers.split(","):
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(sanitizer, chosen, Path(folder)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

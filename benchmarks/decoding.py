"""Decoding of one token by Llama with static caches, beside the bandwidth of a copy, TorchInductor and eager.

    python benchmarks/decoding.py --device cuda --record              # 8 layers of the 8B shape, bf16, batch 1 and 8
    python benchmarks/decoding.py --device cuda --layers 32 --weights plain int8 int4 --record deep
    python benchmarks/decoding.py --record                            # CPU: 2 layers of the 1B shape, float32
    python benchmarks/decoding.py --dtype bfloat16 --record bfloat16

All sides decode with the same weights and caches, in interleaved rounds in rotating order, among which a large tensor
is copied. A side whose compile takes longer than `--side-seconds` is left out; a second run finds what the first one
cached. With `--seconds`, what begins later is left out. Columns:

- weights: "plain" ones have the activations' dtype; int8 and int4 ones are those of torchao's weight-only quantisation.
- us: the median of a round's mean time of a token. A round is several tokens in sequence, without waits in between.
- bandwidth: bytes of the weights that a token reads, over its time, as a part of the bytes that the copy reads and
  writes in a second. The embedding does not count. 1.0 is the speed of the copy.
- matmuls: the same over the time of the matmul kernels alone, in a profile (GPUs).
- kernels: kernels of a token, in a profile (GPUs).
- error: norm(difference) / norm of the logits, against the same weights and caches in float64.

On GPUs, "reads alone" are a chain of launches that only read what a token reads: what a program of so many launches
could reach if it computed nothing.

A second table has the kernels of each side: their number and time in a token, and for those of fxwrap the bytes of
their tensors over their time, as a part of the copy's (GPUs).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.decoding_models import WEIGHTS, Decoder, build_model, weight_bytes
from benchmarks.decoding_reads import Reads, reads_of_token
from benchmarks.measure_kernels import (
    Contender,
    first_line,
    fresh_function,
    interleaved_host_times,
    relative_error,
    synchronize,
)
from benchmarks.results import Report, Row, add_record_option
from fxwrap.lines import Launch
from fxwrap.wrapper_ir import Value

SIDES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "eager": ("eager", {}),
    "inductor": ("inductor", {}),
    "inductor reduce-overhead": ("inductor", {"mode": "reduce-overhead"}),
    "inductor max-autotune": ("inductor", {"mode": "max-autotune"}),
    "fxwrap": ("fxwrap", {}),
    "fxwrap reduce-overhead": ("fxwrap", {"mode": "reduce-overhead"}),
    "fxwrap ordered": ("fxwrap", {"options": {"cuda_graphs": True}}),
    "fxwrap generated": ("fxwrap", {"options": {"cuda_graphs": True, "matmul_kernels": "generated"}}),
    "fxwrap max-autotune": ("fxwrap", {"mode": "max-autotune"}),
}
"""The backend of each side, and the keywords of `torch.compile`; "generated" has all matmuls as kernels, untimed,
and "ordered" no launch that starts before its predecessor has ended."""

SHAPES = {
    "cuda": {"width": 4096, "hidden": 14336, "heads": 32, "key_heads": 8, "vocabulary": 32000, "layers": [8]},
    "cpu": {"width": 2048, "hidden": 8192, "heads": 32, "key_heads": 8, "vocabulary": 8192, "layers": [2]},
}
"""The shapes of Llama 8B and 1B."""

Decode = Callable[[Tensor], tuple[Tensor, Tensor]]
MATMUL = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|splitk|(^|_)(addmm|bmm|mm|mv|matmul|contraction)(_|\d|$)", re.I)
"""Kernels that compute matmuls, by their names."""

_COPY, _READS = "copy", "reads alone"
_MAX_COPIED_BYTES = 1 << 30
_PROFILED_TOKENS = 5


@dataclass(frozen=True)
class Profile:
    """The kernels of a token: their number and seconds by name."""

    counts: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def matmul_seconds(self) -> float:
        """The seconds of matmul kernels."""
        return sum([time for name, time in self.seconds.items() if MATMUL.search(name)])


@dataclass(frozen=True)
class Case:
    """A shape of the model."""

    weights: str
    layers: int
    batch: int

    @property
    def shape(self) -> Mapping[str, int]:
        """The sizes that the model reads."""
        return {"layers": self.layers, "batch": self.batch}

    @property
    def row(self) -> Row:
        """The first cells of a row."""
        return {"weights": self.weights, **self.shape}

    def __str__(self) -> str:
        return f"{self.weights} weights, {self.layers} layers, batch {self.batch}"


def compile_side(name: str, model: Decoder) -> Decode:
    """Returns the model on a side, with a code object of its own."""
    backend, keywords = SIDES[name]
    decode: Decode = fresh_function(lambda tokens: model(tokens))
    if backend != "eager":
        decode = torch.compile(decode, backend=backend, fullgraph=True, dynamic=False, **keywords)
    return torch.no_grad()(decode)


def run_tokens(decode: Decode, tokens: Tensor, count: int) -> None:
    """Decodes several tokens in sequence; the results of each may be overwritten by the next."""
    for _ in range(count):
        torch.compiler.cudagraph_mark_step_begin()
        decode(tokens)


def profile_kernels(decode: Decode, tokens: Tensor) -> Profile:
    """Returns the kernels of a token, the mean of several."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_tokens(decode, tokens, _PROFILED_TOKENS)
        synchronize(tokens.device)
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for event in profile.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            counts[event.name] += 1
            time = (event.time_range.end - event.time_range.start) / 1e6
            seconds[event.name] = seconds.get(event.name, 0.0) + time
    return Profile(
        {name: count / _PROFILED_TOKENS for name, count in counts.items()},
        {name: time / _PROFILED_TOKENS for name, time in seconds.items()},
    )


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body, at the next step of the interpreter, when the seconds have passed."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled_sides(
    chosen: argparse.Namespace, model: Decoder, tokens: Tensor, case: str
) -> tuple[dict[str, Decode], dict[str, float]]:
    """Returns the sides that compile within the time limit, and their errors."""
    expected = torch.no_grad()(model.exact_logits)(tokens)
    sides: dict[str, Decode] = {}
    errors: dict[str, float] = {}
    for name in chosen.sides:
        start = time.monotonic()
        try:
            with time_limit(max(min(chosen.side_seconds, chosen.end - start), 1)):
                decode = compile_side(name, model)
                run_tokens(decode, tokens, 4)  # the first compiles, later ones capture graphs
                synchronize(tokens.device)
        except Exception as error:  # noqa: BLE001 - the other sides are measured without one that fails
            reason = getattr(error, "inner_exception", error)  # Dynamo's error has another one of the backend
            print(f"    {case}, {name}: left out, {first_line(reason)[:200]}", flush=True)
            continue
        sides[name], errors[name] = decode, relative_error(decode(tokens)[1], expected)
        print(f"    {case}, {name}: error {errors[name]:.2e}, {time.monotonic() - start:.0f} s", flush=True)
    return sides, errors


def measure(chosen: argparse.Namespace, case: Case, report: Report, kernel_report: Report | None) -> None:
    """Measures all sides for a shape and adds their rows."""
    torch._dynamo.reset()
    model = build_model(argparse.Namespace(**{**vars(chosen), **case.shape, "ranks": 1}), case.weights)
    bytes_read = weight_bytes(model)
    tokens = torch.randint(chosen.vocabulary, (case.batch, 1), device=chosen.device)
    sides, errors = compiled_sides(chosen, model, tokens, str(case))
    contenders = {
        name: Contender(partial(run_tokens, decode, tokens, chosen.calls), chosen.calls)
        for name, decode in sides.items()
    }
    source = torch.ones(min(bytes_read, _MAX_COPIED_BYTES), dtype=torch.uint8, device=chosen.device)
    target = torch.empty_like(source)
    contenders[_COPY] = Contender(lambda: target.copy_(source), 1)
    contenders[_COPY].run()
    if chosen.device.type == "cuda":
        reads = reads_of_token(model)
        contenders[_READS] = Contender(partial(Reads(reads, chosen.device).run, chosen.calls), chosen.calls)
    times = interleaved_host_times(contenders, chosen.rounds, chosen.device)
    bandwidth = 2 * source.nbytes / times[_COPY].median
    others = [name for name in chosen.sides if name.startswith("inductor")]
    for name in [name for name in contenders if name != _COPY]:
        profile = None if kernel_report is None or name == _READS else profile_kernels(sides[name], tokens)
        median = times[name].median
        row: Row = {
            **case.row, "side": name, "us": round(1e6 * median, 1), "tokens/s": round(case.batch / median),
            **{f"/ {other}": round(median / times[other].median, 3) if other in sides else None for other in others},
            "bandwidth": round(bytes_read / median / bandwidth, 3),
            "matmuls": round(bytes_read / profile.matmul_seconds / bandwidth, 3)
            if profile is not None and profile.matmul_seconds else None,
            "kernels": len(reads) if name == _READS else round(sum(profile.counts.values())) if profile else None,
            "error": errors.get(name),
        }  # fmt: skip
        report.add(row, {"seconds": times[name].samples, "copy": times[_COPY].samples, "bytes": source.nbytes})
        if profile is not None and kernel_report is not None:
            add_kernels(kernel_report, case, name, profile, bandwidth)


def add_kernels(report: Report, case: Case, side: str, profile: Profile, bandwidth: float) -> None:
    """Adds a row for each kernel, the longest first."""
    total, moved = sum(profile.seconds.values()), kernel_bytes() if side.startswith("fxwrap") else {}
    for name, seconds in sorted(profile.seconds.items(), key=lambda item: -item[1]):
        share = moved[name] * profile.counts[name] / seconds / bandwidth if name in moved else None
        row: Row = {
            **case.row, "side": side, "kernel": name[:100], "matmul": "yes" if MATMUL.search(name) else "no",
            "of a token": round(profile.counts[name], 2), "us": round(1e6 * seconds, 2),
            "part": round(seconds / total, 3), "bandwidth": None if share is None else round(share, 3),
        }  # fmt: skip
        report.add(row)


def kernel_bytes() -> Mapping[str, float]:
    """Returns the mean bytes of the tensors of a launch, by the function's name, of programs that are still held."""
    sizes: dict[str, list[int]] = {}
    for record in fxwrap.compiles():
        functions = {item.name: re.findall(r"^def (\w+)", item.source, re.M)[-1:] for item in record.program.kernels}
        for line in record.program.lines():
            if isinstance(line, Launch):
                tensors = [item for item in (*line.arguments, *line.outs) if isinstance(item, Value)]
                moved = sum([item.tensor_type.storage_bytes for item in tensors])
                for function in functions[line.kernel]:
                    sizes.setdefault(function, []).append(int(moved))
    return {name: sum(items) / len(items) for name, items in sizes.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", help="bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=1024, help="of the caches; the token is in the middle")
    for name, size in SHAPES["cpu"].items():
        count = "+" if isinstance(size, list) else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, nargs=count, help="8B on GPUs, 1B on CPUs")
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["plain"])
    parser.add_argument("--top", type=int, default=0, help="sample of so many tokens; 0 for the most probable token")
    parser.add_argument("--sides", choices=SIDES, nargs="+", help="all; on CPUs those without a mode")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, help="tokens of a round; 20 on GPUs, 4 on CPUs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what begins later is left out")
    parser.add_argument("--side-seconds", type=float, default=1e4, help="the longest compile of a side")
    parser.add_argument("--no-profile", action="store_true", help="no tables of kernels")
    add_record_option(parser)
    chosen = parser.parse_args()
    is_gpu = chosen.device.type == "cuda"
    if "int4-packed" in chosen.weights and not is_gpu:
        parser.error("int4-packed is the layout of NVIDIA GPUs; choose --device cuda, or the weights int4")
    chosen.dtype = getattr(torch, chosen.dtype or ("bfloat16" if is_gpu else "float32"))
    chosen.calls = chosen.calls or (20 if is_gpu else 4)
    for name, size in SHAPES["cuda" if is_gpu else "cpu"].items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, size)
    if chosen.sides is None:
        chosen.sides = [name for name, (_, keywords) in SIDES.items() if is_gpu or not keywords]
    chosen.end = time.monotonic() + min(chosen.seconds, 1e6)
    note = f"medians of {chosen.rounds} rounds of {chosen.calls} tokens, width {chosen.width}, {chosen.dtype}"
    report = Report(f"decoding-{chosen.device.type}", chosen, chosen.device, note)
    has_kernels = is_gpu and not chosen.no_profile
    kernel_report = (
        Report(f"decoding-kernels-{chosen.device.type}", chosen, chosen.device, note) if has_kernels else None
    )
    for weights, layers, batch in itertools.product(chosen.weights, chosen.layers, chosen.batch):
        if time.monotonic() < chosen.end:
            measure(chosen, Case(weights, layers, batch), report, kernel_report)


if __name__ == "__main__":
    main()

"""Decoding of one token by Llama with static caches, beside the bandwidth of a copy, TorchInductor and eager.

    python benchmarks/decoding.py --device cuda --record              # 8 layers of the 8B shape, bf16, batch 1 and 8
    python benchmarks/decoding.py --device cuda --layers 32 --record deep
    python benchmarks/decoding.py --record                            # CPU: 2 layers of the 1B shape, float32
    python benchmarks/decoding.py --dtype bfloat16 --record bfloat16

All sides decode with the same weights and caches, in interleaved rounds in rotating order, among which a large tensor
is copied. Columns:

- us: the median of a round's mean time of a token. A round is several tokens in sequence, without waits in between.
- bandwidth: bytes of the weights that a token reads, over its time, as a part of the bytes that the copy reads and
  writes in a second. The embedding does not count. 1.0 is the speed of the copy.
- matmuls: the same over the time of the matmul kernels alone, in a profile (GPUs).
- kernels: kernels of a token, in a profile (GPUs).
- error: norm(difference) / norm of the logits, against the same weights and caches in float64.

A second table has the kernels of each side: their number and time in a token (GPUs).
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.distributed_models import DecodingLlama
from benchmarks.measure_kernels import Contender, fresh_function, interleaved_host_times, relative_error, synchronize
from benchmarks.results import Report, Row, add_record_option

SIDES: Mapping[str, tuple[str, str | None]] = {
    "eager": ("eager", None),
    "inductor": ("inductor", None),
    "inductor reduce-overhead": ("inductor", "reduce-overhead"),
    "inductor max-autotune": ("inductor", "max-autotune"),
    "fxwrap": ("fxwrap", None),
    "fxwrap reduce-overhead": ("fxwrap", "reduce-overhead"),
    "fxwrap max-autotune": ("fxwrap", "max-autotune"),
}
"""The backend and the mode of each side."""

SHAPES = {
    "cuda": {"width": 4096, "hidden": 14336, "heads": 32, "key_heads": 8, "vocabulary": 32000, "layers": 8},
    "cpu": {"width": 2048, "hidden": 8192, "heads": 32, "key_heads": 8, "vocabulary": 8192, "layers": 2},
}
"""The shapes of Llama 8B and 1B."""

Decode = Callable[[Tensor], tuple[Tensor, Tensor]]
MATMUL = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|splitk|(^|_)(addmm|bmm|mm|mv|matmul|contraction)(_|\d|$)", re.I)
"""Kernels that compute matmuls, by their names."""

_COPY = "copy"
_MAX_COPIED_BYTES = 1 << 30
_PROFILED_TOKENS = 5


class Decoder(DecodingLlama):
    """Returns the next tokens and their logits."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.logits(tokens)
        return logits.argmax(-1), logits


@dataclass(frozen=True)
class Profile:
    """The kernels of a token: their number and seconds by name."""

    counts: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def matmul_seconds(self) -> float:
        """The seconds of matmul kernels."""
        return sum([time for name, time in self.seconds.items() if MATMUL.search(name)])


def build_model(chosen: argparse.Namespace, batch: int) -> Decoder:
    """Returns the model with random weights and caches."""
    shape = argparse.Namespace(**{**vars(chosen), "batch": batch, "ranks": 1})
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(chosen.dtype)
    try:
        with chosen.device:
            model = Decoder(shape).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    for name, cache in model.named_buffers():
        if name.startswith("cache"):
            cache.normal_()
    return model


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of the weights that a token reads as a whole."""
    items = model.named_parameters()
    return sum([item.numel() * item.itemsize for name, item in items if name != "tokens.weight"])


def compile_side(name: str, model: Decoder) -> Decode:
    """Returns the model on a side, with a code object of its own."""
    backend, mode = SIDES[name]
    decode: Decode = fresh_function(lambda tokens: model(tokens))
    if backend != "eager":
        decode = torch.compile(decode, backend=backend, mode=mode, fullgraph=True, dynamic=False)
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


def measure(chosen: argparse.Namespace, batch: int, report: Report, kernel_report: Report | None) -> None:
    """Measures all sides for a batch size and adds their rows."""
    torch._dynamo.reset()
    model = build_model(chosen, batch)
    bytes_read = weight_bytes(model)
    tokens = torch.randint(chosen.vocabulary, (batch, 1), device=chosen.device)
    expected = torch.no_grad()(copy.deepcopy(model).double())(tokens)[1]
    errors: dict[str, float] = {}
    contenders: dict[str, Contender] = {}
    sides: dict[str, Decode] = {}
    for name in chosen.sides:
        decode = sides[name] = compile_side(name, model)
        run_tokens(decode, tokens, 4)  # the first compiles, later ones capture graphs
        errors[name] = relative_error(decode(tokens)[1], expected)
        contenders[name] = Contender(partial(run_tokens, decode, tokens, chosen.calls), chosen.calls)
        print(f"    batch {batch}, {name}: error {errors[name]:.2e}", flush=True)
    source = torch.ones(min(bytes_read, _MAX_COPIED_BYTES), dtype=torch.uint8, device=chosen.device)
    target = torch.empty_like(source)
    contenders[_COPY] = Contender(lambda: target.copy_(source), 1)
    contenders[_COPY].run()
    times = interleaved_host_times(contenders, chosen.rounds, chosen.device)
    bandwidth = 2 * source.nbytes / times[_COPY].median
    for name, decode in sides.items():
        profile = None if kernel_report is None else profile_kernels(decode, tokens)
        median = times[name].median
        row: Row = {
            "batch": batch, "side": name, "us": round(1e6 * median, 1), "tokens/s": round(batch / median),
            **{f"/ {other}": round(median / times[other].median, 3) for other in sides if other.startswith("inductor")},
            "bandwidth": round(bytes_read / median / bandwidth, 3),
            "matmuls": round(bytes_read / profile.matmul_seconds / bandwidth, 3)
            if profile is not None and profile.matmul_seconds else None,
            "kernels": None if profile is None else round(sum(profile.counts.values())),
            "error": errors[name],
        }  # fmt: skip
        report.add(row, {"seconds": times[name].samples, "copy": times[_COPY].samples, "bytes": source.nbytes})
        if profile is not None and kernel_report is not None:
            add_kernels(kernel_report, batch, name, profile)


def add_kernels(report: Report, batch: int, side: str, profile: Profile) -> None:
    """Adds a row for each kernel, the longest first."""
    total = sum(profile.seconds.values())
    for name, seconds in sorted(profile.seconds.items(), key=lambda item: -item[1]):
        row: Row = {
            "batch": batch, "side": side, "kernel": name[:100], "matmul": "yes" if MATMUL.search(name) else "no",
            "of a token": round(profile.counts[name], 2), "us": round(1e6 * seconds, 2),
            "part": round(seconds / total, 3),
        }  # fmt: skip
        report.add(row)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", help="bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=1024, help="of the caches; the token is in the middle")
    for name in SHAPES["cpu"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="8B on GPUs, 1B on CPUs")
    parser.add_argument("--sides", choices=SIDES, nargs="+", help="all; on CPUs those without a mode")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, help="tokens of a round; 20 on GPUs, 4 on CPUs")
    parser.add_argument("--no-profile", action="store_true", help="no tables of kernels")
    add_record_option(parser)
    chosen = parser.parse_args()
    is_gpu = chosen.device.type == "cuda"
    chosen.dtype = getattr(torch, chosen.dtype or ("bfloat16" if is_gpu else "float32"))
    chosen.calls = chosen.calls or (20 if is_gpu else 4)
    for name, size in SHAPES["cuda" if is_gpu else "cpu"].items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, size)
    if chosen.sides is None:
        chosen.sides = [name for name, (_, mode) in SIDES.items() if is_gpu or mode is None]
    note = f"medians of {chosen.rounds} rounds of {chosen.calls} tokens, {chosen.layers} layers of width {chosen.width}"
    report = Report(f"decoding-{chosen.device.type}", chosen, chosen.device, note)
    has_kernels = is_gpu and not chosen.no_profile
    kernel_report = (
        Report(f"decoding-kernels-{chosen.device.type}", chosen, chosen.device, note) if has_kernels else None
    )
    for batch in chosen.batch:
        measure(chosen, batch, report, kernel_report)


if __name__ == "__main__":
    main()

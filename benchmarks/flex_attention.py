"""FlexAttention's forward beside Inductor's and causal SDPA, interleaved in one run.

    python benchmarks/flex_attention.py                  # on a CPU: 1 x 8 x 1024 x 64, float32
    python benchmarks/flex_attention.py --device cuda    # 4 x 16 x 4096 x 64, bfloat16
    python benchmarks/flex_attention.py --device cuda --configurations   # each configuration of fxwrap's kernel too

The variant is one of `VARIANTS`: a score function and a mask. Columns: milliseconds, medians of interleaved rounds;
their ratio to Inductor's; norm(difference) / norm of the result against float64, over the batch's first element.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.measure_kernels import Contender, fresh_function, interleaved_device_times, interleaved_host_times
from benchmarks.results import Report, Row, add_record_option
from fxwrap.compile.backend import make_backend
from fxwrap.loop_ir import Kernel
from fxwrap.printers.triton import print_streaming_triton, streaming_configurations
from fxwrap.runtime.kernels import load_kernel


def _linear(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def _identity(score: Tensor, *_: Tensor) -> Tensor:
    return score


MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 256),
    "documents": lambda b, h, q, k: (q // 300 == k // 300) & (q >= k),
    "full": lambda b, h, q, k: q >= 0,
}
CALLS = 5
"""Calls of a round."""

VARIANTS = ("causal+bias", "causal", "window", "documents", "full")


def attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any) -> Any:
    return flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)


def formula(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any) -> Tensor:
    """Returns the result in float64, one head at a time."""
    results = []
    for head in range(query.shape[1]):
        rows, keys = [torch.arange(item.shape[2], device=item.device) for item in (query, key)]
        scores = query[:, head].double() @ key[:, head].double().mT / query.shape[-1] ** 0.5
        zero = torch.tensor(0, device=query.device)
        scores = score_mod(scores, zero, zero + head, rows[:, None], keys)
        scores = scores.masked_fill(~mask(zero, zero, rows[:, None], keys), -torch.inf)
        results.append(scores.softmax(-1) @ value[:, head].double())
    return torch.stack(results, 1)


def milliseconds(functions: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Returns the times of functions that take turns: of the device's work alone, on a GPU."""
    for function in functions.values():
        function()
    contenders = {name: Contender(partial(_repeat, function, CALLS), CALLS) for name, function in functions.items()}
    if device.type == "cuda":
        times = interleaved_device_times(contenders, rounds)
    else:
        times = interleaved_host_times(contenders, rounds, device)
    return {name: [sample * 1e3 for sample in item.samples] for name, item in times.items()}


def _repeat(function: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        function()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs=4, default=None, help="batch, heads, length, width")
    parser.add_argument("--variants", nargs="*", default=["causal+bias"], choices=VARIANTS)
    parser.add_argument(
        "--queries", type=int, default=0, help="query rows, by default the length; few with 'full' decode"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--configurations", action="store_true", help="time each configuration of the Triton kernel")
    add_record_option(parser)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    report = Report(f"flex_attention-{arguments.device}", arguments, arguments.device)
    for variant in arguments.variants:
        _measure(variant, arguments, report)


def _measure(variant: str, arguments: argparse.Namespace, report: Report) -> None:
    device, is_gpu = arguments.device, arguments.device == "cuda"
    sizes = arguments.sizes or ([4, 16, 4096, 64] if is_gpu else [1, 8, 1024, 64])
    dtype = torch.bfloat16 if is_gpu else torch.float32
    torch.manual_seed(0)
    query, key, value = [torch.randn(sizes, device=device, dtype=dtype) for _ in range(3)]
    rows = arguments.queries or sizes[2]
    query = query[:, :, :rows].contiguous()
    slopes = 2.0 ** (-8.0 * torch.arange(1, sizes[1] + 1, device=device) / sizes[1])
    score_mod = _linear(slopes) if variant.endswith("+bias") else _identity
    mask = MASKS[variant.removesuffix("+bias")]
    block_mask = create_block_mask(mask, None, None, rows, sizes[2], device=device)
    programs: list[fxwrap.Compiled] = []

    def compile_graph(*items: Any, **keywords: Any) -> fxwrap.Compiled:
        programs.append(fxwrap.compile_graph(*items, **keywords))
        return programs[-1]

    backends: dict[str, Any] = {"fxwrap": make_backend(fxwrap.Options(), compile_graph), "inductor": "inductor"}
    functions: dict[str, Callable[[], Any]] = {}
    for name, backend in backends.items():
        compiled = torch.compile(fresh_function(attention), backend=backend, dynamic=False, fullgraph=True)
        functions[name] = partial(compiled, query, key, value, score_mod, block_mask)
    causal = rows == sizes[2]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    functions["sdpa causal" if causal else "sdpa"] = partial(sdpa, query, key, value, is_causal=causal)
    expected = formula(query[:1], key[:1], value[:1], score_mod, mask)
    errors = {
        name: float((function()[:1].double() - expected).norm() / expected.norm())
        for name, function in functions.items() if name in backends
    }  # fmt: skip
    if arguments.configurations:
        functions |= _configurations(programs[0].program.kernels[0].loop_ir, query, key, value, slopes, block_mask)
    times = milliseconds(functions, torch.device(device), arguments.rounds)
    reference = statistics.median(times["inductor"])
    shape = f"{' x '.join(map(str, sizes))}, {rows} rows, {str(dtype).removeprefix('torch.')}"
    for name, samples in times.items():
        median = statistics.median(samples)
        row: Row = {"variant": variant, "sizes": shape, "side": name, "ms": median, "/ inductor": median / reference}
        report.add({**row, "error": errors.get(name)}, raw=samples)


def _configurations(kernel: Any, *tensors: Any) -> dict[str, Callable[[], Any]]:
    """Returns launches of the kernel in each configuration, on tensors by dtype and order of its buffers."""
    assert isinstance(kernel, Kernel)
    query, key, value, slopes, mask = tensors
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    inputs = [*lists, query, key, slopes, value]
    if [item.dtype for item in kernel.inputs] != [item.dtype for item in inputs]:
        return {}
    out = torch.empty_like(query)
    launches: dict[str, Callable[[], Any]] = {}
    for item in streaming_configurations(kernel, int):
        printed = print_streaming_triton(kernel, item)
        launch = load_kernel("triton", printed.source, printed.signature, printed.options)
        name = f"rows {item.row_block}, keys {item.key_block}, warps {item.num_warps}, stages {item.num_stages}"
        launches[name] = partial(launch, printed.grid, *inputs, out)
    return launches


if __name__ == "__main__":
    main()

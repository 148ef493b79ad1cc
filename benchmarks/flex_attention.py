"""FlexAttention, its forward or its gradients, beside Inductor's and causal SDPA, interleaved in one run.

    python benchmarks/flex_attention.py                  # on a CPU: 1 x 8 x 1024 x 64, float32
    python benchmarks/flex_attention.py --device cuda    # 4 x 16 x 4096 x 64, bfloat16
    python benchmarks/flex_attention.py --device cuda --configurations   # each configuration of fxwrap's kernels too
    python benchmarks/flex_attention.py --device cuda --backward         # forward and backward, and their difference

The variant is one of `VARIANTS`: a score function and a mask. Columns: milliseconds, medians of interleaved rounds;
their ratio to Inductor's; norm(difference) / norm of the result against float64, over two heads of the first element
of the batch. With `--backward`, rows are of forward and backward together and of the backward, the difference from the
forward; the error is the largest of those of the gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from fxwrap.printers.triton import StreamingConfiguration, print_streaming_triton, streaming_configurations
from fxwrap.runtime.kernels import load_kernel
from fxwrap.wrapper_ir import KernelDefinition


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

HEADS = 2
"""Heads whose results are compared with float64."""

VARIANTS = ("causal+bias", "causal", "window", "documents", "full")


def attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any) -> Any:
    return flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)


def formula(operands: Sequence[Tensor], score_mod: Any, mask: Any) -> Tensor:
    """Returns the result for query, key and value in float64, one head at a time."""
    query, key, value = operands
    results = []
    for head in range(query.shape[1]):
        rows, keys = [torch.arange(item.shape[2], device=item.device) for item in (query, key)]
        scores = query[:, head] @ key[:, head].mT / query.shape[-1] ** 0.5
        zero = torch.tensor(0, device=query.device)
        scores = score_mod(scores, zero, zero + head, rows[:, None], keys)
        scores = scores.masked_fill(~mask(zero, zero, rows[:, None], keys), -torch.inf)
        results.append(scores.softmax(-1) @ value[:, head])
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
    parser.add_argument("--backward", action="store_true", help="measure gradients of queries, keys and values")
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
    forward: dict[str, Callable[[], Any]] = {}
    for name, backend in backends.items():
        compiled = torch.compile(fresh_function(attention), backend=backend, dynamic=False, fullgraph=True)
        forward[name] = partial(compiled, query, key, value, score_mod, block_mask)
    causal = rows == sizes[2]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    forward["sdpa causal" if causal else "sdpa"] = partial(sdpa, query, key, value, is_causal=causal)
    functions, leaves = forward, (query, key, value)
    copies = [item[:1, :HEADS].double() for item in leaves]
    expected: tuple[Tensor, ...] = (formula(copies, score_mod, mask),)
    if arguments.backward:
        grad = torch.randn_like(query)
        for item in leaves:
            item.requires_grad_()
        functions = {name: partial(_gradients, function, leaves, grad) for name, function in forward.items()}
        for item in copies:
            item.requires_grad_()
        expected = _gradients(partial(formula, copies, score_mod, mask), copies, grad[:1, :HEADS].double())
    errors = {name: _error(function(), expected) for name, function in functions.items() if name in backends}
    if arguments.configurations:
        lists = _block_lists(block_mask)
        for program in programs:
            for kernel in program.program.kernels:
                functions |= _configurations(kernel, leaves, slopes if variant.endswith("+bias") else None, *lists)
    times = milliseconds(functions, torch.device(device), arguments.rounds)
    shape = f"{' x '.join(map(str, sizes))}, {rows} rows, {str(dtype).removeprefix('torch.')}"
    _report(report, {"variant": variant, "sizes": shape}, times, errors)
    if arguments.backward:
        for item in leaves:
            item.requires_grad_(False)
        alone = milliseconds(forward, torch.device(device), arguments.rounds)
        backward = {
            f"{name}, backward": [both - statistics.median(alone[name]) for both in times[name]] for name in forward
        }
        _report(report, {"variant": variant, "sizes": shape}, backward, {}, "inductor, backward")


def _report(
    report: Report, head: Row, times: dict[str, list[float]], errors: dict[str, float], reference: str = "inductor"
) -> None:
    for name, samples in times.items():
        median = statistics.median(samples)
        row: Row = {**head, "side": name, "ms": median, "/ inductor": median / statistics.median(times[reference])}
        report.add({**row, "error": errors.get(name)}, raw=samples)


def _gradients(function: Callable[[], Any], leaves: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(), leaves, grad)


def _error(results: Any, expected: Sequence[Tensor]) -> float:
    """Returns the largest relative error of results, over the first heads of the batch's first element."""
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(results, expected, strict=True)
    return max(float((result[:1, :HEADS].double() - item).norm() / item.norm()) for result, item in pairs)


def _block_lists(mask: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the lists of key blocks, and those of query blocks."""
    keys = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    return keys, [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]


def _configurations(
    definition: KernelDefinition, leaves: Sequence[Tensor], slopes: Tensor | None, keys: list[Tensor],
    queries: list[Tensor],
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """Returns launches of a kernel of attention in each configuration that compiles; {} for another kernel."""
    query, key, value = [item.detach() for item in leaves]
    bias, statistic = [] if slopes is None else [slopes], torch.ones(query.shape[:3], device=query.device)
    operands = {
        "flex_attention": [*keys, query, key, *bias, value],
        "flex_attention_grad_query": [*keys, query, key, query, value, *bias, statistic, statistic],
        "flex_attention_grad_key_value": [*queries, query, key, query, value, *bias, statistic, statistic],
    }
    kind, kernel = definition.name.rpartition("_")[0], definition.loop_ir
    inputs = operands.get(kind, [])
    if not isinstance(kernel, Kernel) or [item.dtype for item in kernel.inputs] != [item.dtype for item in inputs]:
        return {}
    outputs = [torch.empty_like(query) for _ in kernel.outputs]
    candidates = streaming_configurations(kernel, int)

    def launched(item: StreamingConfiguration) -> Callable[[], Any] | None:
        printed = print_streaming_triton(kernel, item)
        launch = load_kernel("triton", printed.source, printed.signature, printed.options)
        run = partial(launch, printed.grid, *inputs, *outputs)
        try:
            run()
        except Exception as error:  # noqa: BLE001 - other processors have less memory
            print(f"{kind}, {item}: {error}")
            return None
        return run

    with ThreadPoolExecutor(8) as pool:
        launches = dict(zip(candidates, pool.map(launched, candidates), strict=True))
    return {
        f"{kind}: {item}": run
        for item, run in launches.items() if run is not None
    }  # fmt: skip


if __name__ == "__main__":
    main()

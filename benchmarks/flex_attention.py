"""FlexAttention's forward, gradients or decoding beside Inductor's and SDPA, interleaved in one run.

    python benchmarks/flex_attention.py                  # on a CPU: 1 x 8 x 1024 x 64, float32
    python benchmarks/flex_attention.py --device cuda --sizes 4x16x4096x64 4x16x4096x128
    python benchmarks/flex_attention.py --device cuda --passes backward --variants causal window
    python benchmarks/flex_attention.py --device cuda --passes decode --sizes 8x32/8x4096x128     # 8 heads of keys
    python benchmarks/flex_attention.py --device cuda --seconds 150 --record forward     # again, until no case is left
    python benchmarks/flex_attention.py --device cuda --configurations   # each configuration of fxwrap's kernels, too

A case is a pass, a variant of `VARIANTS` (a score function and a mask) and sizes. Columns: milliseconds, medians of
interleaved rounds; the ratio to Inductor's; norm(difference) / norm of the result against float64, over two heads of
the first element of the batch; registers of a thread, spills and shared bytes of fxwrap's kernels. Times of a backward
are those of forward and backward together less those of the forward; its error is the largest of the gradients'.

The pass `lse` is a forward that also returns the logarithm of each row's sum of exponentials; `decode` has one row of
queries, at the last position. Decoding by a mask or a score function reads the position from a tensor.

`--seconds` begins no case that would end later; with `--record`, rows of the result file are kept and their cases are
not measured again. `--parallel N` measures cases in processes of their own: N compile at a time, one measures.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.flex_configurations import configurations, kernel_usage
from benchmarks.measure_kernels import Contender, first_line, fresh_function, interleaved_times, repeat
from benchmarks.results import FOLDER, Report, Row, add_record_option, geometric_mean, recorded_rows, result_path
from fxwrap.compile.backend import make_backend


def _linear(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def _relative(table: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: score + table[h, q - k + table.shape[1] // 2]


def _capped(cap: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: torch.tanh(score / cap) * cap


def score_function(variant: str, sizes: Sizes, device: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Returns the score function of a variant and the tensors that it captures."""
    match variant.partition("+")[2]:
        case "bias":
            captured = 2.0 ** (-8.0 * torch.arange(1, sizes.heads + 1, device=device) / sizes.heads)
            return _linear(captured), [captured]
        case "relative":
            captured = torch.randn(sizes.heads, 2 * sizes.length, device=device)
            return _relative(captured), [captured]
        case "cap":
            captured = torch.tensor(20.0, device=device)
            return _capped(captured), [captured]
        case _:
            return lambda score, *_: score, []


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

VARIANTS = ("causal", "causal+bias", "causal+relative", "causal+cap", "window", "documents", "full")
PASSES = ("forward", "lse", "backward", "decode")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: queries have `heads`, keys and values `key_heads`."""

    batch: int
    heads: int
    key_heads: int
    length: int
    width: int

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Returns the sizes of BATCHxHEADSxLENGTHxWIDTH, where HEADS may be HEADS/KEY_HEADS."""
        try:
            batch, heads, length, width = text.split("x")
            heads, _, key_heads = heads.partition("/")
            return cls(int(batch), int(heads), int(key_heads or heads), int(length), int(width))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxHEADS[/KEY_HEADS]xLENGTHxWIDTH") from None

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.key_heads}" if self.key_heads != self.heads else str(self.heads)
        return f"{self.batch}x{heads}x{self.length}x{self.width}"


@dataclass(frozen=True)
class Case:
    """A pass of `PASSES`, of a variant."""

    step: str
    variant: str
    sizes: Sizes

    @property
    def head(self) -> Row:
        """The cells that identify the case."""
        return {"pass": self.step, "variant": self.variant, "sizes": str(self.sizes)}


class Call:
    """The functions of a case: by side, its call; and what float64 says about the first heads."""

    def __init__(self, case: Case, device: str, options: fxwrap.Options | None = None) -> None:
        self.case, sizes = case, case.sizes
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        rows = 1 if case.step == "decode" else sizes.length
        shapes = [(sizes.heads, rows), *[(sizes.key_heads, sizes.length)] * 2]
        self.leaves = [
            torch.randn(sizes.batch, heads, length, sizes.width, device=device, dtype=dtype) for heads, length in shapes
        ]
        self.score_mod, self.captured = score_function(case.variant, sizes, device)
        self.mask = MASKS[case.variant.partition("+")[0]]
        if rows != sizes.length and case.variant != "full":
            offset = torch.tensor(sizes.length - rows, device=device)
            self.score_mod, self.mask = _from_position(offset, self.score_mod, self.mask)
        self.block_mask = create_block_mask(self.mask, None, None, rows, sizes.length, device=device)
        self.programs: list[fxwrap.Compiled] = []
        own = make_backend(options or fxwrap.Options(), self._compile_graph)
        backends: dict[str, Any] = {"fxwrap": own, "inductor": "inductor"}
        self.forward: dict[str, Callable[[], Any]] = {}
        is_grouped = sizes.heads != sizes.key_heads
        for name, backend in backends.items():
            compiled = torch.compile(fresh_function(attention), backend=backend, dynamic=False, fullgraph=True)
            self.forward[name] = partial(
                compiled, *self.leaves, self.score_mod, self.block_mask, is_grouped, case.step == "lse"
            )
        sdpa: Any = torch.nn.functional.scaled_dot_product_attention
        self.forward["sdpa"] = partial(sdpa, *self.leaves, is_causal=rows == sizes.length, enable_gqa=is_grouped)
        self.functions = self.forward
        if case.step == "backward":
            self.grad = torch.randn_like(self.leaves[0])
            for item in self.leaves:
                item.requires_grad_()
            self.functions = {name: partial(_gradients, function, self.leaves, self.grad)
                              for name, function in self.forward.items()}  # fmt: skip

    def _compile_graph(self, *items: Any, **keywords: Any) -> fxwrap.Compiled:
        self.programs.append(fxwrap.compile_graph(*items, **keywords))
        return self.programs[-1]

    def compile(self) -> None:
        """Compiles both sides."""
        for name in ("fxwrap", "inductor"):
            self.functions[name]()

    def errors(self) -> dict[str, float]:
        """Returns the relative error of each compiled side; compiles."""
        group = self.case.sizes.heads // self.case.sizes.key_heads
        key_heads = -(-HEADS // group)
        heads = key_heads * group
        copies = [item.detach()[:1, :count].double() for item, count in
                  zip(self.leaves, (heads, key_heads, key_heads), strict=True)]  # fmt: skip
        if self.case.step == "backward":
            for item in copies:
                item.requires_grad_()
            function = partial(formula, copies, self.score_mod, self.mask)
            expected = _gradients(lambda: function()[0], copies, self.grad[:1, :heads].double())
        else:
            expected = formula(copies, self.score_mod, self.mask)[: 1 + (self.case.step == "lse")]
        return {name: _error(self.functions[name](), expected) for name in ("fxwrap", "inductor")}


def attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, is_grouped: bool, returns_lse: bool
) -> Any:
    keywords: dict[str, Any] = {"enable_gqa": is_grouped, "return_lse": returns_lse}
    return flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask, **keywords)


def _from_position(offset: Tensor, score_mod: Any, mask: Any) -> tuple[Any, Any]:
    """Returns the score and the mask function where the first row of queries is at the position `offset`."""
    return (
        lambda score, b, h, q, k: score_mod(score, b, h, q + offset, k),
        lambda b, h, q, k: mask(b, h, q + offset, k),
    )


def formula(operands: Sequence[Tensor], score_mod: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Returns result and logarithms of sums for query, key and value in float64, one head at a time."""
    query, key, value = operands
    group, results, logarithms = query.shape[1] // key.shape[1], list[Tensor](), list[Tensor]()
    for head in range(query.shape[1]):
        rows, keys = [torch.arange(item.shape[2], device=item.device) for item in (query, key)]
        scores = query[:, head] @ key[:, head // group].mT / query.shape[-1] ** 0.5
        zero = torch.tensor(0, device=query.device)
        scores = score_mod(scores, zero, zero + head, rows[:, None], keys)
        scores = scores.masked_fill(~mask(zero, zero, rows[:, None], keys), -torch.inf)
        results.append(scores.softmax(-1) @ value[:, head // group])
        logarithms.append(scores.logsumexp(-1))
    return torch.stack(results, 1), torch.stack(logarithms, 1)


def milliseconds(functions: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Returns the times of functions that take turns: of the device's work alone, on a GPU."""
    for function in functions.values():
        function()
    contenders = {name: Contender(partial(repeat, function, CALLS), CALLS) for name, function in functions.items()}
    times = interleaved_times(contenders, rounds, device)
    return {name: [sample * 1e3 for sample in item.samples] for name, item in times.items()}


def _gradients(function: Callable[[], Any], leaves: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(), leaves, grad)


def _error(results: Any, expected: Sequence[Tensor]) -> float:
    """Returns the largest relative error of results, over the first heads of the batch's first element."""
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(results, expected, strict=True)
    return max(float((result[:1, : item.shape[1]].double() - item).norm() / item.norm()) for result, item in pairs)


@contextmanager
def turn_on_device(lock: str | None) -> Iterator[None]:
    """Holds the lock file, if there is one, and hands unused device memory back."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def measure(case: Case, arguments: argparse.Namespace) -> tuple[Row, object]:
    """Returns the row of a case and its raw values; compiles while other processes measure."""
    torch.empty(1, device=arguments.device)  # starting a device takes seconds
    with turn_on_device(arguments.lock):
        call = Call(case, arguments.device)
    call.compile()
    with turn_on_device(arguments.lock):
        return _measured(call, arguments)


def _measured(call: Call, arguments: argparse.Namespace) -> tuple[Row, object]:
    case, device = call.case, torch.device(arguments.device)
    errors = call.errors()
    times = milliseconds(call.functions, device, arguments.rounds)
    if case.step == "backward":
        for item in call.leaves:
            item.requires_grad_(False)
        alone = milliseconds(call.forward, device, arguments.rounds)
        times = {name: [both - statistics.median(alone[name]) for both in times[name]] for name in times}
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    usage = kernel_usage(call.programs)
    row = {
        **case.head, **{f"{name}, ms": median for name, median in medians.items()},
        "/ inductor": medians["fxwrap"] / medians["inductor"], "error": errors["fxwrap"],
        "inductor's error": errors["inductor"],
        **{name: "/".join([str(item[name]) for item in usage.values()]) for name in ("registers", "spills", "shared")},
    }  # fmt: skip
    return row, {**times, "kernels": usage}


def sweep(case: Case, arguments: argparse.Namespace, report: Report) -> None:
    """Reports each configuration of the kernels of a case, which have a loop IR unless they come from a cache."""
    call = Call(case, arguments.device, fxwrap.Options(compile_cache=False))
    call.errors()
    for name, run in configurations(call.programs, call.leaves, call.captured, call.block_mask):
        samples = milliseconds({name: run}, torch.device(arguments.device), max(3, arguments.rounds // 3))[name]
        report.add({**case.head, "configuration": name, "ms": statistics.median(samples)}, raw=samples)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Returns the cases of a command line, by size first."""
    default = "4x16x4096x64" if arguments.device == "cuda" else "1x8x1024x64"
    sizes = arguments.sizes or [Sizes.parse(default)]
    every = product(sizes, arguments.passes, arguments.variants)
    return [Case(step, variant, item) for item, step, variant in every]


def measure_apart(case: Case, arguments: argparse.Namespace, deadline: float) -> tuple[Row, object] | str:
    """Returns the row and the raw values of a case measured in another process, or why there is none."""
    command = [sys.executable, __file__, "--device", arguments.device, "--rounds", str(arguments.rounds)]
    command += ["--sizes", str(case.sizes), "--passes", case.step, "--variants", case.variant, "--lock", arguments.lock]
    seconds = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
    if seconds == 0.0:
        return "the time is over"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its compile workers too, which hold the pipes
        process.communicate()
        return "the time is over"
    if process.returncode:
        return first_line(RuntimeError(errors[-1000:]))
    result: list[Any] | str = json.loads(output.splitlines()[-1])
    return result if isinstance(result, str) else (result[0], result[1])


def _result_or_error(case: Case, arguments: argparse.Namespace) -> tuple[Row, object] | str:
    try:
        return measure(case, arguments)
    except Exception as error:  # noqa: BLE001 - the process that started this one reports it
        return first_line(error)


def rows_in_order(missing: Sequence[Case], arguments: argparse.Namespace, start: float) -> Iterator[tuple[Row, object]]:
    """Yields the rows of cases, one after the other, until the time is over."""
    longest = 0.0
    for position, case in enumerate(missing):
        began = time.monotonic()
        if began - start + longest > arguments.seconds:
            print(f"{len(missing) - position} cases are left: run again", flush=True)
            return
        yield measure(case, arguments)
        longest = max(longest, time.monotonic() - began)
        torch.compiler.reset()


def rows_of_processes(
    missing: Sequence[Case], arguments: argparse.Namespace, start: float
) -> Iterator[tuple[Row, object]]:
    """Yields the rows of cases as their processes end, until the time is over."""
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(arguments.parallel) as pool:
        arguments.lock = lock.name
        futures = {pool.submit(measure_apart, case, arguments, start + arguments.seconds): case for case in missing}
        for future in as_completed(futures):
            result = future.result()
            if isinstance(result, str):
                print(f"{futures[future]}: {result}", flush=True)
            else:
                yield result


def run_cases(arguments: argparse.Namespace, start: float, folder: Path = FOLDER) -> None:
    """Measures and reports the cases that have no row, until the time is over."""
    name = f"flex_attention-{arguments.device}"
    earlier, samples = recorded_rows(result_path(name, arguments, folder))
    report = Report(name, arguments, arguments.device, folder=folder, earlier=earlier, earlier_raw=samples)
    known = [{key: row.get(key) for key in ("pass", "variant", "sizes")} for row in earlier]
    missing = [case for case in cases(arguments) if case.head not in known]
    rows = rows_of_processes if arguments.parallel else rows_in_order
    ratios = list[float]()
    for row, raw in rows(missing, arguments, start):
        report.add(row, raw)
        ratios.append(float(row["/ inductor"] or 0.0))
    if ratios:
        print(f"geometric mean of {len(ratios)} ratios: {geometric_mean(ratios):.3f}, largest {max(ratios):.3f}")


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=Sizes.parse, nargs="*", help="BATCHxHEADS[/KEY_HEADS]xLENGTHxWIDTH")
    parser.add_argument("--passes", nargs="*", default=["forward"], choices=PASSES)
    parser.add_argument("--variants", nargs="*", default=["causal+bias"], choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case that would end later")
    parser.add_argument("--parallel", type=int, default=0, help="processes, which take turns on the device")
    parser.add_argument("--configurations", action="store_true", help="time each configuration of the Triton kernels")
    parser.add_argument("--lock", help="of a process of --parallel: the file that it locks to measure")
    add_record_option(parser)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.lock is not None:
        for case in cases(arguments):
            print(json.dumps(_result_or_error(case, arguments)))
        return
    run_cases(arguments, start)
    if arguments.configurations:
        report = Report(f"flex_attention-configurations-{arguments.device}", arguments, arguments.device)
        for case in cases(arguments):
            sweep(case, arguments, report)


if __name__ == "__main__":
    main()

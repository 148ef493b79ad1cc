"""Layers of experts written as loops, in inference and in training steps, beside Inductor, eager and grouped matmuls.

    python benchmarks/expert_loops.py --device cuda --record                         # all models and forms
    python benchmarks/expert_loops.py --tokens 64 --models deepseek --divisor 16     # on a CPU: small layers
    python benchmarks/expert_loops.py --device cuda --record --resume --seconds 80   # the cases that a run left

A form says where the experts' weights are: in one tensor ("stack"), in a module for each expert ("modules"), or in
modules of a model that is frozen ("frozen", in inference only). "inductor" and "fxwrap" compile the loop; "inductor
grouped" is the same layer as transformers writes it with `torch._grouped_mm`, on stacked weights. A step computes the
gradients of the tokens, the routing weights and the experts' weights. Columns: milliseconds of the host and the device
together, medians of interleaved rounds; their ratios to both of Inductor's; the peak of device memory above what lives
between the calls; seconds of the first call; norm(difference) / norm of the worst result or gradient against float64.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure_kernels import (
    Contender,
    compile_with,
    first_line,
    interleaved_host_times,
    peak_of,
    relative_error,
    repeat,
    synchronize,
)
from benchmarks.results import Report, Row, add_record_option, recorded_rows, result_path

MODELS = {"mixtral": (8, 2, 4096, 14336, 0), "deepseek": (64, 6, 2048, 1408, 2816), "qwen3": (128, 8, 2048, 768, 0)}
"""Experts, experts of a token, width, hidden width, and the hidden width of the shared expert."""

FORMS = ("stack", "modules", "frozen")

SIDES = ("eager", "fxwrap", "inductor grouped", "inductor")


class Gated(nn.Module):
    """A feed-forward layer with SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(rows)) * self.up(rows))
        return result


class Experts(nn.Module):
    """The experts of a layer, whose subclasses say where the weights are and how the layer is computed."""

    def __init__(self, number: int, width: int, hidden: int, shared: int) -> None:
        super().__init__()
        self.number = number
        self.shared = Gated(width, shared) if shared else None
        self.make(number, width, hidden)

    def make(self, number: int, width: int, hidden: int) -> None:
        """Adds the parameters."""
        self.up = nn.Parameter(torch.randn(number, 2 * hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, width, hidden) / hidden**0.5)

    def forward(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        result = self.routed(tokens, chosen, gates)
        return result if self.shared is None else result + self.shared(tokens)

    def routed(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Returns the sums of the tokens' experts: a loop."""
        result = torch.zeros_like(tokens)
        mask = functional.one_hot(chosen, self.number).permute(2, 1, 0)
        for number in range(self.number):
            position, token = torch.where(mask[number])
            values = self.expert(number, tokens[token]) * gates[token, position, None]
            result.index_add_(0, token, values.to(tokens.dtype))
        return result

    def expert(self, number: int, rows: Tensor) -> Tensor:
        """Returns one expert of its rows."""
        gate, up = functional.linear(rows, self.up[number]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down[number])


class ModuleExperts(Experts):
    """A loop over modules."""

    def make(self, number: int, width: int, hidden: int) -> None:
        self.experts = nn.ModuleList([Gated(width, hidden) for _ in range(number)])

    def expert(self, number: int, rows: Tensor) -> Tensor:
        result: Tensor = self.experts[number](rows)
        return result


class GroupedExperts(Experts):
    """The experts as transformers computes them by grouped matmuls."""

    def routed(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        count = chosen.shape[1]
        numbers, order = chosen.reshape(-1).sort()
        numbers = numbers.float() if numbers.is_cpu else numbers.int()
        offsets = torch.histc(numbers, bins=self.number, min=0, max=self.number - 1).cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(tokens[order // count], self.up.transpose(1, 2), offsets).chunk(2, -1)
        values = torch._grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offsets)
        values = values * gates.reshape(-1)[order][:, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return values[inverse].view(len(tokens), count, -1).sum(1).to(tokens.dtype)


class Routed(nn.Module):
    """A layer of experts after its choice of experts."""

    def __init__(self, layer: Experts, of_token: int) -> None:
        super().__init__()
        self.layer, self.of_token = layer, of_token

    def forward(self, tokens: Tensor, scores: Tensor) -> Tensor:
        gates, chosen = torch.topk(scores.softmax(-1), self.of_token, dim=-1)
        result: Tensor = self.layer(tokens, chosen, gates.to(tokens.dtype))
        return result


def stacked(gradients: list[Tensor], layer: Experts) -> list[Tensor]:
    """Returns the result and the gradients of a step in the order of a layer with stacked weights."""
    if not isinstance(layer, ModuleExperts) or len(gradients) == 1:
        return gradients
    shared = 0 if layer.shared is None else 3
    first, of_experts = gradients[: 3 + shared], gradients[3 + shared :]
    gate, up, down = (torch.stack(of_experts[place::3]) for place in range(3))
    return [*first[:3], torch.cat([gate, up], 1), down, *first[3:]]


def layers(model: str, form: str, divisor: int, dtype: torch.dtype, device: str) -> tuple[Routed, Routed]:
    """Returns a layer of a form and the same layer written with grouped matmuls."""
    number, of_token, *sizes = MODELS[model]
    width, hidden, shared = [size // divisor for size in sizes]
    with torch.device(device):
        kind = Experts if form == "stack" else ModuleExperts
        layer = kind(number, width, hidden, shared).to(dtype)
        grouped = GroupedExperts(number, width, hidden, shared).to(dtype)
    with torch.no_grad():
        if isinstance(layer, ModuleExperts):
            for index, expert in enumerate(layer.experts):
                assert isinstance(expert, Gated)
                grouped.up[index].copy_(torch.cat([expert.gate.weight, expert.up.weight]))
                grouped.down[index].copy_(expert.down.weight)
        else:
            grouped.up.data, grouped.down.data = layer.up.data, layer.down.data
    grouped.shared = layer.shared
    return Routed(layer, of_token), Routed(grouped, of_token)


@dataclass(frozen=True)
class Case:
    """A layer in one form, and a number of tokens, in inference or in a training step."""

    model: str
    form: str
    training: bool
    count: int

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row that say what it measures, but for the side."""
        what = "step" if self.training else "inference"
        return {"case": f"{self.model}-{self.form}", "what": what, "tokens": self.count}

    @property
    def key(self) -> tuple[Any, ...]:
        """The cells that identify the case in rows of an earlier run."""
        return tuple(self.columns.values())


@dataclass(frozen=True)
class Operands:
    """The inputs of a layer, and the gradient of its result in a training step."""

    inputs: tuple[Tensor, ...]
    upstream: Tensor
    training: bool

    def results(self, module: nn.Module, run: Callable[..., Tensor]) -> list[Tensor]:
        """Returns the result of a module's call, in a step also the gradients of the inputs and the parameters."""
        if not self.training:
            with torch.no_grad():
                return [run(*self.inputs)]
        result = run(*self.inputs)
        leaves = [*self.inputs, *module.parameters()]
        return [result.detach(), *torch.autograd.grad(result, leaves, self.upstream)]

    def double(self) -> Operands:
        """Returns the operands in float64."""
        inputs = tuple([item.detach().double().requires_grad_(self.training) for item in self.inputs])
        return Operands(inputs, self.upstream.double(), self.training)


def operands(case: Case, chosen: argparse.Namespace) -> Operands:
    """Returns random tokens and scores of experts."""
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    experts, _, width, *_ = MODELS[case.model]
    tokens = torch.randn(case.count, width // chosen.divisor, device=device, dtype=dtype)
    scores = torch.randn(case.count, experts, device=device)
    inputs = (tokens.requires_grad_(case.training), scores.requires_grad_(case.training))
    return Operands(inputs, torch.randn(tokens.shape, device=device, dtype=dtype), case.training)


def reference(grouped: Routed, tensors: Operands) -> list[Tensor]:
    """Returns the results of the loop in float64, on stacked weights."""
    module = copy.deepcopy(grouped).double()
    module.layer.routed = Experts.routed.__get__(module.layer)  # type: ignore[method-assign]
    return tensors.double().results(module, module)


def compiled(module: nn.Module, side: str, form: str) -> Callable[..., Tensor]:
    """Returns a module as a side compiles it."""
    backend = side.partition(" ")[0]
    freezing = {"fxwrap": ("fxwrap", {"freeze": True}), "inductor": ("inductor:freezing", {})}
    backend, options = freezing.get(backend, (backend, {})) if form == "frozen" else (backend, {})
    return compile_with(backend, module, options)


def measure(case: Case, chosen: argparse.Namespace, report: Report) -> None:
    """Measures all sides of a case and adds their rows."""
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, grouped = layers(case.model, case.form, chosen.divisor, getattr(torch, chosen.dtype), chosen.device)
    tensors = operands(case, chosen)
    expected = reference(grouped, tensors)
    rows: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    for side in chosen.sides:
        module = grouped if side == "inductor grouped" else layer
        run = partial(tensors.results, module, compiled(module, side, case.form))
        start = time.perf_counter()
        try:
            with torch._dynamo.config.patch(recompile_limit=64):
                results = run()
            synchronize(device)
            seconds = time.perf_counter() - start
            error = relative_error(stacked(results, module.layer), expected)
            del results
            run()
            peak = peak_of(run, device)[1] / 1e6
        except Exception as failure:  # noqa: BLE001 - a side that cannot run a case is a row of the table
            print(f"  {side}: {first_line(failure)}", flush=True)
            report.add({**case.columns, "side": side, "ms": None, "note": type(failure).__name__})
            continue
        rows[side] = {"peak MB": round(peak, 1), "first call s": round(seconds, 1), "error": error}
        contenders[side] = Contender(partial(repeat, run, chosen.calls), chosen.calls)
    times = interleaved_host_times(contenders, chosen.rounds, device)
    for side, row in rows.items():
        median = times[side].median
        ratios = {
            f"/ {other}": round(median / times[other].median, 3) if other in times else None
            for other in ("inductor", "inductor grouped")
        }
        report.add(
            {**case.columns, "side": side, "ms": round(1e3 * median, 3), **ratios, **row},
            {"seconds": times[side].samples},
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mixtral", "deepseek"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--what", nargs="+", choices=("inference", "step"), default=["step", "inference"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 64])
    parser.add_argument("--divisor", type=int, default=1, help="of the widths")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=3, help="calls of a round")
    parser.add_argument("--resume", action="store_true", help="skip cases that the result file has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    add_record_option(parser)
    chosen = parser.parse_args()
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    start, table = time.perf_counter(), f"expert_loops-{chosen.device}"
    earlier, raw = recorded_rows(result_path(table, chosen)) if chosen.resume else ([], [])
    measured = {(row["case"], row["what"], row["tokens"]) for row in earlier}
    report = Report(table, chosen, torch.device(chosen.device), earlier=earlier, earlier_raw=raw)
    for model in chosen.models:
        for what in chosen.what:
            for count in chosen.tokens:
                for form in chosen.forms:
                    case = Case(model, form, what == "step", count)
                    is_skipped = (form == "frozen" and case.training) or case.key in measured
                    if is_skipped or time.perf_counter() - start > chosen.seconds:
                        continue
                    measure(case, chosen, report)


if __name__ == "__main__":
    main()

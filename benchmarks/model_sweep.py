"""Every architecture that can be built small, forward and one training step, beside eager and float64.

    python benchmarks/model_sweep.py --library transformers --jobs 2 --record
    python benchmarks/model_sweep.py --library timm --only 'resnet|vit'
    python benchmarks/model_sweep.py --sample 12 --emitters python,cpp,fx,interpreter
    python benchmarks/model_sweep.py --record --missing     # continue: the models that the recorded table lacks

Models run in worker processes, each with a time limit. A result is right if its error against float64 is at most three
times eager's, or if it is eager's own but for rounding (where float64 decides otherwise, as routing to experts does).
Some models have discrete decisions (a clamp, an expert) that rounding turns: for those, a result is right if its error
is at most three times that of eager with its parameters moved by a rounding error, the worst of several runs (column
`moved`). For the FX emitter, `as_strided` counts the nodes of emitted graphs that view or measure a storage where the
model wrote no `as_strided`. The table's `status` is "right", "wrong", "fxwrap: ..." (it failed), "torch: ..."
(`aot_eager` fails alike or has the same other results), "skipped: ..." (eager cannot run the small model), or "killed"
(time or memory).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from benchmarks.results import Cell, Report, add_record_option, result_path
from benchmarks.sweep_models import Inputs, SweepModel, sweep_models
from fxwrap import GraphInfo
from fxwrap.errors import FusionWarning

FACTOR, SLACK = 3.0, 1e-5
"""How much larger than eager's an error against float64 may be."""

MODELS_PER_WORKER = 20

COLUMNS = ("status", "eager error", "error", "from eager", "moved", "as_strided", "compile and run, s")

STORAGE_OPERATORS = (torch.ops.aten.as_strided.default, torch.ops.aten.sym_storage_offset.default)

MOVED_RUNS = 8
"""Runs of eager with moved parameters, each with other random numbers."""


@dataclass(frozen=True)
class Values:
    """What a model returned, or its gradients: float64 copies of the tensors, in order."""

    tensors: list[Tensor]

    def error(self, reference: Values) -> float:
        """Returns norm(difference) / norm(reference) over all tensors."""
        if [item.shape for item in self.tensors] != [item.shape for item in reference.tensors]:
            return float("inf")
        pairs = zip(self.tensors, reference.tensors)
        difference = sum(float((one - other).square().sum()) for one, other in pairs)
        norm = sum(float(item.square().sum()) for item in reference.tensors)
        return (difference / norm) ** 0.5 if norm else difference**0.5


def forward_values(model: Callable[..., Any], inputs: Inputs) -> Values:
    """Returns the floating-point tensors of an inference."""
    with torch.no_grad():
        return _values(_floats(model(**inputs)))


def training_values(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> Values:
    """Returns the gradients of a step in train mode; the loss weighs all results with fixed random numbers."""
    model.train()
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    loss: Any = 0.0
    for item in _floats(call(**inputs)):
        if item.requires_grad:
            weights = torch.randn(item.shape, generator=generator).to(item)
            loss = loss + (item * weights).sum() / item.numel()
    loss.backward()
    return _values(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def _floats(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _values(tensors: Iterable[Tensor]) -> Values:
    return Values([item.detach().to("cpu", torch.float64, copy=True) for item in tensors])


def compare(
    model: nn.Module, inputs: Inputs, training: bool, backend: str, options: Mapping[str, Any]
) -> dict[str, Cell]:
    """Returns the row of one model and step."""

    def run(module: nn.Module, arguments: Inputs, compiled: Callable[..., Any] | None = None) -> Values:
        torch.manual_seed(0)
        call = module if compiled is None else compiled
        return training_values(module, call, arguments) if training else forward_values(call, arguments)

    model = copy.deepcopy(model)
    model.train(training)
    state = copy.deepcopy(model.state_dict())
    try:
        eager = run(model, inputs)
    except Exception as error:  # noqa: BLE001 - reported in the table
        return {"status": f"skipped: {_first_line(error)}"}
    try:
        doubles = {name: item.double() if item.is_floating_point() else item for name, item in inputs.items()}
        exact = run(copy.deepcopy(model).double(), doubles)
    except Exception:  # noqa: BLE001 - a model that asks for float32 is compared with eager alone
        exact = eager
    model.load_state_dict(state)
    torch._dynamo.reset()
    compiled = (
        torch.compile(model, backend=backend, options=dict(options))
        if options
        else torch.compile(model, backend=backend)
    )
    start = time.perf_counter()
    own = run(model, inputs, compiled)
    seconds = time.perf_counter() - start
    own_error, eager_error, between = own.error(exact), eager.error(exact), own.error(eager)
    if not math.isfinite(eager_error):
        return {"status": "skipped: eager's results are not finite"}
    row: dict[str, Cell] = {
        "status": "right", "eager error": eager_error, "error": own_error, "from eager": between,
        "compile and run, s": seconds,
    }  # fmt: skip
    if own_error <= FACTOR * eager_error + SLACK or between <= SLACK:
        return row
    model.load_state_dict(state)
    moved = max(run(_moved(model, seed), inputs).error(exact) for seed in range(MOVED_RUNS))
    return {**row, "moved": moved, "status": "right" if own_error <= FACTOR * moved + SLACK else "wrong"}


def _compare_emitter(model: nn.Module, inputs: Inputs, training: bool, emitter: str) -> dict[str, Cell]:
    """Returns the row of one model and step by an emitter of fxwrap."""
    if emitter != "fx":
        return compare(model, inputs, training, "fxwrap", {"emitter": emitter})
    storage_views: list[str] = []

    def count(module: GraphModule, info: GraphInfo) -> GraphModule:
        storage_views.extend(_storage_views(module))
        return module

    row = compare(model, inputs, training, "fxwrap", {"emitter": emitter, "on_graph": count})
    for view in storage_views:
        print(f"{type(model).__name__}: {view}", flush=True)
    return {**row, "as_strided": len(storage_views)}


def _storage_views(module: GraphModule) -> Iterator[str]:
    """Yields the nodes that view or measure a storage and stand for no `as_strided` of the model."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            if node.target in STORAGE_OPERATORS and node.meta.get("original_aten") not in STORAGE_OPERATORS:
                yield f"{node.format_node()} {node.meta.get('fxwrap_as_strided', '')}"


def _moved(model: nn.Module, seed: int) -> nn.Module:
    """Returns a copy whose parameters differ by at most one unit in the last place."""
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator).to(parameter) * 2 - 1
                parameter.mul_(1 + noise * torch.finfo(parameter.dtype).eps)
    return moved


def judge(model: SweepModel, training: bool, emitter: str, device: str) -> dict[str, Cell]:
    """Returns the row of one model, with torch's own failures told apart."""
    torch.manual_seed(0)
    try:
        module, inputs = model.build()
        module = module.to(device)
        inputs = {name: item.to(device) for name, item in inputs.items()}
    except Exception as error:  # noqa: BLE001 - reported in the table
        return {"status": f"skipped: {_first_line(error)}"}
    try:
        row = _compare_emitter(module, inputs, training, emitter)
        if row["status"] != "wrong":
            return row
    except Exception as error:  # noqa: BLE001 - reported in the table
        row = {"status": f"fxwrap: {_first_line(error)}"}
    try:
        other = compare(module, inputs, training, "aot_eager", {})
    except Exception as error:  # noqa: BLE001 - reported in the table
        return {**row, "status": f"torch: {_first_line(error)}"}
    if row["status"] == other["status"] == "wrong":
        return {**row, "status": "torch: aot_eager's results differ from eager's alike"}
    return row


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0]}"[:160]


def work(library: str, device: str, jobs: Connection) -> None:
    """Runs models by name, in a process of its own."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", message="(?s).* called instead", category=FusionWarning)
    torch.set_num_threads(1)
    models = {model.name: model for model in sweep_models(library)}
    while (job := jobs.recv()) is not None:
        name, training, emitter = job
        jobs.send(judge(models[name], training, emitter, device))


class Worker:
    """A process that runs models, replaced when it dies, hangs, or has run many."""

    def __init__(self, library: str, device: str, limit: float) -> None:
        self._library, self._device, self._limit = library, device, limit
        self._process: Any = None
        self._jobs: Any = None
        self._done = 0

    def run(self, name: str, training: bool, emitter: str) -> dict[str, Cell]:
        """Returns the row of a model; "killed" after the time limit or when the process died."""
        if self._process is None or self._done == MODELS_PER_WORKER:
            self.stop()
            context = multiprocessing.get_context("spawn")
            self._jobs, other = context.Pipe()
            self._process = context.Process(target=work, args=(self._library, self._device, other), daemon=True)
            self._process.start()
            other.close()
            self._done = 0
        self._done += 1
        self._jobs.send((name, training, emitter))
        try:
            if self._jobs.poll(self._limit):
                return dict(self._jobs.recv())
            reason = f"killed: more than {self._limit:.0f} s"
        except (EOFError, ConnectionResetError):
            self._process.join()
            reason = f"killed: exit status {self._process.exitcode}"
        self.stop()
        return {"status": reason}

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _rows(worker: Worker, name: str, steps: Sequence[str], emitters: Sequence[str]) -> Iterator[dict[str, Cell]]:
    """Yields the rows of a model; a step that eager cannot run has one row."""
    for step in steps:
        for emitter in emitters:
            row = worker.run(name, step == "training", emitter)
            yield {"model": name, "step": step, "emitter": emitter, **{key: row.get(key) for key in COLUMNS}}
            if str(row["status"]).startswith("skipped"):
                break


def _is_settled(row: Mapping[str, Cell]) -> bool:
    return str(row["status"]).startswith(("right", "skipped"))


def _recorded(path: Path | None) -> dict[str, Any]:
    """Returns a recorded table, empty if there is none."""
    return json.loads(path.read_text()) if path is not None and path.exists() else {"rows": []}


def _earlier_rows(recorded: Mapping[str, Any], names: Sequence[str]) -> tuple[list[dict[str, Cell]], str]:
    """Returns the recorded rows of other models, and where they are from."""
    fields = ("model", "step", "emitter", *COLUMNS)
    rows = [{key: row.get(key) for key in fields} for row in recorded["rows"] if row["model"] not in names]
    if not rows:
        return [], ""
    before = "".join(re.findall("; of the first .*", recorded.get("note", "")))
    source = f"commit {recorded['commit'][:8]}, {recorded['date']}, torch {recorded['versions']['torch']}"
    return rows, f"{before}; of the first {len(rows)} rows, {source}, on {recorded['machine']['device']}"


def main() -> None:
    """Prints the table, and counts of its outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["transformers", "timm"], default="transformers")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--sample", type=int, help="this many models, drawn at random by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, each with one thread")
    parser.add_argument("--emitters", default="cpp", help="of python,cpp,fx,interpreter")
    parser.add_argument("--steps", default="forward,training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one model")
    parser.add_argument(
        "--missing", action="store_true",
        help="only models without a recorded row, or whose row is neither right nor skipped; the other rows are kept",
    )  # fmt: skip
    add_record_option(parser)
    chosen = parser.parse_args()
    table = f"model_sweep-{chosen.library}"
    recorded = _recorded(result_path(table, chosen)) if chosen.missing else {"rows": []}
    unsettled = {row["model"] for row in recorded["rows"] if not _is_settled(row)}
    settled = {row["model"] for row in recorded["rows"]} - unsettled
    names = [model.name for model in sweep_models(chosen.library) if re.search(chosen.only, model.name)]
    names = [name for name in names if name not in settled]
    if chosen.sample is not None:
        names = sorted(random.Random(chosen.seed).sample(names, min(chosen.sample, len(names))))
    earlier, source = _earlier_rows(recorded, names)
    note = f"weights and inputs are random; {chosen.library} {version(chosen.library)}{source}"
    report = Report(table, chosen, chosen.device, note, earlier=earlier)
    outcomes = Counter[str]()
    workers = SimpleQueue[Worker]()
    for _ in range(chosen.jobs):
        workers.put(Worker(chosen.library, chosen.device, chosen.limit))

    def run(name: str) -> list[dict[str, Cell]]:
        worker = workers.get()
        try:
            return list(_rows(worker, name, chosen.steps.split(","), chosen.emitters.split(",")))
        finally:
            workers.put(worker)

    with ThreadPoolExecutor(chosen.jobs) as threads:
        for future in as_completed([threads.submit(run, name) for name in names]):
            for row in future.result():
                outcomes[f"{row['step']}, {row['emitter']}: {str(row['status']).partition(':')[0]}"] += 1
                report.add(row)
    for _ in range(chosen.jobs):
        workers.get().stop()
    print("\n" + "\n".join(f"{outcome}: {count}" for outcome, count in sorted(outcomes.items())))


if __name__ == "__main__":
    main()

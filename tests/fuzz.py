"""Random graphs under random options in random emitters beside eager: static, dynamic, control flow, training, layers,
attention; and functions as models write them, in training: attention, experts, norms, optimizers.

    python -m tests.fuzz --graphs 2000 --jobs 2          # `make fuzz`
    python -m tests.fuzz --seconds 600 --jobs 16 --record
    python -m tests.fuzz --only training --seed 1234 --graphs 1

Each graph is compiled with several options and emitters, its variants, and each program runs on the same fresh inputs.
The seed alone determines the graph, the options and the inputs. Kernels run on the test suite's imaginary device, which
needs no compiler, or are compiled as C++, or run in Triton's interpreter as for a GPU, in any of their configurations.
A failure prints the seed, the options, the graph and the error, and does not end the run; the exit status is 1 after
any.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound, free_unbacked_symbols

import fxwrap
from benchmarks.results import add_record_option, environment, result_path, write_result
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.devices import CPU, CUDA, TRITON, scoped_registration
from fxwrap.errors import GraphError, InputError, UnsupportedError
from fxwrap.lowering.fusion import fusion
from fxwrap.options import PLANNERS, Options
from fxwrap.printers import KernelRequest, PrintedKernel, triton_configurations
from fxwrap.printers.languages import TRITON_KERNEL_COMBINER
from fxwrap.runtime.devices import CUDA_RUNTIME
from tests.devices.registration import on_abacus
from tests.lowering.planned_programs import close
from tests.runtime.cuda_graphs.cpu_graph_capturer import cpu_with_graph_capture
from tests.support.agreement import Agreement, in_float64, promote
from tests.support.fuzzing import Drawn, Failure, Outcome, Task, drawn_example, run_seeds
from tests.support.strategies.attention import attention, attention_functions
from tests.support.strategies.control_graphs import control_graphs
from tests.support.strategies.dynamic_graphs import LETTERS, DynamicGraph, Run, dynamic_graphs
from tests.support.strategies.experts import experts
from tests.support.strategies.exported import EXPORTED, ROUTES, SAVED, exported_modules
from tests.support.strategies.functions import Compile, RandomFunction, gradients
from tests.support.strategies.graphs import FAMILIES, graphs
from tests.support.strategies.layers import layers
from tests.support.strategies.norms import norms
from tests.support.strategies.optimizers import optimizers

FRESH_RUNS, SPECIAL_RUNS = 12, 8
"""Inputs for each graph: random elements, and those with infinities, NaN, zeros of both signs and extreme numbers.

A run of a program costs a tenth of its compile."""

TRAINING_RUNS, ATTENTION_RUNS = 8, 2

SPECIAL_SHARE = 1 / 6
"""How many elements of such inputs are special."""

LEDGER_SECONDS, SHOWN_SEEDS = 60, 20

HINTS = (1, 2, 64, 4096)
"""Hints of sizes, other than the traced ones."""

INFINITIES = (math.inf, -math.inf)
SPECIAL_NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, math.nan, 2.0**-126, 1 - 2.0**-24)

VARIANCES = ("aten.native_layer_norm.default", "aten.var_mean.correction")
"""Operators whose mean of a row with an infinity is NaN in eager mode, unless it is the last that a lane adds."""

VARIANTS = {
    "static": 3,
    "dynamic": 3,
    "control": 3,
    "training": 1,
    "layers": 4,
    "layers in training": 1,
    "attention": 3,
    "experts": 2,
    "norms": 2,
    "optimizers": 1,
    "attention in training": 1,
    "exported": 3,
}
"""Compiles of each graph. Dynamo traces a graph for each training compile, which then shares nothing with others."""

CPP_SHARE = 1 / 60
"""How many graphs are emitted as C++, which takes a C++ compiler, and have kernels of C++."""

KERNELS = ("abacus", "cpp", "triton", "graphs")
KERNEL_SHARES = {
    "layers": (2, 1, 2, 0), "layers in training": (2, 1, 2, 0), "attention": (1, 2, 2, 0),
    "attention in training": (1, 2, 2, 0), "experts": (2, 1, 2, 0), "norms": (1, 1, 4, 0), "optimizers": (4, 1, 4, 3),
    "exported": (3, 1, 2, 0),
}  # fmt: skip
OTHER_KERNEL_SHARES = (48, 1, 1, 0)
"""How many graphs have kernels of each of these kinds: C++ takes a compiler, Triton's interpreter is slow.

Programs with "graphs" have C++ kernels, and are captured as CUDA graphs are; each run of them is repeated.
"""

GRAPH_REPEATS = 3

_EAGER_ERRORS = (RuntimeError, IndexError, ZeroDivisionError)
"""What eager mode raises for sizes that a graph does not take; the last one where a size of 0 divides another."""

GPU = replace(
    CPU,
    **{
        name: getattr(CUDA, name)
        for name in (
            "massively_parallel", "combo_kernel_bytes", "combo_large_kernels", "instructions_per_byte",
            "counted_sort_elements", "supports_tensor_descriptors",
        )
    },
    convolutions=replace(CUDA.convolutions, prepacked_dtypes=CPU.convolutions.prepacked_dtypes),
    matmuls=replace(
        CPU.matmuls,
        **{
            name: getattr(CUDA.matmuls, name)
            for name in (
                "unfused_bias_dtypes", "generated_dequantised_rows", "generated_unaligned_products",
                "generated_grouped_rows", "described_grouped_rows", "sorted_expert_dtypes", "stacked_expert_bytes",
                "packed_bytes",
            )
        },
        generated_rows=((torch.float16, 16), (torch.bfloat16, 16)),
    ),
    attention=replace(CPU.attention, streaming_sizes=()),
)  # fmt: skip
"""A CPU for whose kernels the compiler decides as for a GPU."""

REFUSED_GRAPHS = {
    "by the guards of the graph, but option 'symbol_ranges'": "a range excludes the only size of a graph",
    "a_stride_expr": "cond does not merge branches whose dimensions of size 1 make strides ambiguous",
    "list assignment index out of range": "the fake rule of split of a dimension of size 0 fails (torch 2.11)",
}
"""Texts of errors with which a graph is discarded, and the reasons; most are errors of torch."""

TRAINING = graphs(FAMILIES, writes=0, sizes=(3, 4, 2, 1, 5), dtypes=(torch.float32, torch.float64, torch.float32))
DYNAMO_SETTINGS = {"capture_dynamic_output_shape_ops": True, "recompile_limit": 64}
"""Settings of Dynamo, under which sizes that depend on data break no graph."""

TRACED = ("training", "layers in training", "experts", "norms", "optimizers", "attention in training")
"""The kinds that Dynamo traces."""

SHARES = {
    "static": 12, "dynamic": 4, "control": 2, "training": 2, "layers": 2, "layers in training": 1, "attention": 1,
    "experts": 1, "norms": 1, "optimizers": 1, "attention in training": 1, "exported": 2,
}  # fmt: skip
STRATEGIES = {
    "static": graphs(), "dynamic": dynamic_graphs(), "control": control_graphs(), "training": TRAINING,
    "layers": layers(), "layers in training": layers(), "attention": attention(),
    "experts": experts(), "norms": norms(), "optimizers": optimizers(),
    "attention in training": attention_functions(), "exported": exported_modules(),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A variant of a seed: its kind of graph, and how that is compiled.

    Fields:
        ranges, hints: of a dynamic graph's sizes, by letter.
    """

    kind: str
    seed: int
    variant: int
    emitter: str
    kernels: str
    options: dict[str, Any]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hints: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def draw(cls, kind: str, seed: int, variant: int) -> Case:
        """Returns a variant of a seed."""
        choose = random.Random(f"{seed}.{variant}")
        emitter = (
            "cpp" if choose.random() < CPP_SHARE else choose.choice([one for one in COMPARED_EMITTERS if one != "cpp"])
        )
        options: dict[str, Any] = {
            "fuse": choose.random() < 0.8,
            "layout": choose.choice(["auto", "preserve"]),
            "output_strides": choose.choice(["eager", "eager", "any"]),
            "memory_planning": choose.choice(["default", "none", "reuse", *PLANNERS]),
            "memory_slack": choose.choice([0.0, 0.0, 0.1]),
            "bucket_collectives": choose.random() < 0.5,
            "overlap_collectives": choose.random() < 0.5,
            "reorder_for_peak_memory": choose.random() < 0.5,
            "combo_kernels": choose.random() < 0.5,
            "matmul_kernels": choose.choice(["auto", "library", "generated"]),
            "check_memory": emitter == "interpreter" and choose.random() < 0.5,
        }
        shares = KERNEL_SHARES.get(kind, OTHER_KERNEL_SHARES)
        kernels = "cpp" if emitter == "cpp" else choose.choices(KERNELS, shares)[0]
        if kernels == "triton":
            options |= {"cpu_kernels": "triton", "devices": (GPU,)}
        if kernels == "graphs":
            options["cuda_graphs"] = True
        drawn = [(letter, _draw_range(choose, size)) for letter, size in LETTERS.items() if choose.random() < 0.2]
        hints = {letter: choose.choice(HINTS) for letter in LETTERS if choose.random() < 0.2}
        return cls(kind, seed, variant, emitter, kernels, options, dict(drawn), hints)

    def make_options(self, symbols: Mapping[str, sympy.Symbol] = MappingProxyType({})) -> Options:
        """Returns the options of the compile; `symbols` are those of a dynamic graph's letters."""
        ranges = {symbols[letter].name: bounds for letter, bounds in self.ranges.items() if letter in symbols}
        hints = {symbols[letter].name: size for letter, size in self.hints.items() if letter in symbols}
        options = {**self.options, "symbol_ranges": ranges, "symbol_hints": hints}
        return Options(emitter=self.emitter, compile_cache=False, fallback="error", **options)


def _draw_range(choose: random.Random, size: int) -> tuple[int, int]:
    """Returns a range with a size that tracing has seen, often at an edge, or a range beyond it."""
    return choose.choice([(2, size), (size, size + 4), (size, size), (2, 1 << 40), (size + 1, 64), (2, 16), (3, 64)])


@dataclass(frozen=True)
class CaseResult:
    """The outcome of a case without a difference.

    Fields:
        runs: runs that agree with eager; none if the case was discarded.
        errors: those of them in which both raise.
        refused: more runs, of sizes out of range, which raise InputError.
        discarded: why a compile was discarded, or graphs that were drawn before this one: reasons with counts.
    """

    runs: int = 0
    errors: int = 0
    refused: int = 0
    discarded: Mapping[str, int] = field(default_factory=dict)


class Subject:
    """The graph of a seed, and its results in eager mode, which its variants share; each computed when first used."""

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        self.seed = seed
        self.kind = random.Random(seed).choices(kinds, [SHARES[name] for name in kinds])[0]
        self.cases = tuple([Case.draw(self.kind, seed, variant) for variant in range(VARIANTS[self.kind])])

    @property
    def is_traced(self) -> bool:
        """Whether Dynamo traces it, and gradients may be compared too."""
        return self.kind in TRACED

    @cached_property
    def drawn(self) -> Drawn:
        """The graph, and why others were rejected."""
        return drawn_example(STRATEGIES[self.kind], self.seed)

    @property
    def graph(self) -> Any:
        """The graph."""
        return self.drawn.example

    @cached_property
    def function(self) -> RandomFunction:
        """That which Dynamo traces."""
        graph = self.graph
        return graph if isinstance(graph, RandomFunction) else RandomFunction(lambda *inputs: graph.module(*inputs), ())

    @cached_property
    def inputs(self) -> list[Sequence[Tensor]]:
        """The inputs that the graph was drawn with, and fresh ones."""
        if isinstance(self.graph, RandomFunction):
            return list(self.graph.runs)
        if isinstance(self.graph, DynamicGraph):
            return [run.inputs for run in self.sizes_that_hold]
        torch.manual_seed(self.seed)
        inputs = self.graph.inputs
        fresh = TRAINING_RUNS if self.is_traced else ATTENTION_RUNS if self.kind == "attention" else FRESH_RUNS
        # gradients at infinities are NaN, whatever computes them
        special = 0 if self.is_traced or self.kind in ("layers", "attention") else SPECIAL_RUNS
        numbers = SPECIAL_NUMBERS if _computes_variances(self.graph.module) else (*SPECIAL_NUMBERS, *INFINITIES)
        return [
            inputs,
            *[[_fresh(item) for item in inputs] for _ in range(fresh - 1)],
            *[[_with_special_values(_fresh(item), numbers) for item in inputs] for _ in range(special)],
        ]

    @cached_property
    def runs_of_sizes(self) -> list[Run]:
        """The runs of a dynamic graph, also of sizes that it does not allow."""
        return self.graph.runs()

    @cached_property
    def sizes_that_hold(self) -> list[Run]:
        """Those of sizes that are in range and that fulfil the guards."""
        return [run for run in self.runs_of_sizes if self.graph.holds(run.sizes)]

    @cached_property
    def wanted(self) -> list[Agreement | Exception]:
        """For each of the inputs, the results in eager mode and the inputs after the run, or results and gradients.

        Where eager mode raises for a size that a run brings (an extremum of nothing, a division by a size of 0), the
        error.
        """
        wanted: list[Agreement | Exception] = []
        for inputs in self.inputs:
            try:
                results = self._run_in_eager_mode(inputs)
            except _EAGER_ERRORS as error:
                wanted.append(error)
            else:
                dtypes = [item.dtype for item in inputs if isinstance(item, Tensor)]
                wanted.append(Agreement(results, partial(self._run_in_float64, inputs), dtypes))
        return wanted

    def _run_in_eager_mode(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(self.graph, RandomFunction):
            return self.graph.results(inputs)
        return self._run(self.graph.module, [item.clone() for item in inputs])

    def _run_in_float64(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(self.graph, RandomFunction):
            return self.graph.exact_results(inputs)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # quotients of integers have it
        try:
            return self._run(in_float64(self.graph.module), [promote(item) for item in inputs])
        finally:
            torch.set_default_dtype(default)

    def _run(self, module: GraphModule, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.is_traced:
            return gradients(module, inputs)
        with torch.no_grad():
            return [*module(*inputs), *inputs]


def run_case(case: Case, subject: Subject) -> CaseResult:
    """Returns the result of a case. Raises AssertionError for a difference from eager."""
    try:
        graph = subject.graph
    except PendingUnbackedSymbolNotFound:
        return _discarded("make_fx fails on slices of slices of unbacked lengths (torch 2.11)")
    try:
        settings = {**DYNAMO_SETTINGS, "specialize_float": case.kind == "attention in training"}
        run = _train if subject.is_traced else _run_exported if case.kind == "exported" else _infer
        with _kernel_scope(case), torch._dynamo.config.patch(settings):
            result = run(case, subject)
    except Exception as error:
        raise AssertionError(f"{case}\n{graph}") from error
    if case.variant:
        return result
    rejected = {f"graph drawn again: {reason}": count for reason, count in subject.drawn.rejected.items()}
    return replace(result, discarded={**result.discarded, **rejected})


def _kernel_scope(case: Case) -> AbstractContextManager[Any]:
    """Returns a scope with the kernels of a case.

    Those of Triton are printed in any of their configurations, and reduce rows and columns also of small tensors.
    """
    if case.kernels == "abacus":
        return on_abacus()
    if case.kernels == "cpp":
        return nullcontext()
    if case.kernels == "graphs":
        return cpu_with_graph_capture()

    def printer(request: KernelRequest) -> Sequence[Callable[[], PrintedKernel]]:
        candidates = list(triton_configurations(request))
        random.Random(f"{case.seed}.{case.variant}.{request.kernel}").shuffle(candidates)
        return candidates

    scope = ExitStack()
    scope.enter_context(
        scoped_registration(
            CUDA, printer=printer, combiner=TRITON_KERNEL_COMBINER, runtime=CUDA_RUNTIME, language=TRITON
        )
    )
    scope.enter_context(mock.patch.multiple(fusion, _MIN_PART_BYTES=0, _MIN_ROWS_PER_COLUMN=0))
    return scope


def _discarded(reason: str) -> CaseResult:
    return CaseResult(discarded={reason: 1})


def _infer(case: Case, subject: Subject) -> CaseResult:
    graph = subject.graph
    dynamic = isinstance(graph, DynamicGraph)
    sample = None if dynamic else tuple([item.clone() for item in graph.inputs])
    options = case.make_options(graph.symbols()) if dynamic else case.make_options()
    expected = subject.wanted
    try:
        compiled = fxwrap.compile_graph(graph.module, sample, options=options)
    except GraphError as error:
        reason = next((reason for text, reason in REFUSED_GRAPHS.items() if text in str(error)), None)
        if reason is None:
            raise
        return _discarded(reason)
    pairs = list(zip(subject.inputs, expected, strict=True))
    laid_out = set() if dynamic and graph.from_zero else _eager_layouts(graph.module)
    if dynamic:
        known = zip(subject.sizes_that_hold, pairs, strict=True)
        pairs = [pair for run, pair in known if graph.in_range(run.sizes, case.ranges)]
    for inputs, wanted in pairs:
        actual = [_same_layout(item) for item in inputs]
        if isinstance(wanted, Exception):
            _check_raises(compiled, actual, wanted)
            continue
        with torch.no_grad():
            results = compiled(*actual)
        _check(wanted, (*results, *actual), set() if case.options["output_strides"] == "any" else laid_out)
    refused = _check_refused(case, subject, compiled) if dynamic else 0
    return CaseResult(len(pairs), sum(isinstance(wanted, Exception) for _, wanted in pairs), refused)


def _run_exported(case: Case, subject: Subject) -> CaseResult:
    """Compares results, mutated inputs, containers and aliases of an exported program; later runs show its buffers."""
    graph = subject.graph
    try:
        program = copy.deepcopy(graph.program)
        wanted = graph.outcomes(copy.deepcopy(graph.program).module())
    except Exception as error:  # noqa: BLE001 - torch.export refuses it, or runs it with other sizes only
        return _discarded(f"torch.export: {type(error).__name__}: {str(error).partition(chr(10))[0][:80]}")
    try:
        compiled: Any = fxwrap.compile_graph(program, options=case.make_options())
    except UnsupportedError as error:
        if "'text'" not in str(error):
            raise
        return _discarded("C++ returns no text")
    route = random.Random(f"{case.seed}.{case.variant}.route").choice(ROUTES)
    if route == SAVED:
        with tempfile.TemporaryDirectory() as folder:
            compiled.save(f"{folder}/program.fxw")
            compiled = fxwrap.load(f"{folder}/program.fxw", emitter=case.emitter, mmap=False)
    if route == EXPORTED:
        compiled = fxwrap.fx.export(compiled).module()
    for number, (actual, expected) in enumerate(zip(graph.outcomes(compiled), wanted, strict=True)):
        if isinstance(actual, InputError) and graph.rows[number] < 2:
            return CaseResult(number, refused=1)  # the states of buffers differ from now on
        assert type(actual) is type(expected), f"{route}, run {number}: {actual!r} is not {expected!r}"
        for position, (one, other) in enumerate(zip(actual, expected, strict=True)):
            where = f"result {position} of run {number}, {route}:\n{one}\nis not\n{other}"
            same = close(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
            assert same and type(one) is type(other), where
    return CaseResult(len(wanted))


def _check_refused(case: Case, subject: Subject, compiled: Callable[..., Any]) -> int:
    """Checks that sizes out of range raise InputError, and returns how many."""
    refused = [run for run in subject.runs_of_sizes if not subject.graph.in_range(run.sizes, case.ranges)]
    for run in refused:
        try:
            compiled(*[_same_layout(item) for item in run.inputs])
        except InputError:
            continue
        raise AssertionError(f"no InputError for sizes {dict(run.sizes)}, which are out of range")
    return len(refused)


def _check_raises(compiled: Callable[..., Any], inputs: Sequence[Tensor], wanted: Exception) -> None:
    """Checks that a program raises like eager mode.

    A kernel need not find an integer that is divided by zero, a size of -1 was inferred when the graph was traced, and
    only eager's gradient of a group norm lacks a device where there are no rows.
    """
    try:
        compiled(*inputs)
    except _EAGER_ERRORS:
        return
    benign = ("ZeroDivisionError", "unspecified dimension size -1", "tensor does not have a device")
    assert any(text in repr(wanted) for text in benign), f"no error, where eager mode raises {wanted!r}"


def _fresh(tensor: Tensor) -> Tensor:
    """Returns random elements in the layout of a tensor; integers as small as the graphs' own, scalars unchanged."""
    if not tensor.dim():
        return tensor.clone()
    if tensor.dtype is torch.bool:
        values = torch.rand(tensor.shape) < 0.5
    elif tensor.dtype.is_floating_point:
        values = torch.randn(tensor.shape, dtype=torch.float64)
    else:
        values = torch.randint(-4, 5, tensor.shape)
    return _same_layout(tensor).copy_(values)


def _with_special_values(tensor: Tensor, numbers: Sequence[float]) -> Tensor:
    """Returns the tensor, with some of its floats replaced by special ones."""
    if not tensor.dtype.is_floating_point or not tensor.dim():
        return tensor
    values = torch.tensor(numbers, dtype=tensor.dtype)
    chosen = values[torch.randint(len(values), tensor.shape)]
    return tensor.copy_(torch.where(torch.rand(tensor.shape) < SPECIAL_SHARE, chosen, tensor))


def _computes_variances(module: GraphModule) -> bool:
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    return any(str(node.target) in VARIANCES for part in parts for node in part.graph.nodes)


def _same_layout(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def _train(case: Case, subject: Subject) -> CaseResult:
    """Compares results and gradients under torch.compile."""
    options = {name: value for name, value in vars(case.make_options()).items() if value != getattr(Options(), name)}
    expected, function = subject.wanted, subject.function
    compiled = _compile(subject, backend="fxwrap", options=options)
    errors, repeats = 0, GRAPH_REPEATS if case.kernels == "graphs" else 1
    for inputs, wanted in repeats * list(zip(subject.inputs, expected, strict=True)):
        if isinstance(wanted, Exception):
            _check_raises(lambda *items: function.results(items, compiled), inputs, wanted)
            errors += 1
            continue
        try:
            results = function.results(inputs, compiled)
        except Exception:
            if _fails_in_torch(subject, inputs, None):
                return _discarded("aot_eager fails too")
            raise
        try:
            _check(wanted, results)
        except AssertionError:
            wrong = {place: item for place, item in enumerate(results) if not wanted.holds(place, item)}
            if _fails_in_torch(subject, inputs, wrong):
                return _discarded("aot_eager has the same results, which are not eager's")
            raise
    return CaseResult(repeats * len(subject.inputs), errors)


def _compile(subject: Subject, **keywords: Any) -> Compile:
    """Returns torch.compile with some arguments; all functions that it returns for one function share its compiles.

    The lengths of attention become symbols when they change: of symbolic heads no kernel computes it.
    """
    torch._dynamo.reset()
    dynamic = None if subject.kind == "attention in training" else subject.seed % 2 == 0
    return cache(partial(torch.compile, dynamic=dynamic, **keywords))


def _fails_in_torch(subject: Subject, inputs: Sequence[Tensor], wrong: Mapping[int, Tensor] | None) -> bool:
    """Whether the backend "aot_eager", which runs no code of fxwrap, gives these wrong results, or fails without any.

    Known: wrong gradients of a returned view whose elements overlap, with torch 2.11 the fake rule of a split of a
    dimension of size 0, and steps of Adam whose learning rate is a tensor: those of float64 scalars are lost.
    """
    try:
        others = subject.function.results(inputs, _compile(subject, backend="aot_eager"))
    except Exception:  # noqa: BLE001  it is torch's, whatever it is
        return wrong is None
    return bool(wrong) and all(close(item, others[place]) for place, item in wrong.items())


def _eager_layouts(module: GraphModule) -> set[int]:
    """Returns the positions of results that have eager mode's strides.

    Those of unknown sizes have the strides of torch's fake tensors: where strides are equal, the order of dimensions
    depends on the sizes.
    """
    results = module.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    values = [item.meta.get("val") if isinstance(item, Node) else item for item in results]
    return {place for place, value in enumerate(values) if not free_unbacked_symbols(value)}


def _check(agreement: Agreement, results: Sequence[Tensor], strides: Collection[int] = ()) -> None:
    """Compares results with eager mode's, and the strides of those at some positions."""
    wanted = agreement.wanted
    assert len(wanted) == len(results), f"{len(results)} results, not {len(wanted)}"
    for position, (want, result) in enumerate(zip(wanted, results)):
        where = f"result {position}"
        assert (result.dtype, result.shape) == (want.dtype, want.shape), f"{where}: {result.dtype}{list(result.shape)}"
        if position in strides and want.numel():
            pairs = zip(want.shape, want.stride(), result.stride())
            assert all(one == other or size == 1 for size, one, other in pairs), f"{where}: strides {result.stride()}"
        assert agreement.holds(position, result), f"{where}:\n{result}\nis not\n{want}"


def fuzz(first: int, count: int, jobs: int, seconds: float, kinds: Sequence[str]) -> Iterator[Outcome]:
    """Yields each case with the number of its runs, or with its failure."""
    return run_seeds(Task(partial(Subject, kinds=kinds), run_case), first, count, jobs, seconds)


class Counts:
    """What a run of the fuzzer did, by kind of graph and emitter; discarded cases by kind of graph and reason."""

    def __init__(self) -> None:
        self.seeds = set[int]()
        counters = [Counter[tuple[str, str]]() for _ in range(5)]
        self.compiles, self.runs, self.errors, self.refused, self.failed = counters
        self.discarded = Counter[tuple[str, str]]()
        self.discarded_seeds: dict[tuple[str, str], list[int]] = {}
        self.failed_seeds: dict[tuple[str, str], list[int]] = {}

    def add(self, case: Case, result: CaseResult | Failure) -> None:
        """Counts the outcome of a case."""
        key = (case.kind, case.emitter)
        self.compiles[key] += 1
        self.seeds.add(case.seed)
        if isinstance(result, Failure):
            self.failed[key] += 1
            self.failed_seeds.setdefault(key, []).append(case.seed)
            return
        self.runs[key] += result.runs
        self.errors[key] += result.errors
        self.refused[key] += result.refused
        for reason, count in result.discarded.items():
            self.discarded[case.kind, reason] += count
            self.discarded_seeds.setdefault((case.kind, reason), []).append(case.seed)

    def by_kind(self) -> Iterator[dict[str, Any]]:
        """Yields a row for each kind of graph and emitter, with the seeds of failures."""
        for key in sorted(self.compiles):
            row: dict[str, Any] = dict(zip(("kind", "emitter"), key))
            row |= {"compiles": self.compiles[key], "runs": self.runs[key], "both raise": self.errors[key]}
            row["refused"] = self.refused[key]
            yield {**row, "failures": self.failed[key], "seeds of failures": self.failed_seeds.get(key, [])}

    def by_reason(self) -> Iterator[dict[str, Any]]:
        """Yields a row for each reason why cases were discarded, with a few of their seeds."""
        for reason, count in self.discarded.most_common():
            row: dict[str, Any] = dict(zip(("kind", "discarded because"), reason))
            yield {**row, "count": count, "seeds": self.discarded_seeds[reason][:SHOWN_SEEDS]}

    def __str__(self) -> str:
        done = f"{len(self.seeds)} graphs, {self.compiles.total()} compiles, {self.runs.total()} runs"
        done += f", {self.refused.total()} refused"
        return f"{done}, {self.failed.total()} failures, {self.discarded.total()} discarded"


class Ledger:
    """The recorded runs of the fuzzer, one row each, in `benchmarks/results/fuzz.json`: no seed counts twice.

    A run writes its own row every `LEDGER_SECONDS`, so that a process that is killed loses little.
    """

    def __init__(self, chosen: argparse.Namespace, path: Path | None) -> None:
        recorded = json.loads(path.read_text()) if path is not None and path.exists() else {"rows": [], "raw": []}
        self.rows: list[dict[str, Any]] = recorded["rows"]
        self._raw, self._chosen, self._path = recorded["raw"], chosen, path
        self._own: list[dict[str, Any]] = []
        self._facts = {**environment(torch.device("cpu")), "script": "tests/fuzz.py"}
        self._written = time.monotonic()

    @classmethod
    def read(cls, chosen: argparse.Namespace) -> Ledger:
        """Reads the ledger that `--record` names; it is empty, and never written, without."""
        return cls(chosen, result_path("fuzz", chosen))

    def overlapping(self, first: int, count: int) -> dict[str, Any] | None:
        """Returns a recorded row that has some of these seeds."""
        rows = [row for row in self.rows if first <= row["last seed"] and row["first seed"] < first + count]
        return rows[0] if rows else None

    def update(self, counts: Counts, seconds: float) -> None:
        """Writes the row of this run again if the last time is a while ago."""
        if self._path is not None and time.monotonic() - self._written > LEDGER_SECONDS:
            self.write(counts, seconds)

    def write(self, counts: Counts, seconds: float) -> None:
        """Writes the ledger with the row of this run."""
        assert self._path is not None, "only a run with --record writes the ledger"
        versions: Any = self._facts["versions"]
        row = {
            "date": self._facts["date"], "commit": self._facts["commit"], "torch": versions["torch"],
            "first seed": self._chosen.seed, "last seed": max(counts.seeds, default=self._chosen.seed),
            "graphs": len(counts.seeds), "compiles": counts.compiles.total(), "runs": counts.runs.total(),
            "both raise": counts.errors.total(), "refused": counts.refused.total(), "failures": counts.failed.total(),
            "discarded": counts.discarded.total(), "seconds": round(seconds), "processes": self._chosen.jobs,
        }  # fmt: skip
        self._own = [row]
        raw = {"kinds": list(counts.by_kind()), "discarded": list(counts.by_reason())}
        write_result(self._path, {**self._facts, "rows": [*self.rows, row], "raw": [*self._raw, raw]})
        self._written = time.monotonic()

    def __str__(self) -> str:
        rows = [*self.rows, *self._own]
        totals = [f"{sum([row[name] for row in rows])} {name}" for name in ("graphs", "compiles", "runs", "failures")]
        return f"the ledger has {', '.join(totals)} of {len(rows)} recorded runs"


def main() -> int:
    """Prints failures while they happen, and counts at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) * 1000, help="the first graph's; by default the time"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default=",".join(SHARES), help="kinds of graphs")
    add_record_option(parser)
    chosen = parser.parse_args()
    ledger = Ledger.read(chosen)
    if (row := ledger.overlapping(chosen.seed, chosen.graphs)) is not None and chosen.record is not None:
        parser.error(f"--seed: the ledger has seeds {row['first seed']} to {row['last seed']}, recorded {row['date']}")
    counts = Counts()
    start = time.monotonic()
    with suppress(KeyboardInterrupt):  # an interrupted run prints its counts
        for case, result in fuzz(chosen.seed, chosen.graphs, chosen.jobs, chosen.seconds, chosen.only.split(",")):
            counts.add(case, result)
            if isinstance(result, Failure):
                where = f"{case.kind}, variant {case.variant}, {case.emitter}, {case.kernels} kernels"
                print(f"seed {case.seed} ({where})\n{result.text}\n", flush=True)
            ledger.update(counts, time.monotonic() - start)
    for rows in (counts.by_kind(), counts.by_reason()):
        for row in rows:
            print(", ".join(f"{name} {value}" for name, value in row.items()))
    note = f"seeds from {chosen.seed} on, {time.monotonic() - start:.0f} s with {chosen.jobs} processes"
    print(f"{counts}; {note}")
    if chosen.record is not None:
        ledger.write(counts, time.monotonic() - start)
        print(ledger)
    return 1 if counts.failed.total() else 0


if __name__ == "__main__":
    sys.exit(main())

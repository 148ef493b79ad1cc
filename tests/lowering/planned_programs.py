"""Planned programs without a compiler: the interpreter runs their kernels by the loop IR's evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.converters.interpreter import interpreter
from fxwrap.devices import CPU
from fxwrap.loop_ir import Kernel, evaluate_kernel
from fxwrap.lowering.program import lower_with_coverage
from fxwrap.options import Options
from fxwrap.printers import KernelRequest, PrintedKernel, print_kernel
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.kernels import load_kernel, prepare_kernels
from fxwrap.symbolic import evaluate
from fxwrap.wrapper_ir import Program, leaves, verify

EvaluateKernel = Callable[..., None]

STRICT = Options(fallback="error")
"""No kernel may be declined: printers must support every plan of fusion."""


class Planned:
    """A program and its kernels in the loop IR, by their source, which is their text."""

    def __init__(self, program: Program, kernels: dict[str, Kernel]) -> None:
        self.program = program
        self.kernels = kernels

    def run(self, inputs: Sequence[Any], evaluate_with: EvaluateKernel = evaluate_kernel) -> tuple[Any, ...]:
        """Runs the program on flat inputs, which it may change, each kernel by `evaluate_with`."""

        def load(language: str, source: str, signature: Any, options: Any) -> Callable[..., None]:
            kernel = self.kernels[source]
            return lambda grid, *arguments: launch(kernel, arguments, evaluate_with)

        with (
            mock.patch.object(interpreter, "load_kernel", load),
            mock.patch.object(interpreter, "prepare_kernels", lambda texts: None),
        ):
            return interpreter.run(self.program, inputs)

    @property
    def launches(self) -> list[str]:
        """The names of the kernels launched, in order."""
        return [line.kernel for line in self.program.lines() if line.opcode == "kernel.launch"]

    @property
    def calls(self) -> list[str]:
        """The operators called, in order."""
        return [line.target for line in self.program.lines() if line.opcode in ("extern.call", "extern.mutate")]


def plan(graph: GraphModule, inputs: Sequence[Any] | None, options: Options = STRICT, **keywords: Any) -> Planned:
    """Lowers a graph, and records its kernels in the loop IR instead of printing them."""
    kernels: dict[str, Kernel] = {}

    def keep(request: KernelRequest) -> PrintedKernel:
        kernel = request.kernel
        kernels[str(kernel)] = kernel
        buffers = (*kernel.inputs, *kernel.outputs)
        return PrintedKernel("cpp", str(kernel), (*["*"] * len(buffers), *["i64"] * len(kernel.symbols)))

    return Planned(lower_with_coverage(graph, inputs, options=options, print_kernel=keep, **keywords).program, kernels)


def check(function: Callable[..., Any], *inputs: torch.Tensor, options: Options = STRICT) -> Planned:
    """Plans a function's graph and compares the results of its kernels with eager mode; returns the plan."""
    return check_graph(make_fx(function)(*[item.clone() for item in inputs]), inputs, options)


def check_graph(graph: GraphModule, inputs: Sequence[Any], options: Options = STRICT) -> Planned:
    """Plans a graph and compares the outputs, and the inputs after it, with those of the graph itself."""
    planned = plan(graph, list(inputs), options)
    verify(planned.program)
    expected, actual = [item.clone() for item in inputs], [item.clone() for item in inputs]
    results = graph(*expected)
    wanted = [*[item for item in leaves(results) if item is not None], *expected]
    computed = [*[item for item in planned.run(list(actual)) if item is not None], *actual]
    for want, got in zip(wanted, computed, strict=True):
        assert _layout(got) == _layout(want), f"{_layout(got)} is not {_layout(want)}\n{planned.program}"
        assert close(got, want), f"{got}\nis not\n{want}\n{planned.program}"
    return planned


def _layout(tensor: torch.Tensor) -> Any:
    """A tensor's dtype, sizes, and those strides that say where its elements are."""
    strides = zip(tensor.shape, tensor.stride(), strict=True) if tensor.numel() else ()
    return tensor.dtype, tuple(tensor.shape), tuple([stride for size, stride in strides if size != 1])


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether floats agree by relative norm, where both are finite, and all else exactly."""
    if not want.dtype.is_floating_point:
        return torch.equal(got, want)
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(
        got[~finite].nan_to_num(), want[~finite].nan_to_num()
    ):
        return False
    difference = (got[finite].double() - want[finite].double()).norm()
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[want.dtype]
    return bool(difference <= tolerance * (1 + want[finite].double().norm()))


def launch(kernel: Kernel, arguments: Sequence[Any], evaluate_with: EvaluateKernel = evaluate_kernel) -> None:
    """Evaluates a kernel on the arguments of a launch: tensors of any strides, then numbers."""
    buffers = (*kernel.inputs, *kernel.outputs)
    symbols = {symbol.name: value for symbol, value in zip(kernel.symbols, arguments[len(buffers) :], strict=True)}
    flat: dict[str, torch.Tensor] = {}
    for buffer, tensor in zip(buffers, arguments[: len(buffers)], strict=True):
        assert tensor.dtype is buffer.dtype, f"{buffer.name} is {tensor.dtype}, not {buffer.dtype}"
        last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
        flat[buffer.name] = torch.as_strided(tensor, (last + 1 if tensor.numel() else 0,), (1,))
    evaluate_with(kernel, flat, symbols)


def printed_launch(plans: Sequence[Planned], language: str) -> EvaluateKernel:
    """Prints and prepares the kernels of plans in a language together; returns what runs one of them."""
    kernels = {text: kernel for planned in plans for text, kernel in planned.kernels.items()}
    printed = {
        text: print_kernel(KernelRequest(kernel, language, torch.device("cpu"), CPU, int))
        for text, kernel in kernels.items()
    }
    prepare_kernels(
        tuple([KernelText(language, item.source, item.signature, item.options) for item in printed.values()])
    )

    def run(kernel: Kernel, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        item = printed[str(kernel)]
        launcher = load_kernel(item.language, item.source, item.signature, item.options)
        grid = tuple([int(evaluate(size, numbers)) for size in item.grid])
        order = [buffers[buffer.name] for buffer in (*kernel.inputs, *kernel.outputs)]
        launcher(grid, *order, *[numbers[symbol.name] for symbol in kernel.symbols])

    return run


def compared_with_evaluator(other: EvaluateKernel) -> EvaluateKernel:
    """Returns what runs a kernel both ways on equal memory, compares all of it, and leaves the evaluator's."""

    def run(kernel: Kernel, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        memory = {name: tensor.clone() for name, tensor in buffers.items()}
        evaluate_kernel(kernel, buffers, numbers)
        other(kernel, memory, numbers)
        for name, tensor in buffers.items():
            assert close(memory[name], tensor), f"{name} is {memory[name]}, not {tensor}\n{kernel}"

    return run

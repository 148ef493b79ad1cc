"""Interpreters that evaluate the loop IR of kernels, instead of launching them or before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from fxwrap.converters.base import Handlers
from fxwrap.converters.interpreter import Interpreter
from fxwrap.lines import Launch
from fxwrap.loop_ir import Kernel, evaluate_kernel
from fxwrap.wrapper_ir import Block, LineBase, Program


class _KernelEvaluator(Interpreter):
    """An interpreter that can evaluate the loop IR of a launch."""

    def _evaluate_kernel(self, kernel: Kernel, line: Launch) -> list[torch.Tensor]:
        """Returns the tensors that a kernel writes, on the CPU."""
        arguments = self._evaluate(line.arguments)
        tensors = [item for item in arguments if isinstance(item, torch.Tensor)]
        numbers = [item for item in arguments if not isinstance(item, torch.Tensor)]
        outs = [_copy(item) for item in self._evaluate(line.outs)]
        flat = zip((*kernel.inputs, *kernel.outputs), (*[_copy(item) for item in tensors], *outs), strict=True)
        buffers = {buffer.name: _elements(item) for buffer, item in flat}
        symbols = dict(zip([symbol.name for symbol in kernel.symbols], numbers, strict=True))
        evaluate_kernel(kernel, buffers, symbols)
        return outs


class LoopInterpreter(_KernelEvaluator):
    """Runs a program whose kernels are evaluated by their loop IR instead of launched, so that none is compiled."""

    def prepare_kernels(self) -> None:
        """Compiles nothing."""

    def launch(self, line: Launch) -> None:
        kernel = self.program.kernel(line.kernel).loop_ir
        if not isinstance(kernel, Kernel):
            super().launch(line)
            return
        for out, evaluated in zip(self._evaluate(line.outs), self._evaluate_kernel(kernel, line), strict=True):
            out.copy_(evaluated)


@dataclass
class LaunchEvaluation:
    """The evaluation of a launch's kernel by its loop IR.

    Fields:
        line: the launch; None evaluates nothing.
        remaining: how many runs of a line in a block precede the one that is evaluated.
        outs: the tensors that the evaluator writes, in the order of the launch's `outs`, on the CPU; None if the launch
            did not run or its kernel has no loop IR.
    """

    line: LineBase | None = None
    remaining: int = 0
    outs: list[torch.Tensor] | None = None


class EvaluatingInterpreter(_KernelEvaluator):
    """Runs a program, and evaluates the kernel of one launch by its loop IR before it is launched."""

    name = "interpreter"

    def __init__(
        self, program: Program, handlers: Handlers | None = None, evaluation: LaunchEvaluation | None = None
    ) -> None:
        super().__init__(program, handlers)
        self.evaluation = evaluation or LaunchEvaluation()

    def _block_interpreter(self, block: Block, arguments: list[Any]) -> Self:
        inner = super()._block_interpreter(block, arguments)
        inner.evaluation = self.evaluation
        return inner

    def launch(self, line: Launch) -> None:
        kernel = self.program.kernel(line.kernel).loop_ir
        if line is self.evaluation.line and isinstance(kernel, Kernel):
            if not self.evaluation.remaining:
                self.evaluation.outs = self._evaluate_kernel(kernel, line)
            self.evaluation.remaining -= 1
        super().launch(line)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the CPU with equal strides."""
    extent = 1 + sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
    elements = torch.as_strided(tensor, (extent if tensor.numel() else 0,), (1,)).cpu().clone()
    return torch.as_strided(elements, tensor.shape, tensor.stride(), 0)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all elements of a tensor's memory."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)

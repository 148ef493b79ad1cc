"""Random expressions of integers and bools: kernels in C++ and Triton and by the evaluator, against eager per operator.

`python -m tests.lowering.integer_expressions --count 100000 --seed 0` checks as many expressions, and prints those that
differ, each with its graph alone. A graph has many expressions, so that few kernels are compiled.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxwrap.loop_ir import INTEGERS, evaluate_kernel
from tests.lowering.planned_programs import plan, printed_launch

aten = torch.ops.aten

SHAPES = ((5, 19), (5, 19), (19,), (5, 1), (1,), ())
"""The operands' shapes, which broadcast together: a vectorised part and a rest."""

SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*SIGNED, torch.int32, torch.int64, torch.uint8, torch.bool)


class NoCandidate(Exception):
    """Eager raises, or has no defined result, for the operator that was drawn."""


@dataclass(frozen=True)
class Entry:
    """A node and its value in eager mode."""

    node: Node
    value: Tensor

    @property
    def bits(self) -> int:
        return self.value.dtype.itemsize * 8


Operand = Entry | int | bool


class ExpressionDraw:
    """A graph of expressions that is being drawn. Values are computed as nodes are added: they are eager's results."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.graph = Graph()
        self.inputs: list[Tensor] = []
        self.leaves = [self._input(shape, dtype) for dtype in dict.fromkeys(DTYPES) for shape in dict.fromkeys(SHAPES)]

    def _input(self, shape: Sequence[int], dtype: torch.dtype) -> Entry:
        count = torch.Size(shape).numel()
        value = torch.tensor([self.number(dtype) for _ in range(count)], dtype=dtype).reshape(shape)
        self.inputs.append(value)
        return Entry(self.graph.placeholder(f"x{len(self.inputs)}"), value)

    def number(self, dtype: torch.dtype) -> int | bool:
        """Draws a number of a dtype: a limit of it or of a narrower dtype, a small one, or any."""
        if dtype is torch.bool:
            return self.random.random() < 0.5
        limits = torch.iinfo(dtype)
        narrower = torch.iinfo(self.random.choice(SIGNED))
        kind = self.random.random()
        if kind < 0.4:
            number = self.random.choice((0, 1, 2, 3, 7, 10, 64, -1, -2, -3, -7))
        elif kind < 0.7:
            number = self.random.choice((limits.min, limits.max, narrower.min, narrower.max)) + self.random.randint(
                -1, 1
            )
        else:
            number = self.random.getrandbits(self.random.randint(1, 64)) - self.random.getrandbits(32)
        return min(max(number, limits.min), limits.max)

    # --- operands ---------------------------------------------------------------------------------------------------

    def operand(self, depth: int, accepts: Sequence[torch.dtype] = ()) -> Entry:
        """Draws an expression of a depth, of one of the dtypes if they are named."""
        for _ in range(40):
            if depth <= 0 or self.random.random() < 0.15:
                entry = self.random.choice(self.leaves)
            else:
                try:
                    entry = self.random.choices(_STEPS, _WEIGHTS)[0](self, depth - 1)
                except NoCandidate:
                    continue
            if not accepts or entry.value.dtype in accepts:
                return entry
        raise NoCandidate

    def integer(self, depth: int) -> Entry:
        return self.operand(depth, tuple(INTEGERS))

    def tensor_or_number(self, depth: int, beside: Entry) -> Operand:
        return self.number_for(beside) if self.random.random() < 0.4 else self.operand(depth)

    def number_for(self, entry: Entry) -> int | bool:
        return self.number(entry.value.dtype if self.random.random() < 0.9 else torch.bool)

    def call(self, target: Any, *arguments: Any, **keywords: Any) -> Entry:
        """Adds a call; raises NoCandidate where eager raises."""
        values = [item.value if isinstance(item, Entry) else item for item in arguments]
        try:
            value = target(*values, **keywords)
        except (RuntimeError, TypeError, NotImplementedError, OverflowError, ValueError, IndexError) as error:
            raise NoCandidate from error
        if value.dtype not in INTEGERS and value.dtype is not torch.bool:
            raise NoCandidate
        nodes = tuple([item.node if isinstance(item, Entry) else item for item in arguments])
        return Entry(self.graph.call_function(target, nodes, keywords), value)


# --- operators ------------------------------------------------------------------------------------------------------


def _unary(draw: ExpressionDraw, depth: int) -> Entry:
    operators = (aten.neg, aten.abs, aten.sign, aten.bitwise_not, aten.square, aten.relu, aten.logical_not, aten.sgn)
    return draw.call(draw.random.choice(operators).default, draw.operand(depth))


def _sum(draw: ExpressionDraw, depth: int) -> Entry:
    left = draw.operand(depth)
    alpha = {"alpha": draw.number_for(left)} if draw.random.random() < 0.3 else {}
    right = draw.tensor_or_number(depth, left)
    operator = draw.random.choice((aten.add, aten.sub, aten.rsub))
    return draw.call(operator.Tensor if isinstance(right, Entry) else operator.Scalar, left, right, **alpha)


def _product(draw: ExpressionDraw, depth: int) -> Entry:
    left = draw.operand(depth)
    right = draw.tensor_or_number(depth, left)
    return draw.call(aten.mul.Tensor if isinstance(right, Entry) else aten.mul.Scalar, left, right)


def _bits(draw: ExpressionDraw, depth: int) -> Entry:
    left = draw.operand(depth)
    right = draw.tensor_or_number(depth, left)
    operator = draw.random.choice((aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor))
    if isinstance(right, Entry):
        return draw.call(operator.Tensor, left, right)
    return (
        draw.call(operator.Scalar_Tensor, right, left)
        if draw.random.random() < 0.3
        else draw.call(operator.Scalar, left, right)
    )


def _shift(draw: ExpressionDraw, depth: int) -> Entry:
    """Shifts by counts from 0 to the width of the result less 1."""
    left = draw.integer(depth)
    operator = draw.random.choice((aten.bitwise_left_shift, aten.bitwise_right_shift))
    if draw.random.random() < 0.5:
        return draw.call(operator.Tensor_Scalar, left, draw.random.randrange(left.bits))
    count = draw.integer(depth)
    count = draw.call(aten.bitwise_and.Scalar, count, min(left.bits, count.bits, 64) - 1)
    if draw.random.random() < 0.2:
        return draw.call(operator.Scalar_Tensor, draw.number(torch.int8), count)
    return draw.call(operator.Tensor, left, count)


def _division(draw: ExpressionDraw, depth: int) -> Entry:
    """Divides by no zero, and the smallest number not by -1: eager raises, or the process ends."""
    left = draw.integer(depth)
    right: Operand = draw.number_for(left) if draw.random.random() < 0.9 else draw.integer(depth)
    value = right.value if isinstance(right, Entry) else torch.tensor(right, dtype=left.value.dtype)
    dtype = torch.result_type(left.value, value)
    smallest = dtype.is_signed and bool((left.value == torch.iinfo(dtype).min).any())
    if bool((value == 0).any()) or (smallest and bool((value.to(dtype) == -1).any())):
        raise NoCandidate
    tensor = isinstance(right, Entry)
    kind = draw.random.randrange(5)
    if kind < 2:
        target = aten.div.Tensor_mode if tensor else aten.div.Scalar_mode
        return draw.call(target, left, right, rounding_mode=("floor", "trunc")[kind])
    target = (aten.floor_divide, aten.remainder, aten.fmod)[kind - 2]
    return draw.call((target.default if kind == 2 else target.Tensor) if tensor else target.Scalar, left, right)


def _power(draw: ExpressionDraw, depth: int) -> Entry:
    if draw.random.random() < 0.6:
        return draw.call(aten.pow.Tensor_Scalar, draw.integer(depth), draw.random.choice((0, 1, 2, 3, 4, 5, 7, 31, 64)))
    exponent = draw.call(aten.bitwise_and.Scalar, draw.integer(depth), draw.random.choice((3, 7, 63)))
    if draw.random.random() < 0.3:
        return draw.call(aten.pow.Scalar, draw.number(exponent.value.dtype), exponent)
    return draw.call(aten.pow.Tensor_Tensor, draw.integer(depth), exponent)


def _extremum(draw: ExpressionDraw, depth: int) -> Entry:
    left = draw.operand(depth)
    kind = draw.random.randrange(4)
    if kind == 0:
        return draw.call(draw.random.choice((aten.maximum, aten.minimum)).default, left, draw.operand(depth))
    if kind == 1:
        return draw.call(draw.random.choice((aten.clamp_min, aten.clamp_max)).default, left, draw.number_for(left))
    if kind == 2:
        return draw.call(aten.clamp.default, left, draw.number_for(left), draw.number_for(left))
    return draw.call(aten.clamp.Tensor, left, draw.operand(depth), draw.operand(depth))


def _comparison(draw: ExpressionDraw, depth: int) -> Entry:
    left = draw.operand(depth)
    right = draw.tensor_or_number(depth, left)
    operator = draw.random.choice((aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge))
    return draw.call(operator.Tensor if isinstance(right, Entry) else operator.Scalar, left, right)


def _logic(draw: ExpressionDraw, depth: int) -> Entry:
    operator = draw.random.choice((aten.logical_and, aten.logical_or, aten.logical_xor))
    return draw.call(operator.default, draw.operand(depth), draw.operand(depth))


def _selection(draw: ExpressionDraw, depth: int) -> Entry:
    condition = draw.operand(depth, (torch.bool,))
    left = draw.operand(depth)
    if draw.random.random() < 0.3:
        return draw.call(aten.masked_fill.Scalar, left, condition, draw.number_for(left))
    right = draw.tensor_or_number(depth, left)
    return draw.call(aten.where.self if isinstance(right, Entry) else aten.where.ScalarOther, condition, left, right)


def _conversion(draw: ExpressionDraw, depth: int) -> Entry:
    return draw.call(aten._to_copy.default, draw.operand(depth), dtype=draw.random.choice(DTYPES))


def _ternary(draw: ExpressionDraw, depth: int) -> Entry:
    operands = [draw.integer(depth) for _ in range(3)]
    return draw.call(aten.addcmul.default, *operands, value=draw.number(operands[0].value.dtype))


def _reduction(draw: ExpressionDraw, depth: int) -> Entry:
    entry = draw.operand(depth)
    if entry.value.dim() < 2:
        raise NoCandidate
    dim, keepdim = draw.random.randrange(2), draw.random.random() < 0.5
    kind = draw.random.randrange(6)
    if kind == 0:
        return draw.call(aten.sum.dim_IntList, entry, [dim], keepdim)
    if kind == 1:
        return draw.call(aten.prod.dim_int, entry, dim, keepdim)
    if kind == 2:
        return draw.call(draw.random.choice((aten.amax, aten.amin)).default, entry, [dim], keepdim)
    if kind == 3:
        return draw.call(draw.random.choice((aten.any, aten.all)).dim, entry, dim, keepdim)
    if kind == 4:
        return draw.call(draw.random.choice((aten.argmax, aten.argmin)).default, entry, dim, keepdim)
    return draw.call(draw.random.choice((aten.cumsum, aten.cumprod)).default, entry, dim)


_OPERATORS: dict[Callable[[ExpressionDraw, int], Entry], float] = {
    _unary: 2, _sum: 4, _product: 2, _bits: 2, _shift: 2, _division: 3, _power: 1, _extremum: 2, _comparison: 1,
    _logic: 0.5, _selection: 1, _conversion: 2, _ternary: 0.5, _reduction: 0.15,
}  # fmt: skip
_STEPS, _WEIGHTS = list(_OPERATORS), list(_OPERATORS.values())


# --- checks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expressions:
    """A graph that returns the values of many expressions, with eager's results."""

    seed: int
    graph: Graph
    roots: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def text(self, root: Node) -> str:
        """Returns one expression's graph, and the dtypes and shapes of its inputs."""
        lines = [line for line in str(self.module([root]).graph).splitlines() if "num_users=0" not in line]
        used = {line.split()[0].lstrip("%") for line in lines if "placeholder" in line}
        named = [(f"x{number}", item) for number, item in enumerate(self.inputs, 1) if f"x{number}" in used]
        return "\n".join([*[f"{name}: {item.dtype}{list(item.shape)}" for name, item in named], *lines])

    def module(self, roots: Sequence[Node]) -> GraphModule:
        """Returns a module that computes some of the expressions."""
        graph, copies = Graph(), dict[Node, Node]()
        needed, pending = set[Node](), list(roots)
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        for node in self.graph.nodes:
            if node in needed or node.op == "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple([copies[root] for root in roots]))
        return GraphModule(torch.nn.Module(), graph)


def draw_expressions(seed: int, count: int, depth: int = 4) -> Expressions:
    """Draws so many expressions over common inputs."""
    draw = ExpressionDraw(seed)
    entries: list[Entry] = []
    while len(entries) < count:
        try:
            entry = draw.operand(draw.random.randint(1, depth))
        except NoCandidate:
            continue
        if entry.node.op != "placeholder":
            entries.append(entry)
    roots, values = [item.node for item in entries], [item.value for item in entries]
    return Expressions(seed, draw.graph, tuple(roots), tuple(draw.inputs), tuple(values))


def differences(drawn: Sequence[Expressions], languages: Sequence[str] = ("cpp", "triton")) -> Iterator[str]:
    """Yields a text for each expression whose value differs from eager's in one of the languages."""
    plans = [plan(item.module(item.roots), list(item.inputs)) for item in drawn]
    for language in ("evaluator", *languages):
        evaluate = evaluate_kernel if language == "evaluator" else printed_launch(plans, language)
        for item, planned in zip(drawn, plans, strict=True):
            results = planned.run([value.clone() for value in item.inputs], evaluate)
            for root, result, value in zip(item.roots, results, item.values, strict=True):
                if result.dtype is not value.dtype or not torch.equal(result, value):
                    yield f"{language}, seed {item.seed}: {_difference(result, value)}\n{item.text(root)}"


def _difference(result: Tensor, value: Tensor) -> str:
    if result.dtype is not value.dtype or result.shape != value.shape:
        return f"{result.dtype}{list(result.shape)} is not {value.dtype}{list(value.shape)}"
    different = (result != value).nonzero()
    first = tuple(different[0].tolist())
    return f"{len(different)} of {value.numel()} elements, at {first} {result[first]} instead of {value[first]}"


def main() -> None:
    """Checks expressions in batches until the count is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expressions", type=int, default=50, help="the number of expressions in one graph")
    parser.add_argument("--graphs", type=int, default=8, help="the number of graphs compiled together")
    options = parser.parse_args()
    checked = failed = 0
    seed = options.seed
    while checked < options.count:
        drawn = [draw_expressions(seed + number, options.expressions) for number in range(options.graphs)]
        for text in differences(drawn):
            failed += 1
            print(text, flush=True)
        seed += len(drawn)
        checked += sum(len(item.roots) for item in drawn)
        print(f"{checked} expressions, {failed} differences, seeds {options.seed} to {seed - 1}", flush=True)


if __name__ == "__main__":
    main()

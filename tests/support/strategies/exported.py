"""Random modules for `torch.export`: dynamic sizes, nested containers, mutated buffers and inputs, views and aliases as
results, sizes as inputs and results, None, constants, conditionals and loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fxwrap.errors import InputError

COLUMNS = 4
ROWS = (5, 3, 2, 9, 1, 16, 33)
"""Numbers of rows: the first is exported."""

Step: TypeAlias = tuple[str, int, int]
"""What is computed from two earlier tensors, by their positions, counted from the last and modulo their number."""

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, 1:3],
    "transposed": lambda x: x.t(),
    "first row": lambda x: x[0],
    "strided": lambda x: x[:, ::2],
    "rest": lambda x: x[1:],
    "grown": lambda x: x.unsqueeze(1),
    "flat": lambda x: x.reshape(-1),
    "reversed": lambda x: x.flip(0),
    "repeated": lambda x: x[:, :1].expand(-1, 3),
}
PURE: dict[str, Callable[[Module, Tensor, Tensor], Tensor]] = {
    "add": lambda _, x, y: x + y,
    "gate": lambda _, x, y: x * torch.sigmoid(y),
    "tanh": lambda _, x, __: x.tanh(),
    "linear": lambda m, x, _: m.linear(x),
    "softmax": lambda _, x, __: x.softmax(-1),
    "centre": lambda _, x, y: x - y.mean(0, keepdim=True),
    "norm": lambda m, x, _: torch.nn.functional.layer_norm(x, (COLUMNS,), m.scale),
    "scan": lambda _, x, __: x.cumsum(0) / 16,
    "gram": lambda _, x, y: (x @ y.t()) @ y / 256,
    "rows as a number": lambda _, x, __: x / x.shape[0],
    "constant": lambda m, x, _: x + m.constant,
    "literal": lambda _, x, __: x * torch.tensor([0.5, 1.0, -1.0, 2.0]),
    "buffer": lambda m, x, _: x + m.mean,
    "count": lambda m, x, _: x / (m.count + 1),
    "joined": lambda _, x, y: torch.cat([x, y])[: x.shape[0]] * 0.5,
    "picked": lambda _, x, __: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "where": lambda _, x, y: torch.where(y.round() > 0, x, y),
    "dequantised": lambda _, x, __: (x * 8).round().clamp(-127, 127).to(torch.int8).to(x.dtype) / 8,
    "half": lambda _, x, __: x.to(torch.bfloat16).to(x.dtype),
    "chosen": lambda m, x, _: torch.cond(m.count > 2, lambda z: z * 2, lambda z: z.sin(), (x,)),
    "chosen by sum": lambda _, x, __: torch.cond(
        x.round().sum() > 0, lambda z: z.exp() / 64, lambda z: z - z.amax(), (x,)
    ),
    "loop": lambda _, x, __: torch.ops.higher_order.while_loop(
        lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.5 + 0.25), (torch.zeros((), dtype=torch.int64), x), ()
    )[1],
}
WRITES: dict[str, Callable[[Module, Tensor, Tensor], object]] = {
    "write mean": lambda m, x, _: m.mean.mul_(0.5).add_(x.mean(0)),
    "copy mean": lambda m, x, _: m.mean.copy_(x[0]),
    "write part of mean": lambda m, x, _: m.mean[1:3].add_(x[0, :2]),
    "increment": lambda m, _, __: m.count.add_(1),
    "write transient": lambda m, x, _: m.transient[:, 0].copy_(x.amax(0)),
    "write input": lambda _, x, __: x.mul_(0.5),
    "write view": lambda _, x, y: x[:, 1:3].add_(y[:, :2] * 0.5),
    "write row": lambda _, x, y: x[0].copy_(y.sum(0) / 64),
}
RESULTS = (
    "tensor",
    "tensor",
    "tensor",
    "view",
    "sum",
    "same",
    "input",
    "buffer",
    "rows",
    "none",
    "constant",
    "product",
)
DIRECT, SAVED, EXPORTED = ROUTES = ("direct", "saved", "exported")
"""How a compiled program is called: itself, loaded from its file, as an exported program again."""


class Module(torch.nn.Module):
    """A module of random steps over its inputs, which returns a random container."""

    mean: Tensor
    count: Tensor
    transient: Tensor

    def __init__(self, steps: Sequence[Step], results: Sequence[tuple[str, int, str]], shape: str) -> None:
        super().__init__()
        self.steps, self.results, self.shape = steps, results, shape
        self.linear = torch.nn.Linear(COLUMNS, COLUMNS)
        self.scale = torch.nn.Parameter(torch.rand(COLUMNS) + 0.5)
        self.register_buffer("mean", torch.randn(COLUMNS))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("transient", torch.randn(COLUMNS, 2), persistent=False)
        self.constant = torch.randn(COLUMNS)

    def forward(self, x: Tensor, tree: dict[str, Any], *, number: int | None = None) -> Any:
        """Runs the steps on rows of `COLUMNS` elements: `x`, and two in `tree`."""
        inputs = [x, tree["y"], tree["pair"][0]]
        tensors = list(inputs)
        for name, first, second in self.steps:
            one, other = tensors[-1 - first % len(tensors)], tensors[-1 - second % len(tensors)]
            if name in WRITES:
                WRITES[name](self, one, other)
            else:
                tensors.append(PURE[name](self, one, other))
        if number is not None:
            tensors.append(tensors[-1] * number)
        return self._container([self._result(*item, inputs, tensors) for item in self.results])

    def _result(self, kind: str, position: int, view: str, inputs: list[Tensor], tensors: list[Tensor]) -> Any:
        tensor = tensors[-1 - position % len(tensors)]
        match kind:
            case "view":
                return VIEWS[view](tensor)
            case "sum":
                return tensor.sum(-1)
            case "same":
                return (tensor, tensor)
            case "input":
                return inputs[position % 3]
            case "buffer":
                return self.mean * 1
            case "rows":
                return tensor.shape[0] + position
            case "none":
                return None
            case "constant":
                return "text" if position % 2 else 7
            case "product":
                return {"product": tensor * 2, "rows": tensor.shape[0] * 2}
        return tensor

    def _container(self, items: list[Any]) -> Any:
        match self.shape:
            case "dict":
                return {f"item {number}": item for number, item in enumerate(items)}
            case "nested":
                return {"first": items[0], "rest": [tuple(items[1:]), {"last": items[-1]}]}
            case "single":
                return items[0]
        return tuple(items) if self.shape == "tuple" else items


@dataclass(frozen=True)
class ExportedModule:
    """A module, and the arguments of several runs, of which the first is exported."""

    module: Module
    runs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]

    def __repr__(self) -> str:
        module, (args, kwargs) = self.module, self.runs[0]
        text = f"steps {module.steps}\nresults {module.results} in a {module.shape}\n{kwargs}, {args[1]['pair'][1:]}"
        return f"{text}\nrows {self.rows}"

    @cached_property
    def program(self) -> ExportedProgram:
        """The exported program, whose number of rows is dynamic."""
        args, kwargs = self.runs[0]
        rows = {0: Dim.DYNAMIC} if self.is_dynamic else {}
        shapes = dict(zip(("x", "tree"), tree_map(lambda item: rows if isinstance(item, Tensor) else None, args)))
        shapes |= dict.fromkeys(kwargs, Dim.DYNAMIC if self.is_dynamic else None)
        return torch.export.export(copy.deepcopy(self.module), copy.deepcopy(args), kwargs, dynamic_shapes=shapes)

    @property
    def is_dynamic(self) -> bool:
        """Whether the runs have several numbers of rows."""
        return len(set(self.rows)) > 1

    @property
    def rows(self) -> list[int]:
        """The number of rows of each run."""
        return [run[0][0].shape[0] for run in self.runs]

    def outcomes(self, function: Callable[..., Any]) -> list[Any]:
        """Returns, for each run, the flat results of a function, its inputs after the run, and which inputs its
        results share memory with.

        An InputError is an outcome, too.
        """
        outcomes: list[Any] = []
        for args, kwargs in copy.deepcopy(self.runs):
            try:
                with torch.no_grad():
                    result = function(*args, **kwargs)
            except InputError as error:
                outcomes.append(error)
                continue
            leaves, tree = tree_flatten(result)
            inputs = _tensors(args)
            pairs = zip(inputs, _tensors(self.runs[len(outcomes)][0]), strict=True)
            # Of inputs that are written, functional programs return no views: ExportedProgram.run_decompositions.
            addresses = [_address(item) if torch.equal(item, before) else 0 for item, before in pairs]
            aliases = [addresses.index(_address(item)) if _address(item) in addresses else None for item in leaves]
            outcomes.append([tree, *map(_snapshot, leaves), *map(_snapshot, inputs), aliases])
        return outcomes


def _tensors(tree: Any) -> list[Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, Tensor)]


def _address(item: Any) -> int:
    """Returns the address of a tensor's storage, and -1 for other objects and tensors without elements."""
    return item.untyped_storage().data_ptr() if isinstance(item, Tensor) and item.numel() else -1


def _snapshot(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) else item


@st.composite
def exported_modules(draw: st.DrawFn) -> ExportedModule:
    """Draws a module and the arguments of its runs."""
    choice: Callable[[Sequence[Any]], Any] = lambda options: draw(st.sampled_from(options))  # noqa: E731
    position = st.integers(0, 7)
    names = [*PURE, *PURE, *WRITES]
    steps = [(choice(names), draw(position), draw(position)) for _ in range(draw(st.integers(1, 7)))]
    results = [(choice(RESULTS), draw(position), choice(list(VIEWS))) for _ in range(draw(st.integers(1, 4)))]
    module = Module(steps, results, choice(("tuple", "list", "dict", "nested", "single")))
    sizes = (
        [5, *draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=3))] if choice((True, True, False)) else [5] * 2
    )
    number, other = choice((None, None, 3)), choice((None, 2.5, "mode"))
    runs = []
    for size in sizes:
        x, y, z = [torch.randn(size, COLUMNS) for _ in range(3)]
        tree = {"y": y, "pair": (z, other)}
        step = 0 if number is None or len(set(sizes)) == 1 else size
        runs.append(((x, tree), {} if number is None else {"number": number + step}))
    return ExportedModule(module, runs)

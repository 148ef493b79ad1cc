"""The calling convention of a program: how arguments become its flat inputs, and its flat outputs the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fxwrap.errors import InputError
from fxwrap.lines import Return
from fxwrap.torch_compat import TreeSpec, tree_flatten, tree_labels, type_name
from fxwrap.wrapper_ir import Operand, Program

OUTPUT = "output"
"""The name of an output that no key or field names, and the first part of the names of items of a returned sequence."""


@dataclass(frozen=True, eq=False)
class CallingConvention:
    """Names and trees of the arguments and results of a program.

    Fields:
        arguments: the name of each argument. The first `positional` of them may be passed by position, all by name.
        trees: the tree of each argument; their leaves are the program's flat inputs, in order.
        result: the tree of the result; its leaves are the program's flat outputs.
        constants: values that the program was compiled for, by the position of the flat input. Calls pass equal ones.
        unknown_types: types of the saved trees that this process does not know, and replaces by dicts and tuples.
        source: the JSON data that the convention was read from, if it was.
    """

    arguments: tuple[str, ...]
    positional: int
    trees: tuple[TreeSpec, ...]
    result: TreeSpec
    constants: Mapping[int, object] = field(default_factory=dict)
    unknown_types: tuple[str, ...] = ()
    source: Mapping[str, Any] | None = None

    @classmethod
    def of_flat(cls, program: Program) -> CallingConvention:
        """Returns the convention of a program without trees: one argument for each input, and a tuple of outputs."""
        names = tuple([item.name for item in program.inputs])
        trees = tree_flatten(names)[1].children()
        return cls(names, len(names), tuple(trees), tree_flatten((0,) * len(returned_operands(program)))[1])

    @property
    def input_count(self) -> int:
        """The number of flat inputs."""
        return sum([tree.num_leaves for tree in self.trees])

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """The name of each flat input: the argument, then keys, fields and positions, joined by dots."""
        paths = [(name, *path) for name, tree in zip(self.arguments, self.trees, strict=True) for path in _paths(tree)]
        return _unique([".".join(map(str, path)) for path in paths])

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """The name of each flat output: keys, fields and positions, joined by dots."""
        paths = [path if path and isinstance(path[0], str) else (OUTPUT, *path) for path in _paths(self.result)]
        return _unique([".".join(map(str, path)) for path in paths])

    @cached_property
    def takes_plain_arguments(self) -> bool:
        """Whether the positional arguments are the flat inputs."""
        return self.positional == len(self.arguments) and self.takes_leaves

    @cached_property
    def returns_plain_tuple(self) -> bool:
        """Whether the result is the tuple of the flat outputs."""
        return self.result.type is tuple and all(child.is_leaf() for child in self.result.children())

    @cached_property
    def takes_leaves(self) -> bool:
        """Whether each argument is a flat input."""
        return all(tree.is_leaf() for tree in self.trees)

    def bind(self, arguments: Sequence[object], keywords: Mapping[str, object]) -> list[object]:
        """Returns the flat inputs of a call.

        Raises InputError for missing, unexpected and repeated arguments, and for arguments of another structure.
        """
        count = len(arguments)
        inputs, used = list[object](), 0
        if count > self.positional:
            raise InputError(f"it takes {self.positional} positional arguments, got {count}; {self._expected()}")
        for position, (name, tree) in enumerate(zip(self.arguments, self.trees)):
            if position < count:
                argument = arguments[position]
            elif name in keywords:
                argument = keywords[name]
                used += 1
            else:
                raise InputError(f"the argument '{name}' is missing; {self._expected()}")
            if tree.is_leaf():
                inputs.append(argument)
            else:
                inputs += self._flatten(name, tree, argument)
        if used != len(keywords):
            raise self._unexpected(keywords, self.arguments[count:])
        return inputs

    def check_constants(self, inputs: Sequence[object]) -> None:
        """Raises InputError for an input that differs from the constant that the program was compiled for."""
        for position, constant in self.constants.items():
            value = inputs[position]
            if value is not constant and (type(value) is not type(constant) or value != constant):
                raise InputError(
                    f"'{self.input_names[position]}' is {constant!r} in this program, which was exported with it; "
                    f"got {_shown(value)}. Export the model with the other value, or with a dynamic number"
                )

    def _flatten(self, name: str, tree: TreeSpec, argument: object) -> list[Any]:
        try:
            return list(tree.flatten_up_to(argument))
        except (ValueError, KeyError) as error:
            raise InputError(
                f"the argument '{name}' has another structure than the example that the model was exported with: "
                f"{str(error).rstrip('.')}; pass {tree_text(tree)}"
            ) from error

    def _unexpected(self, keywords: Mapping[str, object], names: Sequence[str]) -> InputError:
        name = next(name for name in keywords if name not in names)
        if name in self.arguments:
            return InputError(f"the argument '{name}' is passed by position and by name")
        return InputError(f"it takes no argument '{name}'; {self._expected()}")

    def _expected(self) -> str:
        parts = [*self.arguments[: self.positional]]
        if self.positional < len(self.arguments):
            parts += ["*", *self.arguments[self.positional :]]
        return f"its arguments are ({', '.join(parts)})"


def returned_operands(program: Program) -> tuple[Operand, ...]:
    """Returns a program's flat outputs."""
    last = program.body.lines[-1]
    assert isinstance(last, Return)
    return tuple(last.values)


def tree_text(tree: TreeSpec) -> str:
    """Returns a tree for people: `{'k': [*, *]}`, with * for each leaf."""
    return _text(tree, tree_labels(tree))


def _text(tree: TreeSpec, labels: Any) -> str:
    if tree.is_leaf():
        return "*"
    names, inner = labels
    parts = [_text(child, item) for child, item in zip(tree.children(), inner, strict=True)]
    if tree.type is list:
        return f"[{', '.join(parts)}]"
    if tree.type is tuple:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    pairs = list(zip(names, parts, strict=True))
    if tree.type is dict:
        return "{" + ", ".join([f"{name!r}: {part}" for name, part in pairs]) + "}"
    shown = [f"{name}={part}" if isinstance(name, str) else part for name, part in pairs]
    return f"{type_name(tree).rpartition('.')[2]}({', '.join(shown)})"


def _paths(tree: TreeSpec) -> list[tuple[str | int, ...]]:
    """Returns the path of labels of each leaf of a tree."""
    paths: list[tuple[str | int, ...]] = []

    def visit(node: TreeSpec, labels: Any, path: tuple[str | int, ...]) -> None:
        if node.is_leaf():
            paths.append(path)
            return
        for child, label, inner in zip(node.children(), *labels, strict=True):
            visit(child, inner, (*path, label))

    visit(tree, tree_labels(tree), ())
    return paths


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Returns names with a number after each one that occurred before."""
    seen: set[str] = set()
    unique: list[str] = []
    for name in names:
        number, candidate = 0, name
        while candidate in seen:
            number += 1
            candidate = f"{name}_{number}"
        seen.add(candidate)
        unique.append(candidate)
    return tuple(unique)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
    return text if len(text) < 80 else text[:77] + "..."

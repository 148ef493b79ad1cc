"""The builder of new lines: fresh names, inferred types, effects and windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from fxwrap.errors import RewriteError
from fxwrap.inference import CallFacts, CallInference, Result, keyword_pairs, tuples
from fxwrap.lines import Alloc, Call, Comment, EnterRange, ExitRange, Free, Launch, Mutate, View
from fxwrap.torch_compat import out_argument_names
from fxwrap.wrapper_ir import (
    Constant,
    KernelDefinition,
    LineBase,
    Origin,
    Program,
    Size,
    TensorType,
    Type,
    Value,
    consumed,
    contiguous_strides,
    defined,
    leaves,
)


class Names:
    """The names that a program has for values, and what new lines add to it: kernels and constants."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inference = CallInference(program)
        self.kernels = {kernel.hash: kernel for kernel in program.kernels}
        self.constants: dict[str, torch.Tensor] = {}
        self.constant_values: list[Constant] = []
        self._taken = {value.name for line in program.lines() for value in defined(line)}
        self._taken |= {value.name for block in program.all_blocks() for value in block.arguments}
        self._taken |= {item.name for item in program.inputs} | {item.value.name for item in program.constants}
        self._counts: dict[str, int] = {}

    def fresh(self, wish: str) -> str:
        """Returns a name that nothing has yet, as near to the wish as can be, and takes it."""
        name = "".join([letter if letter.isalnum() else "_" for letter in wish]) or "value"
        name = name if not name[0].isdigit() else f"v{name}"
        found = name
        while found in self._taken:
            self._counts[name] = self._counts.get(name, 0) + 1
            found = f"{name}_{self._counts[name]}"
        self._taken.add(found)
        return found


class LineBuilder:
    """Makes the lines that stand in the place of a match, in order.

    Every method adds lines and returns the values they give. A value is a tensor or number of the program; literals,
    expressions over the program's symbols, dtypes, devices and lists stand for themselves.
    """

    def __init__(self, names: Names, origin: Origin, *, nested: bool = False) -> None:
        self.lines: list[LineBase] = []
        self._names = names
        self._origin = origin
        self._nested = nested

    # --- operators --------------------------------------------------------------------------------------------------

    def call(self, target: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls an operator that writes nothing.

        Returns its result, a tuple of them where it has several, or None where it has none. A result that is a plain
        window on an operand becomes a view.

        Raises RewriteError for an operator that is not known, that writes, or that fails on these arguments.
        """
        given, named = tuples(arguments), keyword_pairs(keywords)
        facts = self._names.inference.call(target, given, named)
        if facts.operator.written:
            raise RewriteError(f"{target} writes its operands: use `call_into` or `mutate`")
        operands = _values((given, named))
        plain = self._plain_view(facts, given, named, operands)
        if plain is not None:
            return plain
        results, aliases = self._results(target, facts, operands)
        self.add(Call(results, target, given, named, aliases=aliases, effect_set=facts.effects))
        return _given(results)

    def call_into(self, target: str, *arguments: Any, outs: Sequence[Value], **keywords: Any) -> None:
        """Calls an operator's out= form ("aten.mm.out"), which fills `outs`, in the order of its schema."""
        given, named = tuples(arguments), keyword_pairs(keywords)
        names = self._out_names(target)
        if len(names) != len(outs):
            raise RewriteError(f"{target} fills {len(names)} tensors, not {len(outs)}")
        filled = tuple(zip(names, outs, strict=True))
        facts = self._names.inference.call(target, given, (*named, *filled))
        self.add(Call((), target, given, named, tuple(outs), effect_set=facts.effects))

    def _out_names(self, target: str) -> tuple[str, ...]:
        try:
            return out_argument_names(target)
        except LookupError as error:
            raise RewriteError(str(error)) from None

    def mutate(self, target: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls an operator that writes operands. Returns its results, but for those that are operands themselves."""
        given, named = tuples(arguments), keyword_pairs(keywords)
        facts = self._names.inference.call(target, given, named)
        written = facts.operator.written_operands(given, named)
        if not written:
            raise RewriteError(f"{target} writes no operand: use `call`")
        results: tuple[Any, ...] = ()
        aliases: tuple[Value | None, ...] = ()
        if facts.operator.returned_operands(given, named) is None:
            results, aliases = self._results(target, facts, _values((given, named)))
        self.add(Mutate(results, target, given, written, named, aliases, facts.effects))
        return _given(results)

    def _plain_view(self, facts: CallFacts, given: Any, named: Any, operands: list[Value]) -> Value | None:
        """Adds the view that a call stands for, if it is one that cannot fail when it runs."""
        if facts.effects or len(facts.results) != 1 or not isinstance(facts.results[0], Result):
            return None
        result = facts.results[0]
        if result.base is None or not result.plain or any(isinstance(x, sympy.Basic) for x in leaves((given, named))):
            return None
        value = self.value(result.type, facts.operator.name.split(".")[1])
        self.add(View(value, operands[result.base]))
        return value

    def _results(
        self, target: str, facts: CallFacts, operands: list[Value]
    ) -> tuple[tuple[Any, ...], tuple[Value | None, ...]]:
        aliases: list[Value | None] = []
        wish = target.split(".")[1].strip("_")

        def make(item: Any) -> Any:
            if isinstance(item, tuple):
                return tuple([make(part) for part in item])
            aliases.append(None if item is None or item.base is None else operands[item.base])
            return None if item is None else self.value(item.type, wish)

        results = tuple([make(item) for item in facts.results])
        return results, tuple(aliases) if any(alias is not None for alias in aliases) else ()

    # --- kernels and memory -----------------------------------------------------------------------------------------

    def kernel(self, definition: KernelDefinition) -> str:
        """Adds a kernel to the program, unless it has an equal one. Returns the name for `launch`."""
        known = self._names.kernels.get(definition.hash)
        if known is not None:
            return known.name
        names = {kernel.name for kernel in self._names.kernels.values()}
        name, number = definition.name, 0
        while name in names:
            name, number = f"{definition.name}_{number}", number + 1
        self._names.kernels[definition.hash] = dataclasses.replace(definition, name=name)
        return name

    def launch(
        self, kernel: str | KernelDefinition, arguments: Sequence[Any], outs: Sequence[Value],
        grid: Sequence[Size] = (1, 1, 1),
    ) -> None:  # fmt: skip
        """Launches a kernel on tensors and numbers; it fills `outs`. A definition is added to the program."""
        name = kernel if isinstance(kernel, str) else self.kernel(kernel)
        self.add(Launch(name, tuples(tuple(arguments)), tuple(outs), tuple(grid)))

    def empty(self, type_: TensorType, name: str = "buffer") -> Value:
        """Allocates uninitialised memory."""
        value = self.value(type_, name)
        self.add(Alloc(value))
        return value

    def view(
        self, base: Value, sizes: Sequence[Size], strides: Sequence[Size] | None = None, offset: Size = 0
    ) -> Value:
        """Returns a window on a value's memory; strides are row-major unless given.

        `offset` counts elements from the first of `base`.
        """
        type_ = base.tensor_type
        steps = contiguous_strides(tuple(sizes)) if strides is None else tuple(strides)
        changed = dataclasses.replace(
            type_, sizes=tuple(sizes), strides=steps, storage_offset=type_.storage_offset + offset
        )
        value = self.value(changed, "view")
        self.add(View(value, base))
        return value

    def constant(self, tensor: torch.Tensor, name: str = "constant") -> Value:
        """Adds a constant to the program. Raises RewriteError inside of a block, which sees no constants."""
        if self._nested:
            raise RewriteError("a block sees its arguments only: a constant of the program is out of its reach")
        type_ = TensorType(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        value = self.value(type_, name)
        self._names.constants[value.name] = tensor
        self._names.constant_values.append(Constant(value))
        return value

    def payload(self, value: Value) -> torch.Tensor | None:
        """Returns the tensor behind a constant that nothing writes; None for any other value."""
        known = [item for item in self._names.program.constants if item.value.name == value.name]
        if known and not known[0].mutable:
            return self._names.program.store.tensors.get(value.name)
        return self._names.constants.get(value.name)

    # --- notes and lines of one's own -------------------------------------------------------------------------------

    def comment(self, text: str) -> None:
        """Adds a remark."""
        self.add(Comment(text))

    def enter_range(self, name: str) -> None:
        """Opens a range in the profiler's record."""
        self.add(EnterRange(name))

    def exit_range(self, name: str) -> None:
        """Closes the range of this name, opened last."""
        self.add(ExitRange(name))

    def value(self, type_: Type, name: str = "value") -> Value:
        """Returns a value with a fresh name, for a line of one's own."""
        return Value(self._names.fresh(name), type_)

    def add(self, line: LineBase) -> None:
        """Adds a line of any class; without an origin, it gets the match's. Frees are placed later, by the rewrite."""
        if isinstance(line, Free) or (consumed(line) and not defined(line)):
            raise RewriteError("frees are placed when all lines are there: leave them out", str(line))
        self.lines.append(line if line.origin is not None else line.replace(origin=self._origin))

    def again(self, line: LineBase, operands: Mapping[str, Value] | None = None) -> Any:
        """Adds an operator's call again, with other operands for some, by name. Returns its results."""
        if not isinstance(line, Call | Mutate):
            raise RewriteError("only calls of operators can be made again", type(line).__name__)

        def other(item: Any) -> Any:
            if isinstance(item, tuple):
                return tuple([other(inner) for inner in item])
            return (operands or {}).get(item.name, item) if isinstance(item, Value) else item

        given, named = other(line.arguments), {name: other(item) for name, item in line.keywords}
        if isinstance(line, Mutate):
            return self.mutate(line.target, *given, **named)
        if line.outs:
            self.call_into(line.target, *given, outs=other(line.outs), **named)
            return None
        return self.call(line.target, *given, **named)


def _values(tree: Any) -> list[Value]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Value)]


def _given(results: tuple[Any, ...]) -> Any:
    return None if not results else results[0] if len(results) == 1 else results

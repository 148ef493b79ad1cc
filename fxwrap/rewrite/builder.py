"""The builder of new lines: fresh names, inferred types, effects and aliases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from fxwrap import inference
from fxwrap import wrapper_ir as ir
from fxwrap.errors import RewriteError
from fxwrap.lines import Alloc, Comment, EnterRange, ExitRange, ExternCall, Free, Launch, Mutate, View
from fxwrap.names import NameAllocator
from fxwrap.torch_compat import out_argument_names


class RewriteContext:
    """The state of rewriting a program: used names, and the kernels and constants that new lines add."""

    def __init__(self, program: ir.Program) -> None:
        self.program = program
        self.inference = inference.CallInference.for_program(program)
        self.kernels = {kernel.hash: kernel for kernel in program.kernels}
        self.constants: dict[str, torch.Tensor] = {}
        self.constant_values: list[ir.ProgramConstant] = []
        self._names = NameAllocator(ir.value_names(program) | {item.name for item in program.inputs})

    def fresh(self, name_hint: str) -> str:
        """Returns a new name, derived from the hint."""
        return self._names.create_name(name_hint or "value")


class LineBuilder:
    """Builds the lines that replace a match, in order.

    Every method adds lines and returns the values that they define. Operands are values of the program, literals,
    expressions over its symbols, dtypes, devices, and lists of these.
    """

    def __init__(self, context: RewriteContext, origin: ir.Origin, *, nested: bool = False) -> None:
        self.lines: list[ir.LineBase] = []
        self._context = context
        self._origin = origin
        self._nested = nested

    # --- operators --------------------------------------------------------------------------------------------------

    def call(self, target: str, *arguments: object, **keywords: object) -> Any:
        """Calls an operator that mutates nothing.

        Returns its result, a tuple of several, or None. A result that is a plain strided view becomes a `memory.view`.
        Raises RewriteError for an operator that is unknown, that mutates operands, or that fails on these arguments.
        """
        return self._call(target, arguments, keywords, inference.with_declared_layout)

    def _call(
        self,
        target: str,
        arguments: Sequence[object],
        keywords: Mapping[str, object],
        lines_of: Callable[[ExternCall], Sequence[ir.LineBase]],
    ) -> Any:
        """Adds the lines of a call as `call` does; `lines_of` returns those of an extern call."""
        args, kwargs = inference.lists_to_tuples(arguments), inference.keyword_pairs(keywords)
        call = self._context.inference.call(target, args, kwargs)
        if call.operator.mutated_arguments:
            raise RewriteError(f"{target} writes its operands: use `call_out_variant` or `mutate`")
        operands = _values((args, kwargs))
        view = self._plain_view(call, args, kwargs, operands)
        if view is not None:
            return view
        results, aliases = self._results(target, call, operands)
        line = ExternCall(results, target, args, kwargs, aliases=aliases, effect_set=call.effects)
        for item in lines_of(line):
            self.add(item)
        return _unpack_results(results)

    def call_out_variant(self, target: str, *arguments: object, outs: Sequence[ir.Value], **keywords: object) -> None:
        """Calls an operator's out variant ("aten.mm.out"), which writes `outs`, in the order of its schema."""
        args, kwargs = inference.lists_to_tuples(arguments), inference.keyword_pairs(keywords)
        try:
            names = out_argument_names(target)
        except LookupError as error:
            raise RewriteError(str(error)) from None
        if len(names) != len(outs):
            raise RewriteError(f"{target} writes {len(names)} tensors, not {len(outs)}")
        call = self._context.inference.call(target, args, (*kwargs, *zip(names, outs, strict=True)))
        self.add(ExternCall((), target, args, kwargs, tuple(outs), effect_set=call.effects))

    def mutate(self, target: str, *arguments: object, **keywords: object) -> Any:
        """Calls an operator that mutates operands. Returns its results, without those that are operands."""
        args, kwargs = inference.lists_to_tuples(arguments), inference.keyword_pairs(keywords)
        call = self._context.inference.call(target, args, kwargs)
        written = call.operator.mutated_operands(args, kwargs)
        if not written:
            raise RewriteError(f"{target} writes no operand: use `call`")
        results: tuple[Any, ...] = ()
        aliases: tuple[ir.Value | None, ...] = ()
        if call.operator.returned_operands(args, kwargs) is None:
            results, aliases = self._results(target, call, _values((args, kwargs)))
        self.add(Mutate(results, target, args, written, kwargs, aliases, call.effects))
        return _unpack_results(results)

    def _plain_view(
        self,
        call: inference.InferredCall,
        args: tuple[object, ...],
        kwargs: inference.Keywords,
        operands: list[ir.Value],
    ) -> ir.Value | None:
        """Adds the view that replaces a call, if the call cannot fail at run time."""
        result = call.results[0] if len(call.results) == 1 and not call.effects else None
        if not isinstance(result, inference.InferredResult) or result.base is None or not result.is_strided_view:
            return None
        if any(isinstance(leaf, sympy.Basic) for leaf in ir.leaves((args, kwargs))):
            return None
        value = self.value(result.type, call.operator.name.split(".")[1])
        self.add(View(value, operands[result.base]))
        return value

    def _results(
        self, target: str, call: inference.InferredCall, operands: list[ir.Value]
    ) -> tuple[tuple[Any, ...], tuple[ir.Value | None, ...]]:
        aliases: list[ir.Value | None] = []
        name_hint = target.split(".")[1].strip("_")

        def define(item: inference.InferredTree) -> Any:
            if isinstance(item, tuple):
                return tuple([define(part) for part in item])
            aliases.append(None if item is None or item.base is None else operands[item.base])
            return None if item is None else self.value(item.type, name_hint)

        results = tuple([define(item) for item in call.results])
        return results, tuple(aliases) if any(alias is not None for alias in aliases) else ()

    # --- kernels and memory -----------------------------------------------------------------------------------------

    def kernel(self, definition: ir.KernelDefinition) -> str:
        """Adds a kernel to the program, unless it has an equal one; returns the kernel's name for `launch`."""
        known = self._context.kernels.get(definition.hash)
        if known is not None:
            return known.name
        names = {kernel.name for kernel in self._context.kernels.values()}
        name, number = definition.name, 0
        while name in names:
            name, number = f"{definition.name}_{number}", number + 1
        self._context.kernels[definition.hash] = dataclasses.replace(definition, name=name)
        return name

    def launch(
        self, kernel: str | ir.KernelDefinition, arguments: Sequence[object], outs: Sequence[ir.Value],
        grid: Sequence[ir.Size] = (1, 1, 1),
    ) -> None:  # fmt: skip
        """Launches a kernel that writes `outs`, by its name or by a definition, which is added to the program."""
        name = kernel if isinstance(kernel, str) else self.kernel(kernel)
        self.add(Launch(name, inference.lists_to_tuples(tuple(arguments)), tuple(outs), tuple(grid)))

    def empty(self, type_: ir.TensorType, name: str = "buffer") -> ir.Value:
        """Allocates uninitialised memory."""
        value = self.value(type_, name)
        self.add(Alloc(value))
        return value

    def view(
        self, base: ir.Value, sizes: Sequence[ir.Size], strides: Sequence[ir.Size] | None = None, offset: ir.Size = 0
    ) -> ir.Value:
        """Returns a view of a value; strides are row-major by default.

        `offset` counts elements from the first of `base`.
        """
        old, sizes = base.tensor_type, tuple(sizes)
        strides = ir.contiguous_strides(sizes) if strides is None else tuple(strides)
        type_ = dataclasses.replace(old, sizes=sizes, strides=strides, storage_offset=old.storage_offset + offset)
        value = self.value(type_, "view")
        self.add(View(value, base))
        return value

    def constant(self, tensor: torch.Tensor, name: str = "constant") -> ir.Value:
        """Adds a constant to the program. Raises RewriteError in a nested block, which cannot use constants."""
        if self._nested:
            raise RewriteError("a nested block can use its arguments only, and no constant of the program")
        type_ = ir.TensorType(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        value = self.value(type_, name)
        self._context.constants[value.name] = tensor
        self._context.constant_values.append(ir.ProgramConstant(value))
        return value

    def constant_tensor(self, value: ir.Value) -> torch.Tensor | None:
        """Returns the tensor of an immutable constant; None for any other value."""
        known = [item for item in self._context.program.constants if item.value.name == value.name]
        if known and not known[0].mutable:
            return self._context.program.store.tensors.get(value.name)
        return self._context.constants.get(value.name)

    # --- comments and lines -------------------------------------------------------------------------------

    def comment(self, text: str) -> None:
        """Adds a comment."""
        self.add(Comment(text))

    def enter_range(self, name: str) -> None:
        """Opens a profiler range."""
        self.add(EnterRange(name))

    def exit_range(self, name: str) -> None:
        """Closes the innermost profiler range, which has this name."""
        self.add(ExitRange(name))

    def value(self, type_: ir.Type, name: str = "value") -> ir.Value:
        """Returns a value with a fresh name, for a line to `add`."""
        return ir.Value(self._context.fresh(name), type_)

    def add(self, line: ir.LineBase) -> None:
        """Adds a line of any class; one without an origin gets the match's. The rewrite inserts frees later."""
        if isinstance(line, Free) or (ir.consumed(line) and not ir.defined(line)):
            raise RewriteError("the rewrite inserts frees: leave them out", str(line))
        self.lines.append(line if line.origin is not None else line.replace(origin=self._origin))

    def clone_call(self, line: ir.LineBase, operands: Mapping[str, ir.Value] | None = None) -> Any:
        """Adds a copy of an operator's call, with other operands for some, by name. Returns its results."""
        if not isinstance(line, ExternCall | Mutate):
            raise RewriteError("only calls of operators can be cloned", type(line).__name__)

        def substitute(leaf: object) -> object:
            return (operands or {}).get(leaf.name, leaf) if isinstance(leaf, ir.Value) else leaf

        args, kwargs = ir.map_leaves((line.arguments, line.keywords), substitute)
        if isinstance(line, Mutate):
            return self.mutate(line.target, *args, **dict(kwargs))
        if line.outs:
            outs = ir.map_leaves(line.outs, substitute)
            self.call_out_variant(line.target, *args, outs=outs, **dict(kwargs))
            return None
        return self._call(line.target, args, dict(kwargs), lambda call: (call,))


def _values(tree: object) -> list[ir.Value]:
    return [leaf for leaf in ir.leaves(tree) if isinstance(leaf, ir.Value)]


def _unpack_results(results: tuple[object, ...]) -> Any:
    return None if not results else results[0] if len(results) == 1 else results

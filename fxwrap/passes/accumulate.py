"""In-place accumulation: matmuls and convolutions add to a tensor that nothing else reads in its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxwrap.lines import ExternCall, Free, Mutate
from fxwrap.torch_compat import operator_overload
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    LineT,
    Operand,
    Ownership,
    Program,
    Value,
    alias_roots,
    blocks,
    last_uses,
    map_line,
    program_arguments,
    values_in,
)
from fxwrap.wrapper_ir.operators import operator_schema


@dataclass(frozen=True)
class _InPlaceForm:
    """The in-place form of a call that adds to a tensor; the call itself first copies the tensor into its result.

    `target` is its operator, which takes the call's arguments by name, the tensor first. Unless `any_layout`, the
    tensor must be contiguous.
    """

    target: str
    any_layout: bool = False


_IN_PLACE_FORMS: Mapping[str, _InPlaceForm] = {
    "aten.addmm.default": _InPlaceForm("aten.addmm_.default"),
    "aten.baddbmm.default": _InPlaceForm("aten.baddbmm_.default"),
    "fxwrap.frozen_convolution.default": _InPlaceForm("fxwrap.frozen_convolution_.default", any_layout=True),
}


def accumulate_in_place(program: Program) -> Program:
    """Returns the program in which matmuls and convolutions add in place to tensors that they use last.

    The tensor is owned by the block, which frees it after the call, and has the result's type. Results are bitwise
    equal, and the peak memory is at most as large. Linear in the number of lines.
    """
    functions = tuple(
        [(name, _accumulate(block, block.arguments, block.arguments)) for name, block in program.functions]
    )
    donated = [item.value for item in program.inputs if item.ownership is Ownership.OWNED]
    others = [item for item in program_arguments(program) if item not in donated]
    body = _accumulate(program.body, program_arguments(program), others)
    return program.replace(body=body, functions=functions)


def _accumulate(block: Block, arguments: Sequence[Value], readonly: Sequence[Value]) -> Block:
    """Changes a block with these arguments, of which `readonly` may have other references."""
    freed = {line.root.name for line in block.lines if isinstance(line, Free) and line.stream == 0}
    freed -= {item.name for item in readonly}
    roots = alias_roots(block.lines, arguments)
    last = last_uses([line for line in block.lines if not isinstance(line, Free)], arguments)
    sums: dict[str, Value] = {}  # the tensor that a result is, by the result's name
    accumulated: set[str] = set()
    lines: list[LineBase] = []
    position = 0
    for line in block.lines:
        if isinstance(line, Free):
            if line.root.name not in accumulated:
                lines.append(_renamed(line, sums))
            continue
        inner = {name: _accumulate(nested, nested.arguments, nested.arguments) for name, nested in blocks(line)}
        addend = _addend(line, roots)
        is_last_use = addend is not None and addend.name in freed and last[addend.name] == position
        if isinstance(line, ExternCall) and addend is not None and is_last_use:
            accumulated.add(addend.name)
            (result,) = values_in(line.results)
            sum_ = sums[result.name] = sums.get(addend.name, addend)
            call = _renamed(line, sums)
            form = _IN_PLACE_FORMS[call.target]
            operands = _in_place_arguments(call, form)
            lines.append(Mutate((), form.target, operands, (sum_,), call.keywords, origin=line.origin))
        else:
            lines.append(_renamed(line.replace(**inner) if inner else line, sums))
        position += 1
    return Block(block.arguments, tuple(lines))


def _renamed(line: LineT, sums: Mapping[str, Value]) -> LineT:
    return map_line(line, lambda item: sums.get(item.name, item) if type(item) is Value else item) if sums else line


def _in_place_arguments(call: ExternCall, form: _InPlaceForm) -> tuple[Operand, ...]:
    """Returns the positional arguments of a call's in-place form, whose first is the tensor."""
    names, in_place_names = [
        operator_schema(operator_overload(target)).argument_names for target in (call.target, form.target)
    ]
    arguments = dict(zip(names, call.arguments, strict=False))  # the others have keywords, or are defaults
    return tuple([arguments[name] for name in in_place_names if name in arguments])


def _addend(line: LineBase, roots: Mapping[str, str]) -> Value | None:
    """Returns the tensor to which a call adds: of the result's type, with memory of its own, and no other operand."""
    form = _IN_PLACE_FORMS.get(line.target) if isinstance(line, ExternCall) else None
    if not isinstance(line, ExternCall) or form is None:
        return None
    if line.outs or line.stream != 0 or line.effect_set or any(line.aliases):
        return None
    addend, *others = _in_place_arguments(line, form)
    operands = [roots[item.name] for item in values_in(tuple(others))]
    (result,) = values_in(line.results)
    if not isinstance(addend, Value) or addend.type != result.type:
        return None
    is_own = roots[addend.name] == addend.name and addend.name not in operands
    return addend if is_own and (form.any_layout or addend.tensor_type.is_contiguous) else None

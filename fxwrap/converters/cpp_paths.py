"""What a key path leads to in an operator's result, in emitted C++."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.converters.cpp_text import place
from fxwrap.converters.cpp_writer import CppWriter, unsupported
from fxwrap.lines import Bind
from fxwrap.wrapper_ir import ListType, ScalarType, Tag, Type, element_type


def followed(writer: CppWriter, line: Bind) -> tuple[str, list[str]]:
    """Returns the text of the number that a key path leads to, and the slots to let go of once it is read.

    An element that is a tensor is taken out of its list first, by a statement.
    """
    name = writer.name_of(line.source)
    type_, positions, steps = _through_lists(line.source.type, line.path)
    text, taken = "", []
    places = "{" + ", ".join(map(str, positions)) + "}"
    if isinstance(type_, ScalarType):
        text = f"element_{type_.kind}(f, {name}, {places})" if positions else place(name, type_.kind)
    elif positions:
        taken = [writer.unit.fresh_slot("element")]
        writer.say(f"element(f, {taken[0]}, {name}, {places});")
        name = taken[0]
    for step in steps:
        match step.name:
            case "size" | "stride" | "storage_offset":
                text = f"{step.name}({', '.join(['f', name, *map(str, step.arguments)])})"
            case "divide":
                text = f"{text} / {step.arguments[0]}"
            case "truth":
                text = f"{text} != 0" if text else f"item_bool(f, {name})"
            case _:
                raise unsupported(line, f"no element is in a value of type {type_}")
    return text, taken


def _through_lists(type_: Type, path: Sequence[Tag]) -> tuple[Type, list[int], list[Tag]]:
    """Returns the type of the element that a path leads to, its positions in lists, and the steps from there."""
    steps, positions = list(path), []
    while isinstance(type_, ListType) and steps and steps[0].name == "element":
        positions.append(int(steps.pop(0).arguments[0]))
        type_ = element_type(type_)
    return type_, positions, steps

"""Key paths of unbacked symbols in emitted C++."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.converters.cpp.text import frame_field
from fxwrap.converters.cpp.writer import CppWriter, unsupported
from fxwrap.lines import Bind
from fxwrap.wrapper_ir import ListType, ScalarType, Tag, Type, element_type


def read_key_path(writer: CppWriter, line: Bind) -> tuple[str, list[str]]:
    """Returns the text of the number at a key path, and the slots to drop afterwards.

    A statement copies an element that is a tensor from its list to such a slot.
    """
    name = writer.name_of(line.source)
    type_, positions, steps = _split_at_tensor(line.source.type, line.path)
    text, temporaries = "", []
    indices = "{" + ", ".join(map(str, positions)) + "}"
    if isinstance(type_, ScalarType):
        text = f"element_{type_.kind}(f, {name}, {indices})" if positions else frame_field(name, type_.kind)
    elif positions:
        temporaries = [writer.unit.fresh_slot("element")]
        writer.emit(f"element(f, {temporaries[0]}, {name}, {indices});")
        name = temporaries[0]
    for step in steps:
        match step.name:
            case "size" | "stride" | "storage_offset":
                text = f"{step.name}({', '.join(['f', name, *map(str, step.arguments)])})"
            case "divide":
                text = f"{text} / {step.arguments[0]}"
            case "truth":
                text = f"{text} != 0" if text else f"item_bool(f, {name})"
            case _:
                raise unsupported(line, f"a value of type {type_} has no elements")
    return text, temporaries


def _split_at_tensor(type_: Type, path: Sequence[Tag]) -> tuple[Type, list[int], list[Tag]]:
    """Returns the type of the element after the first `element` steps, their positions, and the other steps."""
    steps, positions = list(path), []
    while isinstance(type_, ListType) and steps and steps[0].name == "element":
        positions.append(int(steps.pop(0).arguments[0]))
        type_ = element_type(type_)
    return type_, positions, steps

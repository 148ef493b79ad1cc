"""Hand-written emitted programs for the tests of the C++ runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch

from fxwrap.runtime.native import NativeProgram, compile_cpp, load_program


def source(
    body: str,
    *,
    slots: Sequence[str],
    operators: Mapping[str, str] | None = None,
    inputs: str = "",
    outputs: str = "",
    constants: str = "",
    ints: Sequence[str] = (),
    bools: Sequence[str] = (),
    floats: Sequence[str] = (),
) -> str:
    """An emitted program: `operators` maps a C++ name to "aten::name.overload"; symbols are declared in order."""
    lines = [f"constexpr Slot {name}{{{index}}};" for index, name in enumerate(slots)]
    lines += [f"constexpr IntSymbol {name}{{{index}}};" for index, name in enumerate(ints)]
    lines += [f"constexpr BoolSymbol {name}{{{len(ints) + index}}};" for index, name in enumerate(bools)]
    lines += [f"constexpr FloatSymbol {name}{{{index}}};" for index, name in enumerate(floats)]
    for name, schema in (operators or {}).items():
        operator, _, overload = schema.partition(".")
        lines.append(f'static Operator {name}{{"{operator}", "{overload}"}};')
    fields = ['.name = "program"', f".slots = {len(slots)}", f".ints = {len(ints) + len(bools)}"]
    fields.append(f".floats = {len(floats)}")
    for field, kind, items in (
        ("inputs", "Input", inputs),
        ("constants", "Arg", constants),
        ("outputs", "Arg", outputs),
    ):
        if items:
            lines.append(f"static constexpr {kind} {field}[] = {{{items}}};")
            fields.append(f".{field} = program::{field}")
    declarations = "\n".join(lines)
    return f"""#include "bridge.h"
namespace program {{
using namespace fxwrap;
static Device cpu{{"cpu"}};
{declarations}
static void run(Frame& f) {{
{body}
}}
}}  // namespace program
FXWRAP_EXPORT const fxwrap::Program fxwrap_program = {{{", ".join(fields)}, .run = program::run}};
"""


@cache
def _compiled(text: str) -> str:
    return str(compile_cpp(text, name="program"))


def load(body: str, *, bound: Sequence[torch.Tensor] = (), **fields: object) -> NativeProgram:
    """The loaded program of `source(body, **fields)` with `bound` as its constants."""
    return load_program(_compiled(source(body, **fields)), constants=bound)  # type: ignore[arg-type]


def names(*items: str) -> str:
    """Inputs named as their slots; `owned(x)` is named x."""
    return ", ".join(f'{{"{item.removeprefix("owned(").rstrip(")")}", {item}}}' for item in items)

"""Results of operators in memory that the program allocates, so that a plan can place them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fxwrap.lines import Alloc, Call, Free
from fxwrap.wrapper_ir import Block, LineBase, Program, TensorType, Value, blocks

OUT_FORMS: Mapping[str, str] = {
    "aten.mm.default": "aten.mm.out",
    "aten.addmm.default": "aten.addmm.out",
    "aten.bmm.default": "aten.bmm.out",
    "aten.baddbmm.default": "aten.baddbmm.out",
    "aten.mv.default": "aten.mv.out",
    "aten.addmv.default": "aten.addmv.out",
    "aten._addmm_activation.default": "aten._addmm_activation.out",
}
"""Operators whose out= form is the same computation, written where it is told to.

That of most others (convolutions, norms, attention) computes a result of its own and copies it.
"""


def fill_given_memory(program: Program) -> Program:
    """Returns the program with products of matrices in memory of `memory.alloc` lines, through their out= forms.

    Only where the program frees the result itself and its type is contiguous: what is given back is memory of its own
    anyway. Numbers are the same to the bit. Linear in the number of lines.
    """
    functions = tuple([(name, _changed(block)) for name, block in program.functions])
    return program.replace(body=_changed(program.body), functions=functions)


def _changed(block: Block) -> Block:
    freed = {line.root.name for line in block.lines if isinstance(line, Free) and line.stream == 0}
    lines: list[LineBase] = []
    for line in block.lines:
        inner: dict[str, Any] = {name: _changed(nested) for name, nested in blocks(line)}
        if isinstance(line, Call) and (result := _own_result(line, freed)) is not None:
            lines.append(Alloc(result, origin=line.origin))
            lines.append(dataclasses.replace(line, results=(), target=OUT_FORMS[line.target], outs=(result,)))
        else:
            lines.append(dataclasses.replace(line, **inner) if inner else line)
    return Block(block.arguments, tuple(lines))


def _own_result(line: Call, freed: set[str]) -> Value | None:
    """Returns the result of a call that may be written into memory of the block's own, else None."""
    if line.target not in OUT_FORMS or line.outs or line.stream != 0 or line.effect_set:
        return None
    match line.results:
        case (Value(type=TensorType() as type_) as result,) if result.name in freed and not any(line.aliases):
            return result if type_.is_contiguous and type_.storage_offset == 0 and not type_.layout else None
        case _:
            return None

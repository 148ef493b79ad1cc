"""Replacement of operators by out variants, whose results a memory plan can assign."""

from __future__ import annotations

from collections.abc import Mapping

from fxwrap.lines import Alloc, ExternCall, Free
from fxwrap.wrapper_ir import Block, LineBase, Program, TensorType, Value, blocks

OUT_VARIANTS: Mapping[str, str] = {
    "aten.mm.default": "aten.mm.out",
    "aten.addmm.default": "aten.addmm.out",
    "aten.bmm.default": "aten.bmm.out",
    "aten.baddbmm.default": "aten.baddbmm.out",
    "aten.mv.default": "aten.mv.out",
    "aten.addmv.default": "aten.addmv.out",
    "aten._addmm_activation.default": "aten._addmm_activation.out",
}
"""Operators whose out variant writes its result directly.

Out variants of most others (convolutions, norms, attention) compute a temporary and copy it.
"""


def use_out_variants(program: Program) -> Program:
    """Returns the program with out variants of matmuls that write to `memory.alloc` lines.

    Only for results that the program frees and whose type is contiguous. Results are bitwise equal. Linear in the
    number of lines.
    """
    functions = tuple([(name, _use_out_variants_in(block)) for name, block in program.functions])
    return program.replace(body=_use_out_variants_in(program.body), functions=functions)


def _use_out_variants_in(block: Block) -> Block:
    freed = {line.root.name for line in block.lines if isinstance(line, Free) and line.stream == 0}
    lines: list[LineBase] = []
    for line in block.lines:
        inner = {name: _use_out_variants_in(nested) for name, nested in blocks(line)}
        if isinstance(line, ExternCall) and (result := _replaceable_result(line, freed)) is not None:
            lines.append(Alloc(result, origin=line.origin))
            lines.append(line.replace(results=(), target=OUT_VARIANTS[line.target], outs=(result,)))
        else:
            lines.append(line.replace(**inner) if inner else line)
    return Block(block.arguments, tuple(lines))


def _replaceable_result(line: ExternCall, freed: set[str]) -> Value | None:
    """Returns the result of a call that an allocation of the block can replace, or None."""
    if line.target not in OUT_VARIANTS or line.outs or line.stream != 0 or line.effect_set:
        return None
    match line.results:
        case (Value(type=TensorType() as type_) as result,) if result.name in freed and not any(line.aliases):
            return result if type_.is_contiguous and type_.storage_offset == 0 and not type_.layout else None
        case _:
            return None

"""The Wrapper IR: programs as plain data, their text form, their verifier, and analyses that read roles.

It knows no line class; those are in `fxwrap.lines`.
"""

from fxwrap.symbolic import Size
from fxwrap.wrapper_ir.analyses import (
    LiveBytes,
    alias_roots,
    all_effects,
    called_functions,
    captured_symbols,
    executed_blocks,
    hints_with_fallback,
    is_release,
    last_uses,
    live_bytes,
    program_arguments,
    released_inputs,
    symbol_infos,
    symbol_values,
)
from fxwrap.wrapper_ir.canonicalization import canonicalize_program, program_key
from fxwrap.wrapper_ir.effects import (
    ASSERT,
    OUTPUT,
    UNKNOWN,
    Effect,
    Tag,
    communication_effect,
    effects_conflict,
    random_effect,
)
from fxwrap.wrapper_ir.line import (
    Block,
    EventStep,
    FunctionSummary,
    LineBase,
    Terminator,
    blocks,
    consumed,
    defined,
    defined_symbol,
    leaves,
    map_leaves,
    map_line,
    reads,
    symbols_used,
    type_symbols,
    used,
    values_in,
    writes,
)
from fxwrap.wrapper_ir.operators import OperatorSchema, is_assertion, operator_name, operator_schema
from fxwrap.wrapper_ir.origin import Origin, Source
from fxwrap.wrapper_ir.parser import parse_program
from fxwrap.wrapper_ir.printer import line_text, print_line, print_literal, print_type
from fxwrap.wrapper_ir.program import (
    ConstantStore,
    Input,
    KernelDefinition,
    Ownership,
    Program,
    ProgramConstant,
    print_kernel,
    print_program,
)
from fxwrap.wrapper_ir.roles import (
    FieldSpec,
    Form,
    Role,
    attribute,
    block,
    consume,
    define,
    line_class,
    read,
    target,
    write,
)
from fxwrap.wrapper_ir.streams import (
    CURRENT_STREAM,
    ENTRY_POSITION,
    Stream,
    StreamConflict,
    StreamOrder,
    has_device_index,
    stream_device,
    stream_name,
    stream_of,
    uses_streams,
)
from fxwrap.wrapper_ir.types import (
    DTYPE_NAMES,
    DTYPES,
    GENERATOR,
    Leaf,
    ListType,
    OpaqueType,
    Operand,
    OptionalType,
    Result,
    ScalarType,
    TensorType,
    TokenType,
    Type,
    Value,
    contiguous_strides,
    element_type,
    holds_memory,
    types_agree,
)
from fxwrap.wrapper_ir.verifier import verify

__all__ = [
    "ASSERT", "CURRENT_STREAM", "DTYPES", "DTYPE_NAMES", "ENTRY_POSITION", "GENERATOR", "OUTPUT", "UNKNOWN", "Block",
    "ConstantStore", "Effect", "EventStep", "FieldSpec", "Form", "FunctionSummary", "Input", "KernelDefinition", "Leaf",
    "LineBase", "ListType", "LiveBytes", "OpaqueType", "Operand", "OperatorSchema", "OptionalType", "Origin",
    "Ownership", "Program", "ProgramConstant", "Result", "Role", "ScalarType", "Size", "Source", "Stream",
    "StreamConflict", "StreamOrder", "Tag", "TensorType", "Terminator", "TokenType", "Type", "Value", "alias_roots",
    "all_effects", "attribute", "block", "blocks", "called_functions", "canonicalize_program", "captured_symbols",
    "communication_effect", "consume", "consumed", "contiguous_strides", "define", "defined", "defined_symbol",
    "effects_conflict", "element_type", "executed_blocks", "has_device_index", "hints_with_fallback", "holds_memory",
    "is_assertion", "is_release", "last_uses", "leaves", "line_class", "line_text", "live_bytes", "map_leaves",
    "map_line", "operator_name", "operator_schema", "parse_program", "print_kernel", "print_line", "print_literal",
    "print_program", "print_type", "program_arguments", "program_key", "random_effect", "read", "reads",
    "released_inputs", "stream_device", "stream_name", "stream_of", "symbol_infos", "symbol_values", "symbols_used",
    "target", "type_symbols", "types_agree", "used", "uses_streams", "values_in", "verify", "write", "writes",
]  # fmt: skip

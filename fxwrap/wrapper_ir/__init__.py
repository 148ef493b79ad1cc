"""The Wrapper IR: programs as plain data, their text form, their verifier, and analyses that read roles.

It knows no line class; those are in `fxwrap.lines`.
"""

from fxwrap.wrapper_ir.effects import ASSERT, OUTPUT, UNKNOWN, Effect, Origin, Tag, communication_effect, effects_conflict, random_effect
from fxwrap.wrapper_ir.line import (
    Block,
    LineBase,
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
    writes,
)
from fxwrap.wrapper_ir.parser import parse_program
from fxwrap.wrapper_ir.printer import print_line, print_literal, print_type
from fxwrap.wrapper_ir.program import Constant, ConstantStore, Input, KernelDefinition, Ownership, Program, print_kernel, print_program
from fxwrap.wrapper_ir.roles import FieldSpec, Form, Role, attribute, block, consume, define, line_class, read, target, write
from fxwrap.wrapper_ir.types import (
    DTYPE_NAMES,
    DTYPES,
    ListType,
    OpaqueType,
    OptionalType,
    ScalarType,
    Size,
    TensorType,
    TokenType,
    Type,
    Value,
    contiguous_strides,
)
from fxwrap.wrapper_ir.verifier import verify

__all__ = [
    "ASSERT", "DTYPES", "DTYPE_NAMES", "OUTPUT", "UNKNOWN",
    "Block", "Constant", "ConstantStore", "Effect", "FieldSpec", "Form", "Input", "KernelDefinition", "LineBase",
    "ListType", "OpaqueType", "OptionalType", "Origin", "Ownership", "Program", "Role", "ScalarType", "Size", "Tag",
    "TensorType", "TokenType", "Type", "Value",
    "attribute", "block", "blocks", "communication_effect", "consume", "consumed", "contiguous_strides", "define",
    "defined", "defined_symbol", "effects_conflict", "leaves", "line_class", "map_leaves", "map_line", "parse_program",
    "print_kernel", "print_line", "print_literal", "print_program", "print_type", "random_effect", "read", "reads", "symbols_used",
    "target", "type_symbols", "used", "verify", "write", "writes",
]  # fmt: skip

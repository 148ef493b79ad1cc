"""The Wrapper IR: programs as plain data, their text form, their verifier, and analyses that read roles.

It knows no line class; those are in `fxwrap.lines`.
"""

from .effects import ASSERT, OUTPUT, UNKNOWN, Effect, Origin, Tag, communication_effect, effects_conflict, random_effect
from .line import (
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
from .parser import parse_program
from .printer import print_line, print_literal, print_type
from .program import Constant, ConstantStore, Input, KernelDefinition, Ownership, Program, print_program
from .roles import FieldSpec, Form, Role, attribute, block, consume, define, line_class, read, target, write
from .types import (
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
from .verifier import verify

__all__ = [
    "ASSERT", "DTYPES", "DTYPE_NAMES", "OUTPUT", "UNKNOWN",
    "Block", "Constant", "ConstantStore", "Effect", "FieldSpec", "Form", "Input", "KernelDefinition", "LineBase",
    "ListType", "OpaqueType", "OptionalType", "Origin", "Ownership", "Program", "Role", "ScalarType", "Size", "Tag",
    "TensorType", "TokenType", "Type", "Value",
    "attribute", "block", "blocks", "communication_effect", "consume", "consumed", "contiguous_strides", "define",
    "defined", "defined_symbol", "effects_conflict", "leaves", "line_class", "map_leaves", "map_line", "parse_program",
    "print_line", "print_literal", "print_program", "print_type", "random_effect", "read", "reads", "symbols_used",
    "target", "type_symbols", "used", "verify", "write", "writes",
]  # fmt: skip

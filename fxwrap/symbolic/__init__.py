"""Sizes and conditions over symbols: construction, text form, evaluation, bounds and printers."""

from fxwrap.symbolic.canonical import canonical as canonical
from fxwrap.symbolic.kinds import expression_kind as expression_kind
from fxwrap.symbolic.symbols import Expression as Expression
from fxwrap.symbolic.symbols import Kind as Kind
from fxwrap.symbolic.symbols import Size as Size
from fxwrap.symbolic.symbols import is_symbol_name as is_symbol_name
from fxwrap.symbolic.symbols import make_symbol as make_symbol
from fxwrap.symbolic.symbols import symbol_kind as symbol_kind
from fxwrap.symbolic.text import parse_expr as parse_expr
from fxwrap.symbolic.text import print_expr as print_expr
from fxwrap.symbolic.text import read_expr as read_expr
from fxwrap.symbolic.text import read_size as read_size
from fxwrap.symbolic.tokens import PUNCTUATION as PUNCTUATION
from fxwrap.symbolic.tokens import Token as Token
from fxwrap.symbolic.tokens import TokenStream as TokenStream
from fxwrap.symbolic.tokens import quote as quote
from fxwrap.symbolic.tokens import tokenize as tokenize

"""Sizes and conditions over symbols: construction, IR text, evaluation, bounds and printers."""

from fxwrap.symbolic.callables import *
from fxwrap.symbolic.canonicalize import *
from fxwrap.symbolic.cpp_printer import *
from fxwrap.symbolic.positions import *
from fxwrap.symbolic.printing import *
from fxwrap.symbolic.relations import *
from fxwrap.symbolic.symbols import *
from fxwrap.symbolic.text import *
from fxwrap.symbolic.tokens import *

"""The Wrapper IR: programs as plain data, their text form, their verifier, and analyses that read roles.

It knows no line class; those are in `fxwrap.lines`.
"""

from fxwrap.symbolic import Size as Size
from fxwrap.wrapper_ir.analyses import *
from fxwrap.wrapper_ir.canonicalization import *
from fxwrap.wrapper_ir.dependent_launches import *
from fxwrap.wrapper_ir.effects import *
from fxwrap.wrapper_ir.highlight import *
from fxwrap.wrapper_ir.kernel_calls import *
from fxwrap.wrapper_ir.kernel_calls_text import *
from fxwrap.wrapper_ir.line import *
from fxwrap.wrapper_ir.operators import *
from fxwrap.wrapper_ir.origin import *
from fxwrap.wrapper_ir.overlaps import *
from fxwrap.wrapper_ir.parser import *
from fxwrap.wrapper_ir.printer import *
from fxwrap.wrapper_ir.program import *
from fxwrap.wrapper_ir.roles import *
from fxwrap.wrapper_ir.streams import *
from fxwrap.wrapper_ir.types import *
from fxwrap.wrapper_ir.verifier import *

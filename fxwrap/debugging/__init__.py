"""Values per line of a running program, their references, and the first line that is wrong."""

from fxwrap.debugging.agreement import *
from fxwrap.debugging.bisection import *
from fxwrap.debugging.checked_program import *
from fxwrap.debugging.copies import *
from fxwrap.debugging.dispatch_modes import *
from fxwrap.debugging.divergence import *
from fxwrap.debugging.graph_code import *
from fxwrap.debugging.graph_history import *
from fxwrap.debugging.minify import *
from fxwrap.debugging.objects import *
from fxwrap.debugging.points import *
from fxwrap.debugging.references import *
from fxwrap.debugging.repro import *
from fxwrap.debugging.statistics import *
from fxwrap.debugging.values import *

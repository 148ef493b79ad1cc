"""Lowering rules: what each ATen operator computes, element by element."""

from fxwrap.lowering.rules import norms as norms
from fxwrap.lowering.rules import pointwise as pointwise
from fxwrap.lowering.rules import reductions as reductions
from fxwrap.lowering.rules import views as views
from fxwrap.lowering.rules.registry import RULES as RULES
from fxwrap.lowering.rules.registry import Call as Call
from fxwrap.lowering.rules.registry import Result as Result

"""The compile pipeline and its entries."""

from fxwrap.compile.backend import DYNAMO_PASSES as DYNAMO_PASSES
from fxwrap.compile.backend import GraphInfo as GraphInfo
from fxwrap.compile.backend import fxwrap as fxwrap
from fxwrap.compile.backend import make_backend as make_backend
from fxwrap.compile.compiled import Compiled as Compiled
from fxwrap.compile.compiled import Stage as Stage
from fxwrap.compile.compiler import compile_graph as compile_graph
from fxwrap.compile.inspection import CompileRecord as CompileRecord
from fxwrap.compile.inspection import compiles as compiles
from fxwrap.compile.inspection import inspect as inspect
from fxwrap.compile.inspection import record_loaded as record_loaded
from fxwrap.compile.steps import EMISSION_STEPS as EMISSION_STEPS
from fxwrap.compile.steps import PROGRAM_STEPS as PROGRAM_STEPS
from fxwrap.compile.steps import effective_emitter as effective_emitter
from fxwrap.compile.steps import plan_program_memory as plan_program_memory
from fxwrap.converters.emission import emit as emit

"""The loop IR: kernels as index spaces with bodies of typed scalar operations, and their reference evaluator."""

from fxwrap.loop_ir.assumptions import *
from fxwrap.loop_ir.atoms import *
from fxwrap.loop_ir.body_operations import *
from fxwrap.loop_ir.builder import *
from fxwrap.loop_ir.canonicalize import *
from fxwrap.loop_ir.checked_rows import *
from fxwrap.loop_ir.column_parts import *
from fxwrap.loop_ir.complementary_loads import *
from fxwrap.loop_ir.contraction import *
from fxwrap.loop_ir.evaluate import *
from fxwrap.loop_ir.group_sums import *
from fxwrap.loop_ir.index import *
from fxwrap.loop_ir.interleaved import *
from fxwrap.loop_ir.kernel import *
from fxwrap.loop_ir.masked_selections import *
from fxwrap.loop_ir.moved_elements import *
from fxwrap.loop_ir.offsets import *
from fxwrap.loop_ir.operations import *
from fxwrap.loop_ir.parse import parse_kernel as parse_kernel
from fxwrap.loop_ir.ranges import index_range as index_range
from fxwrap.loop_ir.ranges import size_range as size_range
from fxwrap.loop_ir.ranges import value_range as value_range
from fxwrap.loop_ir.row_parts import *
from fxwrap.loop_ir.segment_fusion import *
from fxwrap.loop_ir.segments import *
from fxwrap.loop_ir.selected_constants import *
from fxwrap.loop_ir.shared_windows import *
from fxwrap.loop_ir.small_integers import *
from fxwrap.loop_ir.split import *
from fxwrap.loop_ir.streaming import *
from fxwrap.loop_ir.streaming_bounds import *
from fxwrap.loop_ir.traffic import *
from fxwrap.loop_ir.uniform_reductions import *
from fxwrap.loop_ir.unrolled_rows import *
from fxwrap.loop_ir.verify import *

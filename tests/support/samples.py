"""Programs that together hold at least two instances of every line, for round trips, verification and converters.

Each is IR text. `Sample.program()` parses it and fills its constants; `Sample.inputs(seed)` gives fresh random inputs
for those that a CPU can run now.
"""

from __future__ import annotations

from fxwrap.wrapper_ir import KernelDefinition
from tests.support.opaque import COUNTER
from tests.support.sample import EXTENSIONS, Sample, random_tensor

__all__ = ["EXTENSIONS", "SAMPLES", "Sample", "random_tensor"]

_RELU = KernelDefinition(
    "relu",
    "cpp",
    """#include <cstdint>
extern "C" void kernel(const float* in0, float* out0, int64_t n0) {
  for (int64_t i = 0; i < n0; ++i) out0[i] = in0[i] > 0 ? in0[i] : 0;
}
""",
    ("*f32", "*f32", "i64"),
)
_SCALE_ADD = KernelDefinition(
    "scale_add",
    "cpp",
    """#include <cstdint>
extern "C" void kernel(const float* in0, const float* in1, float* out0, float* out1, int64_t n0, double n1) {
  for (int64_t i = 0; i < n0; ++i) {
    out0[i] = static_cast<float>(in0[i] * n1);
    out1[i] = in0[i] + in1[i];
  }
}
""",
    ("*f32", "*f32", "*f32", "*f32", "i64", "f64"),
    (("flags", "-O2"),),
)
_TRITON_RELU = KernelDefinition(
    "relu",
    "triton",
    """import triton
import triton.language as tl


@triton.jit
def kernel(in0, out0, n0, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n0
    loaded = tl.load(in0 + index, mask=inside)
    tl.store(out0 + index, tl.maximum(loaded, 0.0), mask=inside)
""",
    ("*f32", "*f32", "i64"),
    (("BLOCK", 64), ("enable_fp_fusion", False), ("num_warps", 4)),
)

_OPAQUE = f"opaque<{COUNTER}>"

_TABLE = (
    Sample("empty", "program @empty() {\n  control.return()\n}\n"),
    Sample(
        "input_as_output",
        """
program @input_as_output(%x: borrowed f32[3, 4]@cpu, %i: borrowed i64[]@cpu) {
  control.return(%x, none, %i, %x, 7, 2.5, true)
}
""",
    ),
    Sample(
        "mlp",
        """
program @mlp(%x: borrowed f32[s0, 8]@cpu, %w: borrowed f32[8, 4]@cpu) options="emitter=python" target="cpu" {
  s0 = symbol.size(%x) dim=0 range=(2, 4096) hint=6 divisible=2
  check.layout(%x) name="x" : f32[s0, 8]@cpu
  check.layout(%w) name="w" alignment=4 : f32[8, 4]@cpu
  n0 = symbol.let expr=4*s0
  %buf0 = memory.alloc() : f32[s0, 4]@cpu
  extern.call @aten.mm.out(%x, %w) outs=(%buf0)
  %buf1 = memory.alloc() : f32[s0, 4]@cpu
  kernel.launch @relu(%buf0, n0) outs=(%buf1)
  %buf2 = memory.reuse(%buf0) : f32[s0, 4 | 1, s0]@cpu
  extern.mutate @aten.copy_.default(%buf2, %buf1) writes=(%buf2)
  memory.free(%buf1)
  control.return(%buf2, s0, n0)
}
""",
        (_RELU,),
        symbols={"s0": 6},
    ),
    Sample(
        "cpp_kernel_with_two_outputs",
        """
program @scale_add(%x: borrowed f32[4, 8]@cpu, %y: borrowed f32[4, 8]@cpu) {
  %a = memory.alloc() : f32[4, 8]@cpu
  %b = memory.alloc() : f32[4, 8]@cpu
  kernel.launch @scale_add(%x, 32, 0.5, %y) outs=(%a, %b) grid=(1, 1, 1)
  %c = memory.alloc() : f32[4, 8]@cpu
  kernel.launch @scale_add(%a, %y, 32, 2.0) outs=(%c, %b)
  memory.free(%a)
  control.return(%b, %c)
}
""",
        (_SCALE_ADD,),
    ),
    Sample(
        "triton_kernel",
        """
program @relu(%x: borrowed f32[s0, 8]@cpu) {
  s0 = symbol.size(%x) dim=0 range=(1, inf) hint=25
  n0 = symbol.let expr=8*s0
  %y = memory.alloc() : f32[s0, 8]@cpu
  kernel.launch @relu(%x, n0) outs=(%y) grid=(ceildiv(n0, 64), 1, 1)
  control.return(%y)
}
""",
        (_TRITON_RELU,),
        symbols={"s0": 25},
    ),
    Sample(
        "views_share_one_root",
        """
program @views_share_one_root(%x: borrowed f32[4, 6]@cpu) {
  %r = extern.call @aten.exp.default(%x) : f32[4, 6]@cpu
  %t = memory.view(%r) : f32[6, 4 | 1, 6]@cpu
  %half = memory.view(%t) : f32[3, 4 | 1, 6 | 3]@cpu
  extern.mutate @aten.mul_.Scalar(%half, 2.0) writes=(%half)
  %row = memory.view(%x) : f32[6 | | 12]@cpu
  control.return(%t, %r, %half, %row)
}
""",
    ),
    Sample(
        "pool_and_workspace",
        """
program @pool_and_workspace(%x: borrowed f32[8, 4]@cpu, %y: borrowed f32[8, 4]@cpu) {
  %pool = memory.pool() : u8[384]@cpu
  %a = memory.pool_slice(%pool) : f32[8, 4]@cpu
  %b = memory.pool_slice(%pool) offset=128 : f32[4, 8]@cpu
  %late = memory.pool_slice(%pool) offset=256 : i64[8]@cpu
  extern.call @aten.add.out(%x, %y, alpha=2) outs=(%a)
  %flat = memory.view(%b) : f32[8, 4]@cpu
  extern.call @aten.sub.out(%x, %a) outs=(%flat)
  %work = memory.workspace() zeroed=true : u8[128]@cpu
  %scratch = memory.workspace() : u8[64]@cpu
  extern.mutate @aten.fill_.Scalar(%scratch, 3) writes=(%scratch)
  extern.call @aten.argmax.out(%b, 0, false) outs=(%late)
  %small = memory.pool() : u8[64]@cpu
  %c = memory.pool_slice(%small) offset=32 : f32[8]@cpu
  extern.call @aten.sum.IntList_out(%a, [1]) outs=(%c)
  %zero = extern.call @aten.sum.default(%work) : i64[]@cpu
  %three = extern.call @aten.sum.default(%scratch) : i64[]@cpu
  memory.free(%work)
  memory.free(%scratch)
  %d = extern.call @aten.mul.Tensor(%a, %flat) : f32[8, 4]@cpu
  %e = extern.call @aten.add.Tensor(%c, %late) : f32[8]@cpu
  memory.free(%pool)
  memory.free(%small)
  control.return(%d, %e, %zero, %three)
}
""",
    ),
    Sample(
        "operator_arguments",
        """
program @operator_arguments(%x: borrowed f32[4, 8]@cpu, %mask: borrowed bool[4, 8]@cpu, %index: borrowed i64[3]@cpu) {
  %joined = extern.call @aten.cat.default([%x, %x], 1) : f32[4, 16]@cpu
  %clamped = extern.call @aten.clamp.default(%joined, none, 1.0) : f32[4, 16]@cpu
  memory.free(%joined)
  %taken = extern.call @aten.index.Tensor(%x, [none, %index]) : f32[4, 3]@cpu
  %wide = extern.call @aten._to_copy.default(%x, dtype=dtype(f64)) : f64[4, 8]@cpu
  %full = extern.call @aten.full.default([2, 3], 1.5, dtype=dtype(f32), layout=layout("strided"), \
device=device("cpu"), pin_memory=false) : f32[2, 3]@cpu
  %hidden = extern.call @aten.masked_fill.Scalar(%x, %mask, -inf) : f32[4, 8]@cpu
  %copy = extern.call @aten.clone.default(%x, memory_format=memory_format("contiguous_format")) : f32[4, 8]@cpu
  %gelu = extern.call @aten.gelu.default(%x, approximate="tanh") : f32[4, 8]@cpu
  control.return(%clamped, %taken, %wide, %full, %hidden, %copy, %gelu)
}
""",
    ),
    Sample(
        "exact_scalars",
        """
program @exact_scalars(%i: borrowed i64[5]@cpu, %z: borrowed c64[3]@cpu, %h: borrowed bf16[4]@cpu, \
%d: borrowed f64[2]@cpu) {
  %i1 = extern.call @aten.add.Scalar(%i, 9007199254740993) : i64[5]@cpu
  %i2 = extern.call @aten.mul.Scalar(%i, -3) : i64[5]@cpu
  %b = extern.call @aten.gt.Scalar(%i, 2) : bool[5]@cpu
  %z1 = extern.call @aten.add.Scalar(%z, complex(1.0, -2.5)) : c64[3]@cpu
  %z2 = extern.call @aten.mul.Tensor(%z1, %z) : c64[3]@cpu
  %h1 = extern.call @aten.mul.Scalar(%h, 0.1) : bf16[4]@cpu
  %d1 = extern.call @aten.add.Scalar(%d, 1e-300, 2.0) : f64[2]@cpu
  memory.free(%z1)
  control.return(%i1, %i2, %b, %z2, %h1, %d1)
}
""",
    ),
    Sample(
        "many_results",
        """
program @many_results(%x: borrowed f32[4, 8]@cpu, %w: borrowed f32[8]@cpu, %g: borrowed f32[4, 8]@cpu) {
  %y, %mean, %rstd = extern.call @aten.native_layer_norm.default(%x, [8], %w, none, 1e-05) \
: f32[4, 8]@cpu, f32[4, 1]@cpu, f32[4, 1]@cpu
  %gx, %gw, _ = extern.call @aten.native_layer_norm_backward.default(%g, %x, [8], %mean, %rstd, %w, none, \
[true, true, false]) : f32[4, 8]@cpu, f32[8]@cpu, none
  memory.free(%mean)
  memory.free(%rstd)
  [%a, %b] = extern.call @aten.split_with_sizes_copy.default(%y, [2, 6], 1) : [f32[4, 2]@cpu, f32[4, 6]@cpu]
  [_, %c] = extern.call @aten.split.Tensor(%gx, 4, 1) aliases=(none, %gx) : [none, f32[4, 4 | 8, 1 | 4]@cpu]
  %best = memory.alloc() : f32[4]@cpu
  %where = memory.alloc() : i64[4]@cpu
  extern.call @aten.max.dim_max(%y, 1) outs=(%best, %where)
  control.return(%y, %c, %gw, %a, %b, %best, %where)
}
""",
    ),
    Sample(
        "aliases",
        """
program @aliases(%x: borrowed f32[6]@cpu, %z: borrowed c64[3]@cpu) {
  %bits = extern.call @aten.view.dtype(%x, dtype(i32)) aliases=(%x) : i32[6]@cpu
  %real = extern.call @aten.view_as_real.default(%z) aliases=(%z) : f32[3, 2]@cpu
  %sum = extern.call @aten.add.Tensor(%bits, %bits) : i32[6]@cpu
  %same = extern.mutate @aten.neg_.default(%sum) writes=(%sum) aliases=(%sum) : i32[6]@cpu
  control.return(%bits, %real, %same, %sum)
}
""",
    ),
    Sample(
        "mutated_inputs_and_constants",
        """
program @batch_norm_statistics(%x: borrowed f32[16, 3]@cpu, %count: mutable i64[]@cpu, %seen: mutable f32[16, 3]@cpu) {
  extern.mutate @aten.add_.Scalar(%count, 1) writes=(%count)
  extern.mutate @aten.copy_.default(%seen, %x) writes=(%seen)
  %y, %mean, %rstd = extern.mutate @aten._native_batch_norm_legit.default(%x, %weight, none, %running_mean, \
%running_var, true, 0.1, 1e-05) writes=(%running_mean, %running_var) : f32[16, 3]@cpu, f32[3]@cpu, f32[3]@cpu
  memory.free(%mean)
  memory.free(%rstd)
  control.return(%y)
}
constant %weight: f32[3]@cpu
constant %running_mean: mutable f32[3]@cpu
constant %running_var: mutable f32[3]@cpu
""",
    ),
    Sample(
        "scatter_and_index_put",
        """
program @scatter_and_index_put(%x: borrowed f32[4, 8]@cpu, %index: borrowed i64[2, 8]@cpu, %rows: borrowed i64[3]@cpu, \
%new: borrowed f32[3, 8]@cpu) {
  %a = extern.call @aten.clone.default(%x) : f32[4, 8]@cpu
  extern.scatter(%index, %x) target=%a dim=0
  extern.scatter(%index, 2.5) target=%a dim=0
  extern.scatter(%index, %new) target=%a dim=0 reduce="amax" include_self=false
  extern.scatter(%index, 0.5) target=%a dim=0 reduce="sum"
  extern.scatter(%index, %x) target=%a dim=0 reduce="add"
  extern.scatter(%index, -2) target=%a dim=0 reduce="multiply"
  %b = extern.call @aten.clone.default(%x) : f32[4, 8]@cpu
  extern.index_put([%rows], %new) target=%b accumulate=true
  %one = extern.call @aten.full.default([], 1.0) : f32[]@cpu
  extern.index_put([none, %rows], %one) target=%b
  memory.free(%one)
  control.return(%a, %b)
}
""",
        limits={"index": 3, "rows": 4},
    ),
    Sample(
        "owned_inputs",
        """
program @owned_inputs(%a: owned f32[4, 4]@cpu, %b: owned f32[4, 4]@cpu, %c: shared f32[4, 4]@cpu, \
%d: owned f32[4, 4]@cpu) {
  %t = memory.reuse(%a) : f32[2, 8]@cpu
  %flat = memory.view(%b) : f32[2, 8]@cpu
  extern.call @aten.exp.out(%flat) outs=(%t)
  memory.free(%b)
  %y = extern.call @aten.mm.default(%c, %d) : f32[4, 4]@cpu
  memory.free(%c)
  control.return(%y, %d, %t)
}
""",
    ),
    Sample(
        "symbols_of_all_kinds",
        """
program @symbols_of_all_kinds(%x: borrowed f32[s0, s1 | 2*s1, 2]@cpu, s2: int range=(1, 64) hint=3, f0: float, \
b0: bool, %count: borrowed i64[]@cpu, %scale: borrowed f32[1]@cpu, %on: borrowed bool[]@cpu) {
  s0 = symbol.size(%x) dim=0 rank=2 range=(1, 1024) hint=4
  s1 = symbol.size(%x) dim=1
  n1 = symbol.size(%x) dim=0 of="stride"
  n2 = symbol.size(%x) dim=0 of="storage_offset"
  u0 = symbol.item(%count) range=(0, 64)
  uf0 = symbol.item(%scale)
  b1 = symbol.item(%on)
  symbol.assert() condition=u0 <= 64 message="at most 64"
  symbol.assert() condition=and(s2 >= 1, n1 == 2*s1)
  n0 = symbol.let expr=floordiv(s0 + 2*u0, 3) + max(s1, modular_indexing(s2, 2, 4))
  f1 = symbol.let expr=f0*uf0 + 0.1
  %y = extern.call @aten.mul.Scalar(%x, f1) : f32[s0, s1]@cpu
  %z = extern.call @aten.full.default([u0, s2], n0, dtype=dtype(i64)) : i64[u0, s2]@cpu
  control.return(%y, %z, n0, n2, f1, b0, b1, u0)
}
""",
        symbols={"s0": 4, "s1": 5, "s2": 3, "f0": 0.25, "b0": True},
    ),
    Sample(
        "unbacked_results",
        """
program @unbacked_results(%x: borrowed f32[12]@cpu) {
  %mask = extern.call @aten.gt.Scalar(%x, 0.0) : bool[12]@cpu
  %where = extern.call @aten.nonzero.default(%mask) : i64[u0, 1 | 1, u0]@cpu
  u0 = symbol.bind(%where) path=(size(0)) range=(0, 12)
  memory.free(%mask)
  %flat = memory.view(%where) : i64[u0]@cpu
  %values = extern.call @aten.index_select.default(%x, 0, %flat) : f32[u0]@cpu
  memory.free(%where)
  %pair = extern.call @aten.cat.default([%values, %values]) : f32[2*u1]@cpu
  u1 = symbol.bind(%pair) path=(size(0), divide(2)) range=(0, inf)
  symbol.assert() condition=u0 == u1 message="the halves have the length of the whole"
  memory.free(%values)
  control.return(%pair, u1)
}
""",
    ),
    Sample(
        "cond_nested",
        """
program @cond_nested(%flag: borrowed bool[]@cpu, %x: borrowed f32[s0, 4]@cpu) {
  s0 = symbol.size(%x) dim=0 range=(1, 64)
  %y = control.cond(%flag, %x) : f32[s0, 4]@cpu {
  ^then(%t: f32[s0, 4]@cpu):
    %t1 = extern.call @aten.sin.default(%t) : f32[s0, 4]@cpu
    %t2 = control.cond(s0 > 4, %t1, %t) : f32[s0, 4]@cpu {
    ^then(%tt: f32[s0, 4]@cpu, %tu: f32[s0, 4]@cpu):
      %tt1 = extern.call @aten.add.Tensor(%tt, %tu) : f32[s0, 4]@cpu
      control.yield(%tt1)
    ^else(%te: f32[s0, 4]@cpu, %tf: f32[s0, 4]@cpu):
      %te1 = extern.call @aten.sub.Tensor(%te, %tf) : f32[s0, 4]@cpu
      control.yield(%te1)
    }
    memory.free(%t1)
    control.yield(%t2)
  ^else(%e: f32[s0, 4]@cpu):
    %e1 = extern.call @aten.cos.default(%e) : f32[s0, 4]@cpu
    control.yield(%e1)
  }
  control.return(%y)
}
""",
        symbols={"s0": 6},
    ),
    Sample(
        "while_loops",
        """
program @while_loops(%i: borrowed i64[]@cpu, %x: borrowed f32[4]@cpu, %w: borrowed f32[4]@cpu) {
  %end, %y = control.while(%i, %x) extra=(%w) : i64[]@cpu, f32[4]@cpu {
  ^cond(%c0: i64[]@cpu, %c1: f32[4]@cpu, %c2: f32[4]@cpu):
    %go = extern.call @aten.lt.Scalar(%c0, 11) : bool[]@cpu
    control.yield(%go)
  ^body(%b0: i64[]@cpu, %b1: f32[4]@cpu, %b2: f32[4]@cpu):
    %next = extern.call @aten.add.Scalar(%b0, 1) : i64[]@cpu
    %moved = extern.call @aten.add.Tensor(%b1, %b2) : f32[4]@cpu
    control.yield(%next, %moved)
  }
  %all_i, %all_y = control.while(%i, %x) stacked=true : i64[u0]@cpu, f32[u0, 4]@cpu {
  ^cond(%d0: i64[]@cpu, %d1: f32[4]@cpu):
    %run = extern.call @aten.lt.Scalar(%d0, 10) : bool[]@cpu
    control.yield(%run)
  ^body(%f0: i64[]@cpu, %f1: f32[4]@cpu):
    %step = extern.call @aten.add.Scalar(%f0, 3) : i64[]@cpu
    %half = extern.call @aten.mul.Scalar(%f1, 0.5) : f32[4]@cpu
    control.yield(%step, %half)
  }
  u0 = symbol.bind(%all_y) path=(size(0)) range=(0, inf)
  control.return(%end, %y, %all_i, %all_y)
}
""",
    ),
    Sample(  # values have the names that blocks may have in the emitted text
        "names_of_blocks",
        """
program @else_3(%i: borrowed i64[]@cpu, %body_1: borrowed f32[4]@cpu, %flag: borrowed bool[]@cpu) {
  %end, %cond_0 = control.while(%i, %body_1) : i64[]@cpu, f32[4]@cpu {
  ^cond(%c0: i64[]@cpu, %c1: f32[4]@cpu):
    %go = extern.call @aten.lt.Scalar(%c0, 11) : bool[]@cpu
    control.yield(%go)
  ^body(%b0: i64[]@cpu, %b1: f32[4]@cpu):
    %next = extern.call @aten.add.Scalar(%b0, 1) : i64[]@cpu
    %half = extern.call @aten.mul.Scalar(%b1, 0.5) : f32[4]@cpu
    control.yield(%next, %half)
  }
  %then_2 = control.cond(%flag, %cond_0) : f32[4]@cpu {
  ^then(%t: f32[4]@cpu):
    %t1 = extern.call @aten.sin.default(%t) : f32[4]@cpu
    control.yield(%t1)
  ^else(%e: f32[4]@cpu):
    %e1 = extern.call @aten.cos.default(%e) : f32[4]@cpu
    control.yield(%e1)
  }
  control.return(%end, %cond_0, %then_2)
}
""",
    ),
    Sample(
        "scan_and_map",
        """
program @scan_and_map(%start: borrowed f32[4]@cpu, %xs: borrowed f32[5, 4]@cpu, %bias: borrowed f32[4]@cpu) {
  %last, %sums = control.scan(%start) over=(%xs) : f32[4]@cpu, f32[5, 4]@cpu {
  ^body(%carry: f32[4]@cpu, %slice: f32[4]@cpu):
    %sum = extern.call @aten.add.Tensor(%carry, %slice) : f32[4]@cpu
    %out = extern.call @aten.clone.default(%sum) : f32[4]@cpu
    control.yield(%sum, %out)
  }
  %first, %products = control.scan(%start) over=(%xs) extra=(%bias) reverse=true : f32[4]@cpu, f32[5, 4]@cpu {
  ^body(%carry2: f32[4]@cpu, %slice2: f32[4]@cpu, %bias2: f32[4]@cpu):
    %shifted = extern.call @aten.add.Tensor(%slice2, %bias2) : f32[4]@cpu
    %product = extern.call @aten.mul.Tensor(%carry2, %shifted) : f32[4]@cpu
    control.yield(%product, %shifted)
  }
  %mapped = control.map(%xs) extra=(%bias) : f32[5, 4]@cpu {
  ^body(%row: f32[4]@cpu, %add: f32[4]@cpu):
    %moved = extern.call @aten.mul.Tensor(%row, %add) : f32[4]@cpu
    control.yield(%moved)
  }
  %low, %high = control.map(%mapped, %sums) : f32[5]@cpu, f32[5, 4]@cpu {
  ^body(%left: f32[4]@cpu, %right: f32[4]@cpu):
    %least = extern.call @aten.amin.default(%left) : f32[]@cpu
    %most = extern.call @aten.maximum.default(%left, %right) : f32[4]@cpu
    control.yield(%least, %most)
  }
  control.return(%last, %sums, %first, %products, %mapped, %low, %high)
}
""",
    ),
    Sample(
        "shared_function",
        """
program @shared_function(%x: borrowed f32[s0, 4]@cpu, %w: borrowed f32[4, 4]@cpu, %v: borrowed f32[4, 4]@cpu) {
  s0 = symbol.size(%x) dim=0
  %a = control.call @layer(%x, %w) : f32[s0, 4]@cpu
  %b, %c = control.call @two_layers(%a, %v) : f32[s0, 4]@cpu, f32[s0, 4]@cpu
  memory.free(%a)
  control.return(%b, %c)
}
function @layer(%layer_x: f32[s0, 4]@cpu, %layer_w: f32[4, 4]@cpu) {
  %layer_1 = extern.call @aten.mm.default(%layer_x, %layer_w) : f32[s0, 4]@cpu
  extern.mutate @aten.relu_.default(%layer_1) writes=(%layer_1)
  control.yield(%layer_1)
}
function @two_layers(%two_x: f32[s0, 4]@cpu, %two_w: f32[4, 4]@cpu) {
  %two_1 = control.call @layer(%two_x, %two_w) : f32[s0, 4]@cpu
  %two_2 = control.call @layer(%two_1, %two_w) : f32[s0, 4]@cpu
  control.yield(%two_1, %two_2)
}
""",
        symbols={"s0": 3},
    ),
    Sample(
        "random_state",
        """
program @random_state(%x: borrowed f32[6]@cpu) {
  %state = random.save() device="cpu" : u8[5056]@cpu
  %r0 = extern.call @aten.rand.default([6], device=device("cpu")) effect_set=(random("cpu")) : f32[6]@cpu
  %later = random.save() device="cpu" : u8[5056]@cpu
  random.restore(%state) device="cpu"
  memory.free(%state)
  %r1 = extern.call @aten.rand_like.default(%x) effect_set=(random("cpu")) : f32[6]@cpu
  random.restore(%later) device="cpu"
  memory.free(%later)
  control.return(%r0, %r1)
}
""",
    ),
    Sample(
        "generator",
        """
program @generator(%x: borrowed f32[6]@cpu, %g: borrowed opaque<Generator>) {
  random.exchange(%g) device="cpu"
  %r0 = extern.call @aten.rand_like.default(%x) effect_set=(random("cpu")) : f32[6]@cpu
  random.exchange(%g) device="cpu"
  %r1 = extern.call @aten.rand.generator([6], generator=%g) effect_set=(random("cpu")) : f32[6]@cpu
  %r2 = extern.call @aten.rand_like.default(%x) effect_set=(random("cpu")) : f32[6]@cpu
  control.return(%r0, %r1, %r2)
}
""",
    ),
    Sample(
        "generators_of_a_function",
        """
program @drawing(%x: borrowed f32[6]@cpu, %g: borrowed opaque<Generator>, %h: borrowed opaque<Generator>) {
  %a = control.call @drawn(%x, %g) : f32[6]@cpu
  %b = control.call @drawn(%a, %h) : f32[6]@cpu
  %c = control.call @drawn(%b, %g) : f32[6]@cpu
  control.return(%a, %b, %c)
}
function @drawn(%y: f32[6]@cpu, %own: opaque<Generator>) {
  random.exchange(%own) device="cpu"
  %r = extern.call @aten.rand_like.default(%y) effect_set=(random("cpu")) : f32[6]@cpu
  random.exchange(%own) device="cpu"
  %z = extern.call @aten.add.Tensor(%y, %r) : f32[6]@cpu
  memory.free(%r)
  control.yield(%z)
}
""",
    ),
    Sample(
        "objects",
        f"""
program @objects(%c: borrowed {_OPAQUE}, %x: borrowed f32[4]@cpu, %unused: borrowed opaque<"a.<b>">) {{
  %y = extern.call @fxwrap_tests.add_count.default(%c, %x) effect_set=(unknown()) : f32[4]@cpu
  %d = extern.call @fxwrap_tests.next_counter.default(%c) effect_set=(unknown()) : {_OPAQUE}
  %z = extern.call @fxwrap_tests.add_count.default(%d, %y) effect_set=(unknown()) : f32[4]@cpu
  memory.free(%y)
  %w = extern.call @fxwrap_tests.sum_counts.default([%c, %d], %z) effect_set=(unknown()) : f32[4]@cpu
  control.return(%z, %d, %unused, %w, %c, %unused)
}}
""",
    ),
    Sample(
        "object_as_constant",
        f"""
program @object(%x: borrowed f32[4]@cpu) {{
  %y = extern.call @fxwrap_tests.sum_counts.default([%k, %k], %x) effect_set=(unknown()) : f32[4]@cpu
  control.return(%y, %k)
}}
constant %k: {_OPAQUE}
""",
    ),
    Sample(
        "objects_of_a_function",
        f"""
program @calls(%x: borrowed f32[4]@cpu, %c: borrowed {_OPAQUE}, %d: borrowed {_OPAQUE}) {{
  %a, %e, %f = control.call @swapped(%x, %c, %d) : f32[4]@cpu, {_OPAQUE}, {_OPAQUE}
  %b, %g, %h = control.call @swapped(%a, %e, %f) : f32[4]@cpu, {_OPAQUE}, {_OPAQUE}
  control.return(%a, %b, %g, %h, %e)
}}
function @swapped(%y: f32[4]@cpu, %i: {_OPAQUE}, %j: {_OPAQUE}) {{
  %z = extern.call @fxwrap_tests.add_count.default(%i, %y) effect_set=(unknown()) : f32[4]@cpu
  control.yield(%z, %j, %i)
}}
""",
    ),
    Sample(
        "objects_of_blocks",
        f"""
program @blocks(%x: borrowed f32[4]@cpu, %i: borrowed i64[]@cpu, %c: borrowed {_OPAQUE}, %d: borrowed {_OPAQUE}) {{
  %flag = extern.call @aten.gt.Scalar(%i, 0) : bool[]@cpu
  %y, %e = control.cond(%flag, %x, %c, %d) : f32[4]@cpu, {_OPAQUE} {{
  ^then(%t: f32[4]@cpu, %tc: {_OPAQUE}, %td: {_OPAQUE}):
    %t1 = extern.call @fxwrap_tests.add_count.default(%tc, %t) effect_set=(unknown()) : f32[4]@cpu
    control.yield(%t1, %td)
  ^else(%f: f32[4]@cpu, %fc: {_OPAQUE}, %fd: {_OPAQUE}):
    %f1 = extern.call @fxwrap_tests.add_count.default(%fd, %f) effect_set=(unknown()) : f32[4]@cpu
    control.yield(%f1, %fc)
  }}
  memory.free(%flag)
  %n, %z, %g, %h = control.while(%i, %y, %c, %d) extra=(%e) : i64[]@cpu, f32[4]@cpu, {_OPAQUE}, {_OPAQUE} {{
  ^cond(%n0: i64[]@cpu, %z0: f32[4]@cpu, %g0: {_OPAQUE}, %h0: {_OPAQUE}, %e0: {_OPAQUE}):
    %go = extern.call @aten.lt.Scalar(%n0, 5) : bool[]@cpu
    control.yield(%go)
  ^body(%n1: i64[]@cpu, %z1: f32[4]@cpu, %g1: {_OPAQUE}, %h1: {_OPAQUE}, %e1: {_OPAQUE}):
    %n2 = extern.call @aten.add.Scalar(%n1, 1) : i64[]@cpu
    %z2 = extern.call @fxwrap_tests.add_count.default(%g1, %z1) effect_set=(unknown()) : f32[4]@cpu
    %z3 = extern.call @fxwrap_tests.sum_counts.default([%e1], %z2) effect_set=(unknown()) : f32[4]@cpu
    memory.free(%z2)
    control.yield(%n2, %z3, %h1, %g1)
  }}
  memory.free(%y)
  memory.free(%n)
  control.return(%z, %g, %h, %e)
}}
""",
    ),
    Sample(
        "notes",
        """
program @notes(%x: borrowed f32[0, 4]@cpu) {
  note.comment() text="zero-size \\"tensors\\",\\nand two lines of text"
  note.enter_range() name="outer"
  note.enter_range() name="inner"
  %y = extern.call @aten.exp.default(%x) : f32[0, 4]@cpu  # a remark that the parser drops
  note.exit_range() name="inner"

  note.exit_range() name="outer"
  note.comment() text=""
  control.return(%y)
}
""",
    ),
    Sample(
        "extension",
        """
program @extension(%x: borrowed f32[4, 8]@cpu) {
  %staging = memory.alloc() : f32[4, 8]@cpu
  %y = abacus.copy(%staging, %x) channel=1 : f32[4, 8]@cpu
  %other = memory.alloc() : f32[4, 8]@cpu
  %z = abacus.copy(%other, %y) : f32[4, 8]@cpu
  control.return(%y, %z)
}
""",
    ),
    Sample(
        "devices_and_streams",
        """
program @devices_and_streams(%x: borrowed f32[1024]@cuda:1, %y: borrowed f32[1024]@cuda:1) {
  device.enter() device="cuda:1"
  %begun = device.record() device="cuda:1" event=3 : opaque<Event>
  device.wait(%begun) device="cuda:1" stream=1
  device.enter() device="cuda:1" stream=1
  %a = extern.call @aten.exp.default(%x) stream=1 : f32[1024]@cuda:1
  device.exit() device="cuda:1" stream=1
  %done = device.record() device="cuda:1" stream=1 : opaque<Event>
  device.enter() device="cuda:0"
  %z = extern.call @aten.full.default([2], 1.0, device=device("cuda:0")) : f32[2]@cuda:0
  device.exit() device="cuda:0"
  %early = device.record() device="cuda:1" : opaque<Event>
  device.wait(%early) device="cuda:1" stream=1
  device.wait(%done) device="cuda:1" stream=0
  %b = extern.call @aten.add.Tensor(%a, %y) : f32[1024]@cuda:1
  memory.free(%a)
  device.exit() device="cuda:1"
  control.return(%b, %z)
}
""",
        cpu_runnable=False,
    ),
    Sample(
        "collectives",
        """
program @collectives(%x: borrowed f32[8]@cuda:0, %y: borrowed f32[8]@cuda:0) {
  %sum = collective.start @_c10d_functional.all_reduce.default(%x, "sum", "0") group="0" : f32[8]@cuda:0
  %own = extern.call @aten.exp.default(%y) : f32[8]@cuda:0
  %mean = collective.start @_c10d_functional.all_reduce_.default(%own, "avg", "0") group="0" writes=(%own) \
aliases=(%own) : f32[8]@cuda:0
  [%all, %too] = collective.start @_c10d_functional.all_gather_into_tensor_coalesced.default([%x, %y], 2, "0") \
group="0" : [f32[16]@cuda:0, f32[16]@cuda:0]
  %sum_ready = collective.wait(%sum) group="0" : f32[8]@cuda:0
  %mean_ready = collective.wait(%mean) group="0" : f32[8]@cuda:0
  %all_ready = collective.wait(%all) group="0" : f32[16]@cuda:0
  %too_ready = collective.wait(%too) group="0" : f32[16]@cuda:0
  %z = extern.call @aten.add.Tensor(%sum_ready, %mean_ready) : f32[8]@cuda:0
  memory.free(%sum)
  memory.free(%own)
  control.return(%z, %all_ready, %too_ready)
}
""",
        cpu_runnable=False,
    ),
    Sample(
        "collectives_into_buffers",
        """
program @collectives_into_buffers(%x: borrowed f32[8]@cuda:0, %ext: borrowed f32[8]@cuda:0) {
  %arrived = collective.wait(%ext) group="" : f32[8]@cuda:0
  %buf = memory.alloc() : f32[16]@cuda:0
  %all = collective.start @_c10d_functional.all_gather_into_tensor_out.default(%x, 2, "0") group="0" outs=(%buf) \
aliases=(%buf) : f32[16]@cuda:0
  %first = collective.wait(%all) group="0" : f32[16]@cuda:0
  %again = collective.wait(%all) group="0" : f32[16]@cuda:0
  %part = collective.start @_c10d_functional.reduce_scatter_tensor.default(%again, "sum", 2, "0") group="0" : \
f32[8]@cuda:0
  %part_ready = collective.wait(%part) group="0" : f32[8]@cuda:0
  %z = extern.call @aten.add.Tensor(%part_ready, %arrived) : f32[8]@cuda:0
  memory.free(%buf)
  memory.free(%part)
  control.return(%z)
}
""",
        cpu_runnable=False,
    ),
    Sample(
        "a_list_of_any_length",
        """
program @a_list_of_any_length(%x: borrowed f32[s0, 4]@cpu) {
  s0 = symbol.size(%x) dim=0
  %rows = extern.call @aten.unbind_copy.int(%x) : list<f32[u0]@cpu>
  u0 = symbol.bind(%rows) path=(element(0), size(0))
  u1 = symbol.bind(%rows) path=(element(-1), size(0), divide(2))
  %y = extern.call @aten.stack.default(%rows, 1) : f32[u0, s0]@cpu
  memory.free(%rows)
  control.return(%y, u0, u1)
}
""",
        symbols={"s0": 5},
    ),
    Sample(
        "types",
        """
program @types(%group: borrowed opaque<ProcessGroup>, %many: borrowed list<f32[2]@cpu>, \
%maybe: borrowed optional<i64[]@cpu>, %token: borrowed token, %n: borrowed int, \
%half: borrowed f8e4m3fn[16, 16]@cuda:0<"shared", "swizzled">, %e: borrowed f32[0, 3]@meta) {
  %y = extern.call @vendor.mixed.default(%many, %maybe, %group, %token, %n, %half) effect_set=(unknown(), \
communicate("0"), output(), assert()) : f16[2, 2 | 1, 2]@cpu
  control.return(%y, %e)
}
""",
        cpu_runnable=False,
    ),
)

SAMPLES: dict[str, Sample] = {sample.name: sample for sample in _TABLE}
"""Every sample by name."""

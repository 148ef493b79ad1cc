"""What a file from a stranger may contain: no code, known lines, operators that check their own operands.

Such a program runs in the interpreter, so none of its text becomes source. See docs/security.md.
"""

from __future__ import annotations

from typing import Any

import sympy

from fxwrap import lines
from fxwrap.artifact.archive import Archive
from fxwrap.torch_compat import operator_overload, torch_schema
from fxwrap.wrapper_ir import Program, TensorType, Value
from fxwrap.wrapper_ir.operators import operator_schema

TRUST_LEVELS = ("full", "none")
"""The values of `fxwrap.load(trust=...)`."""

_LINES = (
    lines.Alloc, lines.Assert, lines.Bind, lines.CallFunction, lines.CheckLayout, lines.Comment, lines.Cond,
    lines.ExternCall, lines.Free, lines.IndexPut, lines.Let, lines.Map, lines.Mutate, lines.Pool, lines.PoolSlice,
    lines.ReadItem, lines.Return, lines.Reuse, lines.ScanLoop, lines.Scatter, lines.SizeOf, lines.View, lines.While,
    lines.Workspace, lines.Yield,
)  # fmt: skip

_BEFORE_CHECKS = (lines.Assert, lines.CheckLayout, lines.Comment, lines.Let, lines.SizeOf)
"""The lines that may precede the check of an input."""

_SAFE = """
    abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip conj_physical copysign cos
    cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2 expm1 fill float_power floor floor_divide fmax fmin fmod
    frac gcd ge gelu gelu_backward gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 isfinite isinf
    isnan isneginf isposinf lcm le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg nextafter
    positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sigmoid_backward sign
    signbit silu silu_backward sin sinc sinh softplus softshrink sqrt square sub tan tanh tanh_backward threshold
    threshold_backward true_divide trunc where xlogy zero
    _log_softmax _softmax all amax amin aminmax any argmax argmin argsort cummax cummin cumprod cumsum logcumsumexp
    logsumexp max mean median min nonzero norm prod sort std std_mean sum topk var var_mean
    _to_copy _unsafe_view alias arange cat clone constant_pad_nd contiguous copy detach diagonal embedding expand eye
    flip full full_like gather index index_add index_fill index_put index_select lift_fresh_copy linspace narrow
    ones ones_like permute repeat reshape roll scalar_tensor scatter scatter_add scatter_reduce select
    select_scatter slice slice_scatter split split_with_sizes squeeze stack t transpose tril triu unbind unsafe_split
    unsafe_split_with_sizes unsqueeze view zeros zeros_like
    addmm addmv baddbmm bmm convolution dot mm mv _adaptive_avg_pool2d avg_pool2d max_pool2d_with_indices
    _native_batch_norm_legit_no_training native_layer_norm bernoulli native_dropout rand randn
"""

SAFE_OPERATORS = frozenset(_SAFE.split())
"""The operators of ATen that a file from a stranger may call, with all overloads and in-place forms.

They check sizes and indices themselves and touch nothing but their operands. Uninitialised memory (`empty`), other
windows of a storage (`as_strided`, `set_`, `resize_`), files and operators with unchecked operands are missing. Random
calls of all of them found no invalid access to memory; `_call_error` rejects the arguments that did.
"""


def check_is_safe(archive: Archive, program: Program, entry: str) -> None:
    """Raises ArtifactError unless a program from a stranger's file can be run."""
    remedy = "Load it with trust='full' only if you trust its author as the author of a package that you install"
    if program.kernels:
        name = program.kernels[0].name
        reason = f"it has code of its own: the kernel @{name}"
        raise archive.error(entry, reason, f"Ask for a file saved with Options(fuse=False). {remedy}")
    for line in program.lines():
        if not isinstance(line, _LINES):
            raise archive.error(entry, f"a file from a stranger may not contain the line '{line.opcode}'", remedy)
        if isinstance(line, lines.ExternCall | lines.Mutate):
            if not _is_safe_operator(line.target):
                raise archive.error(entry, f"a file from a stranger may not call '{line.target}'", remedy)
            reason = _call_error(line)
            if reason:
                raise archive.error(entry, f"a file from a stranger may not call '{line.target}' so: {reason}", remedy)
        if isinstance(line, lines.CallFunction) and line.max_captures:
            raise archive.error(entry, "a file from a stranger may not capture device graphs", remedy)
    for value in _unchecked_inputs(program):
        raise archive.error(entry, f"it does not check its input %{value.name}", f"Ask for a file that does. {remedy}")


def _is_safe_operator(target: str) -> bool:
    namespace, _, name = target.partition(".")
    name = name.partition(".")[0]
    return namespace == "aten" and (name in SAFE_OPERATORS or (name.endswith("_") and name[:-1] in SAFE_OPERATORS))


def _call_error(line: lines.ExternCall | lines.Mutate) -> str:
    """Returns why a call is not safe although its operator is, or "". An unknown operator is rejected elsewhere."""
    try:
        overload = operator_overload(line.target)
    except LookupError:
        return ""
    returns = [str(item.type) for item in torch_schema(overload).returns]
    if not all(text in ("Tensor", "List[Tensor]") for text in returns):
        return "it computes no tensors"  # numbers divide by zero with a signal
    operands, schema = dict(line.keywords), operator_schema(overload)
    operands |= zip(schema.argument_names, line.arguments)
    for argument in torch_schema(overload).arguments:
        if _is_enumeration(argument) and isinstance(operands.get(argument.name), int | sympy.Basic):
            return f"the argument '{argument.name}' is a number"  # torch does not check it
    if isinstance(line, lines.ExternCall):
        declared = schema.is_out_variant == bool(line.outs) and (schema.is_out_variant or not schema.mutated_arguments)
    else:
        declared = set(schema.mutated_operands(line.arguments, line.keywords)) <= set(line.writes)
    return "" if declared else "it does not declare what it writes"


def _is_enumeration(argument: Any) -> bool:
    return any(name in str(argument.real_type) for name in ("ScalarType", "Layout", "MemoryFormat"))


def _unchecked_inputs(program: Program) -> list[Value]:
    """Returns the inputs whose layout is not checked before anything else happens; only tensors can be checked."""
    checked = set()
    for line in program.body.lines:
        if not isinstance(line, _BEFORE_CHECKS):
            break
        if isinstance(line, lines.CheckLayout) and line.expected == line.tensor.type:
            checked.add(line.tensor.name)
    inputs = [item.value for item in program.inputs if isinstance(item.value, Value)]
    return [value for value in inputs if value.name not in checked or not isinstance(value.type, TensorType)]

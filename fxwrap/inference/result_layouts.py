"""Layouts of results that fake tensors and the operators' kernels may compute differently."""

from __future__ import annotations

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, ExternCall
from fxwrap.torch_compat import OpOverload, operator_overload, out_variant_of

_UNTAGGED = frozenset(
    {
        torch.ops.aten.binary_cross_entropy.default,
        torch.ops.aten.complex.default,
        torch.ops.aten.max_unpool2d.default,
        torch.ops.aten.polar.default,
        torch.ops.aten.reflection_pad3d.default,
        torch.ops.aten.replication_pad3d.default,
    }
)
"""Operators without torch's tag of pointwise ones, with strides that follow those of operands in eager mode only."""


def has_uncertain_layout(operator: OpOverload, line: ExternCall, result: ir.TensorType) -> bool:
    """Whether an operator, most of these pointwise, may return other strides than fake tensors have.

    TensorIterator orders the dimensions by the strides of all operands. Its order of dimensions whose strides are equal
    or zero (size 1, broadcast) is not that of fake tensors, and some operators always return contiguous results. Both
    agree on contiguous operands of the result's sizes, or without any dimension that may have size 1.
    """
    if torch.Tag.pointwise not in operator.tags and operator not in _UNTAGGED:
        return False
    types = [value.type for value in ir.leaves((line.arguments, line.keywords)) if isinstance(value, ir.Value)]
    tensors = [type_ for type_ in types if isinstance(type_, ir.TensorType)]
    if not tensors or not all(type_.is_contiguous for type_ in (result, *tensors)):
        return bool(tensors)
    has_size_one = not all(isinstance(size, int) and size != 1 for size in result.sizes)
    return has_size_one and any(type_.sizes != result.sizes for type_ in tensors)


def with_declared_layout(line: ExternCall) -> tuple[ir.LineBase, ...]:
    """Returns a call whose result has the declared strides: the line itself, or an allocation and the out variant.

    The line itself if the strides are certain, if the operator has no out variant, or if it draws random numbers, whose
    order follows eager's layout.
    """
    if line.outs or line.effect_set:
        return (line,)
    match line.results:
        case (ir.Value(type=ir.TensorType() as type_) as result,) if not any(line.aliases) and not type_.layout:
            pass
        case _:
            return (line,)
    operator = operator_overload(line.target)
    if not has_uncertain_layout(operator, line, type_) or (target := out_variant_of(line.target)) is None:
        return (line,)
    call = line.replace(results=(), aliases=(), target=ir.operator_name(target), outs=(result,))
    return Alloc(result, stream=line.stream, origin=line.origin), call

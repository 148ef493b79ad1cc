"""The rewriting rules of fused communication, as patterns and builders of `fxwrap.rewrite`.

Patterns are over graphs of ATen operators, as `fx_before_lowering` passes get them. A gather along a dimension other
than the first one is an all_gather, whose parts are concatenated there; reduce_scatters are the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import torch

from fxwrap import rewrite as rw
from fxwrap.wrapper_ir import TensorType, Value

_GROUP, _COUNT = rw.anything("group"), rw.number("count")
_SHARD, _RESIDUAL, _WEIGHT = rw.tensors("shard residual weight")
_WAIT = "_c10d_functional.wait_tensor.default"

Decline = Callable[[torch.device, str], str]
"""Returns why collectives of a group are not fused on a device, "" if they are."""


@dataclass(frozen=True)
class Rule:
    """A pattern with the function that builds its replacement, for one kind of collective.

    Fields:
        collective: the operator's name, "all_gather_into_tensor".
        pattern: the pattern.
        build: the replacement.
        is_reported: whether the report has its failures; those with several matmuls repeat what the others say.
    """

    collective: str
    pattern: object
    build: rw.ReplacementFunction
    is_reported: bool = True


# --- all_gather + matmul ----------------------------------------------------------------------------------------------


def all_gather_matmul(parts: int, dimension: int, matmuls: int, keeps_gathered: bool, decline: Decline) -> Rule:
    """Returns the rule for matmuls whose left operand is gathered along a dimension from `parts` ranks.

    With `keeps_gathered`, other operators read the gathered tensor too; the fused operator returns it.
    """
    started = rw.call("_c10d_functional.all_gather_into_tensor.default", _SHARD, _COUNT, _GROUP)
    gathered = rw.call(_WAIT, started)
    if dimension:
        split = rw.call("aten.split.Tensor", gathered, rw.number("rows"))
        gathered = rw.call("aten.cat.default", [split.output(number) for number in range(parts)], dimension)
    gathered = gathered.named("gathered")
    rows = rw.view(gathered, optional=True)
    outputs = tuple([
        rw.call("aten.mm.default", rows, rw.tensor(f"right{number}")).named(f"mm{number}")
        for number in range(matmuls)
    ])  # fmt: skip

    def build(match: rw.Match, builder: rw.LineBuilder) -> object:
        shard, lines = match["shard"], [match.line(f"mm{number}") for number in range(matmuls)]
        _require(shard, match["group"], decline)
        whole = _result_type(match.line("gathered"))
        for line in lines:
            _require_rows(line.arguments[0].tensor_type, whole)
        if dimension == len(whole.sizes) - 1:
            raise rw.Skip("it gathers the columns of the matmul's left operand, which would split the matmul's sums")
        rights = tuple([match[f"right{number}"] for number in range(matmuls)])
        gathered_again, results = builder.call(
            "symm_mem.fused_all_gather_matmul.default", shard, rights, dimension, match["group"],
            return_A=keeps_gathered,
        )  # fmt: skip
        replaced = [_in_layout(builder, item, line.results[0]) for item, line in zip(results, lines, strict=True)]
        return (*replaced, _of_type(builder, gathered_again, whole)) if keeps_gathered else tuple(replaced)

    return Rule("all_gather_into_tensor", (*outputs, gathered) if keeps_gathered else outputs, build, matmuls == 1)


# --- matmul + reduce_scatter ------------------------------------------------------------------------------------------


def matmul_reduce_scatter(parts: int, dimension: int, terms: int, decline: Decline) -> Rule:
    """Returns the rule for a sum of `terms` matmuls, summed over `parts` ranks and scattered along a dimension."""
    products = [
        rw.view(rw.call("aten.mm.default", rw.tensor(f"left{number}"), rw.tensor(f"right{number}")), optional=True)
        for number in range(terms)
    ]  # fmt: skip
    whole: object = products[0]
    for product in products[1:]:
        whole = rw.call("aten.add.Tensor", whole, product).as_commutative()
    whole = whole if terms == 1 else rw.view(whole, optional=True)
    operand: object = whole
    if dimension:
        split = rw.call("aten.split.Tensor", whole, rw.number("rows"), dimension).named("split")
        operand = rw.call("aten.cat.default", [split.output(number) for number in range(parts)])
    reduction = rw.anything("reduction")
    started = rw.call("_c10d_functional.reduce_scatter_tensor.default", operand, reduction, _COUNT, _GROUP)

    def build(match: rw.Match, builder: rw.LineBuilder) -> object:
        (result,), group = match.outputs, match["group"]
        assert isinstance(result, Value)
        lefts = [match[f"left{number}"] for number in range(terms)]
        rights = tuple([match[f"right{number}"] for number in range(terms)])
        _require(lefts[0], group, decline)
        if match["reduction"] not in ("sum", "avg"):
            raise rw.Skip(f"its reduction is '{match['reduction']}', and the fused operator has sum and avg")
        leading = (
            match.line("split").arguments[0].tensor_type.sizes[:-1] if dimension else lefts[0].tensor_type.sizes[:1]
        )
        if dimension == len(leading):
            raise rw.Skip("it scatters the columns of the matmul's result")
        lefts = [_with_leading(builder, left, leading) if dimension else left for left in lefts]
        if terms == 1 and not dimension:
            fused = builder.call(
                "symm_mem.fused_matmul_reduce_scatter.default", lefts[0], rights[0], match["reduction"], 0, group
            )
        else:
            fused = builder.call(
                "fxwrap_runtime.matmuls_reduce_scatter.default", tuple(lefts), rights, match["reduction"], dimension,
                match["count"], group,
            )  # fmt: skip
        return _of_type(builder, fused, result.tensor_type)

    return Rule("reduce_scatter_tensor", rw.call(_WAIT, started), build, terms == 1)


def _with_leading(builder: rw.LineBuilder, left: Value, leading: Sequence[Any]) -> Value:
    """Returns a view of a matmul's left operand whose rows are these leading dimensions."""
    type_ = left.tensor_type
    if not type_.is_contiguous or prod(leading) != type_.sizes[0]:
        raise rw.Skip(f"%{left.name}, the matmul's left operand, has no rows that are its leading dimensions")
    return builder.view(left, (*leading, type_.sizes[1]))


# --- all_reduce + residual + RMSNorm ----------------------------------------------------------------------------------


NormRounding = Literal["none", "last", "before the weight"]
"""Whether a norm of half precision, which computes in float32, is rounded at the end or before the weight."""


def all_reduce_rms_norm(operator: str, rounding: NormRounding, decline: Decline) -> Rule:
    """Returns the rule for the RMSNorm of an all_reduce plus a residual, in one operator."""
    reduced = rw.call(_WAIT, rw.call("_c10d_functional.all_reduce.default", _SHARD, "sum", _GROUP))
    total = rw.call("aten.add.Tensor", rw.view(reduced, optional=True), _RESIDUAL).as_commutative().named("total")
    x: object = rw.view(total, optional=True)
    if rounding != "none":
        x = _converted(x, torch.float32)
    mean = rw.call("aten.mean.dim", rw.call("aten.pow.Tensor_Scalar", x, 2), rw.anything("dimensions"), True)
    epsilon = rw.call(("aten.add.Scalar", "aten.add.Tensor", "aten.add_.Scalar"), mean, rw.number("epsilon"))
    scaled = rw.call("aten.mul.Tensor", x, rw.call("aten.rsqrt.default", epsilon)).as_commutative()
    if rounding == "before the weight":
        scaled = _converted(scaled, None)
    norm = rw.call("aten.mul.Tensor", scaled, _WEIGHT).as_commutative()
    if rounding == "last":
        norm = _converted(norm, None)

    def build(match: rw.Match, builder: rw.LineBuilder) -> object:
        shard, (normed, total_value) = match["shard"], match.outputs
        _require(shard, match["group"], decline)
        assert isinstance(normed, Value) and isinstance(total_value, Value)
        rank = len(normed.tensor_type.sizes)
        if [dimension % rank for dimension in match["dimensions"]] != [rank - 1]:
            raise rw.Skip("the norm is not over the last dimension")
        residual, weight = match["residual"], match["weight"]
        if residual.tensor_type.sizes != total_value.tensor_type.sizes:
            raise rw.Skip(f"the residual, %{residual.name}, is broadcast")
        if weight.tensor_type.sizes != normed.tensor_type.sizes[-1:]:
            raise rw.Skip(f"the weight, %{weight.name}, is no vector of the last dimension")
        results = builder.call(operator, shard, residual, weight, float(match["epsilon"]), match["group"])
        return tuple([
            _of_type(builder, item, value.tensor_type)
            for item, value in zip(results, (normed, total_value), strict=True)
        ])  # fmt: skip

    return Rule("all_reduce", (norm, total), build)


def _converted(x: object, dtype: torch.dtype | None) -> rw.Operation:
    to: Any = rw.anything("rounded_dtype") if dtype is None else dtype
    return rw.call("aten._to_copy.default", x, ..., dtype=to)


# --- small all_reduces ------------------------------------------------------------------------------------------------


_ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
_ONE_SHOT_ALIGNMENT = 16


def one_shot_all_reduce(largest: int, decline: Decline) -> Rule:
    """Returns the rule for an all_reduce of at most so many bytes, in which each rank reads the others' tensors."""
    started = rw.call("_c10d_functional.all_reduce.default", _SHARD, "sum", _GROUP)

    def build(match: rw.Match, builder: rw.LineBuilder) -> object:
        shard, group = match["shard"], match["group"]
        _require(shard, group, decline)
        type_ = shard.tensor_type
        if not type_.is_static or not type_.is_contiguous:
            raise rw.Skip(f"%{shard.name} is not a contiguous tensor of static sizes")
        if type_.dtype not in _ONE_SHOT_DTYPES:
            raise rw.Skip(f"%{shard.name} is neither bfloat16 nor float32")
        size = int(type_.storage_bytes)
        if size > largest or size == 0 or size % _ONE_SHOT_ALIGNMENT:
            raise rw.Skip(f"%{shard.name} has {size} bytes, which is no multiple of 16 from 16 to {largest}")
        return builder.call("fxwrap_runtime.one_shot_all_reduce.default", shard, group)

    return Rule("all_reduce", rw.call(_WAIT, started), build)


# --- conditions and layouts -------------------------------------------------------------------------------------------


def _require(operand: Value, group: object, decline: Decline) -> None:
    name = group.name if isinstance(group, Value) else str(group)
    reason = decline(operand.tensor_type.device, name)
    if reason:
        raise rw.Skip(reason)


def _require_rows(rows: TensorType, whole: TensorType) -> None:
    """Declines a matmul whose left operand is not the rows of a tensor: all leading dimensions as one."""
    expected = (prod(whole.sizes[:-1]), whole.sizes[-1])
    if rows.sizes != expected or not rows.is_contiguous or rows.storage_offset != 0:
        raise rw.Skip("the matmul's left operand is another view of the gathered tensor than its rows")


def _result_type(line: Any) -> TensorType:
    """Returns the type of the single result of a wait or of a call."""
    value = line.result if hasattr(line, "result") else line.results[0]
    type_: TensorType = value.tensor_type
    return type_


def _in_layout(builder: rw.LineBuilder, value: Value, old: Value) -> Value:
    return _of_type(builder, value, old.tensor_type)


def _of_type(builder: rw.LineBuilder, value: Value, type_: TensorType) -> Value:
    """Returns a value as a contiguous tensor of the sizes of a type; a copy fuses with the operators that read it."""
    if not value.tensor_type.is_contiguous:
        value = builder.call("aten.clone.default", value, memory_format=torch.contiguous_format)
    return value if value.tensor_type.sizes == type_.sizes else builder.view(value, type_.sizes)


def rules_for(
    parts: Sequence[int], dimensions: Sequence[int], matmuls: int, operator: str, one_shot_bytes: int, decline: Decline
) -> list[Rule]:
    """Returns the rules for graphs with groups of these sizes, and gathers and scatters along these dimensions.

    Those with more matmuls come first, since a line is part of one match only.
    """
    pairs = [(count, dimension) for dimension in dimensions for count in (parts if dimension else parts[:1])]
    rules = [
        all_gather_matmul(count, dimension, number, keeps_gathered, decline)
        for keeps_gathered in (False, True)
        for number in range(matmuls, 0, -1)
        for count, dimension in pairs
    ]
    rules += [
        matmul_reduce_scatter(count, dimension, terms, decline)
        for terms in range(matmuls, 0, -1)
        for count, dimension in pairs
    ]
    if operator:
        rules += [all_reduce_rms_norm(operator, rounding, decline) for rounding in get_args(NormRounding)]
    if one_shot_bytes:
        rules.append(one_shot_all_reduce(one_shot_bytes, decline))
    return rules

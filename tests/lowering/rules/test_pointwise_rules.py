"""Every pointwise rule against eager and float64, on all dtypes of its operator, special values included.

A rule without a comparison fails, and so does an argument that the samples' tables lack.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import sympy
import torch

from fxwrap.devices import CPU, CUDA
from fxwrap.loop_ir import STORAGE_ONLY, Compute
from fxwrap.lowering.fusion.definitions import Pointwise, Stored, pointwise
from fxwrap.lowering.rules import RULES, Declined, OperatorCall
from fxwrap.torch_compat import is_composite, operator_overload
from tests.lowering.evaluate_definitions import Computed, _DefinitionKernel, call_rule, fuses
from tests.lowering.rules.pointwise_samples import DTYPES, FLOATS, samples, special_values
from tests.lowering.rules.rule_checks import rules_of

MODULES = ("pointwise", "arithmetic", "functions", "activations", "pointwise_losses", "copies")
OVERLOADS = sorted(rules_of(*MODULES) - {"prims.fma.default"})
DECLINED = {"aten.binary_cross_entropy.default": "eager raises for inputs that are not between 0 and 1"}
"""Rules that decline every sample on the CPU."""

ZEROS_OF_EITHER_SIGN = tuple(f"aten.{part}" for part in (
    "max", "min", "clamp", "relu", "fmax", "fmin", "hardtanh.", "hardswish.", "hardsigmoid.", "gelu.",
))  # fmt: skip
"""Eager's scalar and vector code differ in the sign of zero."""

# --- comparison ------------------------------------------------------------------------------------------------------

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.float64: (1e-10, 1e-12), torch.bfloat16: (1.6e-2, 1e-3),
              torch.float16: (2e-3, 2e-4)}  # fmt: skip

CONSTANTS_OF_FLOAT32 = ("hardsigmoid_backward", "binary_cross_entropy_backward")
"""Operators whose eager kernels have a constant of float32 in float64 formulas."""


def compare(name: str, result: torch.Tensor, wanted: torch.Tensor, compute_float32: torch.Tensor, label: str) -> None:
    """Asserts that a result is eager's, or where half precision is rounded once instead of at each step, float32's."""
    assert result.dtype is wanted.dtype and result.shape == wanted.shape, label
    if not wanted.dtype.is_floating_point:
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, msg=lambda text: f"{label}\n{text}")
        return
    relative, absolute = TOLERANCES[wanted.dtype]
    if wanted.dtype is torch.float64 and any(part in name for part in CONSTANTS_OF_FLOAT32):
        relative = 1e-7
    near = torch.isclose(result, compute_float32.to(result.dtype), rtol=relative, atol=absolute, equal_nan=True)
    torch.testing.assert_close(
        result, torch.where(near, result, wanted), rtol=relative, atol=absolute, equal_nan=True,
        msg=lambda text: f"{label}\n{text}",
    )  # fmt: skip
    if not name.startswith(ZEROS_OF_EITHER_SIGN):
        zeros = (result == 0) & (wanted == 0) & (compute_float32 == 0)
        signs_differ = zeros & (result.signbit() != wanted.signbit()) & (result.signbit() != compute_float32.signbit())
        assert not signs_differ.any(), f"{label}: signs of zero"


def eager(name: str, positional: list[Any], keywords: dict[str, Any]) -> Any:
    """Returns eager's result, or None where it raises."""
    try:
        return operator_overload(name)(*positional, **keywords)
    except (RuntimeError, TypeError, NotImplementedError, ValueError, OverflowError):
        return None


def widened(item: Any) -> Any:
    half = isinstance(item, torch.Tensor) and item.dtype in STORAGE_ONLY
    return item.to(torch.float32) if half else item


def compared(name: str, positional: list[Any], keywords: dict[str, Any]) -> int:
    """Compares the results of a call with eager; returns the number of comparisons, 0 where a side has no result."""
    wanted = eager(name, positional, keywords)
    if wanted is None:
        assert not fuses(operator_overload(name), *positional, **keywords), f"eager raises for {positional} {keywords}"
        return 0
    result = call_rule(operator_overload(name), *positional, **keywords)
    if isinstance(result, str):
        return 0
    wide = wanted
    if any(item is not widened(item) for item in positional):
        wide = eager(name, [widened(item) for item in positional], keywords)
    shown = [item.dtype if isinstance(item, torch.Tensor) else item for item in [*positional, *keywords.values()]]
    if isinstance(wanted, torch.Tensor):
        result, wanted, wide = (result,), (wanted,), (wide,)
    for one, other, wider in zip(result, wanted, wide, strict=True):
        compare(name, one, other, wider, f"{name} of {shown}")
    return len(wanted)


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OVERLOADS)
def test_every_dtype_and_special_value_matches_eager(name: str) -> None:
    count = sum(compared(name, *sample) for dtype in DTYPES for sample in samples(name, dtype))
    if name not in DECLINED:
        assert count > 0, "nothing was compared"
        return
    assert count == 0
    reasons = {call_rule(operator_overload(name), *positional, **keywords)
                for dtype in FLOATS for positional, keywords in samples(name, dtype, probabilities)}  # fmt: skip
    assert reasons == {DECLINED[name]}


def probabilities(dtype: torch.dtype, count: int) -> torch.Tensor:
    if not dtype.is_floating_point:
        return special_values(dtype, count)
    return torch.rand(count, generator=torch.Generator().manual_seed(1)).to(dtype)


# --- accuracy, numbers, promotion and shapes -------------------------------------------------------------------------


def ordinary_values(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(torch.randint(2**31, ()).item())
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 1.5).to(dtype)


def relative_error(result: torch.Tensor, exact: torch.Tensor, counted: torch.Tensor) -> float:
    difference = (result.double() - exact)[counted]
    return (difference.norm() / exact[counted].norm().clamp(min=1e-30)).item()


NO_FLOATS = tuple(f"aten.{part}" for part in (
    "__", "bitwise", "eq.", "ne.", "lt.", "le.", "gt.", "ge.", "is", "logical_", "signbit", "floor", "nextafter",
    "remainder", "fmod", "div.Scalar_mode", "div.Tensor_mode", "ceil", "round", "trunc", "frac", "heaviside",
    "copysign", "sign.", "sgn.", "hardshrink", "threshold",
))  # fmt: skip
"""Discontinuous operators: a rounded operand changes the result, so they are compared with eager alone."""


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    "name", [name for name in OVERLOADS if name not in DECLINED and not name.startswith(NO_FLOATS)]
)
def test_accuracy_against_float64_matches_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)  # a mean of other values may be near zero, and its relative error large by chance
    compared_samples = 0
    for positional, keywords in samples(name, dtype, ordinary_values):
        wanted = eager(name, positional, keywords)
        exact = eager(name, [item.double() if is_float(item) else item for item in positional], keywords)
        result = None if wanted is None else call_rule(operator_overload(name), *positional, **keywords)
        if wanted is None or isinstance(result, str):
            continue
        parts = [(result, wanted, exact)] if isinstance(wanted, torch.Tensor) else zip(result, wanted, exact)
        for one, other, best in parts:
            if not best.dtype.is_floating_point or not other.dtype.is_floating_point:
                continue
            counted = best.isfinite() & other.isfinite()
            bound = 1.5 * relative_error(other, best, counted) + 2 * torch.finfo(other.dtype).eps
            assert relative_error(one, best, counted) <= bound, (positional, keywords)
            compared_samples += 1
    assert compared_samples > 0


def is_float(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


NUMBER_CALLS = [
    ("aten.add.Scalar", (0.1007,)), ("aten.sub.Scalar", (0.1007,)), ("aten.rsub.Scalar", (0.1007,)),
    ("aten.mul.Scalar", (0.1007,)), ("aten.div.Scalar", (0.1007,)), ("aten.lt.Scalar", (0.1007,)),
    ("aten.eq.Scalar", (0.1007,)), ("aten.ge.Scalar", (0.1007,)), ("aten.remainder.Scalar", (0.1007,)),
    ("aten.fmod.Scalar", (0.1007,)), ("aten.floor_divide.Scalar", (0.1007,)), ("aten.clamp_min.default", (0.1007,)),
    ("aten.hardtanh.default", (-0.7, 0.1007)), ("aten.hardshrink.default", (0.1007,)),
    ("aten.softshrink.default", (0.1007,)), ("aten.leaky_relu.default", (0.1007,)),
    ("aten.threshold.default", (0.1007, 0.3)), ("aten.masked_fill.Scalar", (0.1007,)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(("name", "numbers"), NUMBER_CALLS)
def test_scalars_are_rounded_to_half_precision_like_torch(
    name: str, numbers: tuple[Any, ...], dtype: torch.dtype
) -> None:
    x = torch.cat([torch.randn(3000) * 3, torch.rand(3000) * 0.3, torch.tensor([0.1007])]).to(dtype)
    mask = (x > 0,) if "masked" in name else ()
    result = call_rule(operator_overload(name), x, *mask, *numbers)
    torch.testing.assert_close(result, operator_overload(name)(x, *mask, *numbers), rtol=0, atol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ("add", "sub", "mul", "div", "maximum", "eq", "lt", "pow", "atan2", "remainder"))
def test_operands_of_two_dtypes_are_promoted_as_torch_does(name: str) -> None:
    overload = getattr(torch.ops.aten, name)
    overload = next(getattr(overload, item) for item in ("Tensor", "Tensor_Tensor", "default")
                    if item in overload.overloads())  # fmt: skip
    count = 0
    for left, right in itertools.permutations(DTYPES, 2):
        for left_shape, right_shape in (((4,), (4,)), ((), (4,)), ((4,), ())):
            x = (torch.randn(left_shape) * 5 + 0.1).to(left)
            y = (torch.rand(right_shape) * 300 + 1.3).clamp(max=100 if right is torch.int8 else 250).to(right)
            full = f"aten.{name}.{overload._overloadname}"
            count += compared(full, [x, y], {})
    assert count > 100


SHAPES = [((), ()), ((0,), (0,)), ((1,), (1,)), ((2, 1, 3), (4, 1)), ((3,), ()), ((0, 3), (1, 3)), ((1, 1), (2, 5)),
          ((7, 3), (7, 3))]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("name", [f"aten.{name}" for name in (
    "add.Tensor", "where.self", "mse_loss.default", "xlogy.Tensor", "masked_fill.Scalar", "huber_loss.default",
    "tanh_backward.default",
)])  # fmt: skip
def test_shapes_are_broadcast(name: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    x, y = torch.randn(left), torch.randn(right)
    arguments = {
        "aten.where.self": [torch.rand(torch.broadcast_shapes(left, right)) > 0.5, x, y],
        "aten.masked_fill.Scalar": [x, y > 0, 2.5],
    }.get(name, [x, y])
    if eager(name, arguments, {}) is None:
        assert "backward" in name and left != right
        return
    assert compared(name, arguments, {}) == 1


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)])
@pytest.mark.parametrize("name", ("aten.gelu.default", "aten.isnan.default", "aten.neg.default", "aten.clone.default"))
def test_shapes_of_one_operand(name: str, shape: tuple[int, ...]) -> None:
    assert compared(name, [torch.randn(shape)], {}) == 1


def test_the_smallest_integer_over_minus_one_wraps() -> None:
    x = torch.tensor([-(2**63), 7])
    ops = torch.ops.aten
    harmless = torch.tensor([1, 1])

    def divided(overload: Any, **keywords: Any) -> Any:
        call = {"overload": overload, "keywords": keywords}
        assert not isinstance(call_rule(call["overload"], harmless, -1, **keywords), str)
        return call_rule(_WithoutEager(overload), x, -1, **keywords)

    assert divided(ops.div.Scalar_mode, rounding_mode="floor").tolist() == [-(2**63), -7]
    assert divided(ops.remainder.Scalar).tolist() == [0, 0]
    assert divided(ops.fmod.Scalar).tolist() == [0, 0]


class _WithoutEager:
    """An overload whose eager call, which would kill the process, is replaced by its metadata."""

    def __init__(self, overload: Any) -> None:
        self.overload = overload
        self._schema, self._overloadname = overload._schema, overload._overloadname

    def __call__(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty_like(x)


@pytest.mark.parametrize("reduction", (0, 1, 2))
def test_binary_cross_entropy_requires_probabilities_on_a_gpu(reduction: int) -> None:
    """The evaluator computes the rule for GPUs."""
    x, y, weight = torch.rand(5, 3), torch.rand(5, 3), torch.rand(3)
    x[0] = torch.tensor([0.0, 1.0, 1e-30])
    device = torch.device("cuda", 0)
    wanted = torch.ops.aten.binary_cross_entropy(x, y, weight, reduction)

    def compute(x: torch.Tensor) -> torch.Tensor:
        stored = {Stored(tuple(item.shape), item.dtype, device): item for item in (x, y, weight)}
        call = OperatorCall("aten.binary_cross_entropy.default", [*stored, reduction], {}, wanted, device,
                    lambda item: tuple(item.shape), CUDA)  # fmt: skip
        result = RULES[call.name](call)
        assert isinstance(result, Pointwise)
        return Computed(stored).tensor(result)

    torch.testing.assert_close(compute(x), wanted)
    with pytest.raises(IndexError, match="all elements of input should be between 0 and 1"):
        compute(x + 0.5)


# --- symbols, decline reasons, completeness ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("add.Scalar", (1,)), ("add.Tensor", ("y",)), ("mul.Scalar", ()), ("leaky_relu.default", ()), ("elu.default", ()),
     ("clamp.default", (None,)), ("masked_fill.Scalar", ("mask",)), ("softplus.default", (2.0,)),
     ("pow.Tensor_Scalar", ()), ("hardtanh.default", (-1.0,)), ("div.Scalar", ()), ("lerp.Scalar", ("y",))],
)  # fmt: skip
def test_symbolic_numbers(name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    symbol, value = sympy.Symbol("f0", real=True), 1.75
    tensors = {"y": torch.randn(5), "mask": torch.randn(5) > 0}
    before = [tensors.get(item, item) if isinstance(item, str) else item for item in arguments]
    keyword = {"add.Tensor": "alpha"}.get(name)
    number = _DefinitionKernel.number
    monkeypatch.setattr(
        _DefinitionKernel, "number", lambda self, item, dtype: number(self, value if item is symbol else item, dtype)
    )  # fmt: skip

    class Overload(_WithoutEager):
        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            plain = [value if item is symbol else item for item in arguments]
            return self.overload(*plain, **dict.fromkeys(keywords, value))

    x = torch.randn(5)
    overload = Overload(operator_overload(f"aten.{name}"))
    call = ([x, *before], {keyword: symbol}) if keyword else ([x, *before, symbol], {})
    result = call_rule(overload, *call[0], **call[1])
    torch.testing.assert_close(result, overload(*call[0], **call[1]), equal_nan=True)


X, N, B = torch.randn(3), torch.tensor([1, 2, 3]), torch.tensor([True, False, True])
DECLINE_REASONS = [
    ("add.Tensor", (X, X.to(torch.complex64)), {}, "kernels have no torch.complex64"),
    ("abs.default", (X.to(torch.complex64),), {}, "kernels have no torch.complex64"),
    ("_to_copy.default", (X,), {"dtype": torch.complex64}, "kernels have no torch.complex64"),
    ("_to_copy.default", (X,), {"dtype": torch.float8_e8m0fnu}, "kernels have no torch.float8_e8m0fnu"),
    ("isnan.default", (X.to(torch.float8_e5m2),), {}, "kernels do not compute in torch.float8_e5m2"),
    ("_to_copy.default", (X,), {"device": torch.device("meta")}, "a copy from cpu to meta"),
    ("floor_divide.default", (N, N), {}, "integer division by a divisor that may be zero, for which eager raises"),
    ("remainder.Tensor", (N, N), {}, "integer division by a divisor that may be zero, for which eager raises"),
    ("fmod.Tensor", (N, N), {}, "integer division by a divisor that may be zero, for which eager raises"),
    ("remainder.Scalar_Tensor", (7, N), {}, "integer division by a divisor that may be zero, for which eager raises"),
    ("add.Scalar", (N.to(torch.uint8), 300), {}, "the number 300 is out of the range of torch.uint8"),
    ("eq.Scalar", (N.to(torch.int8), 200), {}, "the number 200 is out of the range of torch.int8"),
    ("round.decimals", (N,), {"decimals": -1}, "an integer rounded to decimals"),
    ("polygamma.default", (1, X), {}, "kernels have no polygamma functions above the digamma function"),
    ("nextafter.default", (X.bfloat16(), X.bfloat16()), {},
     "kernels compute in float32, which has other neighbours than torch.bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "positional", "keywords", "reason"), DECLINE_REASONS)
def test_decline_reasons(name: str, positional: tuple[Any, ...], keywords: dict[str, Any], reason: str) -> None:
    overload = operator_overload(f"aten.{name}")
    if "device" in keywords:
        fake = overload(*positional, **keywords)
        x = Stored((3,), torch.float32, torch.device("cpu"))
        call = OperatorCall(f"aten.{name}", [x], keywords, fake, fake.device, lambda item: tuple(item.shape), CPU)
        with pytest.raises(Declined, match=f"^{re.escape(reason)}$"):
            RULES[call.name](call)
    elif eager(f"aten.{name}", list(positional), keywords) is None:
        assert call_rule(_WithoutEager(overload), *positional, **keywords) == reason
    else:
        assert call_rule(overload, *positional, **keywords) == reason


def test_division_by_a_zero_scalar_is_declined() -> None:
    overload = _WithoutEager(torch.ops.aten.remainder.Scalar)
    assert call_rule(overload, N, 0) == "integer division by zero, for which eager raises"
    overload = _WithoutEager(torch.ops.aten.pow.Tensor_Scalar)
    assert call_rule(overload, N, -1) == "an integer to a negative power, for which eager raises"


DECLINED_OPERATORS = (
    "equal", "frexp", "gcd", "lcm", "i0", "igamma", "igammac",
    "special_airy_ai", "special_bessel", "special_chebyshev", "special_erfcx", "special_hermite", "special_i0e",
    "special_i1", "special_laguerre", "special_legendre", "special_log_ndtr", "special_modified_bessel",
    "special_ndtri", "special_scaled_modified", "special_shifted", "special_spherical", "special_zeta",
)  # fmt: skip
"""Pointwise operators without a rule: random, with a result that is not a tensor, or without a short formula.

Composite operators are decomposed.
"""


def test_every_pointwise_operator_has_a_rule_or_is_named_here() -> None:
    missing = []
    for schema in torch._C._jit_get_all_schemas():
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
        if not schema.name.startswith("aten::") or schema.is_mutable or name.startswith("_foreach"):
            continue
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if operator is None or torch.Tag.pointwise not in operator.tags or is_composite(operator):
            continue
        if f"aten.{name}.{overload}" not in RULES:
            missing.append(name)
    assert [name for name in missing if not name.startswith(DECLINED_OPERATORS)] == []
    assert all(any(name.startswith(part) for name in missing) for part in DECLINED_OPERATORS)


def test_a_cast_to_half_precision_rounds_inside_a_kernel() -> None:
    x = Stored((1,), torch.float32, torch.device("cpu"))
    call = OperatorCall(
        "prims.convert_element_type.default",
        [x, torch.bfloat16],
        {},
        torch.empty(1, dtype=torch.bfloat16),
        torch.device("cpu"),
        lambda item: tuple(item.shape),
        CPU,
    )
    narrow = RULES[call.name](call)
    assert isinstance(narrow, Pointwise)
    wide = pointwise((1,), torch.float32, torch.device("cpu"), lambda reader, indices: narrow.body(reader, indices))
    number = torch.tensor([1.001])
    torch.testing.assert_close(Computed({x: number}).tensor(wide), number.bfloat16().float(), rtol=0, atol=0)


def test_in_place_addcmul_and_addcdiv_as_dynamo_captures_them() -> None:
    """Newer releases of torch capture `prims.fma`, which torch registers only for this."""

    def function(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return x.clone().addcmul_(left, right, value=0.25).addcdiv_(left, right, value=-0.5)

    inputs = [torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    compiled = torch.compile(function, backend="fxwrap", fullgraph=True, options={"fallback": "error"})
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("name", ("aten.mish.default", "aten.mish_backward.default"))
def test_mish_has_one_transcendental_function(name: str) -> None:
    x = Stored((8,), torch.float32, torch.device("cpu"))
    operands = [x] * len(operator_overload(name)._schema.arguments)
    result = torch.empty(8)
    definition = RULES[name](OperatorCall(name, operands, {}, result, x.device, lambda item: tuple(item.shape), CPU))
    assert isinstance(definition, Pointwise)
    kernel = _DefinitionKernel(Computed({x: torch.empty(8)}))
    kernel.store(definition)
    computed = [item.name for item in kernel.body.operations if isinstance(item, Compute)]
    assert [item for item in computed if item in ("exp", "log1p", "tanh", "sigmoid")] == ["exp"]

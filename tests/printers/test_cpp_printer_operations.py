"""Every scalar operation in C++ against torch: exact where torch is exact, else within ULPs of float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from fxwrap.loop_ir import (
    INTEGERS,
    KERNEL_DTYPES,
    OPERATIONS,
    Axis,
    Buffer,
    Kernel,
    KernelBuilder,
    OperationSpec,
    as_index,
)
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.runtime.kernels import load_kernel
from tests.printers.cpp_kernels import compiled_together

FLOATS = (torch.float32, torch.float64)
ULPS = {"lgamma": 16, "digamma": 64, "erfinv": 8, "sigmoid": 6}
"""Where 4 is not kept: sums of several functions, and torch's own algorithms near zeros of the function."""

EXACT_NAMES = """
add sub mul div maximum minimum neg abs sign fmax fmin floor ceil round trunc reciprocal copysign nextafter floor_divide
trunc_divide
"""
EXACT = frozenset(EXACT_NAMES.split())
REMAINDERS = frozenset({"fmod", "remainder", "floor_divide"})
"""Exact too; but where a quotient overflows, eager's remainders are NaN, so their reference is computed in float64."""

SPECIAL_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.25, 1e-3, 0.9999, 88.5, -88.5, 89.0, -104.5, 1e10, -1e10,
    1e-40, 3e38, 10.0, 0.7, float("inf"), -float("inf"), float("nan"),
)  # fmt: skip


def values(dtype: torch.dtype) -> torch.Tensor:
    """Interesting values of a dtype and random ones."""
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        special = [0, 1, 2, 3, 5, 7, 31, 63, info.max, info.max - 1, info.min, info.min + 1]
        special += [] if dtype is torch.uint8 else [-1, -2, -3, -7]
        return torch.tensor(special, dtype=dtype)
    random = torch.cat([torch.randn(40, generator=generator), torch.randn(20, generator=generator) * 30])
    return torch.cat([torch.tensor(SPECIAL_FLOATS, dtype=torch.float64), random.double()]).to(dtype)


def operands_of(spec: OperationSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every combination of the interesting values, as flat tensors."""
    dtypes = [torch.bool, dtype, dtype] if spec.name == "where" else [dtype] * spec.operands
    chosen = [values(item) for item in dtypes]
    if spec.operands == 3:
        first, last = chosen[1][:20], chosen[2][:20]
        chosen[1:] = [first, last[torch.arange(last.numel()).flip(0)]]  # there is no flip of float8
    grid = torch.meshgrid(*[torch.arange(item.numel()) for item in chosen], indexing="ij")
    used = [item[index.flatten()] for item, index in zip(chosen, grid, strict=True)]
    if spec.name in REMAINDERS and dtype in FLOATS:
        used = [torch.cat(parts) for parts in zip(used, dividends_and_divisors(dtype), strict=True)]
    return used


def dividends_and_divisors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of all exponents: small quotients, multiples and their neighbours, and large quotients."""
    generator = torch.Generator().manual_seed(13)
    word = torch.int32 if dtype is torch.float32 else torch.int64
    limits = torch.iinfo(word)
    divisor = torch.randint(limits.min, limits.max, (4096,), generator=generator, dtype=word).view(dtype)
    small = torch.randn(4096, generator=generator, dtype=dtype) * 1000
    multiple = torch.randint(-(2**23), 2**23, (4096,), generator=generator).to(dtype) * divisor
    beside = torch.nextafter(multiple, torch.zeros_like(multiple))
    large = divisor * torch.exp2(torch.randint(0, 90, (4096,), generator=generator)).to(dtype) * small
    return torch.cat([divisor * small, multiple, beside, large]), divisor.repeat(4)


def kernel_of(spec: OperationSpec, used: Sequence[torch.Tensor], result: torch.dtype) -> Kernel:
    """A kernel that applies one operation to each element."""
    body, axis = KernelBuilder(), Axis("i", used[0].numel())
    loads = [body.load(f"in{index}", as_index(axis), item.dtype) for index, item in enumerate(used)]
    body.store("out", as_index(axis), body.compute(spec.name, *loads, dtype=result))
    inputs = [Buffer(f"in{index}", item.dtype, item.numel()) for index, item in enumerate(used)]
    return body.finish([axis], [], inputs, [Buffer("out", result, axis.size)])


def run(kernel: Kernel, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one output of a kernel."""
    printed = print_cpp_kernel(kernel)
    out = torch.full((int(kernel.outputs[0].extent),), 77).to(kernel.outputs[0].dtype)
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), *inputs, out)
    return out


def ulps(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the distance in units in the last place of the expected value; NaN equals NaN."""
    close = expected.to(actual.dtype)
    spacing = (torch.nextafter(close.abs(), torch.full_like(close, torch.inf)) - close.abs()).double()
    away = (actual.double() - expected.double()).abs() / spacing
    same = (actual == close) | (actual.isnan() & close.isnan())
    return torch.where(same, 0.0, away.nan_to_num(nan=torch.inf))


def skip_divisions_by_zero(spec: OperationSpec, dtype: torch.dtype, used: list[torch.Tensor]) -> list[torch.Tensor]:
    """Integer division by zero, and of the least number by -1, which torch refuses or traps on, have no reference."""
    if dtype in INTEGERS and spec.name in ("floor_divide", "trunc_divide", "integer_remainder", "integer_fmod"):
        good = (used[1] != 0) & (used[1].to(torch.int64) != -1)
        return [item[good] for item in used]
    if dtype in INTEGERS and spec.name == "integer_pow":
        good = (used[1].to(torch.int64) >= 0) & (used[1].to(torch.int64) < 70)
        return [item[good] for item in used]
    return used


CASES = [
    (spec, dtype)
    for spec, dtype in itertools.product(OPERATIONS.values(), sorted(KERNEL_DTYPES, key=str))
    if spec.domain.accepts(dtype) and spec.name not in ("cast", "bitcast")
]


def _case(spec: OperationSpec, dtype: torch.dtype) -> tuple[Kernel, list[torch.Tensor]]:
    used = skip_divisions_by_zero(spec, dtype, operands_of(spec, dtype))
    return kernel_of(spec, used, torch.bool if spec.result == "bool" else dtype), used


compiled = compiled_together(lambda spec, dtype: _case(spec, dtype)[0])


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("spec", "dtype"), CASES, ids=lambda item: getattr(item, "name", str(item)[6:]))
def test_operations_match_torch(spec: OperationSpec, dtype: torch.dtype) -> None:
    kernel, used = _case(spec, dtype)
    result, actual = kernel.outputs[0].dtype, run(kernel, used)
    if dtype not in FLOATS or result is torch.bool or spec.name in {*EXACT, *REMAINDERS, "where"}:
        is_nan_in_eager = dtype in FLOATS and spec.name in REMAINDERS - EXACT
        expected = spec.reference(*[item.double() if is_nan_in_eager else item for item in used]).to(result)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        if dtype in FLOATS and result is not torch.bool:
            real = ~expected.isnan()
            assert torch.equal(actual.signbit()[real], expected.signbit()[real]), "signed zeros"
        return
    expected = spec.reference(*[item.double() for item in used])
    worst = ulps(actual, expected)
    index = int(worst.argmax())
    assert worst[index] <= ULPS.get(spec.name, 4), (
        f"{[float(item[index]) for item in used]} gives {actual[index]}, not {expected[index]}"
    )


UNARY = [
    spec for spec in OPERATIONS.values() if spec.operands == 1 and spec.result == "same" and spec.name not in EXACT
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "spec", [spec for spec in UNARY if spec.domain.accepts(torch.float32)], ids=lambda spec: spec.name
)
def test_a_function_is_accurate_everywhere(spec: OperationSpec, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    sign = torch.randint(0, 2, (60000,), generator=generator) * 2 - 1
    size = torch.exp2(torch.empty(60000, dtype=torch.float64).uniform_(-40, 12, generator=generator))
    near = torch.empty(60000, dtype=torch.float64).uniform_(-3, 3, generator=generator)
    if spec.name in ("tan", "sin", "cos", "lgamma", "digamma"):
        size = size.clamp(max=100)
    used = torch.cat([sign * size, near]).to(dtype)
    if spec.name in ("lgamma", "digamma"):
        used = used.abs()  # between their poles torch's own digits are lost
    if spec.name == "erfinv":
        used = used[used.abs() < (0.8 if dtype is torch.float64 else 1)]  # beyond, erf in float64 has too few digits
    actual, expected = run(kernel_of(spec, [used], dtype), [used]), spec.reference(used.double())
    worst = ulps(actual, expected)
    worst[expected.abs() < {"lgamma": 1e-3, "digamma": 1e-3, "sigmoid": 2e-38}.get(spec.name, 0.0)] = 0.0
    index = int(worst.argmax())
    assert worst[index] <= ULPS.get(spec.name, 4), (
        f"{spec.name}({used[index]}) is {actual[index]}, not {expected[index]}"
    )


def test_lgamma_of_negative_numbers() -> None:
    """Where terms cancel, too: eager's own digits are lost there."""
    generator = torch.Generator().manual_seed(7)
    used = torch.cat(
        [torch.rand(40000, generator=generator) * -60, torch.tensor([-0.0, -1.0, -2.0, -1e-45, -torch.inf])]
    )
    actual = run(kernel_of(OPERATIONS["lgamma"], [used], torch.float32), [used])
    expected = torch.lgamma(used.double())
    torch.testing.assert_close(actual.double(), expected, rtol=2e-7, atol=1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", sorted(KERNEL_DTYPES, key=str), ids=str)
def test_casts_match_torch(source: torch.dtype) -> None:
    targets = sorted(KERNEL_DTYPES, key=str)
    operand = values(source)
    body, axis = KernelBuilder(), Axis("i", operand.numel())
    for index, target in enumerate(targets):
        value = body.load("x", as_index(axis), source)
        body.store(f"out{index}", as_index(axis), body.compute("cast", value, dtype=target))
    outputs = [Buffer(f"out{index}", target, axis.size) for index, target in enumerate(targets)]
    kernel = body.finish([axis], [], [Buffer("x", source, axis.size)], outputs)
    printed = print_cpp_kernel(kernel)
    outs = [torch.empty(operand.numel(), dtype=target) for target in targets]
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), operand, *outs)
    for target, out in zip(targets, outs, strict=True):
        in_range = torch.ones_like(operand, dtype=torch.bool)
        if source.is_floating_point and target in INTEGERS:  # what does not fit is undefined
            in_range = (operand.double() > torch.iinfo(target).min) & (operand.double() < torch.iinfo(target).max)
        torch.testing.assert_close(out[in_range], operand[in_range].to(target), rtol=0, atol=0, equal_nan=True)


def test_casts_of_every_float16_and_of_the_floats_between_them() -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = halves[halves.isfinite()].float().sort().values
    middle = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, side)) for side in (torch.inf, -torch.inf)]
    large = torch.tensor([65519.0, 65520.0, 65536.0, 1e30, torch.inf, torch.nan, 1e-45, 2**-25])
    floats = torch.cat([middle, *beside, large, -large])
    for source, target in ((halves, torch.float32), (floats, torch.float16)):
        body, axis = KernelBuilder(), Axis("i", source.numel())
        value = body.load("x", as_index(axis), source.dtype)
        body.store("out", as_index(axis), body.compute("cast", value, dtype=target))
        buffers = [Buffer("x", source.dtype, axis.size)], [Buffer("out", target, axis.size)]
        printed, out = print_cpp_kernel(body.finish([axis], [], *buffers)), torch.empty(source.numel(), dtype=target)
        load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), source, out)
        torch.testing.assert_close(out, source.to(target), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out.signbit(), source.to(target).signbit())


@pytest.mark.parametrize("source", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_cast_to_an_integer_and_back_is_not_trunc(source: torch.dtype) -> None:
    """GCC takes it for trunc, which gives -0.0 for -0.5, and NaN for NaN."""
    integers = (torch.int8, torch.int16, torch.int32, torch.int64)
    operand = torch.tensor([-0.5, -0.0, 0.7, -1.5, torch.nan, 3.0], dtype=source).repeat(11)
    body, axis = KernelBuilder(), Axis("i", operand.numel())
    for index, integer in enumerate(integers):
        value = body.compute("cast", body.load("x", as_index(axis), source), dtype=integer)
        body.store(f"out{index}", as_index(axis), body.compute("cast", value, dtype=source))
    outputs = [Buffer(f"out{index}", source, axis.size) for index in range(len(integers))]
    printed = print_cpp_kernel(body.finish([axis], [], [Buffer("x", source, axis.size)], outputs))
    outs = [torch.empty_like(operand) for _ in integers]
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), operand, *outs)
    for integer, out in zip(integers, outs, strict=True):
        wanted = operand.to(integer).to(source)
        assert not out.isnan().any() and not torch.signbit(out[wanted == 0]).any()
        assert torch.equal(out[~operand.isnan()], wanted[~operand.isnan()])


def test_combined_bools_stay_bool_in_nested_operations() -> None:
    """C++ makes an int of `a & b`, which a function of two values of one type does not take beside a bool."""
    body, axis = KernelBuilder(), Axis("i", 8)
    a, b, c = [body.load(name, as_index(axis), torch.bool) for name in "abc"]
    both, either = body.compute("logical_and", b, c), body.compute("bitwise_or", a, c)
    body.store("out", as_index(axis), body.compute("where", body.compute("where", a, both, c), b, either))
    buffers = [Buffer(name, torch.bool, 8) for name in ("a", "b", "c", "out")]
    printed = print_cpp_kernel(body.finish([axis], [], buffers[:3], buffers[3:]))
    operand = [torch.tensor(column) for column in zip(*itertools.product([False, True], repeat=3), strict=True)]
    out = torch.empty(8, dtype=torch.bool)
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), *operand, out)
    x, y, z = operand
    assert torch.equal(out, torch.where(torch.where(x, y & z, z), y, x | z))


@pytest.mark.parametrize("dtype", FLOATS)
def test_maxima_and_minima_beside_constants(dtype: torch.dtype) -> None:
    """They have forms of their own, which agree on NaN and signed zeros, whichever operand the constant is."""
    body, i, size = KernelBuilder(), Axis("i", len(SPECIAL_FLOATS)), len(SPECIAL_FLOATS)
    x = body.load("x", as_index(i), dtype)
    constants = [(number, body.constant(number, dtype)) for number in (0.0, -0.0, 3.0, float("inf"), float("nan"))]
    names = list(itertools.product(("maximum", "minimum"), range(len(constants)), (False, True)))
    for number, (name, which, is_first) in enumerate(names):
        operands = (constants[which][1], x) if is_first else (x, constants[which][1])
        body.store(f"out{number}", as_index(i), operands[0].apply(name, operands[1]))
    outputs = [Buffer(f"out{number}", dtype, size) for number in range(len(names))]
    kernel = body.finish([i], [], [Buffer("x", dtype, size)], outputs)
    values, results = torch.tensor(SPECIAL_FLOATS, dtype=dtype), [torch.empty(size, dtype=dtype) for _ in names]
    printed = print_cpp_kernel(kernel)
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), values, *results)
    for (name, which, is_first), result in zip(names, results):
        constant = torch.full_like(values, constants[which][0])
        expected = getattr(torch, name)(*((constant, values) if is_first else (values, constant)))
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        real = ~expected.isnan()
        assert torch.equal(result.signbit()[real], expected.signbit()[real]), "signed zeros"

"""What the text of Triton kernels looks like: names, masks, the order of loads, the forms that operations have."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index
from fxwrap.printers.triton import TileConfiguration, print_triton
from tests.printers.triton_kernels import BF16, F32, F64, I64, build, check, launch_interpreted, softmax_kernel

# NumPy, which the interpreter computes with, warns of what these tests are about: overflow, NaN, division by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_masks_only_where_a_block_exceeds_the_bounds() -> None:
    assert "mask" not in print_triton(softmax_kernel(8, 4096)).source
    assert "mask" in print_triton(softmax_kernel(8, 4095)).source


def test_the_text_is_readable() -> None:
    text = print_triton(softmax_kernel(8192, 4096)).source
    assert text.endswith(
        """@triton.jit
def kernel(x_ptr, out_ptr, R_BLOCK: tl.constexpr):
    p0 = tl.program_id(0)
    r0 = tl.arange(0, R_BLOCK)
    # softmax of model.py:12
    x = tl.load(x_ptr + p0 * 4096 + r0).to(tl.float32)
    largest = tl.reduce(x, 0, maximum_or_nan)
    exponentials = tl.sum(tl.exp(x - largest), 0)
    exponentials = tl.where(largest == float("-inf"), 0.0, exponentials)
    sub = x - largest
    exp = tl.exp(sub)
    quotient = exp * (1.0 / exponentials)
    tl.store(out_ptr + p0 * 4096 + r0, quotient.to(tl.bfloat16))
"""
    )


def test_names_do_not_clash() -> None:
    axis = Axis("program", 6)

    def write(body: KernelBuilder) -> None:
        value = (
            body.load("tl", as_index(axis), F32)
            + body.load("x.1", as_index(axis), F32)
            + body.load("exp", as_index(axis), F32)
        )
        body.store("kernel", as_index(axis), body.compute("erf", value.exp().exp()))

    inputs = dict.fromkeys(("tl", "x.1", "exp"), (F32, 6))
    check(build([axis], [], inputs, {"kernel": (F32, 6)}, write))


def test_fast_math_only_where_half_precision_hides_it() -> None:
    half = print_triton(softmax_kernel(8, 64, BF16)).source
    assert "tl.exp(" in half and "div_rn" not in half and "libdevice" not in half
    single = print_triton(softmax_kernel(8, 64, F32)).source
    assert "tl.exp(" not in single and "div_rn" in single
    axis = Axis("p0", 64)

    def write(body: KernelBuilder) -> None:
        x, y = [body.load(name, as_index(axis), BF16).to(F32) for name in "xy"]
        body.store("product", as_index(axis), (x.exp() * y).to(BF16))
        body.store("difference", as_index(axis), ((x + 1.0).exp() - y).to(BF16))
        body.store("logarithm", as_index(axis), body.compute("log", (x + 2.0).exp() + 1.0).to(BF16))
        body.store("quotient", as_index(axis), (x / y).to(BF16))
        body.store("silu", as_index(axis), (x / ((-x).exp() + 1.0) + y).to(BF16))
        body.store("rest", as_index(axis), (1.0 - x / (y * y + 1.0)).to(BF16))

    outputs = dict.fromkeys(("product", "difference", "logarithm", "quotient", "silu", "rest"), (BF16, 64))
    text = check(build([axis], [], dict.fromkeys("xy", (BF16, 64)), outputs, write))
    assert text.count("tl.exp(") == 3, "sums amplify the rounding of the exact form, too"
    assert text.count("libdevice.exp(") == 1, "a logarithm does not keep relative errors"
    assert text.count(" / ") == 2, "a quotient by itself, and one that exponentials have rounded"
    assert text.count("div_rn(") == 1, "1 - x / x is 0"


@pytest.mark.parametrize("dtype", [F32, F64])
def test_quotients_of_selected_zeros_have_no_branch(dtype: torch.dtype) -> None:
    axis = Axis("p0", 64)

    def write(body: KernelBuilder) -> None:
        x, y = [body.load(name, as_index(axis), dtype) for name in "xy"]
        body.store("relu", as_index(axis), x.maximum(0.0) * y / (y * y + 1.0))
        with body.masked(body.index(as_index(axis)) < 32):
            shifted = body.load("x", as_index(axis) + 32, dtype)
        body.store("shifted", as_index(axis), -shifted / (y * y + 1.0))
        body.store("other", as_index(axis), x / (y * y + 1.0))
        body.store("sum", as_index(axis), (x.maximum(0.0) + y) / (y * y + 1.0))

    outputs = dict.fromkeys(("relu", "shifted", "other", "sum"), (dtype, 64))
    text = check(build([axis], [], dict.fromkeys("xy", (dtype, 64)), outputs, write))
    kernel = text[text.rindex("@triton.jit") :]
    assert kernel.count("float_quotient(") == 2 * (dtype is F32) and kernel.count("div_rn(") == 2 * (dtype is F32)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_divisions_by_powers_of_two_are_multiplications(dtype: torch.dtype) -> None:
    axis = Axis("p0", 64)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", as_index(axis), dtype)
        for name, number in (("exact", 4096.0), ("inexact", 3.0), ("huge", 2.0**126), ("zero", 0.0)):
            body.store(name, as_index(axis), x / number)

    outputs = dict.fromkeys(("exact", "inexact", "huge", "zero"), (dtype, 64))
    text = check(build([axis], [], {"x": (dtype, 64)}, outputs, write))
    assert text.count("quotient") == 2, "one definition and one store"


def test_gelu_of_half_precision() -> None:
    axis = Axis("p0", 512)

    def write(body: KernelBuilder) -> None:
        x = body.load("x", as_index(axis), BF16).to(F32)
        gelu = x * 0.5 * ((x * 0.7071067811865476).erf() + 1.0)
        body.store("out", as_index(axis), gelu.to(BF16))

    def write_gradient(body: KernelBuilder) -> None:
        x = body.load("x", as_index(axis), BF16).to(F32)
        tanh = x.tanh()
        body.store("out", as_index(axis), ((tanh + 1.0) * 0.5 + (1.0 - tanh * tanh)).to(BF16))

    def exact(body: KernelBuilder) -> None:
        x = body.load("x", as_index(axis), BF16).to(F32)
        body.store("out", as_index(axis), (x.erf() * x.tanh()).to(BF16))

    operand = torch.cat([torch.linspace(-6, 6, 507), torch.tensor([0.0, -0.0, float("inf"), -200.0, float("nan")])]).to(
        BF16
    )
    kernel = build([axis], [], {"x": (BF16, 512)}, {"out": (BF16, 512)}, write)
    text = check(kernel, inputs={"x": operand}, tolerance=8e-3)
    assert "fast_erf(" in text
    tanh = build([axis], [], {"x": (BF16, 512)}, {"out": (BF16, 512)}, write_gradient)
    assert check(tanh, inputs={"x": operand}, tolerance=8e-3).count("fast_tanh(") == 2, "the helper, and one call"
    alone = check(build([axis], [], {"x": (BF16, 512)}, {"out": (BF16, 512)}, exact), inputs={"x": operand})
    assert "fast_" not in alone, "by themselves they keep their relative precision"


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_numbers_keep_the_sign_of_zero(dtype: torch.dtype) -> None:
    axis = Axis("p0", 4)
    arithmetic = F64 if dtype is F64 else F32

    def write(body: KernelBuilder) -> None:
        x = body.load("x", as_index(axis), dtype).to(arithmetic)
        with body.masked(x > 0.0):
            padded = body.load("x", as_index(axis), dtype, -0.0).to(arithmetic)
        zero = body.constant(-0.0, arithmetic)
        for name, value in (
            ("same", zero),
            ("chosen", (x > 0.0).where(x, zero)),
            ("sum", x + zero),
            ("padded", padded),
        ):
            body.store(name, as_index(axis), value.to(dtype))

    names = ("same", "chosen", "sum", "padded")
    operand = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype)
    kernel = build([axis], [], {"x": (dtype, 4)}, dict.fromkeys(names, (dtype, 4)), write)
    check(kernel, inputs={"x": operand})
    outputs = {name: torch.full((4,), 7.0, dtype=dtype) for name in names}
    launch_interpreted(kernel, print_triton(kernel), {"x": operand, **outputs})
    signs = {name: torch.signbit(value).tolist() for name, value in outputs.items()}
    assert signs["same"] == [True] * 4
    assert signs["chosen"] == signs["padded"] == [True, True, False, True]
    assert signs["sum"] == [False, True, False, True]


def scaled_rows(mean_first: bool) -> Kernel:
    """Rows less their mean, times weights that are gathered at positions which must be below 4."""
    p, r = Axis("p0", 3), Axis("r0", 16)
    position = as_index(p) * 16 + r

    def write(body: KernelBuilder) -> None:
        x = body.load("x", position, F32)
        (total,) = body.reduce("sum", x)
        if mean_first:
            body.store("total", as_index(p), total)
        index = body.load("index", as_index(r), I64)
        body.device_assert(index < 4, "index out of range")
        weight = body.load("weight", as_index(body.indirect_index(index, 4)), BF16).to(F32)
        body.store("out", position, (x - total) * weight)

    inputs = {"x": (F32, 48), "index": (I64, 16), "weight": (BF16, 4)}
    outputs = {"out": (F32, 48)} | ({"total": (F32, 3)} if mean_first else {})
    return build([p], [r], inputs, outputs, write)


@pytest.mark.parametrize("mean_first", [False, True])
def test_loads_independent_of_a_reduction_are_hoisted(mean_first: bool) -> None:
    index = torch.arange(16) % 4
    kernel = scaled_rows(mean_first)
    text = check(kernel, TileConfiguration(y=kernel.axes, r_block=16), inputs={"index": index})
    order = [
        text.index(part) for part in ("load(x_ptr", "load(index_ptr", "device_assert", "load(weight_ptr", "tl.sum(")
    ]
    assert order == sorted(order)


def test_loads_are_not_hoisted_over_writes() -> None:
    p, r = Axis("p0", 2), Axis("r0", 16)
    element = as_index(p) * 16 + r

    def write(body: KernelBuilder) -> None:
        x = body.load("x", element, F32)
        (total,) = body.reduce("sum", x)
        body.store("x", element, x - total)
        body.store("twice", element, body.load("x", as_index(p) * 16 + 15 - r, F32) * 2.0)

    kernel = build([p], [r], {}, {"x": (F32, 32), "twice": (F32, 32)}, write)
    text = print_triton(kernel, TileConfiguration(r_block=16)).source
    assert text.index("tl.store(x_ptr") < text.rindex("tl.load(x_ptr")


def test_a_bool_becomes_a_number_in_one_step() -> None:
    axis = Axis("p0", 8)

    def write(body: KernelBuilder) -> None:
        flag = body.load("x", as_index(axis), F32) > 0.0
        body.store("out", as_index(axis), flag.to(I64).to(F32).to(BF16).to(F32))
        body.store("count", as_index(axis), flag.to(I64) + 1)
        body.store("truth", as_index(axis), flag.to(I64).to(F32).to(torch.bool))

    outputs = {"out": (F32, 8), "count": (I64, 8), "truth": (torch.bool, 8)}
    text = check(build([axis], [], {"x": (F32, 8)}, outputs, write))
    assert ".to(tl.bfloat16)" not in text and text.count(".to(tl.int64)") == 1


def test_indices_in_a_row_are_compared_in_32_bits() -> None:
    p, r = Axis("p0", 6), Axis("r0", 16)

    def write(body: KernelBuilder) -> None:
        label, position = body.load("label", as_index(p), I64), body.index(as_index(r))
        for name, flag in (("same", position.equals(label)), ("other", label.differs(position))):
            (total,) = body.reduce("sum", flag.to(F32) * body.load("x", as_index(p) * 16 + r, F32))
            body.store(name, as_index(p), total)

    outputs = dict.fromkeys(("same", "other"), (F32, 6))
    kernel = build([p], [r], {"x": (F32, 96), "label": (I64, 6)}, outputs, write)
    arguments = {"label": torch.tensor([0, 15, 16, -1, 2**32 + 3, -(2**63)])}
    for configuration in (
        TileConfiguration(y=(p,), r_block=16),
        TileConfiguration(y=(p,), y_block=4, r_block=8, looped=True),
    ):
        assert check(kernel, configuration, inputs=arguments).count("to_int32_or_minus_one(label)") == 2


def test_softmax_sums_flush_small_exponentials_to_zero() -> None:
    p, r = Axis("p0", 4), Axis("r0", 16)

    def write(body: KernelBuilder) -> None:
        largest, total = body.reduce("softmax", body.load("x", as_index(p) * 16 + r, BF16).to(F32))
        body.store("out", as_index(p), largest + total.log())

    kernel = build([p], [r], {"x": (BF16, 64)}, {"out": (F32, 4)}, write)
    operand = torch.linspace(-300, 300, 64).to(BF16)
    operand[:16] = -float("inf")
    operand[16:18] = torch.tensor([float("nan"), float("inf")])
    for configuration in (TileConfiguration(y=(p,), r_block=16), TileConfiguration(y=(p,), r_block=8, looped=True)):
        assert "exp_ftz(" in check(kernel, configuration, inputs={"x": operand})
    assert "exp_ftz(" not in print_triton(softmax_kernel(8, 64)).source, "what is stored keeps small numbers"


def test_reductions_without_softmax_have_no_exponential() -> None:
    p, r = Axis("p0", 64), Axis("r0", 256)

    def write(body: KernelBuilder) -> None:
        (total,) = body.reduce("sum", body.load("x", as_index(p) * 256 + r, BF16).to(F32))
        body.store("out", as_index(p), total)

    assert "libdevice" not in print_triton(build([p], [r], {"x": (BF16, 64 * 256)}, {"out": (F32, 64)}, write)).source

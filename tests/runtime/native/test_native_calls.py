"""Operator calls from emitted C++: arguments of every kind, results of every structure."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.native.native_programs import load, names

aten = torch.ops.aten


def one_call(
    schema: str,
    call: str,
    inputs: tuple[str, ...],
    outputs: str,
    values: tuple[object, ...],
    slots: tuple[str, ...] = (),
    **symbols: tuple[str, ...],
) -> tuple[object, ...]:
    kinds = [name for group in symbols.values() for name in group]
    tensors = tuple(name for name in inputs if name not in kinds)
    program = load(
        f"  CALL(f, op, {call});",
        slots=(*tensors, *slots),
        operators={"op": schema},
        inputs=names(*inputs),
        outputs=outputs,
        **symbols,
    )
    return program(*values)


X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
Y = torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
I64 = torch.tensor([2**53 + 1, -7])


def test_an_int64_scalar_is_exact() -> None:
    (result,) = one_call("aten::mul.Scalar", "(x, 3), (y)", ("x",), "y", (I64,), ("y",))
    assert result.dtype == torch.int64 and torch.equal(result, I64 * 3)
    big = 2**62 + 1
    (result,) = one_call("aten::add.Scalar", f"(x, {big}), (y)", ("x",), "y", (torch.tensor([0]),), ("y",))
    assert result.item() == big


def test_a_bool_scalar_is_a_bool() -> None:
    values = torch.tensor([True, False])
    (result,) = one_call("aten::mul.Scalar", "(x, true), (y)", ("x",), "y", (values,), ("y",))
    assert result.dtype == torch.bool and torch.equal(result, values)


def test_a_complex_scalar_keeps_its_imaginary_part() -> None:
    (result,) = one_call("aten::mul.Scalar", "(x, complex(0.1, -2.5)), (y)", ("x",), "y", (X,), ("y",))
    assert torch.equal(result, torch.mul(X, complex(0.1, -2.5)))


def test_a_scalar_for_a_tensor_is_a_wrapped_number() -> None:
    half = X.half()
    (result,) = one_call("aten::add.Tensor", "(x, 2.5), (y)", ("x",), "y", (half,), ("y",))
    assert result.dtype == torch.float16 and torch.equal(result, half + 2.5)


def test_defaults_and_arguments_by_name() -> None:
    (result,) = one_call("aten::add.Tensor", '(x, y, named("alpha"), 3), (z)', ("x", "y"), "z", (X, Y), ("z",))
    assert torch.equal(result, torch.add(X, Y, alpha=3))
    (result,) = one_call("aten::sum.dim_IntList", "(x, none), (z)", ("x",), "z", (X,), ("z",))
    assert torch.equal(result, X.sum())


def test_dtype_layout_device_memory_format_and_string() -> None:
    call = (
        '(list(2), 2, 3, 7, named("dtype"), DType::int32, named("layout"), Layout::strided, '
        'named("device"), cpu, named("pin_memory"), false), (y)'
    )
    (result,) = one_call("aten::full", call, (), "y", (), ("y",))
    assert torch.equal(result, torch.full((2, 3), 7, dtype=torch.int32)) and result.dtype == torch.int32
    image = torch.rand(1, 2, 3, 4)
    call = '(x, named("memory_format"), MemoryFormat::channels_last), (y)'
    (result,) = one_call("aten::clone", call, ("x",), "y", (image,), ("y",))
    assert result.is_contiguous(memory_format=torch.channels_last) and torch.equal(result, image)
    (result,) = one_call("aten::gelu", '(x, named("approximate"), "tanh"), (y)', ("x",), "y", (X,), ("y",))
    assert torch.equal(result, torch.nn.functional.gelu(X, approximate="tanh"))
    (result,) = one_call("aten::_to_copy", '(x, named("dtype"), DType::bfloat16), (y)', ("x",), "y", (X,), ("y",))
    assert torch.equal(result, X.bfloat16())


def test_every_dtype_of_the_header_has_torchs_code() -> None:
    for dtype in ("uint8", "int16", "float16", "complex64", "bool_", "uint16", "float8_e4m3fn", "float8_e8m0fnu"):
        call = f'(list(1), 2, named("dtype"), DType::{dtype}), (y)'
        (result,) = one_call("aten::empty.memory_format", call, (), "y", (), ("y",))
        assert result.dtype == getattr(torch, dtype.rstrip("_"))


def test_a_list_of_tensors_and_of_optional_tensors() -> None:
    (result,) = one_call("aten::cat", "(list(2), x, y, 1), (z)", ("x", "y"), "z", (X, Y), ("z",))
    assert torch.equal(result, torch.cat([X, Y], 1))
    index = torch.tensor([0, 2])
    (result,) = one_call("aten::index.Tensor", "(x, list(2), none, i), (z)", ("x", "i"), "z", (X, index), ("z",))
    assert torch.equal(result, X[:, index])


def test_a_list_of_scalars_of_mixed_kinds() -> None:
    call = "(list(2), x, y, list(2), 2, 0.5), (list(2), a, b)"
    first, second = one_call("aten::_foreach_mul.ScalarList", call, ("x", "y"), "a, b", (I64, Y), ("a", "b"))
    assert torch.equal(first, I64 * 2) and first.dtype == torch.int64 and torch.equal(second, Y * 0.5)


def test_a_list_of_floats_and_of_bools() -> None:
    image = torch.rand(1, 1, 4)
    call = "(x, none, list(1), 2.0), (y)"
    (result,) = one_call(
        "aten::upsample_linear1d.vec", call.replace("none,", "none, false,"), ("x",), "y", (image,), ("y",)
    )
    assert torch.equal(result, aten.upsample_linear1d.vec(image, None, False, [2.0]))
    weight, gradient = torch.rand(2, 1, 2), torch.rand(1, 2, 3)
    call = (
        "(g, x, w, list(1), 2, list(1), 1, list(1), 0, list(1), 1, false, list(1), 0, 1, "
        "list(3), true, false, true), (a, b, c)"
    )
    got = one_call(
        "aten::convolution_backward", call, ("g", "x", "w"), "a, b, c", (gradient, image, weight), ("a", "b", "c")
    )
    want = aten.convolution_backward(gradient, image, weight, [2], [1], [0], [1], False, [0], 1, [True, False, True])
    assert got[1] is None and want[1] is None
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[2], want[2])


def test_one_int_fills_a_list_of_fixed_length() -> None:
    image = torch.rand(1, 1, 4, 4)
    (result,) = one_call("aten::avg_pool2d", "(x, 2), (y)", ("x",), "y", (image,), ("y",))
    assert torch.equal(result, aten.avg_pool2d(image, 2))


def test_symbols_of_each_kind_as_arguments() -> None:
    call = "(x, list(2), n, 2), (y)"
    (result,) = one_call("aten::view", call, ("x", "n"), "y", (X, 12), ("y",), ints=("n",))
    assert torch.equal(result, X.view(12, 2))
    call = '(x, y, named("alpha"), a), (z)'
    (result,) = one_call("aten::add.Tensor", call, ("x", "y", "a"), "z", (X, Y, 0.25), ("z",), floats=("a",))
    assert torch.equal(result, torch.add(X, Y, alpha=0.25))
    (result,) = one_call("aten::amax", "(x, list(1), 1, k), (z)", ("x", "k"), "z", (X, True), ("z",), bools=("k",))
    assert torch.equal(result, X.amax(1, True))
    (result,) = one_call("aten::mul.Tensor", "(x, n), (z)", ("x", "n"), "z", (I64, 3), ("z",), ints=("n",))
    assert result.dtype == torch.int64 and torch.equal(result, I64 * 3)


def test_results_as_symbols() -> None:
    schema, call = "aten::_local_scalar_dense", "(x), (s)"
    assert one_call(schema, call, ("x",), "s", (torch.tensor(2**60 + 1),), ints=("s",)) == (2**60 + 1,)
    assert one_call(schema, call, ("x",), "s", (torch.tensor(0.5),), floats=("s",)) == (0.5,)
    assert one_call(schema, call, ("x",), "s", (torch.tensor(True),), bools=("s",)) == (True,)
    assert one_call("aten::equal", "(x, y), (s)", ("x", "y"), "s", (X, Y), bools=("s",)) == (False,)


def test_several_results_and_a_list_of_results() -> None:
    values, indices = one_call("aten::topk", "(x, 2), (v, i)", ("x",), "v, i", (X,), ("v", "i"))
    want = X.topk(2)
    assert torch.equal(values, want.values) and torch.equal(indices, want.indices)
    parts = one_call(
        "aten::split_with_sizes", "(x, list(2), 2, 4, 1), (list(2), a, b)", ("x",), "a, b", (X,), ("a", "b")
    )
    assert all(torch.equal(a, b) for a, b in zip(parts, X.split_with_sizes([2, 4], 1)))
    with pytest.raises(RuntimeError, match="returned a list of 2 where the program expects 1"):
        one_call("aten::split_with_sizes", "(x, list(2), 2, 4, 1), (list(1), a)", ("x",), "a", (X,), ("a", "b"))


def test_a_discarded_result() -> None:
    call = "(x, list(1), 6, none, none, 1e-05), (y, none, r)"
    got = one_call("aten::native_layer_norm", call, ("x",), "y, r", (X,), ("y", "r"))
    want = torch.native_layer_norm(X, (6,), None, None, 1e-5)
    torch.testing.assert_close(got, (want[0], want[2]))


def test_mutating_and_out_variants_bump_versions() -> None:
    x = X.clone()
    version = x._version
    (result,) = one_call("aten::add_.Tensor", "(x, y), (z)", ("x", "y"), "z", (x, Y), ("z",))
    assert torch.equal(x, X + Y) and result is x and x._version == version + 1
    out = torch.empty(4, 6)
    version = out._version
    call = '(x, y, named("out"), z), (none)'
    assert one_call("aten::mul.out", call, ("x", "y", "z"), "", (X, Y, out)) == ()
    assert torch.equal(out, X * Y) and out._version == version + 1


@pytest.mark.parametrize(
    ("schema", "call", "message"),
    [
        ("aten::mm", "(x), (y)", "aten::mm is called without its argument 'mat2'"),
        ("aten::mm", "(x, x, x), (y)", "aten::mm takes at most 2 arguments"),
        ("aten::mm", '(x, "text"), (y)', "aten::mm: argument 'mat2' of type Tensor cannot be a string"),
        ("aten::mm", '(x, named("other"), x), (y)', "aten::mm has no argument 'other'"),
        ("aten::view", "(x, 1.5), (y)", "aten::view: argument 'size' takes a list, the program passes a float"),
        ("aten::relu", "(x), (y, y)", "aten::relu has 1 results, the program stores 2"),
        ("aten::no_such_operator", "(x), (y)", "no_such_operator"),
    ],
)
def test_a_schema_mismatch_names_operator_and_argument(schema: str, call: str, message: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        one_call(schema, call, ("x",), "y", (X,), ("y",))
    assert message in str(caught.value)


def test_an_operator_written_in_python_runs() -> None:
    with torch.library._scoped_library("fxwrap_native_test", "FRAGMENT") as library:
        library.define("scaled(Tensor x, *, Scalar factor, str[] words) -> (Tensor, int)")
        library.impl("scaled", lambda x, *, factor, words: (x * factor, len(words)), "CPU")
        call = '(x, named("factor"), 3, named("words"), list(2), "a", "b"), (y, n)'
        result, count = one_call("fxwrap_native_test::scaled", call, ("x",), "y, n", (X,), ("y",), ints=("n",))
        assert torch.equal(result, X * 3) and count == 2

"""Whole programs: memory helpers, inputs and outputs, errors, ownership, threads."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch

from fxwrap.errors import InputError
from fxwrap.runtime.checks import check_input_count, check_layout
from fxwrap.runtime.native import NativeProgram
from fxwrap.torch_compat import DTYPE_NAMES
from tests.runtime.native.native_programs import load, names
from tests.support.garbage import freeze_heap

MM = {"mm": "aten::mm"}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())


def test_memory_helpers() -> None:
    program = load(
        """
  f.ints[s0] = size(f, x, 0);
  empty_strided(f, buf, {f.ints[s0], 6}, {6, 1}, DType::float32, cpu);
  CALL(f, mul, (x, 2, named("out"), buf), (none));
  view(f, row, buf, {6}, {1}, 6);
  alias(f, again, row);
  reuse(f, half, buf, {f.ints[s0], 3}, {3, 1}, DType::float16);
  CALL(f, fill, (half, 1.5), (none));
  move(f, moved, half);
  f.ints[step] = stride(f, row, 0);
  f.ints[offset] = storage_offset(f, row);
  f.ints[here] = defined(f, half);
""",
        slots=("x", "buf", "row", "again", "half", "moved"),
        operators={"mul": "aten::mul.out", "fill": "aten::fill_.Scalar"},
        inputs=names("x"),
        outputs="row, again, moved, s0, step, offset, here, half, none, 7, 0.5, true",
        ints=("s0", "step", "offset"),
        bools=("here",),
    )
    x = torch.rand(4, 6, generator=generator(0))
    row, again, moved, *scalars = program(x)
    assert row is again and scalars == [4, 1, 6, False, None, None, 7, 0.5, True]
    assert torch.equal(moved, torch.full((4, 3), 1.5, dtype=torch.float16))
    # The view still refers to the memory that is reused for another tensor.
    assert row.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr() and row.storage_offset() == 6


def test_reuse_rejects_memory_that_is_too_small() -> None:
    program = load(
        "  empty_strided(f, a, {4}, {1}, DType::float32, cpu);\n  reuse(f, b, a, {5}, {1}, DType::float32);",
        slots=("a", "b"),
        outputs="b",
    )
    with pytest.raises(RuntimeError, match="ends at byte 20 does not fit memory of 16"):
        program()


def test_slices_of_a_pool_share_its_memory() -> None:
    program = load(
        """
  empty_strided(f, pool, {64}, {1}, DType::uint8, cpu);
  pool_slice(f, a, pool, 16, {2, 2}, {2, 1}, DType::float32);
  CALL(f, fill, (a, 3), (none));
""",
        slots=("pool", "a"),
        operators={"fill": "aten::fill_.Scalar"},
        outputs="pool, a",
    )
    pool, a = program()
    assert torch.equal(pool[16:32].view(torch.float32), a.flatten()) and torch.equal(a, torch.full((2, 2), 3.0))


def test_a_view_bumps_its_bases_version() -> None:
    program = load(
        "  view(f, row, x, {6}, {1}, 6);\n  CALL(f, fill, (row, 2), (none));",
        slots=("x", "row"),
        operators={"fill": "aten::fill_.Scalar"},
        inputs=names("x"),
    )
    x = torch.rand(4, 6, generator=generator(0))
    version = x._version
    program(x)
    assert torch.equal(x[1], torch.full((6,), 2.0)) and x._version == version + 1


def test_items_assertions_and_random_state() -> None:
    program = load(
        """
  f.ints[n] = item_int(f, a);
  f.floats[r] = item_float(f, b);
  f.ints[t] = item_bool(f, c);
  if (f.ints[n] > 100) fail_assert(f, "too many");
  save_random_state(f, state, cpu);
  CALL(f, rand, (list(1), 3), (first));
  restore_random_state(f, state, cpu);
  CALL(f, rand, (list(1), 3), (second));
""",
        slots=("a", "b", "c", "state", "first", "second"),
        operators={"rand": "aten::rand"},
        inputs=names("a", "b", "c"),
        outputs="n, r, t, first, second",
        ints=("n",),
        floats=("r",),
        bools=("t",),
    )
    torch.manual_seed(3)
    n, r, t, first, second = program(torch.tensor(7), torch.tensor(0.25), torch.tensor(True))
    torch.manual_seed(3)
    assert (n, r, t) == (7, 0.25, True) and torch.equal(first, second) and torch.equal(first, torch.rand(3))
    with pytest.raises(RuntimeError, match=r"^too many$"):
        program(torch.tensor(101), torch.tensor(0.25), torch.tensor(True))


def mm_program() -> NativeProgram:
    return load("  CALL(f, mm, (x, y), (z));", slots=("x", "y", "z"), operators=MM, inputs=names("x", "y"), outputs="z")


@pytest.mark.parametrize(
    ("schema", "call", "eager", "kind"),
    [
        ("aten::mm", "(x, x), (y)", lambda x: torch.mm(x, x), RuntimeError),
        ("aten::select.int", "(x, 0, 9), (y)", lambda x: x.select(0, 9), IndexError),
        ("aten::softmax.int", "(x, 5), (y)", lambda x: torch.softmax(x, 5), IndexError),
        ("aten::linalg_inv", "(x), (y)", lambda x: torch.linalg.inv(x), RuntimeError),
        ("aten::linalg_cholesky", "(x), (y)", lambda x: torch.linalg.cholesky(x), RuntimeError),
    ],
)
def test_an_operators_error_has_eagers_class_and_text(schema: str, call: str, eager: object, kind: type) -> None:
    program = load(
        f"  CALL(f, op, {call});", slots=("x", "y"), operators={"op": schema}, inputs=names("x"), outputs="y"
    )
    x = torch.zeros(2, 3) if schema != "aten::linalg_cholesky" else -torch.eye(2)
    with pytest.raises(kind) as expected:
        eager(x)  # type: ignore[operator]
    with pytest.raises(kind) as caught:
        program(x)
    assert type(caught.value) is type(expected.value) and str(caught.value) == str(expected.value)


def test_an_error_of_a_python_operator_keeps_its_class() -> None:
    class Refused(Exception):
        pass

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise Refused("not today")

    with torch.library._scoped_library("fxwrap_native_error", "FRAGMENT") as library:
        library.define("refuse(Tensor x) -> Tensor")
        library.impl("refuse", refuse, "CPU")
        program = load(
            "  CALL(f, op, (x), (y));",
            slots=("x", "y"),
            operators={"op": "fxwrap_native_error::refuse"},
            inputs=names("x"),
            outputs="y",
        )
        with pytest.raises(Refused, match="not today"):
            program(torch.zeros(1))


def test_an_operators_warning_becomes_a_python_warning() -> None:
    program = load(
        '  CALL(f, op, (x, 0, named("out"), y), (none));',
        slots=("x", "y"),
        operators={"op": "aten::cumsum.out"},
        inputs=names("x", "y"),
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program(torch.rand(3), torch.empty(2))
    assert any("resized" in str(item.message) and item.category is UserWarning for item in seen)


def test_failing_calls_leak_no_tensors() -> None:
    freeze_heap()
    program = load(
        "  empty_strided(f, a, {4}, {1}, DType::float32, cpu);\n  CALL(f, mm, (x, x), (a));",
        slots=("x", "a"),
        operators=MM,
        inputs='{"x", owned(x)}',
    )
    x = torch.zeros(2, 3)
    before, references = live_tensors(), x._use_count()
    for _ in range(50):
        with pytest.raises(RuntimeError):
            program(x)
        with pytest.raises(RuntimeError):
            program.boxed([x])
    assert live_tensors() == before
    assert x._use_count() == references


def test_a_donated_input_is_released_where_the_program_drops_it() -> None:
    seen: list[bool] = []
    with torch.library._scoped_library("fxwrap_native_owned", "FRAGMENT") as library:
        library.define("look(Tensor x) -> ()")
        program = load(
            "  CALL(f, op, (y), ());\n  drop(f, x);\n  CALL(f, op, (y), ());",
            slots=("x", "y"),
            operators={"op": "fxwrap_native_owned::look"},
            inputs='{"x", owned(x)}, {"y", y}',
        )
        x, y = torch.zeros(3), torch.zeros(3)
        tensor = weakref.ref(x)
        library.impl("look", lambda y: seen.append(tensor() is None), "CPU")
        values = [x, y]
        del x
        program.boxed(values)
        assert values == [] and seen == [False, True]


def test_wrong_inputs_raise_input_errors() -> None:
    program = load(
        "  CALL(f, mul, (x, n), (y));",
        slots=("x", "y"),
        operators={"mul": "aten::mul.Scalar"},
        inputs=names("x", "n"),
        outputs="y",
        ints=("n",),
    )

    class Tagged(torch.Tensor):
        __torch_function__ = classmethod(lambda cls, *_arguments: None)

    x = torch.zeros(2)
    for values, message in (
        ((x,), "program 'program' takes 2 inputs, got 1"),
        ((3, 4), "input 'x': expected a torch.Tensor, got int"),
        ((x.as_subclass(Tagged), 4), "input 'x': expected a torch.Tensor, got Tagged"),
        ((x, 1.5), "input 'n': expected an int, got float"),
        ((x, 2**63), "input 'n': 9223372036854775808 does not fit in 64 bits"),
    ):
        with pytest.raises(InputError) as caught:
            program(*values)
        assert str(caught.value) == message
    with pytest.raises(InputError, match="takes 2 inputs, got 1"):
        check_input_count("program", 2, 1)
    with pytest.raises(TypeError, match="no keyword arguments"):
        program(x, n=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes a list of inputs, got tuple"):
        program.boxed((x, 1))  # type: ignore[arg-type]
    assert torch.equal(program(torch.nn.Parameter(x), 2)[0], x)


CHECKED = (
    torch.zeros(4, 8),
    torch.zeros(4, 1)[:, 0],
    torch.zeros(8, 4).t(),
    torch.zeros(1, 8).as_strided((1, 8), (99, 1)),
    torch.zeros(0, 8).as_strided((0, 8), (5, 7)),
    torch.zeros(4, 8).to_sparse(),
    torch._nested_tensor_from_tensor_list([torch.zeros(8)] * 4),
    torch.zeros(4, 8, device="meta"),
    torch.tensor(1.0),
    None,
    *(torch.empty(4, 8, dtype=dtype) for dtype in DTYPE_NAMES if not str(dtype).startswith("torch.q")),
)


@pytest.mark.parametrize("sizes", [(4, 8), (1, 8), (0, 8), ()])
def test_check_layout_raises_the_same_error_in_cpp_and_python(sizes: tuple[int, ...]) -> None:
    strides = (8, 1) if sizes else ()
    spelled = (str(items).strip("(),") for items in (sizes, strides))
    program = load(
        '  check_layout(f, x, "x", {{{}}}, {{{}}}, DType::float32, cpu);'.format(*spelled),
        slots=("x",),
        inputs=names("x"),
    )

    def outcome(check: Callable[..., object], *arguments: object) -> str:
        try:
            check(*arguments)
        except InputError as error:
            return str(error)
        return "accepted"

    texts = []
    for tensor in CHECKED:
        texts.append(outcome(program, tensor))
        expected = (torch.float32, sizes, strides, torch.device("cpu"))
        assert texts[-1] == outcome(check_layout, tensor, "x", *expected)
    assert texts.count("accepted") in (1, 2) and len(set(texts)) > 20
    assert any("expected f32[" in text and "got bf16[4, 8] on cpu with strides (8, 1)" in text for text in texts)


def test_constants_are_bound_once() -> None:
    fields = {"slots": ("x", "w", "y"), "operators": MM, "inputs": names("x"), "constants": "w", "outputs": "y"}
    x, w = torch.rand(2, 3, generator=generator(0)), torch.rand(3, 2, generator=generator(1))
    program = load("  CALL(f, mm, (x, w), (y));", bound=(w,), **fields)
    torch.testing.assert_close(program(x)[0], x @ w)
    assert program.constants == (w,) and program.name == "program"
    with pytest.raises(InputError, match="takes 1 constants, got 0"):
        load("  CALL(f, mm, (x, w), (y));", **fields)


def test_results_are_plain_tensors_without_autograd_history() -> None:
    program = mm_program()
    x = torch.rand(3, 3, generator=generator(0), requires_grad=True)
    (result,) = program(x, x)
    assert not result.requires_grad and result.grad_fn is None and not result.is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert program(x, x)[0].dtype == torch.float32


def test_a_dispatch_mode_sees_every_operator() -> None:
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    program = load(
        '  empty_strided(f, y, {2, 2}, {2, 1}, DType::float32, cpu);\n  CALL(f, mm, (x, x, named("out"), y), (none));',
        slots=("x", "y"),
        operators={"mm": "aten::mm.out"},
        inputs=names("x"),
        outputs="y",
    )
    with Watch():
        program(torch.zeros(2, 2))
    assert seen[-2:] == ["aten::empty_strided", "aten::mm.out"]


def test_threads_share_a_program() -> None:
    # A fresh text, so that the threads also race for its first use.
    program = load(
        "  CALL(f, mm, (x, y), (z));\n  CALL(f, add, (z, z), (t));\n  drop(f, z);",
        slots=("x", "y", "z", "t"),
        operators={"mm": "aten::mm", "add": "aten::add.Tensor"},
        inputs=names("x", "y"),
        outputs="t",
    )
    failures: list[str] = []

    def work(seed: int) -> None:
        x = torch.rand(5, 5, generator=generator(seed))
        for _ in range(200):
            if not torch.allclose(program(x, x)[0], 2 * (x @ x)):
                failures.append(f"seed {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_output_named_twice_and_an_input_returned_are_the_same_objects() -> None:
    program = load(
        "  CALL(f, mm, (x, x), (y));",
        slots=("x", "w", "y"),
        operators=MM,
        inputs='{"x", x}, {"w", owned(w)}',
        outputs="y, x, y, w",
    )
    x, w = torch.eye(3), torch.zeros(1)
    for _ in range(2):
        first, returned_x, second, returned_w = program(x, w)
        assert first is second and returned_x is x and returned_w is w and torch.equal(first, x)

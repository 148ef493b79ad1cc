"""Views, rearrangements and creation of tensors: every rule against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxwrap.devices import CPU
from fxwrap.loop_ir import Axis, Buffer, as_index, evaluate_index, evaluate_kernel
from fxwrap.lowering.fusion.definitions import Stored, Viewed
from fxwrap.lowering.fusion.tracing import BodyBuilder
from fxwrap.lowering.rules import RULES, Declined, OperatorCall, creation, rearrange, views
from fxwrap.symbolic import evaluate, make_symbol
from tests.lowering.rules.check_rules import (
    DTYPES,
    Sample,
    check_sample,
    define,
    maker,
    registered_names,
    run_rule,
    same_samples,
)

_TO_HALF = {"dtype": torch.bfloat16}
_IOTA = {"start": 3, "step": -2, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}


VIEWS: dict[str, list[Sample]] = {
    **same_samples(
        "view.default _unsafe_view.default view_copy.default _reshape_copy.default",
        lambda t: (t(2, 3, 4), [6, 4]), lambda t: (t(2, 3, 4), [4, 6]), lambda t: (t(6, 5), [2, 1, 3, 5]),
        lambda t: (t(2, 3, 5, 7), [2, 15, 7, 1]), lambda t: (t(0, 3), [3, 0]), lambda t: (t(1), []),
        lambda t: (t(), [1, 1]), lambda t: (t(12), [-1, 3]), lambda t: (t(4, 1, 9), [6, 6]),
    ),
    **same_samples("alias.default detach.default", lambda t: (t(2, 3),)),
    **same_samples("unsqueeze.default unsqueeze_copy.default", lambda t: (t(2, 3), -1), lambda t: (t(), 0)),
    **same_samples("squeeze.default squeeze_copy.default", lambda t: (t(1, 3, 1, 2),), lambda t: (t(1),)),
    **same_samples("squeeze.dim squeeze_copy.dim", lambda t: (t(1, 3, 1), -1), lambda t: (t(1, 3), 1)),
    **same_samples("squeeze.dims squeeze_copy.dims", lambda t: (t(1, 3, 1), [0, 1, 2])),
    **same_samples(
        "expand.default expand_copy.default", lambda t: (t(1, 3), [4, 2, -1]), lambda t: (t(), [2]),
        lambda t: (t(3, 1), [3, 0]),
    ),
    **same_samples("permute.default permute_copy.default", lambda t: (t(2, 3, 4), [2, -3, 1]), lambda t: (t(), [])),
    **same_samples("transpose.int transpose_copy.int", lambda t: (t(2, 3, 4), -1, 0), lambda t: (t(), 0, -1)),
    **same_samples("t.default t_copy.default", lambda t: (t(2, 3),), lambda t: (t(3),), lambda t: (t(),)),
    **same_samples(
        "slice.Tensor slice_copy.Tensor", lambda t: (t(5, 7), 1, 1, 6, 2), lambda t: (t(5, 7), -1, -3),
        lambda t: (t(5), 0, -9, -1), lambda t: (t(5), 0, 4, 2), lambda t: (t(5),), lambda t: (t(5), 0, 7, 9),
        lambda t: (t(5), {"dim": 0, "start": 2}),
    ),
    **same_samples("narrow_copy.default", lambda t: (t(5, 2), 0, -3, 2), lambda t: (t(5), 0, 5, 0)),
    **same_samples("select.int select_copy.int", lambda t: (t(3, 5), 1, -2), lambda t: (t(3, 5), -2, 0),
            lambda t: (t(1), 0, 0)),
    **same_samples(
        "split.Tensor split_copy.Tensor unsafe_split.Tensor", lambda t: (t(7, 2), 3), lambda t: (t(2, 4), 2, -1),
    ),
    **same_samples(
        "split_with_sizes.default unsafe_split_with_sizes.default split_with_sizes_copy.default",
        lambda t: (t(7, 2), [3, 0, 4]), lambda t: (t(2, 3), [1, 2], -1),
    ),
    **same_samples("unbind.int unbind_copy.int", lambda t: (t(3, 2),), lambda t: (t(2, 3), -1)),
    **same_samples(
        "diagonal.default diagonal_copy.default", lambda t: (t(3, 4),), lambda t: (t(2, 5, 3), -2, 1, -1),
        lambda t: (t(2, 3, 4), 1, 2, 0), lambda t: (t(3, 3), 3),
    ),
    **same_samples(
        "unfold.default unfold_copy.default", lambda t: (t(2, 9), 1, 3, 2), lambda t: (t(5, 2), 0, 5, 1),
        lambda t: (t(), 0, 1, 1),
    ),
    **same_samples("flip.default", lambda t: (t(2, 3, 4), [0, -1]), lambda t: (t(0, 3), [0]), lambda t: (t(2), [])),
    **same_samples(
        "roll.default", lambda t: (t(2, 3, 4), [5]), lambda t: (t(3, 5), [1, -7], [0, -1]), lambda t: (t(4), [-1], [0]),
        lambda t: (t(0, 3), [1], [0]), lambda t: (t(5), [1, 1], [0, 0]),
    ),
    **same_samples(
        "rot90.default", lambda t: (t(2, 3),), lambda t: (t(2, 3, 4), -1, [2, 0]), lambda t: (t(2, 3), 2),
        lambda t: (t(2, 3), 4), lambda t: (t(3, 2, 2), 3, [0, -1]),
    ),
    **same_samples("repeat.default", lambda t: (t(2, 3), [2, 1, 3]), lambda t: (t(1), [0]), lambda t: (t(), [3])),
    **same_samples("pixel_shuffle.default", lambda t: (t(2, 12, 3, 1), 2), lambda t: (t(9, 2, 2), 3)),
    **same_samples("pixel_unshuffle.default", lambda t: (t(2, 3, 4, 2), 2), lambda t: (t(1, 3, 6), 3)),
    **same_samples("channel_shuffle.default native_channel_shuffle.default",
            lambda t: (t(2, 6, 3, 1), 2), lambda t: (t(1, 6, 2), 3)),
}  # fmt: skip

REARRANGED: dict[str, list[Sample]] = {
    **same_samples(
        "cat.default", lambda t: ([t(2, 3), t(2, 1), t(2, 4)], 1), lambda t: ([t(0), t(2, 3), t(1, 3)],),
        lambda t: ([t(2, 0), t(2, 2)], -1), lambda t: ([t(0), t(0)],), lambda t: ([t(3)],),
        lambda t: ([t(2), torch.arange(3.0)],),
    ),
    **same_samples("stack.default", lambda t: ([t(2, 3)] * 2 + [t(2, 3)], -1), lambda t: ([t(), t()],),
            lambda t: ([t(0, 2)], 1)),
    **same_samples(
        "constant_pad_nd.default", lambda t: (t(2, 3), [1, 2], 1), lambda t: (t(2, 5), [-1, 2, 0, -1]),
        lambda t: (t(5), [-2, -1], 1), lambda t: (t(2, 3, 4), [0, 0, 3, 1], 1), lambda t: (t(0, 2), [0, 0, 1, 1], 1),
        lambda t: (t(3), [-3, 0]),
    ),
    "aten.reflection_pad1d.default": [lambda t: (t(2, 5), [2, 4]), lambda t: (t(2, 5), [-1, 2])],
    "aten.reflection_pad2d.default": [lambda t: (t(2, 3, 5), [1, 0, 2, 2])],
    "aten.reflection_pad3d.default": [lambda t: (t(1, 2, 3, 2), [1, 1, 2, 0, 0, 1])],
    "aten.reflection_pad1d_backward.default": [
        lambda t: (t(2, 11), t(2, 5), [2, 4]), lambda t: (t(2, 6), t(2, 5), [-1, 2]),
    ],
    "aten.reflection_pad2d_backward.default": [
        lambda t: (t(2, 7, 6), t(2, 3, 5), [1, 0, 2, 2]), lambda t: (t(1, 1, 12, 7), t(1, 1, 8, 8), [0, -1, 2, 2]),
        lambda t: (t(1, 1, 7, 12), t(1, 1, 8, 8), [2, 2, 0, -1]),
    ],
    "aten.reflection_pad3d_backward.default": [lambda t: (t(1, 3, 3, 3), t(1, 2, 3, 2), [1, 0, 0, 0, 0, 1])],
    "aten.replication_pad1d.default": [lambda t: (t(2, 3), [4, 5]), lambda t: (t(2, 5), [-1, -2])],
    "aten.replication_pad2d.default": [lambda t: (t(2, 1, 2), [1, 0, 2, 2])],
    "aten.replication_pad3d.default": [lambda t: (t(1, 2, 3, 2), [3, 1, 2, 0, 0, 4])],
    **same_samples(
        "slice_scatter.default", lambda t: (t(7, 2), t(3, 2), 0, 1, 7, 2), lambda t: (t(2, 5), t(2, 2), -1, -2),
        lambda t: (t(4), t(4)), lambda t: (t(4), t(0), 0, 3, 2),
    ),
    **same_samples(
        "slice_backward.default", lambda t: (t(3, 2), [7, 2], 0, 1, 7, 2), lambda t: (t(2, 2), [2, 5], -1, -2, 9, 1),
    ),
    **same_samples("select_scatter.default", lambda t: (t(3, 4), t(3), 1, -1), lambda t: (t(3), t(), 0, 1)),
    **same_samples("select_backward.default", lambda t: (t(3), [3, 4], 1, -1), lambda t: (t(), [2], 0, 0)),
    **same_samples(
        "diagonal_scatter.default", lambda t: (t(3, 4), t(3)), lambda t: (t(2, 5, 3), t(2, 3), -2, 1, -1),
    ),
    **same_samples("diagonal_backward.default", lambda t: (t(2, 3), [2, 5, 3], -2, 1, 2)),
    **same_samples("diag_embed.default", lambda t: (t(2, 3),), lambda t: (t(2, 3), -1, 0, 2), lambda t: (t(2), 2)),
    **same_samples(
        "tril.default triu.default", lambda t: (t(3, 4),), lambda t: (t(2, 4, 3), -1), lambda t: (t(3, 3), 5),
        lambda t: (t(0, 3), 1), lambda t: (t(1, 1), 1),
    ),
    **same_samples(
        "unfold_backward.default", lambda t: (t(2, 4, 3), [2, 9], 1, 3, 2), lambda t: (t(2, 2, 2), [6, 2], 0, 2, 3),
        lambda t: (t(1), [], 0, 1, 1),
    ),
    **same_samples(
        "im2col.default", lambda t: (t(2, 3, 5, 4), [3, 2], [1, 2], [1, 1], [2, 1]),
        lambda t: (t(2, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    ),
}  # fmt: skip

CREATED: dict[str, list[Sample]] = {
    **same_samples("full.default", lambda t: ([2, 3], 2.5), lambda t: ([], 3, _TO_HALF), lambda t: ([2], True)),
    **same_samples("full_like.default", lambda t: (t(2, 3), 1), lambda t: (t(2, 0), 2.5, _TO_HALF)),
    **same_samples("new_full.default", lambda t: (t(2), [3, 1], 1), lambda t: (t(2), [2], 0.1, _TO_HALF)),
    **same_samples("scalar_tensor.default", lambda t: (2.5,), lambda t: (7, {"dtype": torch.int32})),
    **same_samples("zeros.default ones.default", lambda t: ([2, 3],), lambda t: ([0], _TO_HALF)),
    **same_samples("zeros_like.default ones_like.default", lambda t: (t(2, 3),), lambda t: (t(), _TO_HALF)),
    **same_samples("new_zeros.default new_ones.default", lambda t: (t(2), [3, 1])),
    **same_samples("eye.default", lambda t: (3,), lambda t: (0,), lambda t: (2, {"dtype": torch.int64})),
    **same_samples("eye.m", lambda t: (3, 5), lambda t: (4, 2)),
    **same_samples("arange.default", lambda t: (7,), lambda t: (4.5,), lambda t: (0,), lambda t: (5, _TO_HALF)),
    **same_samples("arange.start", lambda t: (-3, 5), lambda t: (0.5, 9), lambda t: (2.0, 4.0, {"dtype": torch.int64})),
    **same_samples(
        "arange.start_step", lambda t: (9, -4, -3), lambda t: (0.1, 2.0, 0.3),
        lambda t: (1, 9, 2, {"dtype": torch.int32}),
        lambda t: (0.0, 1.0, 0.001), lambda t: (0, 3, 0.5, _TO_HALF),
    ),
    "prims.iota.default": [
        lambda t: (5, _IOTA),
    ],
    **same_samples(
        "linspace.default", lambda t: (0, 1, 7), lambda t: (-2.5, 9.5, 1), lambda t: (3, 3, 0),
        lambda t: (0, 10, 5, {"dtype": torch.int64}), lambda t: (1, 0, 8, {"dtype": torch.float64}),
        lambda t: (0, 1, 9, _TO_HALF),
    ),
}  # fmt: skip

SAMPLES = VIEWS | REARRANGED | CREATED
_CROSS = "aten.linalg_cross.default"
APPROXIMATE = {
    "aten.arange.start_step",
    "aten.linspace.default",
    "aten.reflection_pad1d_backward.default",
    "aten.reflection_pad2d_backward.default",
    "aten.reflection_pad3d_backward.default",
    "aten.unfold_backward.default",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SAMPLES)
def test_rules_match_eager(name: str) -> None:
    for number, sample in enumerate(SAMPLES[name]):
        ran = 0
        for dtype in DTYPES:
            for transposed in (False, True):
                make = maker(dtype, number, transposed)
                ran += check_sample(name, sample, make, exact=name not in APPROXIMATE)
        assert ran, f"no dtype of sample {number} ran"


def test_every_rule_has_a_sample() -> None:
    named = registered_names(views) | registered_names(rearrange) | registered_names(creation)
    assert named - set(DECLINED) == {*SAMPLES, _CROSS}
    assert named <= set(RULES)

    assert named <= set(RULES)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64))
def test_cross_products(dtype: torch.dtype) -> None:
    """Operands may be broadcast, and of integers."""
    for left, right, dim in (((5, 3), (5, 3), -1), ((3, 4), (3, 1), 0), ((2, 1, 3), (1, 4, 3), 2)):
        x, y = [
            (torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) * 8).to(dtype)
            for seed, sizes in enumerate((left, right))
        ]
        arguments = (x, y, {"dim": dim})
        wanted = torch.linalg.cross(x.double(), y.double(), dim=dim)
        for device in ("cuda", "cpu"):
            result = run_rule(_CROSS, arguments, device)
            assert result.dtype is dtype
            assert float((result - wanted).norm() / wanted.norm()) <= (4e-3 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", [name for name, samples in VIEWS.items()])
def test_views_cost_no_kernel(name: str) -> None:
    for sample in VIEWS[name]:
        result, _ = define(name, sample(maker(torch.float32)))
        assert all(isinstance(item, Viewed) for item in (result if isinstance(result, tuple) else (result,)))


# --- declined calls --------------------------------------------------------------------------------------------------

DECLINED: dict[str, tuple[Sample, str]] = {
    "aten.as_strided.default": (lambda t: (t(6), [2], [3]), "addresses memory"),
    "aten.as_strided_copy.default": (lambda t: (t(6), [2], [3]), "addresses memory"),
    "aten.as_strided_scatter.default": (lambda t: (t(6), t(2), [2], [3]), "addresses memory"),
    "aten._reshape_alias.default": (lambda t: (t(6), [2, 3], [3, 1]), "addresses memory"),
    "aten.view.dtype": (lambda t: (t(2), torch.int32), "bytes as another dtype"),
    "aten.view_copy.dtype": (lambda t: (t(2), torch.int32), "bytes as another dtype"),
    "aten.view_as_real.default": (lambda t: (torch.ones(2, dtype=torch.complex64),), "complex"),
    "aten.view_as_real_copy.default": (lambda t: (torch.ones(2, dtype=torch.complex64),), "complex"),
    "aten.view_as_complex.default": (lambda t: (t(3, 2),), "complex"),
    "aten.view_as_complex_copy.default": (lambda t: (t(3, 2),), "complex"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_decline_reasons(name: str) -> None:
    sample, reason = DECLINED[name]
    assert reason in run_rule(name, sample(maker(torch.float32)))


def test_unsupported_dtypes_and_widths_are_declined() -> None:
    complex_tensor = torch.ones(2, 3, dtype=torch.complex64)
    assert run_rule("aten.permute.default", (complex_tensor, [1, 0])) == "kernels have no torch.complex64"
    assert "choose among 17 tensors" in run_rule("aten.cat.default", ([torch.ones(2)] * 17,))


# --- symbolic and huge sizes -----------------------------------------------------------------------------------------

S0, S1 = make_symbol("s0"), make_symbol("s1")


def symbolic_view(name: str, sizes: tuple[Any, ...], arguments: tuple[Any, ...], result: Any) -> Any:
    """Returns a rule's result for a tensor of symbolic sizes; `result` are the result's sizes, or a list of them."""
    base = Stored(sizes, torch.float32, torch.device("cpu"))
    fakes = [torch.empty(0) for _ in result] if isinstance(result, list) else torch.empty(0)
    sizes_by_fake = dict(zip(map(id, fakes), result)) if isinstance(result, list) else {id(fakes): result}
    call = OperatorCall(name, (base, *arguments), {}, fakes, base.device, lambda fake: sizes_by_fake[id(fake)], CPU)
    return RULES[name](call)


@pytest.mark.parametrize(
    ("name", "sizes", "arguments", "result", "wanted"),
    [
        ("aten.view.default", (S0, 3, 4), ([S0, 12],), (S0, 12), "p0, (p1)//4, (p1)%4"),
        ("aten.view.default", (S0, 12), ([S0, 3, 4],), (S0, 3, 4), "p0, 4*p1 + p2"),
        ("aten.view.default", (S0 * S1, 2), ([S0, S1, 2],), (S0, S1, 2), "p0*s1 + p1, p2"),
        ("aten.view.default", (S0, S1), ([S0 * S1],), (S0 * S1,), "(p0)//s1, (p0)%s1"),
        ("aten.unsqueeze.default", (S0, S1), (1,), (S0, 1, S1), "p0, p2"),
        ("aten.flip.default", (S0, S1), ([0],), (S0, S1), "-p0 + s0 - 1, p1"),
        ("aten.slice.Tensor", (S0,), (0, 2, 2**63 - 1), (S0 - 2,), "p0 + 2"),
        ("aten.slice.Tensor", (S0,), (0, -2, 2**63 - 1), (2,), "p0 + s0 - 2"),
        ("aten.slice.Tensor", (S0,), (0, S1, 2**63 - 1), (S0 - S1,), "p0 + s1"),
        ("aten.select.int", (S0, 4), (0, -1), (4,), "s0 - 1, p0"),
        ("aten.diagonal.default", (S0, S1), (1,), (S0,), "p0, p0 + 1"),
        ("aten.roll.default", (S0,), ([2], [0]), (S0,), "(p0 - 2)%s0"),
        ("aten.repeat.default", (S0,), ([3],), (3 * S0,), "(p0)%s0"),
    ],
)  # fmt: skip
def test_views_of_symbolic_sizes(name: str, sizes: Any, arguments: Any, result: Any, wanted: str) -> None:
    view = symbolic_view(name, sizes, arguments, result)
    axes = [Axis(f"p{number}", size) for number, size in enumerate(result)]
    assert ", ".join([str(as_index(index)) for index in view.index_map(axes)]) == wanted


def test_a_split_of_a_symbolic_size() -> None:
    parts = symbolic_view("aten.split_with_sizes.default", (S0 + 3,), ([S0, 3],), [(S0,), (3,)])
    assert [str(as_index(part.index_map([Axis("p", part.sizes[0])])[0])) for part in parts] == ["p", "p + s0"]


def test_an_arange_from_a_symbolic_number_has_unknown_bounds() -> None:
    """`arange(s0, ...)` with a number that may be negative: no bound of an index may be concluded from it."""
    for dtype, arguments in ((torch.int64, (S0, S0 + 4)), (torch.float32, (S0, 4 * S0, S1)), (torch.int32, (0, 4, S1))):
        name = "aten.arange.start" if len(arguments) == 2 else "aten.arange.start_step"
        fake = torch.empty(4, dtype=dtype)
        result = RULES[name](OperatorCall(name, arguments, {}, fake, torch.device("cpu"), lambda fake: (4,), CPU))
        reader = BodyBuilder(lambda definition: "inlined", lambda *_: pytest.fail("nothing is read"))
        reader.body.store("out", Axis("p", 4), reader.load(result, (Axis("p", 4),)))
        kernel = reader.body.finish([Axis("p", 4)], [], [], [Buffer("out", dtype, 4)])
        out = torch.empty(4, dtype=dtype)
        evaluate_kernel(kernel, {"out": out}, {"s0": -3, "s1": 2})
        step = 1 if len(arguments) == 2 else 2
        assert out.tolist() == [(-3 if arguments[0] == S0 else 0) + step * number for number in range(4)]


def test_numbers_of_unknown_sign_are_declined() -> None:
    for name, arguments, result in (
        ("aten.select.int", (0, S1), (4,)),
        ("aten.slice.Tensor", (0, S1, 2 * S1), (S1, 4)),
        ("aten.roll.default", ([S1], [0]), (S0, 4)),
    ):
        with pytest.raises(Declined, match="sign of a symbolic"):
            symbolic_view(name, (S0, 4), arguments, result)


def test_indices_above_two_to_the_31() -> None:
    """Index arithmetic is exact for tensors that no machine here could hold."""
    rows = 2**33 + 5
    for name, sizes, arguments, result, at, wanted in (
        ("aten.view.default", (rows, 6), ([rows * 6],), (rows * 6,), (rows * 6 - 2,), (rows - 1, 4)),
        ("aten.view.default", (rows * 6,), ([rows, 6],), (rows, 6), (rows - 1, 4), (rows * 6 - 2,)),
        ("aten.flip.default", (rows, 2), ([0],), (rows, 2), (3, 1), (rows - 4, 1)),
        ("aten.slice.Tensor", (rows,), (0, 1, rows, 2), (rows // 2,), (2**32,), (2**33 + 1,)),
        ("aten.roll.default", (rows,), ([7], [0]), (rows,), (3,), (rows - 4,)),
        ("aten.unfold.default", (rows,), (0, 3, 2), (rows // 2, 3), (2**32, 2), (2**33 + 2,)),
    ):
        view = symbolic_view(name, sizes, arguments, result)
        axes = [Axis(f"p{number}", size) for number, size in enumerate(result)]
        value_of = dict(zip(axes, at)).__getitem__
        assert tuple([evaluate_index(as_index(index), value_of) for index in view.index_map(axes)]) == wanted


def _values(of_axes: dict[Any, int], numbers: dict[str, int]) -> Any:
    return lambda atom: of_axes[atom] if atom in of_axes else evaluate(atom.expression, numbers)


def test_a_reshape_of_symbolic_sizes_is_right_for_any_of_them() -> None:
    view = symbolic_view("aten.view.default", (S0, S1, 6), ([S0 * S1 * 2, 3],), (2 * S0 * S1, 3))
    for numbers in ({"s0": 2, "s1": 3}, {"s0": 5, "s1": 1}, {"s0": 1, "s1": 4}):
        rows = 2 * numbers["s0"] * numbers["s1"]
        table = torch.arange(rows * 3).reshape(numbers["s0"], numbers["s1"], 6)
        axes = [Axis("p0", 2 * S0 * S1), Axis("p1", 3)]
        for row in range(rows):
            for column in range(3):
                value_of = _values(dict(zip(axes, (row, column))), numbers)
                position = [evaluate_index(as_index(index), value_of) for index in view.index_map(axes)]
                assert table[tuple(position)] == row * 3 + column

"""Rules for reductions, softmax, scans and negative log likelihood, against eager mode and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.lowering.evaluate_definitions import call_rule
from tests.lowering.rules.rule_checks import (
    EVERY,
    FLOATS,
    NUMBERS,
    OperatorWithReference,
    Sample,
    all_of,
    check_all,
    operand,
    rules_of,
    sample,
    special_values_matrix,
)
from tests.support.versions import is_before

aten = torch.ops.aten
DTypes = tuple[torch.dtype, ...]
_UNUSUAL = (math.nan, math.inf, -math.inf)
_UNTRACED = (torch.float16, torch.bfloat16) if is_before("2.13") else ()
"""Dtypes of matrices whose trace eager does not compute on a CPU."""


def _operands(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields operands for reductions over all dimensions and over the first and last."""
    yield operand(dtype, 3, 5, 7)
    yield operand(dtype, 5, 33).t()
    yield operand(dtype, 4, 6)[::2, 1:]
    yield operand(dtype)
    yield operand(dtype, 1)
    yield operand(dtype, 0, 3)
    if dtype.is_floating_point:
        yield special_values_matrix(dtype, *_UNUSUAL)
        yield all_of(dtype, -math.inf)
        yield all_of(dtype, math.inf)
    elif dtype is not torch.bool:
        yield torch.full((3, 4), torch.iinfo(dtype).max, dtype=dtype)


def _whole(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _operands(dtype):
        yield sample(item)


def _one_dim(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _operands(dtype):
        yield sample(item, 0)
        yield sample(item, -1, True)
    yield sample(operand(dtype, 2, 3, 4), 1)
    yield sample(operand(dtype, 3, 0), 0)


def _dim_lists(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _operands(dtype):
        yield sample(item, [0])
        yield sample(item, [-1], True)
    x = operand(dtype, 2, 3, 4, 5)
    for dims in ([0, 2], [3, 1], [-1, -2], [0, 1, 2, 3], [1]):
        yield sample(x, dims)
        yield sample(x, dim=dims, keepdim=True)
    yield sample(operand(dtype, 3, 0), [0])
    yield sample(operand(dtype, 3, 0), [1])


def _maybe_dim_lists(dtype: torch.dtype) -> Iterator[Sample]:
    yield from _dim_lists(dtype)
    yield sample(operand(dtype, 3, 4), [])
    yield sample(operand(dtype, 3, 4), [], True)
    yield sample(operand(dtype, 3, 4), None, True)


def _dims_alone(dtype: torch.dtype) -> Iterator[Sample]:
    for dims in ([0], [-1], [0, 2], [], [2, 1, 0]):
        yield sample(operand(dtype, 2, 3, 4), dims)
    yield sample(operand(dtype), [0])
    yield sample(operand(dtype, 3, 0), [1])


def _with_dtypes(samples: Callable[[torch.dtype], Iterator[Sample]]) -> Callable[[torch.dtype], Iterator[Sample]]:
    def extended(dtype: torch.dtype) -> Iterator[Sample]:
        plain = list(samples(dtype))
        yield from plain
        for result in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32):
            if dtype.is_floating_point and not result.is_floating_point:
                continue  # floats that are no integers; another test covers integers
            yield Sample(plain[0].arguments, {**plain[0].keywords, "dtype": result})

    return extended


def _optional_dim(dtype: torch.dtype) -> Iterator[Sample]:
    yield from _one_dim(dtype)
    yield from _whole(dtype)
    yield sample(operand(dtype, 3, 4), None, True)


def _named_dim(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _optional_dim(dtype):
        names = ("dim", "keepdim")[: len(item.arguments) - 1]
        yield Sample(item.arguments[:1], dict(zip(names, item.arguments[1:], strict=True)))


def _corrections(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _maybe_dim_lists(dtype):
        names = ("dim", "keepdim")[: len(item.arguments) - 1]
        keywords = {**dict(zip(names, item.arguments[1:], strict=True)), **item.keywords}
        yield Sample(item.arguments[:1], keywords)
        for correction in (0, 1, 2.5, 40):
            yield Sample(item.arguments[:1], {**keywords, "correction": correction})
    yield sample(operand(dtype, 3, 4))
    yield sample(operand(dtype, 3, 4) + 1000)


def _corrections_without_infinity(dtype: torch.dtype) -> Iterator[Sample]:
    """The mean of numbers with an infinity among them is NaN in eager, because of how it gets the variance with it."""
    for item in _corrections(dtype):
        if not item.arguments[0].isinf().any():
            yield item


_ORDERS = (0, 1, 2, 3, 0.5, -1, -2.5, math.inf, -math.inf)


def _vector_norms(dtype: torch.dtype) -> Iterator[Sample]:
    for order in _ORDERS:
        for item in (
            operand(dtype, 3, 5),
            operand(dtype),
            operand(dtype, 0, 3),
            special_values_matrix(dtype, *_UNUSUAL),
        ):
            yield sample(item, order, [0])
            yield sample(item, order, [-1], True)
            yield sample(item, order)
        yield sample(operand(dtype, 3, 5), order, [0, 1], dtype=torch.float64)
    yield sample(operand(dtype, 3, 5))


def _norms(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _vector_norms(dtype):
        if len(item.arguments) == 2 and not item.keywords:
            yield item
    yield sample(operand(dtype, 3, 5))


def _dim_norms(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _vector_norms(dtype):
        if len(item.arguments) >= 3 and not item.keywords:
            yield item
    yield sample(operand(dtype, 3, 5), None, [1])


def _typed_norms(dtype: torch.dtype) -> Iterator[Sample]:
    for order in (*_ORDERS, None):
        yield sample(operand(dtype, 3, 5), order, dtype=torch.float64)


def _typed_dim_norms(dtype: torch.dtype) -> Iterator[Sample]:
    for order in (*_ORDERS, None):
        yield sample(operand(dtype, 3, 5), order, [1], True, dtype=torch.float64)


def _distances(dtype: torch.dtype) -> Iterator[Sample]:
    for order in (0, 1, 2, 3, math.inf, -math.inf):
        yield sample(operand(dtype, 3, 5), operand(dtype, 5, seed=1), order)
        yield sample(operand(dtype), operand(dtype, seed=1), order)


def _matrices(dtype: torch.dtype) -> Iterator[Sample]:
    for sizes in ((3, 3), (2, 5), (5, 2), (0, 3)):
        yield sample(operand(dtype, *sizes))


def _softmaxes(dtype: torch.dtype) -> Iterator[Sample]:
    for item in (*_operands(dtype), operand(dtype, 2, 0), operand(dtype, 9, 4) * 100):
        for dim in (0, -1):
            yield sample(item, dim, False)
    yield sample(operand(dtype, 2, 3, 4), 1, False)


def _safe_softmaxes(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _softmaxes(dtype):
        yield Sample(item.arguments[:2])
        yield Sample(item.arguments[:2], {"dtype": torch.float32})


def _masked_softmaxes(dtype: torch.dtype) -> Iterator[Sample]:
    x, mask = operand(dtype, 3, 4), operand(torch.bool, 3, 4)
    yield sample(x, mask, -1, 2)
    yield sample(x, mask, 0, 2)
    yield sample(x, torch.tensor([[True] * 4, [False] * 4, [True, False, False, True]]), 1, 2)
    scores = operand(dtype, 2, 3, 4, 4)
    yield sample(scores, operand(torch.bool, 4, 4), -1, 0)
    yield sample(scores, operand(torch.bool, 2, 4), 3, 1)


def _masked_softmax_gradients(dtype: torch.dtype) -> Iterator[Sample]:
    x, mask = operand(dtype, 3, 4), operand(torch.bool, 3, 4)
    for dim in (0, -1):
        output = torch.nn.functional.softmax(x.masked_fill(mask, -30.0), dim)
        yield sample(operand(dtype, 3, 4, seed=1), output, mask, dim)


def _softmax_gradients(function: Callable[..., torch.Tensor]) -> Callable[[torch.dtype], Iterator[Sample]]:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for item in (operand(dtype, 3, 5, 7), operand(dtype), operand(dtype, 5, 3).t(), operand(dtype, 0, 2)):
            for dim in (0, -1):
                output = function(item.double(), dim).to(dtype)
                yield sample(operand(dtype, *item.shape, seed=1), output, dim, dtype)

    return samples


def _scans(dtype: torch.dtype) -> Iterator[Sample]:
    for item in _operands(dtype):
        yield sample(item, 0)
        yield sample(item, -1)
    yield sample(operand(dtype, 2, 3, 4), 1)


def _likelihoods(reduction_sizes: tuple[tuple[int, ...], ...]) -> Callable[[torch.dtype], Iterator[Sample]]:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for sizes in reduction_sizes:
            scores = torch.log_softmax(operand(torch.float64, *sizes), min(1, len(sizes) - 1)).to(dtype)
            classes = sizes[1] if len(sizes) > 1 else sizes[0]
            target = torch.arange(math.prod(sizes) // classes).reshape(sizes[:1] * (len(sizes) > 1) + sizes[2:])
            target = (target * 7) % classes
            for reduction in (0, 1, 2):
                for ignored in (-100, 1):
                    for weight in (None, operand(dtype, classes).abs()):
                        yield sample(scores, target, weight, reduction, ignored)

    return samples


def _likelihood_gradients(
    forward: str, sizes: tuple[tuple[int, ...], ...]
) -> Callable[[torch.dtype], Iterator[Sample]]:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for item in _likelihoods(sizes)(dtype):
            loss, total = getattr(aten, forward)(*item.arguments)
            yield sample(operand(dtype, *loss.shape, seed=3), *item.arguments, total)

    return samples


_ROWS = ((4, 3), (5,), (1, 2))
_IMAGES = ((2, 3, 4, 5), (1, 2, 1, 1))

SAMPLES: dict[str, tuple[DTypes, Callable[[torch.dtype], Iterator[Sample]]]] = {
    "aten.sum.default": (EVERY, _with_dtypes(_whole)),
    "aten.sum.dim_IntList": (EVERY, _with_dtypes(_maybe_dim_lists)),
    "aten.nansum.default": (EVERY, _with_dtypes(_dim_lists)),
    "aten.prod.default": (EVERY, _with_dtypes(_whole)),
    "aten.prod.dim_int": (EVERY, _with_dtypes(_one_dim)),
    "aten.mean.default": (FLOATS, _with_dtypes(_whole)),
    "aten.mean.dim": (FLOATS, _with_dtypes(_maybe_dim_lists)),
    "aten.amax.default": (EVERY, _maybe_dim_lists),
    "aten.amin.default": (EVERY, _maybe_dim_lists),
    "aten.max.default": (EVERY, _whole),
    "aten.min.default": (EVERY, _whole),
    "aten.max.dim": (EVERY, _one_dim),
    "aten.min.dim": (EVERY, _one_dim),
    "aten.aminmax.default": (EVERY, _named_dim),
    "aten.argmax.default": (NUMBERS, _optional_dim),
    "aten.argmin.default": (NUMBERS, _optional_dim),
    "aten.any.default": (EVERY, _whole),
    "aten.any.dim": (EVERY, _one_dim),
    "aten.any.dims": (EVERY, _maybe_dim_lists),
    "aten.all.default": (EVERY, _whole),
    "aten.all.dim": (EVERY, _one_dim),
    "aten.all.dims": (EVERY, _maybe_dim_lists),
    "aten.count_nonzero.default": (EVERY, _whole),
    "aten.count_nonzero.dim_IntList": (EVERY, _dims_alone),
    "aten.trace.default": (tuple([dtype for dtype in NUMBERS if dtype not in _UNTRACED]), _matrices),
    "aten.var.correction": (FLOATS, _corrections),
    "aten.std.correction": (FLOATS, _corrections),
    "aten.var_mean.correction": (FLOATS, _corrections_without_infinity),
    "aten.std_mean.correction": (FLOATS, _corrections_without_infinity),
    "aten.linalg_vector_norm.default": (FLOATS, _vector_norms),
    "aten.norm.Scalar": (FLOATS, _norms),
    "aten.norm.ScalarOpt_dim": (FLOATS, _dim_norms),
    "aten.norm.ScalarOpt_dtype": (FLOATS, _typed_norms),
    "aten.norm.ScalarOpt_dim_dtype": (FLOATS, _typed_dim_norms),
    "aten.dist.default": (FLOATS, _distances),
    "aten._softmax.default": (FLOATS, _softmaxes),
    "aten._log_softmax.default": (FLOATS, _softmaxes),
    "aten._safe_softmax.default": (FLOATS, _safe_softmaxes),
    "aten._masked_softmax.default": (FLOATS, _masked_softmaxes),
    "aten._softmax_backward_data.default": (FLOATS, _softmax_gradients(torch.softmax)),
    "aten._log_softmax_backward_data.default": (FLOATS, _softmax_gradients(torch.log_softmax)),
    "aten._masked_softmax_backward.default": (FLOATS, _masked_softmax_gradients),
    "aten.logsumexp.default": (EVERY, _dim_lists),
    "aten.cumsum.default": (EVERY, _with_dtypes(_scans)),
    "aten.cumprod.default": (EVERY, _with_dtypes(_scans)),
    "aten.cummax.default": (EVERY, _scans),
    "aten.cummin.default": (EVERY, _scans),
    "aten.logcumsumexp.default": (FLOATS, _scans),
    "aten.nll_loss_forward.default": (FLOATS, _likelihoods(_ROWS)),
    "aten.nll_loss2d_forward.default": (FLOATS, _likelihoods(_IMAGES)),
    "aten.nll_loss_backward.default": (FLOATS, _likelihood_gradients("nll_loss_forward", _ROWS)),
    "aten.nll_loss2d_backward.default": (FLOATS, _likelihood_gradients("nll_loss2d_forward", _IMAGES)),
}


def _marks(position: int, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    """In the short form each operator has float32, in turn one of the other float types, and all integers."""
    others = FLOATS[1:]
    return [pytest.mark.long] if dtype in others and dtype is not others[position % len(others)] else []


_CASES = [
    pytest.param(name, dtype, id=f"{name[5:]}-{str(dtype)[6:]}", marks=_marks(position, dtype))
    for position, (name, (dtypes, _)) in enumerate(SAMPLES.items())
    for dtype in dtypes
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), _CASES)
@pytest.mark.filterwarnings("ignore")  # torch warns of variances without degrees of freedom, and of bool sums
def test_matches_eager(name: str, dtype: torch.dtype) -> None:
    check_all(name, SAMPLES[name][1](dtype))


def test_every_rule_has_samples() -> None:
    assert rules_of("reductions", "softmax") == set(SAMPLES)


def test_casts_before_it_sums() -> None:
    halves = torch.full((2, 3), 1.5)
    for name in ("aten.sum.default", "aten.prod.default"):
        check_all(name, [sample(halves, dtype=torch.int64), sample(halves, dtype=torch.bool)])
    check_all("aten.cumsum.default", [sample(halves, 1, dtype=torch.int64)])


def test_nansum_over_an_empty_list_is_declined() -> None:
    x = torch.randn(2, 3)
    reason = call_rule(aten.nansum.default, x, [])
    assert reason == "torch's shape rule and its kernel differ for an empty list of dimensions"
    check_all("aten.nansum.default", [sample(x), sample(x, None, True), sample(torch.tensor(math.nan), [])])


def test_ties_return_the_first_index() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [math.nan, 1.0, math.nan]])
    assert call_rule(aten.argmax.default, x, 1).tolist() == [1, 0]
    assert call_rule(aten.argmin.default, -x, 1).tolist() == [1, 0]
    assert call_rule(aten.argmax.default, x).item() == 3
    assert call_rule(aten.max.dim, x > 2, 1)[1].tolist() == [1, 0]


def test_half_precision_is_summed_in_float32() -> None:
    x = torch.ones(4096, dtype=torch.bfloat16)
    assert call_rule(aten.sum.default, x).item() == 4096
    assert call_rule(aten.cumsum.default, x, 0)[-1].item() == 4096


@pytest.mark.parametrize(("dtype", "reason"), [(torch.complex64, "have no"), (torch.float8_e5m2, "do not compute in")])
def test_unsupported_dtypes_are_declined(dtype: torch.dtype, reason: str) -> None:
    overload = OperatorWithReference(aten.sum.default, lambda x: torch.ones((), dtype=dtype))
    assert call_rule(overload, torch.ones(2, 3).to(dtype)) == f"kernels {reason} {dtype}"


@pytest.mark.parametrize("target", [[5, 0], [-1, 0]])
@pytest.mark.parametrize("reduction", [0, 1])
def test_a_class_index_out_of_range_raises(target: list[int], reduction: int) -> None:
    scores, classes = torch.randn(2, 3), torch.tensor(target)
    with pytest.raises(IndexError):
        aten.nll_loss_forward(scores, classes, None, reduction, -100)
    fakes = aten.nll_loss_forward(scores, classes * 0, None, reduction, -100)
    with pytest.raises(IndexError, match="out of bounds for a dimension of size 3"):
        call_rule(
            OperatorWithReference(aten.nll_loss_forward.default, lambda *_: fakes),
            scores,
            classes,
            None,
            reduction,
            -100,
        )
    check_all("aten.nll_loss_forward.default", [sample(scores, classes, None, reduction, target[0])])

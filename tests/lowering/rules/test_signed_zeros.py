"""Zeros of both signs among the extrema: each result has eager's bits, in every emitter and kernel language.

Positions are those of the first zero, or the last one for scans, and the value is the element there. Reductions without
positions (`amax`, `max` of a whole tensor) return a zero of either sign, as eager does there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.loop_ir import evaluate_kernel
from fxwrap.options import EMITTERS, Options
from tests.lowering.planned_programs import plan, printed_launch
from tests.support.long_form import LONG, sampled

SHAPES = ((3, 7), (2, 200), (70, 20))
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SEEDS = range(4)


def extrema(*tensors: Tensor) -> list[Tensor]:
    """Values and positions along each dimension."""
    results: list[Tensor] = []
    for x in tensors:
        for dim in range(x.dim()):
            for function in (torch.max, torch.min, torch.cummax, torch.cummin, torch.sort):
                results += function(x, dim)
            results += [x.argmax(dim), x.argmin(dim), *torch.topk(x, 2, dim)]
        results += [x.argmax(), x.argmin()]
    return results


def tensors(seed: int, dtypes: Iterable[torch.dtype] = BITS) -> list[Tensor]:
    """Zeros of both signs, beside other numbers in some rows; outside the long form of every other shape and dtype."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for dtype, shape in sampled([*product(dtypes, SHAPES)], 0, part=2):
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        others = torch.randint(-1, 2, shape, generator=generator) * (torch.arange(shape[0]) % 2).unsqueeze(1)
        few = torch.rand(shape, generator=generator) < 0.1
        results.append((0.0 * signs + (others if seed % 2 else others * few)).to(dtype).mul_(signs))
    return results


def bits(result: Tensor) -> Tensor:
    return result.view(BITS[result.dtype]) if result.dtype in BITS else result


def assert_equal(results: list[Tensor], wanted: list[Tensor], case: object) -> None:
    for number, (result, want) in enumerate(zip(results, wanted, strict=True)):
        assert torch.equal(bits(result), bits(want)), f"result {number} of {case}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_each_emitter_returns_eagers_zeros(emitter: str) -> None:
    compiled = fxwrap.compile_graph(make_fx(extrema)(*tensors(0)), tensors(0), options=Options(emitter=emitter))
    for seed in SEEDS:
        assert_equal(list(compiled(*tensors(seed))), extrema(*tensors(seed)), seed)


@pytest.mark.parametrize("language", ["evaluator", "triton"])
def test_each_language_returns_eagers_zeros(language: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    planned = plan(make_fx(extrema)(*tensors(0, dtypes)), tensors(0, dtypes))
    evaluate_with = evaluate_kernel if language == "evaluator" else printed_launch([planned], language)
    for seed in SEEDS[: 2 if LONG else 1]:
        inputs = tensors(seed, dtypes)
        assert_equal(list(planned.run(inputs, evaluate_with)), extrema(*inputs), seed)

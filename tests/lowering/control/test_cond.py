"""`torch.cond` through every emitter: operands, predicates, closures, sizes, gradients; both branches each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lowering.control.cases import DEVICES, Case, Cases, random

CASES = Cases()
POSITIVE, NEGATIVE = random(4, 8).abs() + 0.1, -random(4, 8).abs() - 0.1
WEIGHTS = random(8, 8, gradient=True)
BOTH = ((POSITIVE,), (NEGATIVE,))


@CASES.add(*BOTH, long=True)
def pointwise(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x * 2,)) * 3


@CASES.add((POSITIVE, WEIGHTS), (NEGATIVE, WEIGHTS), training=True, long=True)
def closure_over_inputs_and_intermediates(x: Tensor, w: Tensor) -> Tensor:
    y = x + 1
    return torch.cond(x.sum() > 0, lambda a: (a @ w).sin() + y, lambda a: a.cos() * 2, (x,))


@CASES.add(*BOTH, training=True)
class ClosureOverParametersAndBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", random(8, seed=3))
        self.constant = torch.tensor([2.0, 3.0] * 4)

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Moves the constant, too, which torch leaves where it is: it is neither a parameter nor a buffer."""
        self.constant = function(self.constant)
        return super()._apply(function, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a: self.linear(a) * self.scale, lambda a: a * self.constant, (x,))


@CASES.add(*BOTH)
def constants_created_inside(x: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0,
        lambda a: a + torch.tensor([2.0], device=a.device),
        lambda a: a * torch.tensor([3.0], device=a.device),
        (x,),
    )


@CASES.add(*BOTH, dynamic=True, long=True)
def numbers_as_operands(x: Tensor) -> Tensor:
    count = x.shape[0]
    return torch.cond(x.sum() > 0, lambda a: a * count, lambda a: a + count + a.shape[1], (x,))


@CASES.add((random(4, 8),), (random(6, 8),), dynamic=True)
def a_condition_over_sizes(x: Tensor) -> Tensor:
    return torch.cond(x.shape[0] > 5, lambda a: a * 2, lambda a: a + 1, (x,))


@CASES.add(*BOTH)
def a_float_an_int_and_a_bool_read_from_tensors(x: Tensor) -> Tensor:
    y = torch.cond(x.sum().item() > 0.5, lambda a: a * 2, lambda a: a + 1, (x,))
    z = torch.cond((x > 0).sum().item() == 32, lambda a: a * 3, lambda a: a + 2, (y,))
    return torch.cond((x > 0).all().item(), lambda a: a * 4, lambda a: a + 3, (z,))


@CASES.add(*BOTH)
def a_predicate_of_one_element(x: Tensor) -> Tensor:
    return torch.cond((x > 0).all(0, keepdim=True).all(1), lambda a: a * 2, lambda a: a + 1, (x,))


@CASES.add((random(4, 8), torch.tensor(True)), (random(4, 8), torch.tensor(False)))
def a_predicate_that_is_an_input(x: Tensor, flag: Tensor) -> Tensor:
    return torch.cond(flag, lambda a: a * 2, lambda a: a + 1, (x,))


@CASES.add(*BOTH, long=True)
def branches_with_different_sizes(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a: a[:2].clone(), lambda a: a * 2, (x,)).sin() * 2


@CASES.add(*BOTH, dynamic=True)
def branches_with_different_symbolic_sizes(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a: a[:2] + 1, lambda a: a * 2, (x,)) * 2


@CASES.add(*BOTH)
def several_results_in_a_tree(x: Tensor) -> Any:
    results = torch.cond(
        x.sum() > 0,
        lambda a: {"sum": a.sum(0), "rest": (a.t() + 1, a.argmax(1))},
        lambda a: {"sum": a.mean(0), "rest": (a.t() * 2, a.argmin(1))},
        (x,),
    )
    return results["sum"] + 1, results["rest"][0], results["rest"][1]


@CASES.add(*BOTH)
def one_result_twice_and_an_operand(x: Tensor) -> Any:
    def then(a: Tensor) -> Any:
        b = a + 1
        return b.clone(), b.clone(), a.clone()

    return torch.cond(x.sum() > 0, then, lambda a: (a.clone(), a * 2, a * 3), (x,))


@CASES.add((POSITIVE,), (NEGATIVE,), (POSITIVE / 1000,), long=True)
def nested(x: Tensor) -> Tensor:
    def then(a: Tensor) -> Tensor:
        return torch.cond(a.sum() > 3, lambda b: b + 1, lambda b: b * torch.tensor([2.0], device=b.device), (a,))

    return torch.cond(x.sum() > 0, then, lambda a: a - 1, (x,))


@CASES.add(*[(x.clone().requires_grad_(),) for x in (POSITIVE, NEGATIVE, POSITIVE / 1000)], training=True)
def nested_in_training(x: Tensor) -> Tensor:
    def then(a: Tensor) -> Tensor:
        return torch.cond(a.sum() > 3, lambda b: b.exp(), lambda b: (b * b).sin(), (a,))

    return torch.cond(x.sum() > 0, then, lambda a: a.tanh(), (x * 2,))


@CASES.add((POSITIVE, WEIGHTS), (NEGATIVE, WEIGHTS), training=True, dynamic=True)
def training_with_symbols(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a, b: a @ b * a.shape[0], lambda a, b: (a @ b).sin(), (x, w))


@CASES.add((random(4, 8, dtype=torch.float16).abs(),), (torch.arange(-8, 0),), (torch.arange(8),))
def other_dtypes(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a + 1, (x,))


@CASES.add(*BOTH)
def random_numbers_in_a_branch(x: Tensor) -> Tensor:
    before = torch.rand_like(x)
    y = torch.cond(x.sum() > 0, lambda a: a + torch.rand_like(a), lambda a: a * 2, (x,))
    return y + before * torch.rand_like(x)


@CASES.add(*BOTH)
def operators_without_a_kernel(x: Tensor) -> Any:
    """Operators that are called inside of branches: several results, views, an index."""
    return torch.cond(
        x.sum() > 0,
        lambda a: (a.topk(2)[0], torch.nonzero(a > 100).sum(0)),
        lambda a: (a.sort()[0][:, :2].clone(), a[:2, :2].long().sum(1)),
        (x,),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.parameters)
def test_cond(case: Case, device: str) -> None:
    case.check(device)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", BOTH, ids=["then", "else"])
def test_a_predicate_on_another_device(inputs: tuple[Tensor]) -> None:
    """A predicate on the CPU over operands on the GPU, and the other way round."""

    def function(x: Tensor, y: Tensor) -> Any:
        on_gpu = torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a + 1, (y,))
        return on_gpu, torch.cond(y.sum() > 0, lambda a: a * 2, lambda a: a + 1, (x,))

    Case(function, ((inputs[0], inputs[0].cuda()),)).check_without_moving_inputs()

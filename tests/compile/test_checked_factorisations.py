"""Functions that check the success of a factorisation: since torch 2.12 that check is an ordered effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.options import Emitter
from tests.support.versions import fails_before

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cholesky": lambda a, b: torch.linalg.cholesky(a) @ b,
    "inv": lambda a, b: torch.linalg.inv(a) @ b,
    "inv_ex": lambda a, b: torch.linalg.inv_ex(a, check_errors=True)[0] @ b,
    "inverse": lambda a, b: a.inverse() @ b + torch.inverse(a + 1),
    "ldl_factor": lambda a, b: torch.linalg.ldl_factor(a.detach())[0] @ b,
    "lu_factor": lambda a, b: torch.linalg.lu_factor(a)[0] @ b,
    "matrix_power": lambda a, b: torch.linalg.matrix_power(a, -2) @ b + a.matrix_power(-1) + torch.matrix_power(a, -1),
    "solve": lambda a, b: torch.linalg.solve(a, b).sin(),
    "tensorinv": lambda a, b: torch.linalg.tensorinv(a, ind=1) @ b,
    "tensorsolve": lambda a, b: torch.linalg.tensorsolve(a, b[:, 0]),
    "two": lambda a, b: torch.linalg.inv(a) @ torch.linalg.solve(a, b),
}


def _operands(*, trained: bool) -> tuple[Tensor, Tensor]:
    matrix, other = torch.randn(3, 3), torch.randn(3, 3)
    return (matrix @ matrix.mT + torch.eye(3)).requires_grad_(trained), other.requires_grad_(trained)


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients(name: str, emitter: Emitter) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="fxwrap", fullgraph=True, options={"emitter": emitter})
    for trained in (False, True):
        inputs = _operands(trained=trained)
        result, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        assert result.requires_grad is trained
        if trained:
            gradients, wanted = [
                torch.autograd.grad(item.square().sum(), inputs, allow_unused=True, materialize_grads=True)
                for item in (result, expected)
            ]
            for gradient, correct in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(gradient, correct, rtol=1e-3, atol=1e-3 * float(1 + correct.abs().max()))


@fails_before("2.12", "torch does not trace the check", pytest.fail.Exception)
@pytest.mark.parametrize("is_used", [True, False])
def test_a_failed_factorisation_raises(is_used: bool) -> None:
    def function(x: Tensor) -> Tensor:
        inverse = torch.linalg.inv(x)
        return inverse + 1 if is_used else x + 1

    traced = fxwrap.compile_graph(make_fx(function)(torch.eye(3)), [torch.eye(3)])
    for call in (torch.compile(function, backend="fxwrap"), lambda x: traced(x)[0]):
        torch.testing.assert_close(call(torch.eye(3)), function(torch.eye(3)))
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            call(torch.zeros(3, 3))

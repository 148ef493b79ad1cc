"""Views of mutated inputs that a function returns are views of the inputs, wherever these begin in their storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.lines import Alloc
from fxwrap.options import EMITTERS


def _whole(x: Tensor) -> Tensor:
    x.add_(1)
    return x.view_as(x)


def _after_a_slice_write(x: Tensor) -> Tensor:
    x[1:] = x[:-1].clone()
    return x.view_as(x)


def _views(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x.mul_(2)
    return x.t(), x[1:, 2], x.unsqueeze(0)[..., ::2]


def _copied(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first result is no view of the input."""
    y = x.neg()
    x.copy_(y)
    return y, x[1]


def _offset(rows: int) -> Tensor:
    return torch.randn(rows * 6 + 3)[3:].view(rows, 6)


def _rows_with_gaps(rows: int) -> Tensor:
    return torch.randn(rows, 11)[:, 2:8]


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "whole": _whole, "slice write": _after_a_slice_write, "views": _views, "copied": _copied,
}  # fmt: skip


def _like(tensor: Tensor) -> Tensor:
    """Returns a copy in a storage of its own, at the same offset."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("create", [_offset, _rows_with_gaps])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_eager_mode(
    name: str, dynamic: bool, create: Callable[[int], Tensor], emitter: Any
) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="fxwrap", dynamic=dynamic, options={"emitter": emitter})
    for rows in (4, 5):
        x = create(rows)
        other = _like(x)
        results, wanted = [item if isinstance(item, tuple) else (item,) for item in (compiled(x), function(other))]
        assert torch.equal(x, other)
        for result, want in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, want)
            shares = want.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            assert (result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == shares
            assert result.stride() == want.stride()
            assert not shares or result.storage_offset() == want.storage_offset()


def test_the_returned_alias_takes_no_memory() -> None:
    """Without it, the program would write the new content twice."""
    compiled = torch.compile(_whole, backend="fxwrap", dynamic=True)
    compiled(_offset(4))
    (record,) = fxwrap.inspect(compiled)
    assert not any(isinstance(line, Alloc) for line in record.compiled.program.lines())


def test_an_input_that_training_mutates() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return x.t(), (x * weight).sum()

    compiled = torch.compile(function, backend="fxwrap", dynamic=True)
    for rows in (4, 5):
        x, weight = _offset(rows), torch.randn(6, requires_grad=True)
        other, same = _like(x), weight.detach().requires_grad_()
        (view, loss), (wanted, wanted_loss) = compiled(x, weight), function(other, same)
        loss.backward()
        wanted_loss.backward()
        assert torch.equal(view, wanted) and view.storage_offset() == 3
        torch.testing.assert_close(loss, wanted_loss)
        torch.testing.assert_close(weight.grad, same.grad)

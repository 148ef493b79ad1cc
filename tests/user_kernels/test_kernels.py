"""Hand-written Triton kernels called in a model: every emitter does what eager does, with kernels fused around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxwrap.testing import assert_emitters_agree
from tests.support.long_form import long_only
from tests.user_kernels import kernels
from tests.user_kernels.cases import Case
from tests.user_kernels.triton_on_cpu import triton_on_cpu


@pytest.fixture(autouse=True)
def _triton_on_cpu() -> Iterator[None]:
    with triton_on_cpu():
        yield


def cover(count: Any) -> Callable[[Any], tuple[Any, ...]]:
    """A grid with one program a block."""
    return lambda meta: (triton.cdiv(count, meta["BLOCK"]),)


# --- functions --------------------------------------------------------------------------------------------------------


def between_fused(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    out, n = torch.empty_like(x), x.numel()
    kernels.add[cover(n)](x, y, out, n, BLOCK=64, num_warps=2)
    return out.exp() + y


def without_operand(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.add[(4, 1)](x.cos(), None, out, x.numel(), BLOCK=64, num_stages=2)
    return out + 1


def in_the_middle_of_launches(x: Tensor, y: Tensor) -> Tensor:
    first, second = torch.empty_like(x), torch.empty_like(x)
    kernels.add[cover(x.numel())](x, y, first, x.numel(), BLOCK=64)
    kernels.add[cover(x.numel())](first * 2, first, second, x.numel(), BLOCK=64)
    return second


def strided(x: Tensor) -> Tensor:
    x = x.sin()
    rows, columns = x.shape
    out = torch.empty(rows, device=x.device, dtype=x.dtype)
    kernels.strided_rows[(rows,)](x, out, rows, columns, x.stride(0), x.stride(1), 0.5, BLOCK=32)
    return out * 2


def numbers_of_every_kind(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.scaled_where[cover(x.numel())](x + 1, out, x.numel(), 0.25, 1, BLOCK=64)
    kernels.scaled_where[cover(x.numel())](out + 1, out, x.numel(), x.shape[0] * 2, 0, BLOCK=64)
    return out


def flags(x: Tensor) -> Tensor:
    """Triton's interpreter takes no flags."""
    out = torch.empty_like(x)
    kernels.scaled_where[cover(x.numel())](x + 1, out, x.numel(), 0.25, True, BLOCK=64)
    return out * 2


def several_results(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
    kernels.minimum_and_maximum[(x.shape[0],)](x * 2, low, high, x.shape[1], BLOCK=32, DTYPE=tl.float64)
    return high - low, low


def default_constant(x: Tensor) -> Tensor:
    low, high = x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
    kernels.minimum_and_maximum[(x.shape[0],)](x, low, high, x.shape[1], BLOCK=32)
    return high - low


def module_globals(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.through_module[cover(x.numel())](x + 1, out, x.numel(), BLOCK=64)
    return out


def written_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    kernels.double_in_place[cover(x.numel())](x, x.numel(), BLOCK=64)
    y = x + 1
    kernels.double_in_place[cover(x.numel())](x, x.numel(), BLOCK=64)
    return y, x * y


def mutated_and_original_returned(x: Tensor) -> Tensor:
    y = x + 1
    z = y.clone()
    kernels.double_in_place[cover(x.numel())](z, x.numel(), BLOCK=64)
    return y + z


def written_window(x: Tensor) -> Tensor:
    kernels.double_in_place[cover(x[1].numel())](x[1], x.shape[1], BLOCK=64)
    return x + 1


def written_gaps(x: Tensor) -> Tensor:
    y = x * 1
    kernels.gaps[(1,)](y[:, ::2], x.numel() // 2 - 1, BLOCK=16)
    return y + 1


def tuned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.tuned[cover(x.numel())](x * 2, out, x.numel())
    return out.exp()


def tuned_in_place(x: Tensor) -> Tensor:
    out = x.exp()
    kernels.tuned_in_place[cover(x.numel())](out, x.numel())
    return out * 2


def with_heuristics(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.with_heuristics[(1,)](x, out, x.numel())
    return out + x


def tuned_with_heuristics(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.tuned_with_heuristics[cover(x.numel())](x, out, x.numel())
    return out


def process_only(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.profiled[(1,)](x.sin(), out, x.numel(), BLOCK=256)
    return out * 2


def in_a_branch(x: Tensor) -> Tensor:
    def doubled(x: Tensor) -> Tensor:
        y = x + 1
        kernels.double_in_place[(4,)](y, 100, BLOCK=64)
        return y * 2

    return torch.cond(x.sum() > 0, doubled, lambda x: x.sin(), (x,))


class Sine(torch.autograd.Function):
    """Launches a kernel forward, and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        kernels.sine[cover(x.numel())](x, out, x.numel(), BLOCK=64)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        kernels.sine_backward[cover(x.numel())](x, gradient.contiguous(), out, x.numel(), BLOCK=64)
        return out


def trained(x: Tensor) -> Tensor:
    return Sine.apply(x * 2) * 3 + x  # type: ignore[no-any-return, no-untyped-call]


def trained_again(x: Tensor) -> Tensor:
    gradients: Tensor = checkpoint(trained, x, use_reentrant=False)
    return gradients.sin()


# --- cases ------------------------------------------------------------------------------------------------------------

# Those of the long form have a function and a form that others have too, each with another one.
CASES = (
    Case(between_fused, ((200,), (200,))),
    Case(between_fused, ((200,), (200,)), dynamic=True, long=True),
    Case(between_fused, ((200,), (200,)), options={"fuse": False}),
    Case(without_operand, ((200,),)),
    Case(in_the_middle_of_launches, ((100,), (100,)), dynamic=True),
    Case(strided, ((4, 20),)),
    Case(strided, ((1, 20),), transposed=True),
    Case(strided, ((4, 20),), dynamic=True, long=True),
    Case(numbers_of_every_kind, ((100,),)),
    Case(numbers_of_every_kind, ((100,),), dynamic=True),
    Case(several_results, ((4, 20),)),
    Case(default_constant, ((4, 20),)),
    Case(module_globals, ((100,),)),
    Case(written_twice, ((100,),)),
    Case(mutated_and_original_returned, ((100,),), dynamic=True),
    Case(written_window, ((3, 50),)),
    Case(written_gaps, ((4, 6),)),
    Case(tuned, ((200,),)),
    Case(tuned, ((200,),), dynamic=True, long=True),
    Case(tuned_in_place, ((200,),), dynamic=True),
    Case(with_heuristics, ((200,),)),
    Case(tuned_with_heuristics, ((192,),)),
    Case(process_only, ((200,),)),
    Case(in_a_branch, ((100,),)),
    Case(trained, ((100,),), training=True, long=True),
    Case(trained, ((100,),), training=True, dynamic=True),
    Case(trained_again, ((100,),), training=True),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [long_only(case) if case.long else case for case in CASES], ids=str)
def test_on_cpu(case: Case) -> None:
    case.check("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, Case(flags, ((100,),))], ids=str)
def test_on_gpu(case: Case) -> None:
    case.check("cuda")


def test_one_program_covers_all_sizes() -> None:
    programs: list[Any] = []

    def keep(program: Any) -> Any:
        programs.append(program)
        return program

    compiled = torch.compile(tuned, backend="fxwrap", dynamic=True, fullgraph=True, options={"passes": (keep,)})
    for count in (200, 64, 65, 3000, 1000):
        x = torch.randn(count)
        torch.testing.assert_close(compiled(x), tuned(x))
    assert len(programs) == 1


def test_a_constant_of_the_function_around_a_kernel() -> None:
    """Triton's interpreter knows no closures, so eager cannot run this on a CPU; the text that is carried has none."""
    three, four = kernels.kernel_over(tl.constexpr(3.0)), kernels.kernel_over(tl.constexpr(4.0))

    def function(x: Tensor) -> Tensor:
        out, other = torch.empty_like(x), torch.empty_like(x)
        three[(1,)](x, out, x.numel(), BLOCK=128)
        four[(1,)](out, other, x.numel(), BLOCK=128)
        return other

    x = torch.randn(100)
    compiled = torch.compile(function, backend="fxwrap", fullgraph=True)
    torch.testing.assert_close(compiled(x), x + 7)


def test_an_exported_program() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return between_fused(x, y)

    inputs = (torch.randn(100), torch.randn(100))
    assert_emitters_agree(torch.export.export(Model(), inputs, strict=True), inputs)

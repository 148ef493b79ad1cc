"""Matmuls and convolutions that add in place to tensors that nothing reads later."""

from __future__ import annotations

import torch
from torch import Tensor

import fxwrap
from fxwrap.lines import Mutate
from fxwrap.passes.accumulate import accumulate_in_place
from fxwrap.testing import assert_emitters_agree
from fxwrap.wrapper_ir import Program, live_bytes, verify
from tests.memory_planning.programs import parsed

_SUMS = """
program @p(%x: borrowed f32[8, 8]@cpu, %o: owned f32[8, 8]@cpu) {
  %a = extern.call @aten.mm.default(%x, %x) : f32[8, 8]@cpu
  %b = extern.call @aten.addmm.default(%a, %x, %x, beta=2) : f32[8, 8]@cpu
  memory.free(%a)
  %c = extern.call @aten.addmm.default(%b, %x, %b) : f32[8, 8]@cpu
  %d = extern.call @aten.addmm.default(%c, %x, %b) : f32[8, 8]@cpu
  memory.free(%c)
  memory.free(%b)
  %e = extern.call @aten.addmm.default(%x, %x, %d) : f32[8, 8]@cpu
  %f = extern.call @aten.addmm.default(%o, %x, %e) : f32[8, 8]@cpu
  memory.free(%o)
  memory.free(%e)
  control.return(%d, %f)
}
"""


def _written(program: Program) -> list[str]:
    return [line.writes[0].name for line in program.lines() if isinstance(line, Mutate)]


def test_the_last_reader_of_a_tensor_adds_to_it() -> None:
    """Not where the tensor is borrowed (%e), or another operand of the matmul (%c)."""
    program = parsed(_SUMS)
    changed = verify(accumulate_in_place(program))
    assert _written(changed) == ["a", "c", "o"]
    assert "control.return(%c, %o)" in str(changed)
    assert live_bytes(changed).peak <= live_bytes(program).peak
    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    results = [fxwrap.run(item, [tensor.clone() for tensor in inputs]) for item in (changed, program)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_tensors_of_other_types_stay() -> None:
    call, type_ = "extern.call @aten.mm.default(%x, %x)", "f32[8, 8]@cpu"
    transposed = _SUMS.replace(f"{call} : {type_}", f"{call} : f32[8, 8 | 1, 8]@cpu")
    broadcast = _SUMS.replace(f"{call} : {type_}", "extern.call @aten.sum.dim_IntList(%x, [0]) : f32[8]@cpu")
    for text in (transposed, broadcast):
        assert _written(accumulate_in_place(parsed(text))) == ["c", "o"]


def test_memory_with_other_references_stays() -> None:
    shared = parsed(_SUMS.replace("%o: owned", "%o: shared"))
    changed = verify(accumulate_in_place(shared))
    assert _written(changed) == ["a", "c"]


_IMAGES = """
program @p(%x: borrowed f32[2, 4, 5, 5 | 100, 1, 20, 4]@cpu, %w: borrowed f32[4, 4, 1, 1]@cpu) {
  %a = CONVOLUTION(%x, %w, none, [], 0.0, [1, 1], [0, 0], [1, 1], 1, none, "none", [100, 1, 20, 4]) : IMAGES
  %b = CONVOLUTION(%x, %w, none, [], 0.0, [1, 1], [0, 0], [1, 1], 1, %a, "relu", [100, 1, 20, 4]) : IMAGES
  memory.free(%a)
  %c = CONVOLUTION(%b, %w, none, [], 0.0, [1, 1], [0, 0], [1, 1], 1, %b, "none", [100, 1, 20, 4]) : IMAGES
  memory.free(%b)
  %d = CONVOLUTION(%c, %w, none, [], 0.0, [1, 1], [0, 0], [1, 1], 1, %x, "none", [100, 1, 20, 4]) : IMAGES
  memory.free(%c)
  control.return(%d)
}
""".replace("CONVOLUTION", "extern.call @fxwrap.frozen_convolution.default").replace(
    "IMAGES", "f32[2, 4, 5, 5 | 100, 1, 20, 4]@cpu"
)


def test_convolutions_add_to_residuals() -> None:
    """Not where the residual is borrowed (%d), or the image (%c)."""
    program = parsed(_IMAGES)
    changed = verify(accumulate_in_place(program))
    assert _written(changed) == ["a"]
    inputs = [torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last), torch.randn(4, 4, 1, 1)]
    (result,), (expected,) = [fxwrap.run(item, [*inputs]) for item in (changed, program)]
    torch.testing.assert_close(result, expected)


def _gradient(x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of three matmuls, as that of the gradients of queries, keys and values, and a sum of batches."""
    total = torch.addmm(torch.addmm(q @ x, k, x), v, x)
    return torch.relu(total), torch.baddbmm(torch.bmm(batch, batch), batch, batch, beta=0.5)


def test_emitters_agree() -> None:
    inputs = [*[torch.randn(6, 6) for _ in range(4)], torch.randn(2, 3, 3)]
    assert_emitters_agree(_gradient, inputs, options=fxwrap.Options(matmul_kernels="library"))

"""Replace `matmul + bias + GELU` by a custom kernel: C++ on a CPU, Triton on a GPU.

The pattern matches lines of the program, in which the weight of a linear layer is a view and the matmul is a call. The
option `preserve_ops` keeps GELU a separate call too; else it would be part of a kernel that may compute more
(docs/rewriting.md).

    python examples/rewrite_custom_kernel.py
"""

import torch

import fxwrap
from fxwrap import rewrite as rw
from fxwrap.wrapper_ir import KernelDefinition

CPP = """
#include "kernel.h"

extern "C" void kernel(const float* x, const float* weight, const float* bias, float* out,
                       int64_t rows, int64_t columns, int64_t depth) {
  #pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      float total = bias[column];
      for (int64_t k = 0; k < depth; ++k) total += x[row * depth + k] * weight[column * depth + k];
      out[row * columns + column] = 0.5f * total * (1.0f + op::erf(total * 0.70710678f));
    }
  }
}
"""

TRITON = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, weight, bias, out, rows, columns, depth, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros((TILE, TILE), tl.float32) + tl.load(bias + column, column < columns)
    for k in range(depth):
        left = tl.load(x + row * depth + k, row < rows, 0.0)
        total += left * tl.load(weight + column * depth + k, column < columns, 0.0)
    result = 0.5 * total * (1.0 + tl.erf(total * 0.70710678))
    tl.store(out + row * columns + column, result, (row < rows) & (column < columns))
"""
TILE = 16
SIGNATURE = ("*f32", "*f32", "*f32", "*f32", "i64", "i64", "i64")

KERNELS = {
    "cpp": KernelDefinition("linear_gelu", "cpp", CPP, SIGNATURE),
    "triton": KernelDefinition("linear_gelu", "triton", TRITON, SIGNATURE, (("TILE", TILE), ("num_warps", 4))),
}


def linear_gelu(language: str) -> fxwrap.Pass:
    """The pass: gelu(bias + x @ weight.t()) becomes one launch, for contiguous float32."""
    x, bias, weight = (rw.tensor(name, dtype=torch.float32, contiguous=True) for name in ("x", "bias", "weight"))
    pattern = rw.call("aten.gelu.default", rw.call("aten.addmm.default", bias, x, rw.view(weight)))

    def build(match: rw.Match, builder: rw.LineBuilder):
        rows, depth = match["x"].type.sizes
        columns = match["weight"].type.sizes[0]
        grid = (-(-rows // TILE), -(-columns // TILE), 1) if language == "triton" else (1, 1, 1)
        (replaced,) = match.outputs
        out = builder.empty(replaced.type, "linear_gelu")
        tensors = [match["x"], match["weight"], match["bias"]]
        builder.launch(KERNELS[language], [*tensors, rows, columns, depth], [out], grid)
        return out

    return rw.rewrite_pass(pattern, build, key=f"1 {language}", name="linear_gelu")


def main(language: str = "triton" if torch.cuda.is_available() else "cpp") -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 32), torch.nn.GELU()]
    model, x = torch.nn.Sequential(*layers).to(device), torch.randn(20, 48, device=device)
    programs = []

    def record(program):
        programs.append(program)
        return program

    passes = [linear_gelu(language), fxwrap.Pass(record, key="record")]
    options = {"passes": passes, "preserve_ops": {"aten.gelu.default"}}
    with torch.no_grad():
        result, expected = torch.compile(model, backend="fxwrap", options=options)(x), model(x)
    print("\n".join(str(programs[0]).split("kernel @")[0].splitlines()[1:]))
    print(f"in {language}, the largest difference is {(result - expected).abs().max().item():.1e}")
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()

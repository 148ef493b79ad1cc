"""Quantise the linear layers of an exported model to 8 bits at compile time.

The weights of an exported program are constants of the program, so a builder function can read and replace them: here
by int8 tensors with a scale per row, which an ATen operator uses.

    python examples/rewrite_quantised_linear.py
"""

import torch

import fxwrap
from fxwrap import rewrite as rw


def int8_linear(smallest: int = 1024) -> fxwrap.Pass:
    """The pass: x @ weight.t() + bias with a weight of at least this many elements becomes an int8 matmul."""
    bias, x, weight = rw.tensors("bias x weight")
    pattern = rw.call("aten.addmm.default", bias, x, rw.view(weight))

    def quantise(match: rw.Match, builder: rw.LineBuilder):
        constant_tensor = builder.constant_tensor(match["weight"])
        if constant_tensor is None or constant_tensor.dtype != torch.float32:
            raise rw.Skip("the weight is not a constant")
        if constant_tensor.numel() < smallest:
            raise rw.Skip(f"the weight has {constant_tensor.numel()} elements")
        scales = constant_tensor.detach().abs().amax(1) / 127
        rounded = (constant_tensor.detach() / scales[:, None]).round().to(torch.int8)
        weight, scale = builder.constant(rounded, "weight_int8"), builder.constant(scales, "scales")
        matmul = builder.call("aten._weight_int8pack_mm.default", match["x"], weight, scale)
        return builder.call("aten.add.Tensor", matmul, match["bias"])

    return rw.rewrite_pass(pattern, quantise, key=f"1 {smallest}", name="int8_linear")


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4)).eval()
    x = torch.randn(16, 64)
    exported = torch.export.export(model, (x,))
    plain = fxwrap.compile_graph(exported)
    smaller = fxwrap.compile_graph(exported, options=fxwrap.Options(passes=[int8_linear()]))
    for name, compiled in (("float32", plain), ("int8", smaller)):
        tensors = compiled.program.store.tensors.values()
        print(f"{name}: {sum(tensor.nbytes for tensor in tensors)} bytes of constants")
    error = (smaller(x) - plain(x)).norm() / plain(x).norm()
    print(f"the result changed by {error:.2%}")
    assert error < 0.02


if __name__ == "__main__":
    main()

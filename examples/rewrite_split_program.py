"""Run the two halves of a model on two devices: one program is split into two.

To run anywhere, "the first device" runs C++ and "the second" runs the emitted FX graph; the transferred tensors are
counted.

    python examples/rewrite_split_program.py
"""

import torch

import fxwrap
from fxwrap import rewrite as rw
from fxwrap.wrapper_ir import Program


def find_split_point(program: Program, module: str) -> int:
    """Returns the position of the first line of a module or of its submodules."""
    for position, line in enumerate(program.body.lines):
        if line.origin and any(name == module or name.startswith(f"{module}.") for name in line.origin.modules):
            return position
    raise LookupError(f"no line has an origin in module {module}")


def main() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)) for _ in range(4)]
    model, x = torch.nn.Sequential(*layers), torch.randn(8, 16)
    program = fxwrap.compile_graph(torch.export.export(model, (x,))).program

    parts = rw.split(program, find_split_point(program, "2"))
    first, second = fxwrap.to_cpp(parts.first).boxed, fxwrap.to_fx(parts.second).boxed

    def on_second_device(inputs):
        moved = [item.to("cpu") for item in inputs]  # .to("cuda:1") on real devices
        inputs.clear()
        count = sum(item.nbytes for item in moved)
        print(f"{len(moved)} tensors of {count} bytes go from the first device to the second")
        return second(moved)

    (result,) = parts.run([x], first, on_second_device)
    print(f"{len(parts.first.body.lines)} lines on the first device, {len(parts.second.body.lines)} on the second")
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()

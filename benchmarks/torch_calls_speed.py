"""Time of one call by the public spelling against the operator itself, on tiny CPU tensors.

The operator, `torch.ops.aten.mul.Tensor` say, is looked up once, outside the timed code. Both are measured
in turn within one run; printed is the median of the repeats. From the repository's root:

    python -m benchmarks.torch_calls_speed
"""

from __future__ import annotations

import statistics
import timeit

import torch

from benchmarks.torch_calls_probe import overload_of
from fxwrap.converters.torch_calls import kind_of, torch_call

x, w = torch.rand(4, 4), torch.rand(4, 4)
ids, buffer = torch.tensor([1, 2]), torch.empty(4, 4)

CASES: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("mul.Tensor", ("x", "w"), {}),
    ("add.Tensor", ("x", "0.5"), {}),
    ("relu.default", ("x",), {}),
    ("mm.default", ("x", "w"), {}),
    ("mm.out", ("x", "w"), {"out": "buffer"}),
    ("addmm.default", ("x", "x", "w"), {}),
    ("add_.Tensor", ("buffer", "x"), {}),
    ("copy_.default", ("buffer", "x"), {}),
    ("permute.default", ("x", "(1, 0)"), {}),
    ("view.default", ("x", "(2, 8)"), {}),
    ("sum.dim_IntList", ("x", "(1,)", "True"), {}),
    ("where.self", ("x > 0.5", "x", "w"), {}),
    ("cat.default", ("(x, w)", "1"), {}),
    ("embedding.default", ("x", "ids"), {}),
    ("gelu.default", ("x",), {}),
    ("silu.default", ("x",), {}),
    ("_softmax.default", ("x", "-1", "False"), {}),
    ("_to_copy.default", ("x",), {"dtype": "torch.float64"}),
    ("native_layer_norm.default", ("x", "(4,)", "x[0]", "x[1]", "1e-5"), {}),
    ("full.default", ("(4, 4)", "1.0"), {"dtype": "torch.float32", "device": "x.device"}),
)
REPEATS, CALLS = 15, 4000


def main() -> None:
    """Print one row for each case."""
    scope = {"torch": torch, "x": x, "w": w, "ids": ids, "buffer": buffer}
    print(f"{'overload':<28}{'operator us':>13}{'public us':>11}{'ratio':>7}  spelling")
    for name, args, kwargs in CASES:
        kinds = tuple(kind_of(eval(text, scope)) for text in args)
        op, overload = name.split(".")
        call = torch_call(op, overload, kinds, {key: kind_of(eval(text, scope)) for key, text in kwargs.items()})
        if call is None:
            raise ValueError(f"{name} has no public spelling for these arguments: see the table")
        keywords = [f"{key}={text}" for key, text in kwargs.items()]
        texts = (f"overload({', '.join([*args, *keywords])})", call.write(args, kwargs))
        timers = [timeit.Timer(text, globals={**scope, "overload": overload_of(name)}) for text in texts]
        with torch.no_grad():
            rounds = [[timer.timeit(CALLS) / CALLS * 1e6 for timer in timers] for _ in range(REPEATS)]
        operator, public = (statistics.median(column) for column in zip(*rounds))
        print(f"{name:<28}{operator:>13.2f}{public:>11.2f}{public / operator:>7.2f}  {texts[1]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

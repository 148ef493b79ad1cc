"""CPU time of one call by the public spelling against the operator itself, on tiny CPU tensors.

The operator, such as `torch.ops.aten.mul.Tensor`, is looked up outside of the timed code. Both are timed in interleaved
rounds of one run; the table shows medians. Run in the repository's root:

    python -m benchmarks.torch_calls_speed [--record]
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit

import torch

from benchmarks.results import Cell, Report, add_record_option
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
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    report = Report("torch_calls_speed", parser.parse_args(), note=f"CPU time, medians of {REPEATS} rounds")
    scope = {"torch": torch, "x": x, "w": w, "ids": ids, "buffer": buffer}
    for name, args, kwargs in CASES:
        kinds = tuple(kind_of(eval(text, scope)) for text in args)
        op, overload = name.split(".")
        call = torch_call(op, overload, kinds, {key: kind_of(eval(text, scope)) for key, text in kwargs.items()})
        if call is None:
            raise ValueError(f"{name} has no public spelling for these arguments: see the table")
        keywords = [f"{key}={text}" for key, text in kwargs.items()]
        texts = (f"overload({', '.join([*args, *keywords])})", call.write(args, kwargs))
        names = {**scope, "overload": overload_of(name)}
        timers = [timeit.Timer(text, timer=time.process_time, globals=names) for text in texts]
        with torch.no_grad():
            rounds = [[timer.timeit(CALLS) / CALLS * 1e6 for timer in timers] for _ in range(REPEATS)]
        operator, public = (statistics.median(column) for column in zip(*rounds))
        cells: dict[str, Cell] = {"overload": name, "operator, us": operator, "public, us": public}
        report.add({**cells, "public / operator": public / operator, "spelling": texts[1]}, rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

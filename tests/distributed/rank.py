"""One rank: runs every case compiled, in all emitters, and prints the result of each as a line of JSON."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

import fxwrap
from fxwrap.compile import emit, make_backend
from fxwrap.options import EMITTERS, Options
from tests.distributed.cases import CASES, EXAMPLE, WORLD_SIZE, Case


class EveryEmitter:
    """A compiled graph that each call runs in every emitter, and compares."""

    def __init__(self, graph: Any, inputs: Any, *, options: Options, **arguments: Any) -> None:
        compiled = fxwrap.compile_graph(graph, inputs, options=options.replace(emitter=EMITTERS[0]), **arguments)
        program, fakes = compiled.program, compiled.fake_inputs
        emitted = {name: emit(program, name, fakes) for name in EMITTERS[1:]}
        others = [compiled.with_emitted(item) for item in emitted.values()]
        self.compiled = [compiled, *others]
        self.program = fxwrap.parse(str(compiled.program))
        assert str(self.program) == str(compiled.program)

    def boxed(self, inputs: list[Any]) -> Any:
        copies = [[item.clone() if isinstance(item, torch.Tensor) else item for item in inputs] for _ in EMITTERS]
        outputs = [compiled.boxed(boxed) for compiled, boxed in zip(self.compiled, copies, strict=True)]
        for emitter, other in zip(EMITTERS, outputs, strict=True):
            for first, second in zip(outputs[0], other, strict=True):
                if isinstance(first, torch.Tensor):
                    torch.testing.assert_close(second, first, msg=lambda text: f"{emitter}: {text}")  # noqa: B023
                else:
                    assert second is first or second == first, (emitter, first, second)
        inputs.clear()
        return outputs[0]


def results(function: Any, case: Case) -> list[Any]:
    """Returns the outputs of a case, then the gradients of its parameters."""
    for parameter in case.parameters:
        parameter.grad = None
    with torch.set_grad_enabled(bool(case.parameters)):
        outputs = function(*case.inputs)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        if case.parameters:
            outputs[0].square().mean().backward()
    return [*outputs, *[parameter.grad for parameter in case.parameters]]


def plain(item: Any) -> tuple[object, torch.Tensor]:
    """Returns the placements and this rank's part of a result."""
    is_distributed = isinstance(item, torch.distributed.tensor.DTensor)
    return ((item.device_mesh, item.placements), item.to_local()) if is_distributed else (None, item)


def check(name: str, rank: int) -> None:
    """Compares two calls of a compiled case with eager."""
    torch.manual_seed(0)
    case = CASES[name](rank)
    expected = results(case.function, case)
    compiled = torch.compile(case.function, backend=make_backend(Options(), EveryEmitter), fullgraph=True)
    for _ in range(2):
        for have, want in zip(results(compiled, case), expected, strict=True):
            (placements, local), (expected_placements, expected_local) = plain(have), plain(want)
            assert placements == expected_placements
            torch.testing.assert_close(local, expected_local)


def outcome(run: Callable[[], object]) -> str:
    """Returns the error of a case, "" if there is none."""
    try:
        run()
    except Exception:  # noqa: BLE001  # the other cases run too
        return traceback.format_exc()
    return ""


def main(arguments: Sequence[str]) -> None:
    """Runs the cases: `rank.py RANK STORE`."""
    rank, store = int(arguments[0]), torch.distributed.FileStore(arguments[1], WORLD_SIZE)
    timeout = timedelta(seconds=300)  # a rank that failed does not take part in collectives
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    for name in CASES:
        error = outcome(partial(check, name, rank))
        print(json.dumps({"case": name, "error": error}), flush=True)
    with contextlib.redirect_stdout(io.StringIO()):
        error = outcome(lambda: runpy.run_path(str(EXAMPLE))["run"](rank, torch.distributed.group.WORLD.group_name))
    print(json.dumps({"case": EXAMPLE.stem, "error": error}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Calls that eager mode rejects for a dtype or a number: rules decline them, so that the call raises eager's error.

    python -m tests.lowering.rules.rejected_calls --only 'index_.*'

The calls are those that torch's operator database makes, and the gradients of its results, with the tensors, dtypes
and numbers among their arguments replaced. A call is printed if eager mode raises and the rule fuses it.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fxwrap.comparison import copy_inputs
from fxwrap.lowering.rules import RULES
from tests.lowering.evaluate_definitions import fuses
from tests.opinfo.calls import DTYPES, Call, cases

OTHER_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
)  # fmt: skip
OTHER_NUMBERS = (-300, 300, 1 << 40, 1e60, 2.5, -1.5, True)
LARGEST, CALLS_PER_OVERLOAD, SAMPLES = 3000, 6, 6


@dataclass(frozen=True)
class RecordedCall:
    """A call of an overload, with flattened arguments; `numbers` are the positions of those of type Scalar."""

    overload: Any
    leaves: tuple[Any, ...]
    structure: TreeSpec
    numbers: tuple[int, ...]

    def variants(self) -> Iterator[Mapping[int, Any]]:
        """Yields replacements of leaves: a dtype is that of a tensor, or a dtype argument."""
        tensors = [index for index, item in enumerate(self.leaves) if isinstance(item, torch.Tensor)]
        dtypes = [index for index, item in enumerate(self.leaves) if isinstance(item, torch.dtype)]
        for dtype in OTHER_DTYPES:
            for chosen in (tensors, dtypes, tensors + dtypes, *[[index] for index in tensors[:3]]):
                if chosen:
                    yield dict.fromkeys(chosen, dtype)
            for index, number in itertools.product(self.numbers, OTHER_NUMBERS):
                yield {**dict.fromkeys(tensors + dtypes, dtype), index: number}

    def replace(self, replaced: Mapping[int, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the arguments and keywords of a variant."""
        leaves = list(self.leaves)
        for index, new in replaced.items():
            is_tensor = isinstance(leaves[index], torch.Tensor)
            leaves[index] = leaves[index].to(new) if is_tensor else new
        arguments, keywords = tree_unflatten(leaves, self.structure)
        return arguments, keywords


class _Recorder(TorchDispatchMode):
    """Records a few calls of each overload that has a rule, with different dtypes and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[object, RecordedCall]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if str(func) in RULES:
            leaves, structure = tree_flatten((list(args), keywords))
            tensors = [item for item in leaves if isinstance(item, torch.Tensor)]
            known = self.calls.setdefault(str(func), {})
            key = tuple([(item.dtype, item.dim()) if isinstance(item, torch.Tensor) else type(item) for item in leaves])
            is_small = all(item.layout is torch.strided and item.numel() <= LARGEST for item in tensors)
            if is_small and len(known) < CALLS_PER_OVERLOAD:
                numbers = _scalar_positions(func, args, keywords)
                known.setdefault(key, RecordedCall(func, tuple(copy_leaves(leaves)), structure, numbers))
        return func(*args, **keywords)


def copy_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Returns leaves with copies of the tensors, which a call may write."""
    return [item.clone() if isinstance(item, torch.Tensor) else item for item in leaves]


def _scalar_positions(func: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int, ...]:
    types = {item.name: str(item.type) for item in func._schema.arguments}
    marked = [types[item.name] in ("Scalar", "number") for item in func._schema.arguments[: len(arguments)]]
    named = {name: types[name] in ("Scalar", "number") for name in keywords}
    marks = [
        [mark] * len(tree_flatten(item)[0])
        for mark, item in (*zip(marked, arguments), *zip(named.values(), keywords.values()))
    ]
    return tuple([index for index, mark in enumerate(itertools.chain(*marks)) if mark])


def recorded_calls(only: str = ".*", samples: int = SAMPLES) -> list[RecordedCall]:
    """Returns calls of overloads with rules, which operators of torch's database, and their gradients, make."""
    recorder = _Recorder()
    for case in cases(DTYPES):
        if not re.fullmatch(only, case.operator.name):
            continue
        for sample in case.samples()[:samples]:
            calls: list[Call] = [sample]
            with suppress(Exception):  # results without gradients
                calls += [sample.gradient_call()] if case.dtype is torch.float32 else []
            for call in calls:
                with suppress(Exception), recorder:  # samples that eager mode rejects
                    call.run(copy_inputs(call.tensors))
    return [call for calls in recorder.calls.values() for call in calls.values()]


def fused_though_rejected(calls: Iterable[RecordedCall]) -> Iterator[str]:
    """Yields variants that a rule fuses although eager mode raises, with eager's error."""
    for call in calls:
        for replaced in call.variants():
            arguments, keywords = call.replace(replaced)
            try:
                call.overload(*copy_leaves(arguments), **keywords)
            except Exception as error:  # noqa: BLE001 - operators raise any exception
                is_for_memory = "alloc" in str(error)
                if not is_for_memory and fuses(call.overload, *arguments, **keywords):
                    yield f"{call.overload} {_short(arguments)} {_short(list(keywords.items()))}: {error!r}"[:400]


def _short(items: Sequence[Any]) -> str:
    texts = [f"{item.dtype}{list(item.shape)}" if isinstance(item, torch.Tensor) else str(item) for item in items]
    return ", ".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the variants; returns 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".*", help="a regular expression for names of operators")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    calls = recorded_calls(chosen.only)
    fused = 0
    for text in fused_though_rejected(calls):
        fused += 1
        print(text, flush=True)
    overloads = {str(call.overload) for call in calls}
    print(f"{len(calls)} calls of {len(overloads)} overloads, {fused} fused though rejected")
    return 1 if fused else 0


if __name__ == "__main__":
    sys.exit(main())

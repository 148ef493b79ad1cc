"""A bug in each part of the compiler is found in whole models; `pytest -rP` shows how many runs each takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

import fxwrap
from fxwrap.caching import clear_caches
from fxwrap.converters.cpp import converter as cpp_converter
from fxwrap.lines import ExternCall, Free
from fxwrap.lowering import RULES
from fxwrap.wrapper_ir import Program, Value
from tests.support.long_form import long_only
from tests.support.models import MODELS
from tests.support.seeded_bugs import change_program, scale_printed

MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
EARLIER = 4
"""The number of matmuls before the one that a wrong pass or converter gives the weight of another."""


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patch before and after which no printed kernel is cached."""
    clear_caches()
    yield monkeypatch
    monkeypatch.undo()
    clear_caches()


def lowering(patch: pytest.MonkeyPatch) -> None:
    """`rsqrt` is lowered as `sqrt`, and layer norms have a large epsilon."""
    patch.setitem(RULES, "aten.rsqrt.default", RULES["aten.sqrt.default"])
    norm = RULES["aten.native_layer_norm.default"]
    patch.setitem(RULES, "aten.native_layer_norm.default", lambda call: norm(with_large_epsilon(call)))


def with_large_epsilon(call: Any) -> Any:
    """Returns a layer norm's call with 1 as its epsilon."""
    return dataclasses.replace(call, arguments=(*call.arguments[:-1], 1.0))


def printer(patch: pytest.MonkeyPatch) -> None:
    """The C++ printer prints `rsqrt` 5% too large."""
    scale_printed(patch, "rsqrt", "1.05f")


def with_weight_of_another(program: Program) -> Program:
    """Gives a matmul the right operand of an earlier one."""
    lines = list(program.body.lines)
    freed = {line.root.name for line in lines if isinstance(line, Free)}
    seen: list[Value] = []
    for number, line in enumerate(lines):
        if not isinstance(line, ExternCall) or line.target not in MATMULS:
            continue
        *others, weight = line.arguments
        assert isinstance(weight, Value)
        other = another(weight, [item for item in seen if item.name not in freed])
        if len(seen) >= EARLIER and other is not None:
            lines[number] = line.replace(arguments=(*others, other))
            return program.replace(body=dataclasses.replace(program.body, lines=tuple(lines)))
        seen.append(weight)
    raise AssertionError("the program has no two matmuls with weights of one type")


def another(weight: Value, seen: list[Value]) -> Value | None:
    """Returns an earlier weight of the same type."""
    return next((item for item in seen if item.name != weight.name and item.type == weight.type), None)


def program_pass(patch: pytest.MonkeyPatch) -> None:
    """The pass `insert_device_guards` confuses the weights of matmuls."""
    change_program(patch, with_weight_of_another)


def converter(patch: pytest.MonkeyPatch) -> None:
    """The converter to C++ confuses the weights of matmuls."""
    original = cpp_converter.CppConverter._call
    seen: list[Value] = []
    wrong: dict[str, Value] = {}  # by the node of the matmul, for each emission

    def call(self: Any, line: Any, target: str, keywords: Any) -> None:
        if target in MATMULS:
            (node, *_), (*others, weight) = line.origin.nodes, line.arguments
            other = another(weight, seen) if len(seen) >= EARLIER and not wrong else None
            if other is not None:
                wrong[node] = other
            seen.append(weight)
            line = line.replace(arguments=(*others, wrong.get(node, weight)))
        original(self, line, target, keywords)

    patch.setattr(cpp_converter.CppConverter, "_call", call)


BUGS = {"lowering": lowering, "kernel printer": printer, "pass": program_pass, "converter": converter}
CULPRITS = {"lowering": "of aten.", "kernel printer": "'cpp', kernel @", "pass": "'insert_device_guards'",
            "converter": "'cpp'"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "part"),
    [("llama", "pass"), *[
        long_only(name, part) for name in ("t5", "bert", "llama") for part in BUGS if (name, part) != ("llama", "pass")
    ]],
)  # fmt: skip
def test_a_bug_in_a_model_is_found(name: str, part: str, patch: pytest.MonkeyPatch) -> None:
    case = MODELS[name]
    model, inputs = case.build(seed=0), case.inputs(seed=0)
    BUGS[part](patch)
    divergence = fxwrap.bisect(model, inputs, options={"emitter": "cpp"}).divergence
    assert divergence is not None and divergence.line is not None
    assert divergence.part == part and divergence.culprit.startswith(CULPRITS[part])
    runs, most = divergence.runs + divergence.reference_runs, 2 * math.log2(divergence.lines)
    print(f"{name}, {part}: {runs} runs for {divergence.lines} lines, at most {most:.1f}")
    assert runs <= most
    assert divergence.line.locations and divergence.line.agreement.error > divergence.line.agreement.allowed

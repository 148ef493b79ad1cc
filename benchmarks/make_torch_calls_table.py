"""Generates `fxwrap/converters/torch_calls_table.py` by asking torch about every overload of ATen.

For each overload that reaches a dispatch mode undecomposed, each public function or method of its name is called with
arguments of many kinds. The table lists the kinds for which exactly that overload is called with equal arguments. No
kernel runs. Run it in the repository's root for each new version of torch:

    python -m benchmarks.make_torch_calls_table
"""

from __future__ import annotations

import random
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType

import torch

from benchmarks.torch_calls_probe import Pattern, passes, patterns
from fxwrap.converters.torch_calls import NUMBERS, ArgumentKind, Parameter, Spelling, parameters_of

TABLE = Path("fxwrap/converters/torch_calls_table.py")
SAMPLES = 300
"""Combinations of kinds that are tried for one spelling."""

NAMESPACES = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
"""The namespaces of public functions, best first."""

PLAIN_PYTHON = {"elu", "hardsigmoid", "hardswish", "leaky_relu", "max_pool2d_with_indices", "mish", "silu"}
"""Python functions of torch.nn.functional that only check their arguments and call the operator."""

EXCLUDED = {"from_file", "range"}
"""Operators whose public functions depend on values: `from_file` opens a file, `range` warns."""

RENAMED = {
    "_log_softmax.default": "torch.log_softmax -half_to_float",
    "_softmax.default": "torch.softmax -half_to_float",
    "_to_copy.default": ".to +copy=True",
}
"""Private operators that a public function of another name calls; the text is the line of RENAMED."""

Choices = dict[str, list[ArgumentKind]]
"""The possible kinds of each parameter, in the order of trial."""


def main() -> None:
    """Writes the table and print how many overloads it covers."""
    rng = random.Random(0)
    same_name: dict[str, list[str]] = {namespace: [] for namespace in ("method", *NAMESPACES)}
    renamed: list[str] = []
    accepts: dict[str, list[str]] = {}
    names = sorted(overload_names())
    for name in names:
        for namespace, spelling in candidates(name):
            accepted = search(name, spelling, rng)
            if accepted is None:
                continue
            if name in RENAMED:
                renamed.append(f"{name} {RENAMED[name]}")
            else:
                same_name[namespace].append(name)
            rules = accepts_rules(name, accepted)
            if rules:
                accepts.setdefault(rules, []).append(name)
            break
    TABLE.write_text(table_text(same_name, renamed, accepts))
    covered = sum(map(len, same_name.values())) + len(renamed)
    print(f"{covered} of {len(names)} overloads covered, {sum(map(len, accepts.values()))} of them with ACCEPTS rules")


def overload_names() -> Iterator[str]:
    """Yields "mul.Tensor" for each ATen overload with its own kernel, composite ones excluded."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, operator = schema.name.partition("::")
        registered = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if namespace != "aten" or not torch._C._dispatch_has_kernel(registered):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(registered, "CompositeImplicitAutograd"):
            yield f"{operator}.{schema.overload_name or 'default'}"


def candidates(name: str) -> Iterator[tuple[str, Spelling]]:
    """Yields the possible spellings, best first, each with its namespace in the table."""
    operator = name.split(".")[0]
    if name in RENAMED:
        function, *changes = RENAMED[name].split()
        dropped = tuple(change[1:] for change in changes if change[0] == "-")
        literals = tuple(change[1:] for change in changes if change[0] == "+")
        yield "", Spelling(function.removeprefix("."), function.startswith("."), dropped, literals)
    if operator.startswith("_") or operator in EXCLUDED:
        return
    method = ("method", Spelling(operator, True))
    has_method = isinstance(getattr(torch.Tensor, operator, None), MethodDescriptorType)
    if has_method and operator.endswith("_"):
        yield method
    for namespace, scope in NAMESPACES.items():
        function = operator.removeprefix(namespace.removeprefix("torch.") + "_")
        public = getattr(scope, function, None)
        if function.startswith("_"):
            continue
        if isinstance(public, BuiltinFunctionType) or (isinstance(public, FunctionType) and function in PLAIN_PYTHON):
            yield namespace, Spelling(f"{namespace}.{function}", False)
    if has_method:
        yield method


def search(name: str, spelling: Spelling, rng: random.Random) -> Choices | None:
    """Returns the kinds of arguments for which the spelling reaches the overload, or None if there are none."""
    parameters = parameters_of(name)
    if parameters is None:
        return None
    choices: Choices | None = {parameter.name: list(parameter.kinds()) for parameter in parameters}
    while choices is not None and all(choices.values()):
        trials = [(pattern, passes(name, spelling, pattern, rng)) for pattern in patterns(choices, SAMPLES, rng)]
        seen = {(parameter, kind) for pattern, passed in trials if passed for parameter, kind in pattern.items()}
        working = without_failures(choices, [(pattern, passed) for pattern, passed in trials if passed is not None])
        working = working and {key: [kind for kind in kinds if (key, kind) in seen] for key, kinds in working.items()}
        if working == choices:
            return with_numbers(name, spelling, parameters, choices, rng)
        choices = working
    return None


def without_failures(choices: Choices, trials: Sequence[tuple[Pattern, bool]]) -> Choices | None:
    """Removes kinds, those with the highest failure rate first, until no remaining trial failed."""
    remaining = {parameter: list(kinds) for parameter, kinds in choices.items()}
    while failures := [pattern for pattern, passed in trials if not passed]:
        used = Counter(choice for pattern, _ in trials for choice in pattern.items())
        failed = Counter(choice for pattern in failures for choice in pattern.items())
        removable = [choice for choice in failed if len(remaining[choice[0]]) > 1]
        if not removable:
            return None
        worst = max(removable, key=lambda choice: (failed[choice] / used[choice], choice[0], choice[1].value))
        remaining[worst[0]].remove(worst[1])
        trials = [(pattern, passed) for pattern, passed in trials if pattern[worst[0]] is not worst[1]]
    return remaining if trials else None


def with_numbers(
    name: str, spelling: Spelling, parameters: Sequence[Parameter], choices: Choices, rng: random.Random
) -> Choices:
    """Adds, for tensor arguments, the kinds of number with which overload and spelling agree too."""
    wider = dict(choices)
    for parameter in parameters:
        if parameter.type != "Tensor" or parameter.is_out:
            continue
        for kind in NUMBERS:
            trials = {
                passes(name, spelling, pattern, rng) for pattern in patterns({**wider, parameter.name: [kind]}, 40, rng)
            }
            if trials == {True}:
                wider[parameter.name] = [*wider[parameter.name], kind]
    return wider


def accepts_rules(name: str, accepted: Mapping[str, Sequence[ArgumentKind]]) -> str:
    """Returns the ACCEPTS rules of an overload: the kinds that differ from those of the schema types."""
    rules = [
        f"{parameter.name}={'|'.join(kind_names(accepted[parameter.name]))}"
        for parameter in parameters_of(name) or ()
        if set(accepted[parameter.name]) != set(parameter.kinds())
    ]
    return " ".join(rules)


def kind_names(kinds: Sequence[ArgumentKind]) -> list[str]:
    """Returns the kinds' names in a fixed order, with "number" for all kinds of number."""
    if set(NUMBERS) <= set(kinds):
        return sorted(kind.value for kind in kinds if kind not in NUMBERS) + ["number"]
    return sorted(kind.value for kind in kinds)


def overloads_text(key: str, names: Sequence[str]) -> str:
    """Returns the source text of an item of a table whose values are overloads, grouped by operator."""
    operators: dict[str, list[str]] = {}
    for name in names:
        op, _, overload = name.partition(".")
        operators.setdefault(op, []).append(overload)
    text = " ".join(f"{op}.{'|'.join(overloads)}" for op, overloads in operators.items())
    item = f'    "{key}": "{text}",'
    if len(item) <= 120:
        return item
    return f'    "{key}": """\n{textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)}\n""",'


def table_text(
    same_name: Mapping[str, Sequence[str]], renamed: Sequence[str], accepts: Mapping[str, Sequence[str]]
) -> str:
    """Returns the source text of the table module."""
    return HEADER.format(version=torch.__version__.split("+")[0]) + "\n".join(
        [
            "SAME_NAME = {",
            *[overloads_text(namespace, names) for namespace, names in same_name.items() if names],
            "}",
            '"""Overloads by namespace of the function of that name, or of the method: `op.overload|overload`."""',
            "",
            'RENAMED = """',
            *renamed,
            '"""',
            '"""Overloads of another name: `-argument` is not written, `+text` is, "." starts a method."""',
            "",
            "ACCEPTS = {",
            *[overloads_text(rules, names) for rules, names in sorted(accepts.items())],
            "}",
            '"""Overloads by the kinds that override those of the schema types: `argument=kind|kind`."""',
            "",
        ]
    )


HEADER = '''"""Public spellings of ATen overloads, in the format of `torch_calls.py`.

Made on torch {version} by `python -m benchmarks.make_torch_calls_table`; do not edit by hand.
"""

'''


if __name__ == "__main__":
    main()

"""Make `fxwrap/converters/torch_calls_table.py` by asking torch about every overload of ATen.

For each overload that reaches a dispatch mode whole, each public function or method of its name is called
with arguments of many kinds; kept are the kinds with which exactly that overload arrives, with equal
arguments. No kernel runs, so this takes two minutes. Run it from the repository's root after a change of
torch's version:

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
from fxwrap.converters.torch_calls import NUMBERS, Kind, Parameter, Spelling, parameters_of

TABLE = Path("fxwrap/converters/torch_calls_table.py")
SAMPLES = 300
"""Combinations of kinds tried for one spelling."""

NAMESPACES = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
"""Where public functions are looked for, best first."""

PLAIN_PYTHON = {"elu", "hardsigmoid", "hardswish", "leaky_relu", "max_pool2d_with_indices", "mish", "silu"}
"""Functions of torch.nn.functional that are Python, yet only check their arguments and call the operator."""

LEFT_OUT = {"from_file", "range"}
"""Operators whose public functions look at values too: `from_file` opens a file, `range` is deprecated and
warns."""

RENAMED = {
    "_log_softmax.default": "torch.log_softmax -half_to_float",
    "_softmax.default": "torch.softmax -half_to_float",
    "_to_copy.default": ".to +copy=True",
}
"""Private operators that a public function of another name reaches alone; the text is the table's RENAMED
line."""

Choices = dict[str, list[Kind]]
"""For each parameter the kinds that may be used, in the order tried."""


def main() -> None:
    """Write the table and print how many overloads it covers."""
    rng = random.Random(0)
    same_name: dict[str, list[str]] = {namespace: [] for namespace in ("method", *NAMESPACES)}
    renamed: list[str] = []
    accepts: list[str] = []
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
            accepts.extend(accepts_line(name, accepted))
            break
    TABLE.write_text(table_text(same_name, renamed, accepts))
    covered = sum(map(len, same_name.values())) + len(renamed)
    print(f"{covered} of {len(names)} overloads covered, {len(accepts)} of them with an ACCEPTS line")


def overload_names() -> Iterator[str]:
    """Give "mul.Tensor" for each ATen overload with a kernel of its own, not made of other operators."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, operator = schema.name.partition("::")
        registered = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if namespace != "aten" or not torch._C._dispatch_has_kernel(registered):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(registered, "CompositeImplicitAutograd"):
            yield f"{operator}.{schema.overload_name or 'default'}"


def candidates(name: str) -> Iterator[tuple[str, Spelling]]:
    """Give the spellings worth trying, best first, each with its namespace in the table."""
    operator = name.split(".")[0]
    if name in RENAMED:
        function, *changes = RENAMED[name].split()
        dropped = tuple(change[1:] for change in changes if change[0] == "-")
        literals = tuple(change[1:] for change in changes if change[0] == "+")
        yield "", Spelling(function.removeprefix("."), function.startswith("."), dropped, literals)
    if operator.startswith("_") or operator in LEFT_OUT:
        return
    method = ("method", Spelling(operator, True))
    has_method = isinstance(getattr(torch.Tensor, operator, None), MethodDescriptorType)
    if has_method and operator.endswith("_"):
        yield method
    for namespace, scope in NAMESPACES.items():
        function = operator.removeprefix(namespace.removeprefix("torch.") + "_")
        found = getattr(scope, function, None)
        if function.startswith("_"):
            continue
        if isinstance(found, BuiltinFunctionType) or (
            isinstance(found, FunctionType) and function in PLAIN_PYTHON
        ):
            yield namespace, Spelling(f"{namespace}.{function}", False)
    if has_method:
        yield method


def search(name: str, spelling: Spelling, rng: random.Random) -> Choices | None:
    """Give the kinds of arguments for which the spelling reaches the overload, or None if there are none."""
    parameters = parameters_of(name)
    if parameters is None:
        return None
    choices: Choices | None = {parameter.name: list(parameter.kinds()) for parameter in parameters}
    while choices is not None and all(choices.values()):
        trials = [
            (pattern, passes(name, spelling, pattern, rng)) for pattern in patterns(choices, SAMPLES, rng)
        ]
        seen = {
            (parameter, kind) for pattern, passed in trials if passed for parameter, kind in pattern.items()
        }
        kept = without_failures(
            choices, [(pattern, passed) for pattern, passed in trials if passed is not None]
        )
        kept = kept and {key: [kind for kind in kinds if (key, kind) in seen] for key, kinds in kept.items()}
        if kept == choices:
            return with_numbers(name, spelling, parameters, choices, rng)
        choices = kept
    return None


def without_failures(choices: Choices, trials: Sequence[tuple[Pattern, bool]]) -> Choices | None:
    """Take away kinds, the one in most failures for its use first, until no trial that is left failed."""
    kept = {parameter: list(kinds) for parameter, kinds in choices.items()}
    while failures := [pattern for pattern, passed in trials if not passed]:
        used = Counter(choice for pattern, _ in trials for choice in pattern.items())
        failed = Counter(choice for pattern in failures for choice in pattern.items())
        removable = [choice for choice in failed if len(kept[choice[0]]) > 1]
        if not removable:
            return None
        worst = max(removable, key=lambda choice: (failed[choice] / used[choice], choice[0], choice[1].value))
        kept[worst[0]].remove(worst[1])
        trials = [(pattern, passed) for pattern, passed in trials if pattern[worst[0]] is not worst[1]]
    return kept if trials else None


def with_numbers(
    name: str, spelling: Spelling, parameters: Sequence[Parameter], choices: Choices, rng: random.Random
) -> Choices:
    """Add, for tensor arguments, the kinds of number with which overload and spelling agree too."""
    wider = dict(choices)
    for parameter in parameters:
        if parameter.type != "Tensor" or parameter.is_out:
            continue
        for kind in NUMBERS:
            trials = {
                passes(name, spelling, pattern, rng)
                for pattern in patterns({**wider, parameter.name: [kind]}, 40, rng)
            }
            if trials == {True}:
                wider[parameter.name] = [*wider[parameter.name], kind]
    return wider


def accepts_line(name: str, accepted: Mapping[str, Sequence[Kind]]) -> Iterator[str]:
    """Give the table's ACCEPTS line, if the kinds differ from those of the schema types anywhere."""
    rules = [
        f"{parameter.name}={'|'.join(kind_names(accepted[parameter.name]))}"
        for parameter in parameters_of(name) or ()
        if set(accepted[parameter.name]) != set(parameter.kinds())
    ]
    if rules:
        yield " ".join([name, *rules])


def kind_names(kinds: Sequence[Kind]) -> list[str]:
    """Give the kinds' names in a fixed order, with "number" for all kinds of number."""
    if set(NUMBERS) <= set(kinds):
        return sorted(kind.value for kind in kinds if kind not in NUMBERS) + ["number"]
    return sorted(kind.value for kind in kinds)


def table_text(same_name: Mapping[str, Sequence[str]], renamed: Sequence[str], accepts: Sequence[str]) -> str:
    """Give the source text of the table module."""
    groups = [
        f'    "{namespace}": """\n{textwrap.fill(" ".join(names), 104, break_on_hyphens=False)}\n""",'
        for namespace, names in same_name.items()
        if names
    ]
    return HEADER.format(version=torch.__version__.split("+")[0]) + "\n".join(
        [
            "SAME_NAME = {",
            *groups,
            "}",
            '"""Overloads reached by the function of their own name in a namespace, or by that method."""',
            "",
            'RENAMED = """',
            *renamed,
            '"""',
            '"""Overloads of another name: `-argument` is not written, `+text` is, "." starts a method."""',
            "",
            'ACCEPTS = """',
            *accepts,
            '"""',
            '"""Kinds of arguments, in place of those that the schema suggests: `argument=kind|kind`."""',
            "",
        ]
    )


HEADER = '''"""Public spellings of ATen overloads; how to read it is in `torch_calls.py`.

Made on torch {version} by `python -m benchmarks.make_torch_calls_table`; do not edit by hand.
"""

'''


if __name__ == "__main__":
    main()

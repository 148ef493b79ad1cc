"""Random configurations: options of a compile, each compared with eager."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.comparison.driver import compare
from fxwrap.options import EMITTERS

__all__ = ["CHOICES", "Configuration", "ConfigurationFailure", "fuzz_configurations", "random_configurations"]

CHOICES: Mapping[str, Sequence[object]] = {
    "emitter": EMITTERS,
    "fuse": (True, False),
    "layout": ("auto", "preserve"),
    "output_strides": ("eager", "any"),
    "fx_form": ("in_place", "functional"),
    "combo_kernels": (True, False),
    "bucket_collectives": (True, False),
    "overlap_collectives": (True, False),
    "reorder_for_peak_memory": (True, False),
    "memory_planning": ("default", "none", "reuse", "auto", "greedy_by_size", "greedy_by_duration", "best_fit"),
    "memory_slack": (0.0, 0.02),
    "runtime_asserts": (True, False),
    "check_memory": (False, True),
    "check_inputs": (True, False),
    "profile_ranges": (False, True),
    "check_values": (None, "stats"),
    "kernels": ("text", "subgraph"),
    "preserve_ops": ((), ("aten.gelu.default",), ("aten._softmax.default", "aten.add.Tensor")),
    "dynamic": (False, True),
}
"""The values of each option, the default first; "dynamic" is torch.compile's."""

Configuration = Mapping[str, object]
"""The options that differ from their defaults; "dynamic" is torch.compile's."""


@dataclass(frozen=True)
class ConfigurationFailure:
    """A configuration that disagrees with eager or fails.

    `configuration` is the random one, `minimal` the least of its options that fail too, `reasons` its differences.
    """

    configuration: Configuration
    minimal: Configuration
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"options={dict(self.minimal)!r}: {'; '.join(self.reasons)} (from {dict(self.configuration)!r})"


def random_configurations(count: int, seed: int = 0, changed: int = 5) -> Iterator[Configuration]:
    """Yields random configurations with up to `changed` options that differ from their defaults, without repetitions.

    The first one has the defaults.
    """
    generator = random.Random(seed)
    seen: set[tuple[tuple[str, object], ...]] = set()
    configuration: dict[str, object] = {}
    while len(seen) < count:
        key = tuple(sorted(configuration.items()))
        if key not in seen:
            seen.add(key)
            yield dict(configuration)
        names = generator.sample(sorted(CHOICES), generator.randint(1, changed))
        configuration = {name: generator.choice(CHOICES[name][1:]) for name in names}


def fuzz_configurations(
    fn: object, inputs: object, configurations: Sequence[Configuration], *, training: bool = False
) -> tuple[ConfigurationFailure, ...]:
    """Compiles a function with each configuration, compares it with eager, and minimises those that fail over options.

    A configuration fails if `compare` reports a difference, or an error of the compile.
    """
    failures: list[ConfigurationFailure] = []
    for configuration in configurations:
        reasons = _reasons(fn, inputs, configuration, training)
        if reasons:
            minimal = dict(configuration)
            for name in configuration:
                fewer = {key: value for key, value in minimal.items() if key != name}
                if fewer_reasons := _reasons(fn, inputs, fewer, training):
                    minimal, reasons = fewer, fewer_reasons
            failures.append(ConfigurationFailure(configuration, minimal, reasons))
    return tuple(failures)


def _reasons(fn: object, inputs: object, configuration: Configuration, training: bool) -> tuple[str, ...]:
    """Returns the differences of a configuration from eager; () if it agrees."""
    options = {"fallback": "error", **{name: value for name, value in configuration.items() if name != "dynamic"}}
    report = compare(
        fn, inputs, training=training, emitters=(), backends=[("fxwrap", options)], repeats=0,
        dynamic=bool(configuration.get("dynamic", False)),
    )  # fmt: skip
    return report.reasons

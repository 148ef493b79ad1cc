"""Random options over models: each configuration agrees with eager."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor

from fxwrap.comparison import CHOICES, fuzz_configurations, random_configurations
from fxwrap.lowering import RULES
from fxwrap.options import Options
from tests.support.long_form import LONG, long_only
from tests.support.models import MODELS

COUNT = 40 if LONG else 6
"""The configurations of each model: 200 over five models in the long form."""


class Block(torch.nn.Module):
    """Matmuls, a norm, a softmax, an activation and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return (torch.softmax(y @ y.transpose(-1, -2), -1) @ x + y).sum(0)


def test_configurations_are_random_valid_and_different() -> None:
    configurations = list(random_configurations(50, seed=1))
    assert configurations[0] == {} and len({str(sorted(item.items())) for item in configurations}) == 50
    assert configurations == list(random_configurations(50, seed=1)) != list(random_configurations(50, seed=2))
    for configuration in configurations:
        options = Options.from_mapping({key: item for key, item in configuration.items() if key != "dynamic"})
        assert all(getattr(options, key) != getattr(Options(), key) for key in configuration if key != "dynamic")
    assert set(CHOICES) - {"dynamic"} <= set(Options.__dataclass_fields__)


@pytest.mark.parametrize("training", [False, True])
def test_configurations_of_a_block_agree_with_eager(training: bool) -> None:
    configurations = list(islice(random_configurations(COUNT, seed=3), int(training), None, 2))
    failures = fuzz_configurations(Block().eval(), torch.randn(3, 4, 8), configurations, training=training)
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.parametrize(
    ("name", "part"), [long_only(name, part) for name in ("gpt2", "bert", "llama", "vit") for part in range(4)]
)
def test_configurations_of_models_agree_with_eager(name: str, part: int) -> None:
    case = MODELS[name]
    configurations = list(random_configurations(COUNT, seed=4))[part::4]
    failures = fuzz_configurations(case.build(seed=0), case.inputs(seed=0), configurations)
    assert not failures, "\n".join(map(str, failures))


def test_a_failure_is_minimised_over_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_without_checks(*arguments: object, **keywords: object) -> object:
        raise ZeroDivisionError("seeded")

    monkeypatch.setitem(RULES, "aten.gelu.default", only_without_checks)
    configuration = {"memory_slack": 0.02, "runtime_asserts": False, "layout": "preserve"}
    (failure,) = fuzz_configurations(torch.nn.GELU(), torch.randn(3), [configuration, {"fuse": False}])
    assert failure.minimal == {} and failure.configuration == configuration and "seeded" in str(failure)
    (failure,) = fuzz_configurations(torch.nn.GELU(), torch.randn(3), [{"fuse": False, "preserve_ops": ()}, {}])
    assert failure.configuration == {}

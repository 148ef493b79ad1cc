"""What converters give, apart from what is in it."""

from __future__ import annotations

from typing import Any

import torch

from fxwrap.converters.emitted import Emitted
from fxwrap.torch_compat import FakeTensorMode


def test_what_is_built_while_tensors_are_fake_is_real() -> None:
    """torch.compile asks a backend for a callable while it traces; what that is bound to must not be fake."""

    def entry(_inputs: list[Any], *, kept: torch.Tensor) -> torch.Tensor:
        return kept

    def build() -> Any:
        kept = torch.zeros(2)
        return lambda *inputs: entry([*inputs], kept=kept)

    with FakeTensorMode():
        assert type(torch.zeros(2)) is not torch.Tensor
        found = Emitted("", build, build)
        assert type(found.boxed([])) is torch.Tensor
        assert type(found.flat()) is torch.Tensor

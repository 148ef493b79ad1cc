"""Dynamo's table of streams and events, for tests of hand-written graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.graph_bytecode_inputs


@pytest.fixture
def empty_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table of streams and events as it is from 2.12 on, in which place 0 is the current stream's; it is empty."""
    table = torch._dynamo.graph_bytecode_inputs
    monkeypatch.setattr(table, "CURRENT_STREAM_INDEX", 0, raising=False)
    table.reset_user_object_tracking()
    yield
    table.reset_user_object_tracking()

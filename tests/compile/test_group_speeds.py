"""Ranks measure a process group together, or all of them use the speed of the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import group_speeds
from fxwrap.compile.group_speeds import GroupSpeed, with_group_speeds
from fxwrap.errors import OptionError
from fxwrap.options import Options


@dataclasses.dataclass(frozen=True)
class Group:
    """One rank's view of a process group of two."""

    own: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return 2


class Measurements:
    """Stands in for the measurement: each rank measures another speed."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def __call__(self, group: Group) -> GroupSpeed:
        self.ranks.append(group.rank())
        return GroupSpeed(1e-4 * (1 + group.rank()), 1e9)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measurements:
    measurements = Measurements()
    monkeypatch.setattr(group_speeds, "measure", measurements)
    monkeypatch.setattr(group_speeds, "WAIT_S", 1.0)
    monkeypatch.setattr(group_speeds, "_device", lambda _group: torch.device("cpu"))
    monkeypatch.setattr(dist, "get_backend", lambda _group: "gloo")
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path / "cache"))
    return measurements


def speeds(store: dist.Store, fingerprints: Sequence[str]) -> list[GroupSpeed | None]:
    """Returns the speed that each rank gets; a rank with the fingerprint "" does not come."""

    def run(rank: int) -> GroupSpeed | None:
        return group_speeds._Meeting(store, Group(rank)).speed(fingerprints[rank])

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, [rank for rank in range(2) if fingerprints[rank]]))


def test_all_ranks_use_the_numbers_of_the_lowest_one(measurements: Measurements) -> None:
    assert speeds(dist.HashStore(), ("a", "a")) == [GroupSpeed(1e-4, 1e9)] * 2
    assert sorted(measurements.ranks) == [0, 1]
    assert speeds(dist.HashStore(), ("a", "a")) == [GroupSpeed(1e-4, 1e9)] * 2  # from the cache folder
    assert sorted(measurements.ranks) == [0, 1]


@pytest.mark.parametrize("fingerprints", [("a", "b"), ("a", ""), ("", "a")])
def test_ranks_that_do_not_meet_measure_nothing(measurements: Measurements, fingerprints: Sequence[str]) -> None:
    """They compile other graphs, or one of them compiles none: a collective could hang."""
    store = dist.HashStore()
    result = speeds(store, fingerprints)
    assert result == [None] * len(result) and measurements.ranks == []
    assert speeds(store, ("a", "a")) == [None, None]  # a rank that comes later


def test_a_damaged_entry_is_measured_again(measurements: Measurements, tmp_path: Path) -> None:
    speeds(dist.HashStore(), ("a", "a"))
    (entry,) = (tmp_path / "cache").rglob("group_speeds/*")
    entry.write_text("fast")
    assert speeds(dist.HashStore(), ("a", "a")) == [GroupSpeed(1e-4, 1e9)] * 2
    assert len(measurements.ranks) == 4


def test_a_group_that_is_not_there_has_the_speed_of_the_device() -> None:
    operators = torch.ops._c10d_functional
    x = torch.rand(8)
    graph = make_fx(lambda x: operators.wait_tensor(operators.all_reduce(x, "sum", "7")), tracing_mode="fake")(x)
    options = Options()
    assert with_group_speeds(options, graph) is options
    assert fxwrap.compile_graph(graph, [x], options=Options(compile_cache=False)).program.lines()


@pytest.mark.parametrize("speed", [(1.0,), (1.0, -1.0), ("1", 2.0)])
def test_bad_speeds(speed: object) -> None:
    with pytest.raises(OptionError, match=r"takes \(seconds, bytes per second\), not .* for '0'"):
        Options(collective_speeds={"0": speed})  # type: ignore[dict-item]

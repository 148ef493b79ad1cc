"""The ranks of a group compile with the same speeds: published, cached, or those of the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile.group_speeds import with_group_speeds
from fxwrap.errors import OptionError
from fxwrap.options import Options
from fxwrap.runtime import group_speeds
from fxwrap.runtime.group_speeds import GroupSpeed, chosen_speed, measure_group, wants_measurement

SPEED = GroupSpeed(1e-4, 1e9)


@dataclasses.dataclass(eq=False)
class Group:
    """One rank's view of a process group of two."""

    own: int
    store: dist.Store
    group_name: str = "0"

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return 2


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two ranks in one process, with one cache folder; the second one measures another speed."""
    monkeypatch.setattr(group_speeds, "measure", lambda group: GroupSpeed(1e-4 * (1 + group.rank()), 1e9))
    monkeypatch.setattr(group_speeds, "group_store", lambda group, prefix: dist.PrefixStore(prefix, group.store))
    monkeypatch.setattr(group_speeds, "_device", lambda _group: torch.device("cpu"))
    monkeypatch.setattr(dist, "get_backend", lambda _group: "gloo")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0, 1])
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FXWRAP_MEASURE_GROUPS", "1")


def ranks(store: dist.Store) -> tuple[Group, Group]:
    return Group(0, store), Group(1, store)


def test_the_first_rank_to_compile_a_graph_decides() -> None:
    first, second = ranks(dist.HashStore())
    assert chosen_speed(first, "a") is None
    measure_group(second)  # publishes nothing
    assert chosen_speed(second, "b") is None
    measure_group(first)
    assert [chosen_speed(group, "a") for group in (first, second)] == [None, None]
    assert [chosen_speed(group, "b") for group in (first, second)] == [None, None]
    assert [chosen_speed(group, "c") for group in (second, first)] == [SPEED, SPEED]


def test_later_jobs_take_the_cached_numbers(tmp_path: Path) -> None:
    measure_group(ranks(dist.HashStore())[0])
    assert [chosen_speed(group, "a") for group in ranks(dist.HashStore())] == [SPEED, SPEED]
    (entry,) = (tmp_path / "cache").rglob("group_speeds/*")
    entry.write_text("fast")
    first, second = ranks(dist.HashStore())
    assert chosen_speed(first, "a") is None and wants_measurement(first)
    measure_group(first)
    assert chosen_speed(second, "b") == SPEED


def test_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    measure_group(ranks(dist.HashStore())[0])
    assert chosen_speed(ranks(dist.HashStore())[0], "a") == SPEED
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two hosts
    assert chosen_speed(ranks(dist.HashStore())[0], "a") is None


def test_groups_are_measured_if_a_compile_had_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks(dist.HashStore())
    assert not wants_measurement(first)
    chosen_speed(first, "a")
    assert wants_measurement(first) and not wants_measurement(second)
    monkeypatch.setenv("FXWRAP_MEASURE_GROUPS", "0")
    assert not wants_measurement(first)


def test_a_group_that_is_not_there_has_the_speed_of_the_device() -> None:
    operators = torch.ops._c10d_functional
    x = torch.rand(8)
    graph = make_fx(lambda x: operators.wait_tensor(operators.all_reduce(x, "sum", "7")), tracing_mode="fake")(x)
    options = Options()
    assert with_group_speeds(options, graph) is options
    assert fxwrap.compile_graph(graph, [x], options=Options(compile_cache=False)).program.lines()


@pytest.mark.parametrize("text", ["", "1e-5", "0.0,1e9", "nan,1e9", "1e-5,inf", "1e200,1e200", "1,2,3", "-1,-1"])
def test_damaged_numbers_are_no_speed(text: str) -> None:
    assert GroupSpeed.parse(SPEED.text()) == SPEED and GroupSpeed.parse(text) is None


@pytest.mark.parametrize("speed", [(1.0,), (1.0, -1.0), ("1", 2.0)])
def test_bad_speeds(speed: object) -> None:
    with pytest.raises(OptionError, match=r"takes \(seconds, bytes per second\), not .* for '0'"):
        Options(collective_speeds={"0": speed})  # type: ignore[dict-item]

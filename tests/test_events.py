"""Events of a compile: one log from which messages, counts, seconds and JSON follow."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from typing import get_type_hints

import pytest

from fxwrap import events
from fxwrap.events import (
    CacheHit,
    Event,
    EventLog,
    KernelFailed,
    OperatorDeclined,
    StepEnded,
    event_count,
    step_seconds,
)

SAMPLES: dict[object, object] = {int: 3, float: 0.25, str: "text", bool: True}


def event_classes() -> list[type[Event]]:
    pending, classes = [Event], list[type[Event]]()
    while pending:
        kind = pending.pop()
        classes.append(kind)
        pending += kind.__subclasses__()
    return [kind for kind in classes if kind not in (Event, events.CacheEvent) and kind.__module__ == "fxwrap.events"]


@pytest.mark.parametrize("kind", event_classes(), ids=lambda kind: kind.__name__)
def test_each_event_is_logged_at_its_level_counted_and_json(
    kind: type[Event], caplog: pytest.LogCaptureFixture
) -> None:
    hints = get_type_hints(kind, vars(sys.modules[kind.__module__]))
    fields = [SAMPLES.get(hints[item.name], ()) for item in dataclasses.fields(kind)]
    event, log, before = kind(*fields), EventLog("waves"), event_count(kind)
    with caplog.at_level(kind.level + 1, kind.logger):
        log.record(event)
    assert not caplog.messages
    with caplog.at_level(kind.level, kind.logger):
        log.record(event)
    assert caplog.messages == [event.message("waves")] and caplog.records[0].levelno == kind.level
    assert event_count(kind) == before + 2 and log.events == (event, event)
    rows = json.loads(log.to_json())
    assert rows[0].pop("at_s") <= rows[1].pop("at_s")
    assert rows == [{"event": kind.__name__, **json.loads(json.dumps(dataclasses.asdict(event)))}] * 2


def test_messages() -> None:
    assert CacheHit("ab12", 0.0004).message("waves") == "'waves' was loaded from the cache in 0.000 s: ab12"
    assert StepEnded("lower", 0.5, False).message("waves") == "'waves': lower took 0.500 s, and changed nothing"
    assert StepEnded("lower", 0.5).message("waves") == "'waves': lower took 0.500 s"
    declined = OperatorDeclined("mm", "aten.mm.default", "a library call", "model.py:3")
    assert declined.message("waves") == "'waves': aten.mm.default is called at mm (model.py:3): a library call"
    assert (
        KernelFailed("k", ("aten.sin",), "no").message("") == "the kernel @k failed, and its operators are called: no"
    )


def test_seconds_of_repeated_steps_are_added() -> None:
    log = EventLog("waves")
    for step in ("lower", "emit", "lower"):
        log.begin_step("lower")
        log.end_step(step, changed=True)
    seconds = [event.seconds for event in log.events if isinstance(event, StepEnded)]
    assert step_seconds(log.events) == {"lower": seconds[0] + seconds[2], "emit": seconds[1]}


def test_events_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepEnded("lower", 0.5).step = "emit"  # type: ignore[misc]
    assert logging.getLogger(StepEnded.logger).name == "fxwrap.compile"

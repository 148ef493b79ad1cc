"""The bridge compiled in the background, while programs that can do without it already run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fxwrap.errors import FxwrapError
from fxwrap.runtime.native.bridge_build import build_bridge

log = logging.getLogger("fxwrap.native")


@dataclass
class _Background:
    """The thread that compiles the bridge, None while there is none, and the actions that wait for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    actions: list[Callable[[], object]] = field(default_factory=list)


_background = _Background()


def after_bridge(action: Callable[[], object]) -> None:
    """Runs an action when the bridge can be loaded, in a thread that compiles it unless another does already.

    Actions run in the order of the calls. None runs if the bridge does not compile, which the log says. The thread ends
    with the process: objects that are compiled by then remain in the cache.
    """
    with _background.lock:
        _background.actions.append(action)
        if _background.thread is None:
            _background.thread = threading.Thread(target=_run, name="fxwrap-bridge", daemon=True)
            _background.thread.start()


def join_background() -> None:
    """Waits until no thread compiles the bridge: for tests."""
    while (thread := _background.thread) is not None and thread.is_alive():
        thread.join()


def _run() -> None:
    is_built = False
    try:
        build_bridge(in_background=True)
        is_built = True
    except (FxwrapError, OSError) as error:
        log.info("the C++ bridge does not compile, and programs run without it: %s", error)
    finally:
        while action := _next_action():
            if is_built:
                _try(action)


def _next_action() -> Callable[[], object] | None:
    with _background.lock:
        if _background.actions:
            return _background.actions.pop(0)
        _background.thread = None
        return None


def _try(action: Callable[[], object]) -> None:
    try:
        action()
    except (FxwrapError, OSError) as error:
        log.info("a kernel is not launched by the C++ bridge: %s", error)


class InterimLauncher:
    """A kernel's launcher that needs no bridge, until the bridge is compiled and `make_launcher` returns its own."""

    def __init__(self, launch: Callable[..., Any], make_launcher: Callable[[], Callable[..., Any]]) -> None:
        self._launch = launch
        self._make_launcher = make_launcher
        after_bridge(self._replace)

    def __call__(self, *arguments: object) -> Any:
        return self._launch(*arguments)

    def _replace(self) -> None:
        self._launch = self._make_launcher()

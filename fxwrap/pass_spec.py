"""Passes of the user's: what one is, where in the pipeline it runs, and a registry of them by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from .errors import OptionError, PassWarning

FX_BEFORE_LOWERING = "fx_before_lowering"
IR_BEFORE_PLANNING = "ir_before_planning"
IR_BEFORE_EMISSION = "ir_before_emission"
FX_EMITTED = "fx_emitted"

POINTS = (FX_BEFORE_LOWERING, IR_BEFORE_PLANNING, IR_BEFORE_EMISSION, FX_EMITTED)
"""Where passes run, in the pipeline's order: on the graph of ATen operators, after decompositions; on the program,
before memory is planned and after; on the graph that a program was emitted as."""


@dataclass(frozen=True)
class Pass:
    """A pass: a function of a graph or program, with what a compile has to know of it.

    Fields:
        run: gets a GraphModule (a copy, which it may change in place and then need not return) or a Program, and
            returns a new one.
        key: says which pass it is, to caches: two passes with one key do the same. It names the version of the function
            and all that it depends on. None means that nothing made with the pass may be cached.
        at: one of `POINTS`.
        name: what errors and stages call it; the function's name unless given.
        order: passes at one point run by this number, then in the order in which they were given.
    """

    run: Callable[[Any], Any]
    key: str | None
    at: str = IR_BEFORE_PLANNING
    name: str = ""
    order: int = 0

    def __post_init__(self) -> None:
        if not callable(self.run):
            raise OptionError(f"a pass is a function of a program or a graph, not {self.run!r}")
        if self.at not in POINTS:
            raise OptionError(f"there is no point {self.at!r} for passes; the known ones are {', '.join(POINTS)}")
        key: Any = self.key
        if key is not None and not (isinstance(key, str) and key):
            raise OptionError(f"the key of a pass is a text that is not empty, not {self.key!r}")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.run, "__qualname__", type(self.run).__name__))

    def text(self) -> str:
        """Returns the pass as options show it: equal for passes with one name, point and key."""
        if self.key is not None:
            return f"{self.name}[{self.key}]@{self.at}"
        return f"{getattr(self.run, '__module__', '?')}.{self.name}[no key]@{self.at}"


Given: TypeAlias = Pass | Callable[[Any], Any] | str | tuple[str, Mapping[str, Any]]
"""How a pass may be given: itself; a function; the name of a registered one, with or without options."""

_REGISTRY: dict[str, tuple[Callable[..., Any], Pass]] = {}


def register_pass(
    name: str, *, key: str, at: str = IR_BEFORE_PLANNING, order: int = 0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function below it as a pass, which `options={"passes": [name]}` then runs.

    Its keyword arguments are the pass's options: `options={"passes": [(name, {"limit": 3})]}`.

    Args:
        name: what options call it; the first part should be the name of its package ("vendor.fuse_linear").
        key: see `Pass.key`; options are added to it.
        at, order: see `Pass`.

    Raises OptionError for a name that is taken by another function.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        known = _REGISTRY.get(name)
        if known is not None and known[0].__qualname__ != function.__qualname__:
            raise OptionError(f"there is a pass '{name}' already: {known[0].__module__}.{known[0].__qualname__}")
        _REGISTRY[name] = function, Pass(function, key, at, name, order)
        return function

    return register


def registered_pass(name: str, /, **options: Any) -> Pass:
    """Returns a registered pass, with options. Raises OptionError for a name that nobody registered."""
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY)) or "none is registered"
        raise OptionError(f"there is no pass {name!r}; the known ones: {known}. Import what registers it first")
    function, spec = _REGISTRY[name]
    if not options:
        return spec
    for option, given in options.items():
        if not isinstance(given, str | int | float | bool | None | tuple):
            raise OptionError(f"option {option!r} of pass '{name}' is plain data, which a key can say, not {given!r}")
    shown = ", ".join([f"{option}={options[option]!r}" for option in sorted(options)])
    return replace(spec, run=partial(function, **options), key=f"{spec.key} {shown}", name=f"{name}({shown})")


def passes_of(given: Iterable[Given] | Mapping[str, Iterable[Given]]) -> tuple[Pass, ...]:
    """Returns the passes that the option `passes` stands for, in the order in which they run.

    A function without a key runs at "ir_before_planning", or at the point under which a mapping has it, with a
    PassWarning. Raises OptionError for what is no pass.
    """
    if isinstance(given, Mapping):
        found = [_pass_of(item, point) for point, items in given.items() for item in items]
    elif isinstance(given, list | tuple):
        found = [_pass_of(item, "") for item in given]
    else:
        raise OptionError(f"option 'passes' takes a list of passes, or lists by their point, not {given!r}")
    return tuple(sorted(found, key=lambda item: (POINTS.index(item.at), item.order)))


def _pass_of(given: Any, point: str) -> Pass:
    match given:
        case Pass():
            found = given
        case str():
            found = registered_pass(given)
        case (str() as name, Mapping() as options):
            found = registered_pass(name, **options)
        case _:
            found = _function(given, point)
    if point and point != found.at:
        raise OptionError(f"pass '{found.name}' runs at {found.at!r}, not at {point!r}")
    return found


def _function(given: Any, point: str) -> Pass:
    """Returns the pass that a function is; an object that is called may have `key` and `at` of its own."""
    key = getattr(given, "key", None)
    at = point or getattr(given, "at", IR_BEFORE_PLANNING)
    found = Pass(given, key, at, getattr(given, "name", "") if isinstance(getattr(given, "name", ""), str) else "")
    if key is None:
        warnings.warn(
            f"pass '{found.name}' has no key, so nothing made with it can be cached: "
            "give fxwrap.Pass(function, key=...), where the key says which version of the function it is",
            PassWarning,
            stacklevel=7,
        )
    return found

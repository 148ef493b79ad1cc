"""The user's passes: their description, the points of the pipeline where they run, and a registry by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from fxwrap.errors import OptionError, PassWarning

PassPoint: TypeAlias = Literal["fx_before_lowering", "ir_before_planning", "ir_before_emission", "fx_emitted"]
PASS_POINTS: tuple[PassPoint, ...] = get_args(PassPoint)
"""Where passes run, in the pipeline's order: on the graph of ATen operators, after decompositions; on the program,
before memory planning and after; on the emitted FX graph."""

FX_BEFORE_LOWERING, IR_BEFORE_PLANNING, IR_BEFORE_EMISSION, FX_EMITTED = PASS_POINTS

PassFunction: TypeAlias = Callable[..., Any]
"""Maps a GraphModule or a Program to a new one, or to the result of `rewrite`; it may change a GraphModule in place."""


@dataclass(frozen=True)
class Pass:
    """A user's pass.

    Fields:
        run: takes a Program, or a copy of a GraphModule, and returns a new one, or a `RewriteResult`, whose matches are
            then counted. None means that the GraphModule was changed in place.
        key: identifies the pass to caches: passes with equal keys must be equal. It names the version of the function
            and all that it depends on. With None, results of the pass are not cached.
        at: the pass point, one of `PASS_POINTS`.
        name: the name in errors and stages; by default the function's name.
        order: passes at one point run in this order, then in the order of the option.
        must_match: whether it is a PassError if the pass matches nothing, or, where matches are not counted, changes
            nothing. It is for models of which this is known: one graph without a match fails.
    """

    run: PassFunction
    key: str | None
    at: PassPoint = IR_BEFORE_PLANNING
    name: str = ""
    order: int = 0
    must_match: bool = False

    def __post_init__(self) -> None:
        if not callable(self.run):
            raise OptionError(f"a pass is a function of a program or a graph, not {self.run!r}")
        if self.at not in PASS_POINTS:
            raise OptionError(f"unknown pass point {self.at!r}; known points: {', '.join(PASS_POINTS)}")
        key: object = self.key
        if key is not None and not (isinstance(key, str) and key):
            raise OptionError(f"the key of a pass is a string that is not empty, not {self.key!r}")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.run, "__qualname__", type(self.run).__name__))

    def text(self) -> str:
        """Returns the text of the pass in options; equal for passes with equal names, points and keys."""
        point = f"{self.at}{' must match' if self.must_match else ''}"
        if self.key is not None:
            return f"{self.name}[{self.key}]@{point}"
        return f"{getattr(self.run, '__module__', '?')}.{self.name}[no key]@{point}"


PassLike: TypeAlias = Pass | PassFunction | str | tuple[str, Mapping[str, object]]
"""An item of the option `passes`: a pass, a function, or the name of a registered pass, with or without options."""

_REGISTRY: dict[str, Pass] = {}


@contextmanager
def empty_pass_registry() -> Iterator[None]:
    """Empties the registry of passes, and restores it at the end; for tests."""
    registered = dict(_REGISTRY)
    _REGISTRY.clear()
    try:
        yield
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(registered)


def register_pass(
    name: str, *, key: str, at: PassPoint = IR_BEFORE_PLANNING, order: int = 0, must_match: bool = False
) -> Callable[[PassFunction], PassFunction]:
    """Registers the decorated function as a pass, which `options={"passes": [name]}` runs.

    Its keyword arguments are the pass's options: `options={"passes": [(name, {"limit": 3})]}`.

    Args:
        name: the name in options; it should begin with the name of its package ("vendor.fuse_linear").
        key: see `Pass.key`; options are added to it.
        at, order, must_match: see `Pass`.

    Raises OptionError for a name that another function has.
    """

    def register(function: PassFunction) -> PassFunction:
        existing = _REGISTRY.get(name)
        if existing is not None and existing.run.__qualname__ != function.__qualname__:
            other = f"{existing.run.__module__}.{existing.run.__qualname__}"
            raise OptionError(f"pass '{name}' is already registered: {other}")
        _REGISTRY[name] = Pass(function, key, at, name, order, must_match)
        return function

    return register


def registered_pass(name: str, /, **options: object) -> Pass:
    """Returns a registered pass with options. Raises OptionError for an unknown name."""
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY)) or "none"
        raise OptionError(f"unknown pass {name!r}; known passes: {known}. Import the module that registers it first")
    spec = _REGISTRY[name]
    if not options:
        return spec
    for option, value in options.items():
        if not isinstance(value, str | int | float | bool | None | tuple):
            raise OptionError(f"option {option!r} of pass '{name}' takes plain data for the key, not {value!r}")
    shown = ", ".join([f"{option}={options[option]!r}" for option in sorted(options)])
    return replace(spec, run=partial(spec.run, **options), key=f"{spec.key} {shown}", name=f"{name}({shown})")


def normalize_passes(option: Iterable[PassLike] | Mapping[str, Iterable[PassLike]]) -> tuple[Pass, ...]:
    """Returns the value of the option `passes` as passes, in the order in which they run.

    A function without a key runs at "ir_before_planning", or at its point in a mapping, with a PassWarning. Raises
    OptionError for other values.
    """
    if isinstance(option, Mapping):
        passes = [_normalize_pass(item, point) for point, items in option.items() for item in items]
    elif isinstance(option, list | tuple):
        passes = [_normalize_pass(item, "") for item in option]
    else:
        raise OptionError(f"option 'passes' takes a list of passes, or lists by pass point, not {option!r}")
    return tuple(sorted(passes, key=lambda item: (PASS_POINTS.index(item.at), item.order)))


def _normalize_pass(item: PassLike, point: str) -> Pass:
    match item:
        case Pass():
            normalized = item
        case str():
            normalized = registered_pass(item)
        case (str() as name, Mapping() as options):
            normalized = registered_pass(name, **options)
        case _:
            normalized = _pass_from_function(item, point)
    if point and point != normalized.at:
        raise OptionError(f"pass '{normalized.name}' runs at {normalized.at!r}, not at {point!r}")
    return normalized


def _pass_from_function(function: Any, point: str) -> Pass:
    """Returns a function as a pass; a callable object may have the attributes `key`, `at` and `name`."""
    name = getattr(function, "name", "")
    at: Any = point or getattr(function, "at", IR_BEFORE_PLANNING)
    item = Pass(function, getattr(function, "key", None), at, name if isinstance(name, str) else "")
    if item.key is None:
        warnings.warn(
            f"pass '{item.name}' has no key, so its results are not cached; "
            "use fxwrap.Pass(function, key=...) with a key that names the version of the function",
            PassWarning,
            stacklevel=7,
        )
    return item

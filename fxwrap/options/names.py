"""Names in options: sets of overloads and kernels, checked against the names that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fxwrap.errors import OptionError
from fxwrap.torch_compat import operator_overload, overload_names_of


def overload_names(option: str, names: object) -> frozenset[str]:
    """Returns the overloads of an option. Raises OptionError for a string, and for a name that torch does not know."""
    members = name_set(option, names)
    for name in sorted(members):
        check_overload(option, name)
    return members


def overload_or_kernel_names(option: str, names: object) -> frozenset[str]:
    """Returns the names of an option, of which those with dots are overloads; kernels are named by their operators."""
    members = name_set(option, names)
    for name in sorted(members):
        if "." in name:
            check_overload(option, name)
    return members


def name_set(option: str, names: object) -> frozenset[str]:
    """Returns a collection of names as a set. Raises OptionError for a string, whose elements are its letters."""
    if isinstance(names, str):
        raise OptionError(f"option {option!r} takes a set of names, not a string: write {{{names!r}}}")
    members = frozenset(names) if isinstance(names, Iterable) else None
    if members is None or not all(isinstance(name, str) for name in members):
        raise OptionError(f"option {option!r} takes a set of names such as 'aten.add.Tensor', not {names!r}")
    return members


def check_overload(option: str, name: object) -> None:
    """Raises OptionError for a name that is not an overload of torch or of an imported library."""
    try:
        operator_overload(str(name))
    except (LookupError, RuntimeError):
        hint = _did_you_mean(str(name))
        remedy = hint or "; name an overload such as 'aten.add.Tensor', and import the library that registers it first"
        raise OptionError(f"option {option!r}: unknown operator {name!r}{remedy}") from None


def _did_you_mean(name: str) -> str:
    """Returns a hint at the nearest known overload, or ""."""
    known = overload_names_of(name.partition(".")[0])
    same = [item for item in known if item.startswith(f"{name.removesuffix('.')}.")]
    close = same or difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""

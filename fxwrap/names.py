"""Names that are used once: of values, symbols and functions of a program, and of variables in printed text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class NameAllocator:
    """Creates legal, readable and unique names.

    Fields: `used` are the names in use; `reserved` are words of the text's language, which no name may be.
    """

    used: set[str] = field(default_factory=set)
    reserved: frozenset[str] = frozenset()
    _suffixes: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def create_name(self, wanted: str) -> str:
        """Returns a legal form of a name, with a numeric suffix if it is in use, and reserves it."""
        base = re.sub(r"\W", "_", wanted)
        base = base if base.isidentifier() else f"v_{base}"
        return self.create_from_legal(f"{base}_value" if base in self.reserved else base)

    def create_from_legal(self, base: str) -> str:
        """Returns a name that is legal, with a numeric suffix if it is in use, and reserves it."""
        name = base
        while name in self.used or name in self.reserved:
            self._suffixes[base] = self._suffixes.get(base, 0) + 1
            name = f"{base}_{self._suffixes[base]}"
        self.used.add(name)
        return name

    def create_numbered(self, prefix: str) -> str:
        """Returns the next unused name of a series, as "s0", "s1" for a legal prefix "s", and reserves it."""
        number = self._numbers.get(prefix, 0)
        while f"{prefix}{number}" in self.used:
            number += 1
        self._numbers[prefix] = number + 1
        self.used.add(f"{prefix}{number}")
        return f"{prefix}{number}"

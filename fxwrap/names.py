"""Names that are used once: of values and functions of a program, and of variables in printed text."""

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
    _counts: dict[str, int] = field(default_factory=dict)

    def create_name(self, wanted: str) -> str:
        """Returns a legal form of a name, with a numeric suffix if it is in use, and reserves it."""
        base = re.sub(r"\W", "_", wanted)
        base = base if base.isidentifier() else f"v_{base}"
        base = f"{base}_value" if base in self.reserved else base
        name = base
        while name in self.used or name in self.reserved:
            self._counts[base] = self._counts.get(base, 0) + 1
            name = f"{base}_{self._counts[base]}"
        self.used.add(name)
        return name

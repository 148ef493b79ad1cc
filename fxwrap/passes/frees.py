"""Frees, as passes and lowering know them: they are a matter of lines alone, which reading graphs back needs too."""

from fxwrap.lines.frees import insert_frees as insert_frees

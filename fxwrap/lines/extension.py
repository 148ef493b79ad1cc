"""The open door for vendors: lines of their own, which every converter can run."""

from __future__ import annotations

from abc import abstractmethod

from fxwrap.wrapper_ir import Effect, LineBase


class ExtensionLine(LineBase):
    """Base of vendors' lines, made by `line_class("vendor.verb")` with the same field roles as ours.

    It prints, parses (`fxwrap.parse(text, extensions=[...])`), verifies and plans by its roles. A converter runs it
    through a handler registered for it, else through `expand()`.
    """

    __slots__ = ()

    @abstractmethod
    def effects(self) -> tuple[Effect, ...]:
        """Returns what the line does besides its reads and writes."""

    @abstractmethod
    def expand(self) -> tuple[LineBase, ...]:
        """Returns core lines that do the same: they define the same values and consume the same roots."""

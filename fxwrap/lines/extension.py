"""The base class of lines defined by vendors."""

from __future__ import annotations

from abc import abstractmethod

from fxwrap.wrapper_ir import Effect, LineBase


class ExtensionLine(LineBase):
    """Base of lines defined by vendors with `line_class("vendor.verb")` and the field roles of core lines.

    Printing, parsing (`fxwrap.parse(text, extensions=[...])`), verification and memory planning use its roles. A
    converter calls the handler registered for the class, else it converts `expand()`.
    """

    __slots__ = ()

    @abstractmethod
    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of the line besides its reads and writes."""

    @abstractmethod
    def expand(self) -> tuple[LineBase, ...]:
        """Returns equivalent core lines, which define the same values and consume the same roots."""

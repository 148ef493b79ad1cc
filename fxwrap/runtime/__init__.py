"""The runtime library of emitted code; it imports nothing of the compiler."""

from fxwrap.runtime import operators as operators

"""The runtime library of emitted code; it imports nothing of the compiler."""

from fxwrap.runtime import operators as operators
from fxwrap.runtime import symmetric_memory as symmetric_memory

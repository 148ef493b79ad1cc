"""The runtime library of emitted code; it imports nothing of the compiler."""

from fxwrap.runtime import printing as printing
from fxwrap.runtime import script_objects as script_objects

"""What emitted code needs while it runs; imports nothing of the compiler."""

from fxwrap.runtime import printing as printing

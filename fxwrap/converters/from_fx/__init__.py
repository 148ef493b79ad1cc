"""FX graphs imported as programs."""

from fxwrap.converters.from_fx.importer import from_fx as from_fx

"""Programs as FX graphs."""

from fxwrap.converters.fx.converter import EmittedGraph as EmittedGraph
from fxwrap.converters.fx.converter import to_fx as to_fx

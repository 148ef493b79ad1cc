"""Programs as FX graphs."""

from fxwrap.converters.fx.forms import FxForm as FxForm
from fxwrap.converters.fx.forms import placeholder_fakes as placeholder_fakes
from fxwrap.converters.fx.forms import to_fx as to_fx
from fxwrap.converters.fx.module import EmittedGraph as EmittedGraph

"""Fake values for types, and inference of the results of operators' calls."""

from fxwrap.inference.calls import *
from fxwrap.inference.eager_errors import *
from fxwrap.inference.fake_values import *
from fxwrap.inference.result_layouts import *

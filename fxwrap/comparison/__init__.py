"""The comparison of eager PyTorch, a float64 reference, the interpreter and the emitters, on the same inputs."""

from fxwrap.comparison.backends import *
from fxwrap.comparison.bisection import *
from fxwrap.comparison.configurations import *
from fxwrap.comparison.driver import *
from fxwrap.comparison.measure import *
from fxwrap.comparison.observe import *
from fxwrap.comparison.report import *
from fxwrap.comparison.repro import *
from fxwrap.comparison.subjects import *

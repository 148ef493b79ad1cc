"""The comparison of eager PyTorch, a float64 reference, the interpreter and the emitters, on the same inputs."""

from fxwrap.compare.copies import *
from fxwrap.compare.driver import *
from fxwrap.compare.measure import *
from fxwrap.compare.observe import *
from fxwrap.compare.report import *
from fxwrap.compare.subjects import *

"""The time of each line of a compiled function, beside its bytes, its operations and the limits of its device."""

from fxwrap.profiling.line_profile import LineProfile as LineProfile
from fxwrap.profiling.line_profile import Profile as Profile
from fxwrap.profiling.line_profile import profile as profile

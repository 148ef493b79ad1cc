"""The C++ runtime: the bridge that emitted C++ calls, its Python binding, and the compiler driver."""

from fxwrap.runtime.native.background import *
from fxwrap.runtime.native.binding import *
from fxwrap.runtime.native.bridge_build import *
from fxwrap.runtime.native.build import *
from fxwrap.runtime.native.compiler import *
from fxwrap.runtime.native.identity import *
from fxwrap.runtime.native.packaged import *
from fxwrap.runtime.native.planner_library import *
from fxwrap.runtime.native.prebuilt import *
from fxwrap.runtime.native.runtime_library import *

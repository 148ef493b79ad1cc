"""Memory planning: live ranges, offset assignment in pools, plans as data, and their application to programs."""

from fxwrap.memory_planning.apply import *
from fxwrap.memory_planning.assignment import *
from fxwrap.memory_planning.live_ranges import *
from fxwrap.memory_planning.plan import *
from fxwrap.memory_planning.serialization import *
from fxwrap.memory_planning.traces import MemoryTrace as MemoryTrace
from fxwrap.memory_planning.visualization import *

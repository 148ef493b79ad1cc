"""Programs as Python source."""

from fxwrap.converters.python.converter import PythonConverter as PythonConverter
from fxwrap.converters.python.module import EmittedPython as EmittedPython
from fxwrap.converters.python.module import PythonModuleText as PythonModuleText
from fxwrap.converters.python.module import to_python as to_python

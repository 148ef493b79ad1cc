"""Programs run line by line."""

from fxwrap.converters.interpreter.interpreter import Interpreter as Interpreter
from fxwrap.converters.interpreter.interpreter import UntrustedInterpreter as UntrustedInterpreter
from fxwrap.converters.interpreter.interpreter import check_inputs as check_inputs
from fxwrap.converters.interpreter.interpreter import run as run
from fxwrap.converters.interpreter.memory_checker import CheckedInterpreter as CheckedInterpreter

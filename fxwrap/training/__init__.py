"""Training steps as one program: forward, loss, backward and optimizer update."""

from fxwrap.training.compiled_step import CompiledStep as CompiledStep
from fxwrap.training.compiled_step import compile_step as compile_step
from fxwrap.training.compiled_step import load_step as load_step

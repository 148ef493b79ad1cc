"""The options of a compile, the user's passes, and the rows of pipelines."""

from fxwrap.options.options import *
from fxwrap.options.user_pass import *

"""The gate to PyTorch's private API: no other module of fxwrap names a private part of torch.

Each item states why the public API is not enough. `docs/versions.md` lists the releases of torch that are
tested; an item that only some of them need says so. Modules of the compiler alone are imported when one of their names
is first used: a process that only runs programs does without them, and without SymPy, which some of them import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fxwrap.torch_compat.allocation import *
from fxwrap.torch_compat.data_parallel import *
from fxwrap.torch_compat.dispatch import *
from fxwrap.torch_compat.distributed import *
from fxwrap.torch_compat.dynamo import *
from fxwrap.torch_compat.graphs import *
from fxwrap.torch_compat.opaque import *
from fxwrap.torch_compat.operators import *
from fxwrap.torch_compat.precompile import *
from fxwrap.torch_compat.prepacked import *
from fxwrap.torch_compat.processor import *
from fxwrap.torch_compat.python_operators import *
from fxwrap.torch_compat.pytrees import *
from fxwrap.torch_compat.streams import *
from fxwrap.torch_compat.symmetric_memory import *
from fxwrap.torch_compat.tensors import *
from fxwrap.torch_compat.training import *

if TYPE_CHECKING:
    from fxwrap.torch_compat.compiled_functions import *
    from fxwrap.torch_compat.fake_tensors import *
    from fxwrap.torch_compat.profiling import *
    from fxwrap.torch_compat.read_elements import *
    from fxwrap.torch_compat.structured_trace import *
    from fxwrap.torch_compat.symbols import *
    from fxwrap.torch_compat.triton import *

_COMPILER_MODULES = (
    "profiling", "structured_trace", "fake_tensors", "symbols", "triton", "compiled_functions", "read_elements",
)  # fmt: skip


def __getattr__(name: str) -> object:
    """Returns a name of the modules of the compiler. Raises AttributeError for an unknown name."""
    if not name.startswith("_"):
        for module in _COMPILER_MODULES:
            names = vars(import_module(f"{__name__}.{module}"))
            if name in names:
                item: object = names[name]
                globals()[name] = item
                return item
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

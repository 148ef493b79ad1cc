"""The gate to PyTorch's private API: no other module of fxwrap names a private part of torch.

Each item states why the public API is not enough. `docs/versions.md` lists the releases of torch that are
tested; an item that only some of them need says so.
"""

from fxwrap.torch_compat.allocation import *
from fxwrap.torch_compat.data_parallel import *
from fxwrap.torch_compat.dispatch import *
from fxwrap.torch_compat.distributed import *
from fxwrap.torch_compat.dynamo import *
from fxwrap.torch_compat.fake_tensors import *
from fxwrap.torch_compat.graphs import *
from fxwrap.torch_compat.opaque import *
from fxwrap.torch_compat.operators import *
from fxwrap.torch_compat.precompile import *
from fxwrap.torch_compat.pytrees import *
from fxwrap.torch_compat.python_operators import *
from fxwrap.torch_compat.streams import *
from fxwrap.torch_compat.symbols import *
from fxwrap.torch_compat.symmetric_memory import *
from fxwrap.torch_compat.tensors import *
from fxwrap.torch_compat.training import *
from fxwrap.torch_compat.triton import *

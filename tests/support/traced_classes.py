"""Classes of tensors that define how functions act on them, which Dynamo traces."""

from __future__ import annotations

from typing import Any

import torch


class Redefined(torch.Tensor):
    """A tensor whose results are of its class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class RedefinedParameter(torch.nn.Parameter):
    """A parameter as those of vLLM's linear layers, whose base class is `BasevLLMParameter`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})

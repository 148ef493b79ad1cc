"""What versions of torch cannot do themselves, for the tests that ask them to."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion


def is_before(version: str) -> bool:
    """Whether torch is older than a version."""
    return TorchVersion(version) > torch.__version__


def fails_before(version: str, reason: str, raises: type[Exception]) -> pytest.MarkDecorator:
    """Marks what torch itself refuses before a version, for this reason: that it does is checked."""
    return pytest.mark.xfail(is_before(version), reason=reason, raises=raises, strict=True)

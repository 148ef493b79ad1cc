"""Kernels as data: the texts of several kernels, by content hash, in one tensor of bytes.

An exported program has such a tensor as a constant. It is JSON, so that reading it runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from fxwrap.devices.kernel_names import kernel_content_hash
from fxwrap.errors import KernelTextError
from fxwrap.runtime.cpp_kernels import KernelOptions

_FORMAT: Final = 1
_EXPORT_AGAIN = "Export the program again with fxwrap.fx.export, or take an undamaged copy of the file"


@dataclass(frozen=True)
class RegisteredKernel:
    """A kernel that graphs launch by its content hash: arguments of `load_kernel`, a name and the number of outputs."""

    language: str
    source: str
    signature: tuple[str, ...]
    options: KernelOptions
    name: str = ""
    outs: int = 0

    @property
    def text(self) -> tuple[str, tuple[str, ...], KernelOptions]:
        """Source, signature and options."""
        return self.source, self.signature, self.options

    @property
    def hash(self) -> str:
        """The content hash, which does not cover the name and the number of outputs."""
        return kernel_content_hash(self.language, *self.text)


def serialize_kernels(kernels: Iterable[RegisteredKernel]) -> torch.Tensor:
    """Returns the texts of kernels as a one-dimensional uint8 tensor on the CPU; equal kernels give equal tensors."""
    entries = {
        kernel.hash: {
            "name": kernel.name,
            "language": kernel.language,
            "signature": kernel.signature,
            "options": kernel.options,
            "outs": kernel.outs,
            "source": kernel.source,
        }
        for kernel in kernels
    }
    text = json.dumps({"format": _FORMAT, "kernels": entries}, indent=1, sort_keys=True)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def parse_kernels(texts: torch.Tensor) -> dict[str, RegisteredKernel]:
    """Returns the kernels of a tensor of texts by their content hashes.

    Raises KernelTextError for a tensor that `serialize_kernels` did not return, and for a kernel that differs from its
    hash.
    """
    content = _read(texts)
    return {kernel_hash: _parse_kernel(kernel_hash, entry) for kernel_hash, entry in content.items()}


def _read(texts: torch.Tensor) -> Mapping[str, Any]:
    if texts.dtype != torch.uint8 or texts.dim() != 1:
        reason = f"the kernels' texts are a {texts.dim()}-dimensional tensor of {texts.dtype}, not bytes"
        raise KernelTextError("", reason, _EXPORT_AGAIN)
    try:
        content = json.loads(bytes(texts.tolist()))
    except ValueError as error:
        raise KernelTextError("", f"the kernels' texts are damaged: {error}", _EXPORT_AGAIN) from error
    version = content.get("format") if isinstance(content, dict) else None
    kernels = content.get("kernels") if version == _FORMAT else None
    if not isinstance(kernels, dict):
        reason = f"the kernels' texts have the format {version!r}, and this version of fxwrap reads {_FORMAT}"
        raise KernelTextError("", reason, "Install the version of fxwrap that exported the program, or export it again")
    return kernels


def _parse_kernel(kernel_hash: str, entry: Mapping[str, Any]) -> RegisteredKernel:
    try:
        kernel = RegisteredKernel(
            entry["language"],
            entry["source"],
            tuple(entry["signature"]),
            tuple([(name, option) for name, option in entry["options"]]),
            entry["name"],
            entry["outs"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise KernelTextError(kernel_hash, f"its entry is damaged: {error}", _EXPORT_AGAIN) from error
    if kernel.hash != kernel_hash:
        reason = "its text was changed: it differs from its content hash"
        raise KernelTextError(kernel.name or kernel_hash, reason, _EXPORT_AGAIN)
    return kernel

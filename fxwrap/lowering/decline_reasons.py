"""The reasons why operators get no kernels: options, devices, effects and missing rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxwrap.devices import DeviceSpec, language_traits
from fxwrap.lowering.builder import FakeValue, LoweringRequest
from fxwrap.lowering.fusion.definitions import definitions_in
from fxwrap.lowering.graph_definitions import DefinitionOperand, library_call_reason
from fxwrap.lowering.rules import LIBRARY_RULES, RULES
from fxwrap.wrapper_ir.operators import OperatorSchema

Arguments: TypeAlias = tuple[tuple[DefinitionOperand, ...], tuple[tuple[str, DefinitionOperand], ...]]
"""The arguments and the keyword arguments of a call, with definitions for tensors."""


@dataclass(frozen=True)
class DeclineRules:
    """Decides which calls of a graph may become kernels; `specs` are those of the device types with kernels."""

    request: LoweringRequest
    specs: Mapping[str, DeviceSpec]

    def reason(
        self, name: str, target: object, schema: OperatorSchema, fake: FakeValue, arguments: Arguments
    ) -> str | None:
        """Returns why a call gets no kernel, or None. `name` is the qualified name of its node.

        `target` is the operator that the node calls, `schema` the one that replaces it, `fake` the fake results.
        """
        options = self.request.options
        if not options.fuse:
            return "fusion is off"
        if name in self.request.declined_nodes:
            if schema.name in LIBRARY_RULES:
                return "a library call: no schedule of a kernel fits it"
            return "its kernel could not be generated"
        if name in self.request.library_calls:
            return "a library call: it was measured to be faster than a kernel"
        if str(target) in options.lowerings:
            return "a user's lowering replaces it"
        if schema.name in options.preserve_ops:
            return "the options preserve it"
        has_rule = schema.name in RULES or schema.name in LIBRARY_RULES
        library_call = None if has_rule else library_call_reason(schema.name)
        if library_call is not None:  # attention may draw random numbers, too
            return library_call
        if not schema.is_pure:
            return "it writes its operands, draws random numbers or has another effect"
        if not has_rule:
            return "it has no lowering rule yet"
        return self._device_reason(schema, fake, arguments)

    def _device_reason(self, schema: OperatorSchema, fake: FakeValue, arguments: Arguments) -> str | None:
        """Returns why the devices of a call's tensors prevent a kernel, or None."""
        results = [item for item in (fake if isinstance(fake, tuple | list) else (fake,)) if item is not None]
        devices = {item.device for item in (*results, *definitions_in(arguments))}
        if len(devices) != 1:
            return "its tensors are on several devices"
        device = next(iter(devices))
        if schema.name in LIBRARY_RULES and not self._has_library_kernels(device):
            return library_call_reason(schema.name)
        if not self.has_kernels(device) or schema.name in self.specs[device.type].prefer_extern_ops:
            return "the device has no kernels for it"
        return None

    def has_kernels(self, device: torch.device) -> bool:
        """Whether the device's type is registered with a kernel language."""
        spec = self.specs.get(device.type)
        return spec is not None and bool(spec.kernel_language)

    def _has_library_kernels(self, device: torch.device) -> bool:
        """Whether a kernel may compute a matmul or a convolution on a device: as text, not as a region."""
        return self.has_kernels(device) and not language_traits(self.specs[device.type].kernel_language).takes_regions

    def can_fuse(self, name: str) -> bool:
        """Whether the call of a node may become a kernel, for all that options and declined nodes say."""
        return self.request.options.fuse and name not in self.request.declined_nodes

"""Collectives fused with the operators beside them, by rewriting rules. `docs/fused_communication.md` is the guide."""

from fxwrap.fused_communication.fusion import CommunicationFusion, FusedCommunication, UnfusedCollective
from fxwrap.fused_communication.support import symmetric_memory_decline
from fxwrap.torch_compat import enable_symmetric_memory

__all__ = [
    "CommunicationFusion",
    "FusedCommunication",
    "UnfusedCollective",
    "enable_symmetric_memory",
    "symmetric_memory_decline",
]

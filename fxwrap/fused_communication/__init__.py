"""Collectives fused with the operators beside them, by rewriting rules. `docs/fused_communication.md` is the guide."""

from fxwrap.fused_communication.fusion import CommunicationFusion, FusedCommunication, UnfusedCollective
from fxwrap.fused_communication.support import symmetric_memory_decline

__all__ = ["CommunicationFusion", "FusedCommunication", "UnfusedCollective", "symmetric_memory_decline"]

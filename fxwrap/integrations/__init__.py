"""Adapters for serving hosts that bring their own interface for compilers: vLLM and SGLang.

Each host has a module, which imports the host only when the host calls it. `docs/integrations.md` describes how to turn
them on.
"""

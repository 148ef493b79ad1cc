"""Passes over programs of the Wrapper IR, shared by all emitters."""

from fxwrap.passes.fold_views import fold_views

__all__ = ["fold_views"]

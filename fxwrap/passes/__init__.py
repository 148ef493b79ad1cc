"""Programs to programs: what is right for every emitter is done here once."""

from fxwrap.passes.views import fold_views

__all__ = ["fold_views"]

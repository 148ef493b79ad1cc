"""Passes over FX graphs: all rewrites before lowering."""

from fxwrap.fx_passes.attention.grouped_queries import *
from fxwrap.fx_passes.attention.masks import *
from fxwrap.fx_passes.decompositions import *
from fxwrap.fx_passes.fake_propagation import *
from fxwrap.fx_passes.in_place_functions import *
from fxwrap.fx_passes.known_results import *
from fxwrap.fx_passes.matmuls.padded import *
from fxwrap.fx_passes.model_source import *
from fxwrap.fx_passes.prepare import *
from fxwrap.fx_passes.prepared_graph import *
from fxwrap.fx_passes.returned_aliases import *
from fxwrap.fx_passes.source import *
from fxwrap.fx_passes.stream_calls import *
from fxwrap.fx_passes.timed_rewrites import *
from fxwrap.fx_passes.training.joint_graph import *

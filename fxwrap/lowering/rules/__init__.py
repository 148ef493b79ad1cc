"""Lowering rules: how a kernel computes each element of an ATen operator's results."""

from fxwrap.lowering.rules import activations as activations
from fxwrap.lowering.rules import arithmetic as arithmetic
from fxwrap.lowering.rules import copies as copies
from fxwrap.lowering.rules import creation as creation
from fxwrap.lowering.rules import depthwise_convolutions as depthwise_convolutions
from fxwrap.lowering.rules import embedding_gradients as embedding_gradients
from fxwrap.lowering.rules import functions as functions
from fxwrap.lowering.rules import grid_samples as grid_samples
from fxwrap.lowering.rules import indexing as indexing
from fxwrap.lowering.rules import matmuls as matmuls
from fxwrap.lowering.rules import norms as norms
from fxwrap.lowering.rules import pointwise_losses as pointwise_losses
from fxwrap.lowering.rules import pooling as pooling
from fxwrap.lowering.rules import quantised_matmuls as quantised_matmuls
from fxwrap.lowering.rules import rearrange as rearrange
from fxwrap.lowering.rules import reductions as reductions
from fxwrap.lowering.rules import softmax as softmax
from fxwrap.lowering.rules import views as views
from fxwrap.lowering.rules.registry import *

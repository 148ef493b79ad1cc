"""The pass pipeline of a serving engine, on the graph of ATen operators, the functional and the in-place graph.

The model calls the engine's operators for normalisation, attention and quantisation, and torch's functional collectives
for the sum over tensor-parallel ranks. Four passes fuse them into the engine's fused kernels, and replace `linear` by a
vendor's:

    all_reduce + add + RMSNorm + quantise -> one operator      (tensor parallelism)
    add + RMSNorm + quantise              -> one operator
    attention + quantise                  -> one operator
    linear                                -> the vendor's

Each pass is one pattern and one replacement for all forms of the graph.

    python examples/rewrite_serving_passes.py
    torchrun --nproc-per-node 2 examples/rewrite_serving_passes.py
"""

import os

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import rewrite as rw

# --- the engine's operators -----------------------------------------------------------------------------------------


@torch.library.custom_op("serving::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalisation of rows."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@torch.library.custom_op("serving::quantise", mutates_args=())
def quantise(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Rounds to int8 with a static scale."""
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


@torch.library.custom_op("serving::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one head."""
    return torch.softmax(query @ key.t() / query.shape[-1] ** 0.5, -1) @ value


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks of a process group: torch's functional collective, and the wait for it."""
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(x, "sum", group))


@torch.library.custom_op("serving::int8_matmul", mutates_args=())
def int8_matmul(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """The product of a quantised tensor and a weight."""
    return x.to(weight.dtype) * scale @ weight.t()


# --- the fused operators --------------------------------------------------------------------------------------------


@torch.library.custom_op("serving::add_rms_norm_quantise", mutates_args=())
def add_rms_norm_quantise(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the quantised norm of a sum, and the sum."""
    total = x + residual
    return quantise(rms_norm(total, weight), scale), total


@torch.library.custom_op("serving::all_reduce_add_rms_norm_quantise", mutates_args=())
def all_reduce_add_rms_norm_quantise(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a sum over the ranks."""
    return add_rms_norm_quantise(all_reduce(x, group), residual, weight, scale)


@torch.library.custom_op("serving::attention_quantise", mutates_args=())
def attention_quantise(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention with a quantised result."""
    return quantise(attention(query, key, value), scale)


@torch.library.custom_op("serving::vendor_linear", mutates_args=())
def vendor_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The vendor's linear layer."""
    return torch.nn.functional.linear(x, weight, bias)


@rms_norm.register_fake
def _(x, *_operands):
    return torch.empty_like(x)


@quantise.register_fake
def _(x, scale):
    return torch.empty_like(x, dtype=torch.int8)


@attention.register_fake
def _(query, key, value):
    return torch.empty_like(query)


@attention_quantise.register_fake
def _(query, key, value, scale):
    return torch.empty_like(query, dtype=torch.int8)


@int8_matmul.register_fake
def _(x, weight, scale):
    return weight.new_empty(x.shape[0], weight.shape[0])


@add_rms_norm_quantise.register_fake
@all_reduce_add_rms_norm_quantise.register_fake
def _(x, residual, weight, scale, group=""):
    return torch.empty_like(x, dtype=torch.int8), torch.empty_like(x)


@vendor_linear.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


# --- the passes -----------------------------------------------------------------------------------------------------

X, RESIDUAL, WEIGHT, BIAS, QUERY, KEY, VALUE = rw.tensors("x residual weight bias query key value")
SCALE = rw.number("scale")


GROUP = rw.anything("group")
STARTED = rw.call("_c10d_functional.all_reduce.default", X, "sum", GROUP)
SUM_OVER_RANKS = rw.call("_c10d_functional.wait_tensor.default", STARTED)


def _norm_of_sum(x):
    """The outputs of add + RMSNorm + quantise: other lines read the sum, which is the next residual, too."""
    total = rw.call("aten.add.Tensor", x, RESIDUAL).as_commutative()
    return rw.call("serving.quantise.default", rw.call("serving.rms_norm.default", total, WEIGHT), SCALE), total


def _call(operator, *names):
    """Returns the function that calls an operator with two results on parts of a match."""

    def build(match, builder):
        return builder.call(operator, *[match[name] for name in ("x", "residual", "weight", "scale", *names)])

    return build


PASSES = {
    "all_reduce + add + RMSNorm + quantise": (
        _norm_of_sum(SUM_OVER_RANKS),
        _call("serving.all_reduce_add_rms_norm_quantise.default", "group"),
    ),
    "add + RMSNorm + quantise": (_norm_of_sum(X), _call("serving.add_rms_norm_quantise.default")),
    "attention + quantise": (
        rw.call("serving.quantise.default", rw.call("serving.attention.default", QUERY, KEY, VALUE), SCALE),
        rw.call("serving.attention_quantise.default", QUERY, KEY, VALUE, SCALE),
    ),
    "linear": (
        rw.call("aten.addmm.default", BIAS, X, rw.view(WEIGHT)),
        rw.call("serving.vendor_linear.default", X, WEIGHT, BIAS),
    ),
}
"""The pipeline: names, patterns and replacements. The longer pattern comes first."""


def run_passes(graph_module: GraphModule) -> tuple[GraphModule, dict[str, int]]:
    """Returns the graph after all passes, in its own form, and the number of replacements of each."""
    counts = {}
    for name, (pattern, replacement) in PASSES.items():
        result = rw.rewrite(graph_module, pattern, replacement)
        graph_module, counts[name] = result.graph_module, len(result.matches)
    return graph_module, counts


# --- a model --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A transformer block with quantised projections; each rank has its part of the output projection."""

    def __init__(self, width: int, rank: int, group: str) -> None:
        super().__init__()
        self.group = group
        self.query, self.key, self.value = [torch.nn.Linear(width, width) for _ in range(3)]
        self.out, self.up, self.down = [torch.nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(3)]
        self.out.data *= 1 + rank
        self.first, self.second = [torch.nn.Parameter(torch.ones(width)) for _ in range(2)]

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        hidden = int8_matmul(quantise(rms_norm(residual, self.first), 0.03), self.up, 0.03)
        attended = attention(self.query(hidden), self.key(hidden), self.value(hidden))
        projected = all_reduce(int8_matmul(quantise(attended, 0.01), self.out, 0.01), self.group)
        residual = residual + projected
        hidden = int8_matmul(quantise(rms_norm(residual, self.second), 0.03), self.down, 0.03)
        return torch.nn.functional.silu(hidden) * 2, residual


def graphs(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, GraphModule]:
    """Returns the model's graph in each form. Additions stay calls, so that the passes find them."""
    aten = make_fx(model)(*inputs)
    forms = {"ATen": aten}
    for form in ("functional", "in_place"):
        options = fxwrap.Options(emitter="fx", fx_form=form, preserve_ops=frozenset({"aten.add.Tensor"}))
        forms[form] = fxwrap.compile_graph(aten, inputs, options=options).graph_module
    return forms


def run(rank: int, group: str) -> None:
    """Runs the passes on every form of the model's graph, and compares with the model."""
    torch.manual_seed(0)
    model = Block(16, rank, group).eval()
    inputs = (torch.randn(4, 16), torch.randn(4, 16))
    with torch.no_grad():
        wanted = model(*inputs)
        for form, graph_module in graphs(model, inputs).items():
            rewritten, counts = run_passes(graph_module)
            assert not any("c10d" in str(node.target) for node in rewritten.graph.nodes)
            for got, expected in zip(rewritten(*inputs), wanted, strict=True):
                torch.testing.assert_close(got, expected)
            print(f"{form}: {', '.join([f'{name}: {count}' for name, count in counts.items()])}")


def main() -> None:
    if "RANK" in os.environ:  # of torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run(dist.get_rank(), dist.group.WORLD.group_name)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

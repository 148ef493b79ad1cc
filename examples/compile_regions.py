"""A vendor's backend without a printer: fxwrap fuses, orders and plans, another compiler compiles each region.

python examples/compile_regions.py [backend of torch.compile, by default inductor]
"""

import sys

import torch
from torch.fx import GraphModule

import fxwrap
from fxwrap.compile import GraphInfo


class VendorCompiler:
    """Compiles each distinct region of a graph with a backend of torch.compile; calls of equal regions share it."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(self, graph: GraphModule, info: GraphInfo) -> GraphModule:
        calls = fxwrap.fx.regions(graph)
        for call in {(call.owner, call.name): call for call in calls}.values():
            region = call.region
            axes = ", ".join([f"{name}: {size}" for name, size in (*region.index_space, *region.reduced)])
            print(f"  {call.name} over [{axes}] reads {region.bytes_read} and writes {region.bytes_written} bytes")
            # In the functional form the module takes the tensors and symbols that it reads, and returns new tensors.
            call.owner.set_submodule(call.name, torch.compile(call.module, backend=self.backend, dynamic=False))
        print(f"{info.kind} graph: {len(calls)} calls of {len({(call.owner, call.name) for call in calls})} regions")
        return graph


def main(backend: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    options = {"kernels": "subgraph", "fx_form": "functional", "on_graph": VendorCompiler(backend)}
    compiled = torch.compile(model, backend="fxwrap", options=options)
    x = torch.randn(2, 16, 64)
    error = (compiled(x) - model(x)).abs().max().item()
    compiled(x).sum().backward()
    print(f"largest difference to eager: {error:.1e} (fxwrap {fxwrap.__version__})")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["inductor"]))

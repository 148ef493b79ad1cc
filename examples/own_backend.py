"""A vendor's backend in ten lines: it receives every graph that fxwrap emits, and returns the callable that runs.

python examples/own_backend.py
"""

import torch
from torch.fx import GraphModule

import fxwrap
from fxwrap.compile import GraphInfo


def vendor_compiler(graph: GraphModule, info: GraphInfo):
    """A vendor's compiler. This one prints a summary and runs the graph unchanged."""
    calls = sum(node.op == "call_function" for node in graph.graph.nodes)
    inputs = len(graph.graph.find_nodes(op="placeholder"))
    print(
        f"{info.kind:9} graph on {info.device}: {calls} calls, {inputs} inputs, of which {len(info.static_inputs)} "
        f"are static, {len(info.mutated_inputs)} are written, {len(info.donated_inputs)} may be overwritten"
    )
    return graph  # or any callable from flat inputs to flat outputs


def main() -> None:
    torch.manual_seed(0)
    first, last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(16), torch.nn.GELU(), last)
    compiled = torch.compile(model, backend="fxwrap", options={"on_graph": vendor_compiler})

    x, target = torch.randn(32, 8), torch.randint(0, 4, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(compiled(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} after {len(losses)} steps (fxwrap {fxwrap.__version__})")

    model.eval()
    with torch.no_grad():
        compiled(x)


if __name__ == "__main__":
    main()

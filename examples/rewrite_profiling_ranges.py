"""Add a profiler range around each attention block, by the modules in the lines' origins.

A pass need not use patterns: it is a function of a program, which is plain data. This one is registered by name and has
an option.

    python examples/rewrite_profiling_ranges.py
"""

import torch

from fxwrap import rewrite as rw
from fxwrap.lines import EnterRange, ExitRange
from fxwrap.wrapper_ir import Program


class Attention(torch.nn.Module):
    """Self-attention with one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection, self.output = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.projection(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(*parts)
        return self.output(attended.transpose(1, 2).reshape(batch, length, width))


class Block(torch.nn.Module):
    """Attention, then a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width, 2)
        self.feed_forward = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())

    def forward(self, x):
        return x + self.feed_forward(x + self.attention(x))


@rw.register_pass("example.ranges", key="1", at="ir_before_emission")
def ranges(program: Program, *, of: str = "attention") -> Program:
    """Opens a range before the first line of each module with this name, and closes it after the last."""
    lines = program.body.lines
    first, last = {}, {}
    for position, line in enumerate(lines):
        for module in line.origin.modules if line.origin else ():
            prefix, name, _ = module.partition(f".{of}")
            if name:
                first.setdefault(prefix + name, position)
                last[prefix + name] = position
    result, end = [], -1
    for position, line in enumerate(lines):
        result += [EnterRange(name) for name, start in first.items() if start == position > end]
        result.append(line)
        for name, stop in last.items():
            if stop == position and first[name] > end:  # a kernel that spans two blocks merges their ranges
                result.append(ExitRange(name))
                end = position
    return program.replace(body=type(program.body)(program.body.arguments, tuple(result)))


def main() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Block(16), Block(16)).eval(), torch.randn(2, 8, 16)
    compiled = torch.compile(model, backend="fxwrap", options={"passes": [("example.ranges", {"of": "attention"})]})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        with torch.profiler.profile() as profile:
            compiled(x)
    times = {event.key: event.cpu_time_total for event in profile.key_averages() if "attention" in event.key}
    for name, microseconds in times.items():
        if "::" not in name:
            print(f"{name}: {microseconds:.0f} us")


if __name__ == "__main__":
    main()

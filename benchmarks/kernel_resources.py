"""Registers, spilled bytes and shared memory of generated kernels, compiled for an H100 or H200; no GPU is needed.

    python benchmarks/kernel_resources.py --record
    python benchmarks/kernel_resources.py --cases int4 experts-prefill

Each case is compiled on fake tensors of the sizes that models have, with the configuration that is the default there,
and each of its kernels by Triton and ptxas for compute capability 9.0. A spill is a value of a thread that ptxas keeps
in local memory. Columns:

- threads: of a program (block).
- registers: of a thread. A multiprocessor has 65,536, so that `blocks` of its programs run at once, as far as registers
  and shared memory allow (228 KiB, 1 KiB of which each program reserves).
- stack and local: bytes of a thread in local memory, where spills are.
- shared: bytes of a program.
- serialised: why ptxas executes matrix instructions one by one, which overlap otherwise.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks import quantised
from benchmarks.results import Report, add_record_option
from fxwrap.runtime.triton.compile import load_jit_function, split_launch_options
from fxwrap.torch_compat import FakeTensorMode
from fxwrap.wrapper_ir import KernelDefinition

CAPABILITY, REGISTERS, SHARED, THREADS, RESERVED = 90, 65536, 228 << 10, 2048, 1 << 10
_TYPES = {"f16": "fp16", "f32": "fp32", "f64": "fp64"}
_SERIALISED = re.compile(r"serialized due to (.*?)(?: (?:in|for) the [^']*'.*)?$", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
BF16, GPU = torch.bfloat16, torch.device("cuda")


def bf16(*sizes: int) -> Tensor:
    """Returns a fake matrix in bfloat16."""
    return torch.empty(sizes, dtype=BF16)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer."""
    return functional.linear(x, weight)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The first half of a layer of Llama."""
    return functional.silu(functional.linear(x, gate)) * functional.linear(x, up)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """A root mean square norm."""
    return functional.rms_norm(x, x.shape[-1:], weight)


def softmax(x: Tensor) -> Tensor:
    """A softmax of rows."""
    return x.softmax(-1)


def loss(x: Tensor, labels: Tensor) -> Tensor:
    """A cross entropy."""
    return functional.cross_entropy(x.float(), labels)


def experts(x: Tensor, tokens: Tensor, offsets: Tensor, gates: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """The experts of sorted tokens."""
    return quantised.experts(torch._grouped_mm, x, tokens, offsets, gates, into, out)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as its formula: causal, with a linear bias. Queries are the last positions."""
    keys = torch.arange(key.shape[2])
    rows = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    scores = (query @ key.transpose(-1, -2)).float() / query.shape[-1] ** 0.5 + (keys - rows) / 16
    return scores.where(keys <= rows, -torch.inf).softmax(-1).to(query.dtype) @ value


def flex_attention(query: Tensor, key: Tensor, value: Tensor, *lists: Tensor) -> Tensor:
    """FlexAttention under a causal mask, with the lists of blocks of 128 x 128."""
    mask = (query.shape[2], key.shape[2], *lists, 128, 128, lambda b, h, q, k: q >= k)
    operator = torch.ops.higher_order.flex_attention
    result: Tensor = operator(query, key, value, lambda score, *_: score, mask, query.shape[-1] ** -0.5, {})[0]
    return result


def expert_operands(rows: int) -> tuple[Tensor, ...]:
    """Returns operands of the experts of Mixtral for so many tokens, two of eight experts each."""
    integers = torch.empty(2 * rows, dtype=torch.int64), torch.empty(8, dtype=torch.int32)
    return bf16(rows, 4096), *integers, bf16(2 * rows), bf16(8, 28672, 4096), bf16(8, 4096, 14336)


def quantised_case(name: str, rows: int) -> Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Returns a function that returns a matmul of quantised weights in the 8B shape, and its operands."""

    def case() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        item = quantised.linear_case(name, rows, 14336, 4096, BF16)
        return item.function, item.inputs

    return case


def attention_case(rows: int, keys: int, width: int) -> Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Returns a function that returns attention of so many queries and keys, and its operands, each its own tensor."""
    return lambda: (attention, tuple(bf16(4, 16, length, width) for length in (rows, keys, keys)))


def flex_attention_case(length: int, width: int) -> Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Returns a function that returns FlexAttention and its operands."""

    def case() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        count = length // 128
        lists = [torch.empty(1, 1, *sizes, dtype=torch.int32) for sizes in 4 * [(count,), (count, count)]]
        return flex_attention, (*[bf16(4, 16, length, width) for _ in range(3)], *lists)

    return case


Case = tuple[Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]], Mapping[str, Any]]
GENERATED: Mapping[str, Any] = {"matmul_kernels": "generated"}
CASES: Mapping[str, Case] = {
    "norm": (lambda: (norm, (bf16(4096, 4096), bf16(4096))), {}),
    "softmax": (lambda: (softmax, (bf16(8192, 2048),)), {}),
    "cross-entropy": (lambda: (loss, (bf16(2048, 50257), torch.empty(2048, dtype=torch.int64))), {}),
    "matmul-1": (lambda: (linear, (bf16(1, 4096), bf16(14336, 4096))), {}),
    "matmul-8": (lambda: (linear, (bf16(8, 4096), bf16(14336, 4096))), {}),
    "matmul-4096": (lambda: (linear, (bf16(4096, 768), bf16(3072, 768))), GENERATED),
    "swiglu-1": (lambda: (swiglu, (bf16(1, 4096), bf16(14336, 4096), bf16(14336, 4096))), {}),
    "swiglu-8": (lambda: (swiglu, (bf16(8, 4096), bf16(14336, 4096), bf16(14336, 4096))), {}),
    **{f"{name}-{rows}": (quantised_case(name, rows), {})
       for name in ("int8", "int4", "float8") for rows in (1, 8)},
    "float8-scaled-8": (quantised_case("float8-scaled", 8), GENERATED),
    "experts-1": (lambda: (experts, expert_operands(1)), {}),
    "experts-16": (lambda: (experts, expert_operands(16)), {}),
    "experts-prefill": (lambda: (experts, expert_operands(1024)), GENERATED),
    **{f"attention-{width}": (attention_case(4096, 4096, width), {}) for width in (64, 128)},
    **{f"flex-attention-{width}": (flex_attention_case(4096, width), {}) for width in (64, 128)},
    "attention-decoding": (attention_case(1, 1024, 128), {}),
}  # fmt: skip


def compile_case(case: Case) -> fxwrap.Compiled:
    """Returns the program of a case on fake tensors of a GPU."""
    build, options = case
    with FakeTensorMode(allow_non_fake_inputs=True):
        function, operands = build()
        graph = make_fx(function)(*operands)
        for node in graph.graph.nodes:  # a torch without CUDA runs few operators on its tensors
            node.meta = {"val": tree_map_only(Tensor, _on_gpu, node.meta["val"])} if "val" in node.meta else {}
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: GPU, (node.args, node.kwargs))
        operands = tuple(map(_on_gpu, operands))
    graph.recompile()
    return fxwrap.compile_graph(graph, operands, options=fxwrap.Options(compile_cache=False, **options))


def _on_gpu(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=GPU)


def usage(kernel: KernelDefinition) -> dict[str, int | str]:
    """Returns the resources of a Triton kernel, compiled for aligned tensors and sizes."""
    function = load_jit_function(kernel.source)
    kinds = ["*" * (entry[0] == "*") + _TYPES.get(entry.lstrip("*"), entry.lstrip("*")) for entry in kernel.signature]
    constants, options = split_launch_options(kernel.options)
    signature = dict(zip(function.arg_names, [*kinds, *["constexpr"] * len(constants)], strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(kinds) if kind[:2] != "fp"}
    source = ASTSource(function, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = _USAGE.search(text)
    assert match is not None, text
    registers, stack, local = map(int, match.groups())
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    blocks = min(by_registers, SHARED // (shared + RESERVED), THREADS // threads, 32)
    return {
        "threads": threads, "registers": registers, "stack": stack, "local": local, "shared": shared, "blocks": blocks,
        "serialised": serialised_products(compiled.asm["ptx"]),
    }  # fmt: skip


def serialised_products(ptx: str) -> str:
    """Returns why ptxas executes the matrix instructions of a kernel one by one; nothing where it does not."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(CAPABILITY).path, "-v", f"--gpu-name=sm_{CAPABILITY}a", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return ", ".join(sorted(set(_SERIALISED.findall(text))))


def main() -> None:
    """Compiles the cases and prints the resources of their kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    add_record_option(parser)
    chosen = parser.parse_args()
    report = Report("kernel_resources", chosen, torch.device("cpu"), note="compiled for compute capability 9.0")
    for name in chosen.cases:
        for kernel in compile_case(CASES[name]).program.kernels:
            if kernel.language == "triton":
                report.add({"case": name, "kernel": kernel.name, **usage(kernel)})


if __name__ == "__main__":
    main()

"""FlexAttention through every emitter, against eager mode and against formulas in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import fxwrap
from fxwrap.compile.backend import make_backend
from fxwrap.devices import CPU
from fxwrap.lines import Launch
from fxwrap.loop_ir import Kernel, evaluate_kernel
from fxwrap.printers.triton import StreamingConfiguration, print_triton
from fxwrap.profiling.work import line_work
from fxwrap.runtime.kernels import load_kernel
from fxwrap.testing import assert_emitters_agree
from tests.support.long_form import long_only


@pytest.fixture(autouse=True)
def eager_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager mode computes the formulas itself; otherwise torch compiles each call for its backend "eager"."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


BATCH, HEADS, LENGTH, WIDTH = 2, 4, 72, 8
SLOPES, RELATIVE = torch.linspace(0.1, 0.5, HEADS), torch.linspace(-1, 1, 2 * LENGTH)
DOCUMENTS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) // 20
PREFIXES = torch.tensor([20, 33])
MASSIVELY_PARALLEL = fxwrap.Options(devices=[dataclasses.replace(CPU, massively_parallel=True)])
"""The form for GPUs, on the CPU."""


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def shifted_by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Leaves rows without keys."""
    return q - k >= h * 9


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + SLOPES[h] * (k - q)


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(score / 2) * 2


def blocks(mask: Any, rows: int = LENGTH, keys: int = LENGTH, size: Any = 32, **per: int) -> BlockMask:
    return create_block_mask(mask, per.get("B"), per.get("H"), rows, keys, device="cpu", BLOCK_SIZE=size)


CAUSAL, DOCUMENT = blocks(causal), blocks(document, B=BATCH)
SHIFTED = blocks(shifted_by_head, H=HEADS)
WINDOW = blocks(lambda b, h, q, k: (q - k).abs() <= 9)
PREFIX = blocks(lambda b, h, q, k: (k < PREFIXES[b]) | (q >= k), B=BATCH)
UNEVEN = blocks(shifted_by_head, 24, 40, 16, H=HEADS)
LATE = blocks(lambda b, h, q, k: (q > 40) & (q >= k))


def operands(
    rows: int = LENGTH,
    keys: int = LENGTH,
    *,
    kv_heads: int = HEADS,
    kv_batch: int = BATCH,
    value_width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Returns random queries, keys and values."""
    random = torch.Generator().manual_seed(0)
    sizes = (BATCH, HEADS, rows, WIDTH), (kv_batch, kv_heads, keys, WIDTH), (kv_batch, kv_heads, keys, value_width)
    return [torch.randn(item, generator=random).to(dtype) for item in sizes]


def score_functions(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return [
        flex_attention(q, k, v, alibi, CAUSAL, return_aux=AuxRequest(lse=True)),
        flex_attention(q, k, v, lambda s, b, h, m, n: s + RELATIVE[m - n + LENGTH], scale=0.5),
        flex_attention(q, k, v, soft_cap, DOCUMENT),
        flex_attention(q, k, v, lambda s, b, h, m, n: torch.where(m >= n, s, -float("inf")), return_lse=True),
    ]


def masked(*masks: BlockMask) -> Callable[..., Any]:
    return lambda q, k, v: [flex_attention(q, k, v, block_mask=mask, return_lse=True) for mask in masks]


def test_masks() -> None:
    """Fully masked rows, lengths that no block divides, and masks that differ between batches or heads."""
    assert_emitters_agree(masked(WINDOW, PREFIX, LATE, SHIFTED), operands())


def test_masks_without_a_loop() -> None:
    mask = masked(DOCUMENT, SHIFTED)
    assert_emitters_agree(mask, operands(), options=MASSIVELY_PARALLEL, emitters=["cpp"])


def test_score_functions() -> None:
    assert_emitters_agree(score_functions, operands(), emitters=("python", "cpp"))


@pytest.mark.long  # tests of gradients, of grouped queries and of few rows have some of these shapes
def test_shapes() -> None:
    """Grouped query attention, shared keys, other strides, one query, more rows than an iteration has."""
    rectangular = blocks(causal, LENGTH, 50, (64, 16), B=BATCH)

    def shapes(*inputs: list[Tensor]) -> Any:
        grouped, shared, tall, single = inputs
        transposed = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in grouped]
        return [
            flex_attention(*grouped, score_mod=alibi, block_mask=CAUSAL, enable_gqa=True),
            flex_attention(*transposed, block_mask=SHIFTED, enable_gqa=True),
            flex_attention(*shared, block_mask=rectangular, return_lse=True),
            flex_attention(*tall, score_mod=alibi),
            flex_attention(*single, score_mod=alibi),
        ]

    inputs = [
        operands(kv_heads=2), operands(keys=50, kv_batch=1, value_width=12), operands(rows=300), operands(rows=1),
    ]  # fmt: skip
    assert_emitters_agree(shapes, inputs, emitters=("interpreter", "cpp"))


def test_dtypes() -> None:
    def dtypes(*inputs: list[Tensor]) -> Any:
        return [flex_attention(*item, score_mod=soft_cap, block_mask=CAUSAL) for item in inputs]

    inputs = [operands(dtype=item) for item in (torch.bfloat16, torch.float16, torch.float64)]
    assert_emitters_agree(dtypes, inputs, emitters=("python", "cpp"))


def test_dynamic_lengths() -> None:
    """One program serves many lengths and block sizes."""
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    compiled = torch.compile(flex_attention, backend=make_backend(fxwrap.Options(), compile_with), dynamic=True)
    for rows, keys, size in ((100, 200, 32), (200, 150, 16), (65, 90, 24)):
        inputs, mask = operands(rows, keys), blocks(causal, rows, keys, size)
        torch.testing.assert_close(compiled(*inputs, block_mask=mask), flex_attention(*inputs, block_mask=mask))
    assert len(compiles) <= 2


@pytest.mark.parametrize("emitter", [long_only("python"), "cpp"])
def test_skipped_blocks_are_not_read(emitter: str) -> None:
    q, k, v = operands()
    expected = flex_attention(q, k, v, block_mask=LATE)
    k[:, :, 64:], v[:, :, 64:] = math.nan, math.nan
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    result = compiled(q, k, v, block_mask=LATE)
    torch.testing.assert_close(result[:, :, :64], expected[:, :, :64])
    assert result[:, :, 64:].isnan().all()


@pytest.mark.parametrize("options", [fxwrap.Options(), MASSIVELY_PARALLEL], ids=["loop", "whole"])
def test_blocks_without_a_mask_function(options: fxwrap.Options) -> None:
    """Lists of blocks mask by themselves; eager mode ignores them."""
    indices = torch.tensor([[[[0, 1, 1], [2, 1, 0], [0, 0, 0]]]], dtype=torch.int32)
    full = torch.tensor([[[[2, 0, 0], [0, 0, 0], [0, 0, 0]]]], dtype=torch.int32)
    counts, full_counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32), torch.tensor([[[1, 0, 0]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, full_counts, full, BLOCK_SIZE=24, seq_lengths=(LENGTH, LENGTH))
    visible = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]]).bool().repeat_interleave(24, 0).repeat_interleave(24, 1)
    inputs = operands()
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=visible).nan_to_num(0)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend=make_backend(options))
    torch.testing.assert_close(compiled(*inputs, block_mask=mask), expected)


def kernels_of(
    function: Callable[..., Any], *inputs: Any, options: fxwrap.Options | None = None
) -> tuple[Any, list[str]]:
    """Returns the results of a compiled function, and the names of the kernels of its program."""
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    torch.compiler.reset()
    backend = make_backend(options or fxwrap.Options(), compile_with)
    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return result, [kernel.name for compiled in compiles for kernel in compiled.program.kernels]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_one_kernel(language: str) -> None:
    """Partial, full and unvisited blocks, grouped heads, rows without keys and a captured table, in one kernel.

    Operands are slices, whose rows are apart and unaligned.
    """
    mask = blocks(lambda b, h, q, k: (q >= k) & (q >= h), H=HEADS, size=16)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, alibi, mask, enable_gqa=True)

    inputs = [torch.cat([item[..., :1], item], -1)[..., 1:] for item in operands(kv_heads=2)]
    result, kernels = kernels_of(attention, *inputs, options=fxwrap.Options(cpu_kernels=language))
    assert kernels == ["flex_attention_0"]
    torch.testing.assert_close(result, attention(*inputs), rtol=1e-5, atol=2e-6)


def test_numbers_are_part_of_the_kernel() -> None:
    """A bias of all batches is read at index 0, which is no tensor in memory and not checked."""
    bias = torch.randn(1, HEADS, LENGTH, LENGTH)
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, m, n: s + bias[0, h, m, n])

    torch.compiler.reset()
    result = torch.compile(attention, backend=make_backend(fxwrap.Options(), compile_with))(*operands())
    torch.testing.assert_close(result, attention(*operands()), rtol=1e-5, atol=2e-6)
    program = compiles[0].program
    (kernel,) = program.kernels
    assert not program.constants
    assert len(kernel.signature) == 5
    assert "index_error" not in kernel.source


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_few_rows_are_split_over_keys(language: str) -> None:
    """The heads of a group are the rows of a tile. Parts for GPUs have fewer keys, for which Triton needs seconds."""
    keys = 2100 if language == "cpp" else 600
    mask = blocks(lambda b, h, q, k: (k > 70) & (k < keys - 100), 1, keys)
    masks = (None, mask) if language == "cpp" else (mask,)
    options = fxwrap.Options() if language == "cpp" else MASSIVELY_PARALLEL.replace(cpu_kernels=language)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return [flex_attention(q, k, v, alibi, item, enable_gqa=True, return_lse=True) for item in masks]

    inputs = operands(1, keys, kv_heads=2)
    result, kernels = kernels_of(attention, *inputs, options=options)
    assert sum(name.startswith("flex_attention_parts") for name in kernels) == 2  # of outputs, of log-sum-exps
    torch.testing.assert_close(result, attention(*inputs), rtol=1e-5, atol=1e-5)


def test_functions_that_no_kernel_inlines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fxwrap.compile")
    inputs = operands()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, m, n: s * SLOPES.sum())

    result, kernels = kernels_of(attention, *inputs)
    torch.testing.assert_close(result, attention(*inputs))
    assert "flex_attention_0" not in kernels
    lines = [item for item in caplog.messages if "is no kernel of its own" in item]
    assert len(lines) == 1
    assert "'flex_attention'" in lines[0]
    assert "which is not computed element by element" in lines[0]


def test_wrong_functions() -> None:
    inputs = operands()

    def with_function(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v: flex_attention(q, k, v, function)

    beyond = with_function(lambda s, b, h, m, n: s + RELATIVE[m + n + 2])
    with pytest.raises(IndexError, match="an index is out of bounds for a dimension of size 144"):
        kernels_of(beyond, *inputs)
    with pytest.raises(Exception, match="Data-dependent branching"):
        kernels_of(with_function(lambda s, b, h, m, n: s if m > n else s * 2), *inputs)
    for function in (lambda s, b, h, m, n: m - n, lambda s, b, h, m, n: s.double() * 2):  # other dtypes are cast
        result, _ = kernels_of(with_function(function), *inputs)
        torch.testing.assert_close(result, with_function(function)(*inputs))
    for function in (
        lambda s, b, h, m, n: s + RELATIVE[:3], lambda s, *_: (s, s), lambda s, *_: None, lambda s, *_: s[None],
        lambda s, *_: s * 1j,
    ):  # fmt: skip
        with pytest.raises(Exception, match=r"node 'flex_attention' .*score_mod or mask_mod cannot be vectorised"):
            kernels_of(with_function(function), *inputs)


def test_a_block_mask_of_another_length() -> None:
    """torch refuses it, with both lengths; a kernel that gets its lists all the same reads no other memory."""
    with pytest.raises(Exception, match="block_mask was created for"):
        kernels_of(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks(causal, 96, 96)), *operands())
    lists = blocks(causal, LENGTH, 200).as_tuple()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.higher_order.flex_attention(q, k, v, alibi, lists, 0.25, {})[0]

    result, kernels = kernels_of(attention, *operands())
    assert kernels == ["flex_attention_0"]
    torch.testing.assert_close(result, formula(*operands(), alibi, causal)[0].float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("fuse", [True, False], ids=["kernel", "formula"])
def test_a_block_mask_without_lists(fuse: bool) -> None:
    """All blocks are visited, whatever their sizes are: the function alone masks."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        block_mask = (LENGTH, LENGTH, *[None] * 8, 64, 32, causal)
        return torch.ops.higher_order.flex_attention(q, k, v, alibi, block_mask, 0.25, {})[0]

    graph_module = make_fx(attention)(*operands())
    (result,) = fxwrap.compile_graph(graph_module, operands(), options=fxwrap.Options(fuse=fuse))(*operands())
    torch.testing.assert_close(result, formula(*operands(), alibi, causal)[0].float(), rtol=1e-5, atol=2e-6)


def test_empty_operands() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, alibi)

    empty, full = operands(0), operands()
    assert kernels_of(attention, empty[0], *full[1:])[0].shape == (BATCH, HEADS, 0, WIDTH)
    without_keys, _ = kernels_of(attention, full[0], *[item[:, :, :0] for item in full[1:]])
    torch.testing.assert_close(without_keys, torch.zeros(BATCH, HEADS, LENGTH, WIDTH))


def test_graphs_of_make_fx_and_export_and_branches() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.higher_order.flex_attention(q, k, v, alibi, CAUSAL.as_tuple(), 0.25, {}, (), ())[0]

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            branches = [lambda q, s=s: flex_attention(q, k, v, alibi, CAUSAL, scale=s) for s in (0.5, 2.0)]
            return torch.cond(q.sum() > 0, *branches, (q,))

    inputs = operands()
    graph = make_fx(attention)(*inputs)
    assert_emitters_agree(graph, inputs, emitters=("interpreter",))
    compiled = fxwrap.compile_graph(graph, inputs)
    assert ("flex_attention", "fused") in [(item.node, item.kind) for item in compiled.coverage]
    (launch,) = [line for line in compiled.program.body.lines if isinstance(line, Launch)]
    products = 2 * 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
    assert products < line_work(launch, compiled.program, {}).flops < 8 * products  # lists of blocks may be longer
    assert_emitters_agree(torch.export.export(Module(), tuple(inputs)), inputs, emitters=("fx",))


# --- gradients --------------------------------------------------------------------------------------------------------


def formula(q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor], mask_mod: Any) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp in float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = [item.double().repeat_interleave(groups, 1) for item in (k, v)]
    b, h, m, n = [torch.arange(size) for size in (*q.shape[:3], k.shape[2])]
    indices = b[:, None, None, None], h[:, None, None], m[:, None], n
    scores = score_mod(q.double() @ k.mT * 0.25, *indices)
    scores = torch.where(mask_mod(*indices), scores, -math.inf)
    total = scores.logsumexp(-1)
    shift = torch.where(total == -math.inf, 0.0, total)[..., None]
    return torch.exp(scores - shift) @ v, total


@pytest.mark.parametrize("emitter", ["python", long_only("cpp")])
def test_gradients(emitter: str) -> None:
    """Gradients of operands and captured tensors. The public function refuses those of operands on a CPU."""
    slopes, relative = SLOPES.clone().requires_grad_(), RELATIVE.clone().requires_grad_()

    def biased(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return torch.tanh(score * slopes[h]) + relative[m - n + LENGTH] + relative[0]

    def attention(q: Tensor, k: Tensor, v: Tensor, block_mask: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        out, total, _ = torch.ops.higher_order.flex_attention(q, k, v, biased, block_mask, 0.25, {})
        return out, total * math.log(2)

    inputs = [item.requires_grad_() for item in operands(kv_heads=2)]
    leaves = [*inputs, slopes, relative]

    def gradients(out: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        random = torch.Generator().manual_seed(1)
        weights = [torch.randn(item.shape, generator=random) for item in (out, total)]
        loss = (out * weights[0]).sum() + (torch.where(total == -math.inf, 0, total) * weights[1]).sum()
        return torch.autograd.grad(loss, leaves)

    torch.compiler.reset()
    compiled = torch.compile(attention, backend="fxwrap", options={"emitter": emitter}, fullgraph=True)
    expected = formula(*inputs, biased, shifted_by_head)
    results = compiled(*inputs, SHIFTED.as_tuple())
    for result, reference in zip((*results, *gradients(*results)), (*expected, *gradients(*expected)), strict=True):
        torch.testing.assert_close(result, reference.to(result.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("language", "kv_batch"), [("cpp", 1), ("triton", BATCH)])
def test_kernels_of_gradients(language: str, kv_batch: int) -> None:
    """Grouped heads, rows without keys, full and partial blocks, shared keys, and the gradient of the log-sum-exp."""
    mask = UNEVEN
    tensors = operands(24, 40, kv_heads=2, kv_batch=kv_batch, value_width=12)
    inputs = [item.requires_grad_() for item in tensors]
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return torch.tanh(score / 2) * 2 + SLOPES[h] * (n - m)

    def attention(q: Tensor, k: Tensor, v: Tensor, block_mask: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        out, total, _ = torch.ops.higher_order.flex_attention(q, k, v, score_mod, block_mask, 0.25, {})
        return out, total * math.log(2)

    def gradients(out: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        random = torch.Generator().manual_seed(1)
        weights = [torch.randn(item.shape, generator=random) for item in (out, total)]
        loss = (out * weights[0]).sum() + (torch.where(total == -math.inf, 0, total) * weights[1]).sum()
        return torch.autograd.grad(loss, inputs)

    torch.compiler.reset()
    backend = make_backend(fxwrap.Options(cpu_kernels=language), compile_with)
    results = gradients(*torch.compile(attention, backend=backend, fullgraph=True)(*inputs, mask.as_tuple()))
    expected = gradients(*formula(*inputs, score_mod, shifted_by_head))
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference.to(result.dtype), rtol=1e-4, atol=1e-5)
    kernels = {kernel.name: kernel.loop_ir for compiled in compiles for kernel in compiled.program.kernels}
    for name, lists in (("flex_attention_grad_query_0", "kv"), ("flex_attention_grad_key_value_0", "q")):
        if language == "triton":
            check_loops(kernels[name], mask, lists)
        assert name in kernels


def test_loops_over_blocks_in_half_precision() -> None:
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    torch.compiler.reset()
    backend = make_backend(fxwrap.Options(cpu_kernels="triton"), compile_with)
    query, key, value = operands(24, 40, dtype=torch.float16)
    torch.compile(flex_attention, backend=backend, fullgraph=True)(query, key, value, soft_cap, UNEVEN)
    (definition,) = compiles[0].program.kernels
    check_loops(definition.loop_ir, UNEVEN, "kv")


def check_loops(kernel: object, mask: BlockMask, lists: str) -> None:
    """Compares forms and orders of a kernel in Triton's interpreter with the evaluator; its first inputs are lists."""
    assert isinstance(kernel, Kernel)
    names = (f"{lists}_num_blocks", f"{lists}_indices", f"full_{lists}_num_blocks", f"full_{lists}_indices")
    random = torch.Generator().manual_seed(0)
    buffers = (*kernel.inputs, *kernel.outputs)
    tensors = {item.name: torch.randn(int(item.extent), generator=random).to(item.dtype) for item in buffers}
    for item, name in zip(kernel.inputs, names, strict=False):
        tensors[item.name] = getattr(mask, name).flatten()
    expected = {name: item.clone() for name, item in tensors.items()}
    evaluate_kernel(kernel, expected)
    for branches, loops, band in ((False, 2, 1), (True, 1, 3), (False, 2, 100)):
        printed = print_triton(kernel, StreamingConfiguration(row_block=16, key_block=16, branches=branches, band=band))
        assert (f"first_head = program // ({band} * rows)" in printed.source) == (band > 1)
        assert printed.source.count("for step in ") == loops
        assert ("if step < first_visits * tiles:" in printed.source) is branches
        results = {name: item.clone() for name, item in tensors.items()}
        launch = load_kernel("triton", printed.source, printed.signature, printed.options)
        launch(tuple(map(int, printed.grid)), *[results[item.name] for item in buffers])
        for item in kernel.outputs:
            result, reference = results[item.name].double(), expected[item.name].double()
            tolerance = 4e-3 if item.dtype is torch.float16 else 1e-5
            assert ((result - reference).norm() / reference.norm()).item() < tolerance


def test_numbers_in_vectorised_functions() -> None:
    """`torch.vmap` casts numbers as if they were tensors."""
    graph = make_fx(lambda x: torch.vmap(lambda item: item * 5 + 2)(x))(torch.randn(3))
    assert_emitters_agree(graph, (torch.randn(3),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_few_rows_of_a_group_are_one_tile(language: str) -> None:
    """Three queries of two heads that share keys are six rows, with and without a split of the keys."""
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    mask = blocks(lambda b, h, q, k: k <= q + 530, 3, 600, (128, 64))
    inputs = operands(3, 600, kv_heads=2)
    expected, _ = formula(*inputs, alibi, lambda b, h, q, k: k <= q + 530)
    for is_parallel in (False, True):
        device = dataclasses.replace(CPU, massively_parallel=is_parallel)
        options = fxwrap.Options(cpu_kernels=language, devices=[device])
        torch.compiler.reset()
        compiled = torch.compile(flex_attention, backend=make_backend(options, compile_with), fullgraph=True)
        result = compiled(*inputs, alibi, mask, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=1e-5)
        kernel = compiles[-1].program.kernels[0].loop_ir
        assert isinstance(kernel, Kernel)
        assert 6 in [axis.size for axis in kernel.axes]


@pytest.mark.gpu
def test_training_on_a_gpu() -> None:
    inputs = [item.cuda().requires_grad_() for item in operands(kv_heads=2)]
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cuda", BLOCK_SIZE=32)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend="fxwrap", fullgraph=True)
    result = compiled(*inputs, score_mod=soft_cap, block_mask=mask, scale=0.25, enable_gqa=True)
    gradients = torch.autograd.grad(result.square().sum(), inputs)
    copies = [item.detach().cpu().requires_grad_() for item in inputs]
    expected, _ = formula(*copies, soft_cap, causal)
    references = torch.autograd.grad(expected.square().sum(), copies)
    for item, reference in zip((result, *gradients), (expected, *references), strict=True):
        torch.testing.assert_close(item.cpu(), reference.to(item.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(300, 64), (300, 128), (300, 256), (1, 128), (3, 64)])
def test_half_precision_on_a_gpu(rows: int, width: int) -> None:
    """Partial and full blocks, grouped heads, a bias and a cap, in training and in a decoding step."""
    shapes = (2, 4, rows, width), (2, 2, 300, width), (2, 2, 300, width)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=rows > 3) for shape in shapes]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh((score + 0.1 * (k - q - 300 + rows)) / 20) * 20

    def late(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + 300 - rows >= k

    mask = create_block_mask(late, None, None, rows, 300, device="cuda")
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend="fxwrap", fullgraph=True)
    result = compiled(*inputs, score_mod, mask, scale=0.25, enable_gqa=True)
    copies = [item.detach().cpu().double().requires_grad_() for item in inputs]
    expected, _ = formula(*copies, score_mod, late)
    pairs = [(result, expected)]
    if rows > 3:
        weights = torch.randn_like(result)
        gradients = torch.autograd.grad(result, inputs, weights)
        pairs += zip(gradients, torch.autograd.grad(expected, copies, weights.cpu().double()), strict=True)
    for value, reference in pairs:
        assert ((value.cpu().double() - reference).norm() / reference.norm()).item() < 1e-2

"""The table of public spellings: every entry reaches its overload with equal arguments, for all kinds it
accepts."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.conftest import NO_EXPECTTEST

pytest.importorskip("expecttest", reason=NO_EXPECTTEST)  # before what follows imports it

from torch.testing._internal.common_methods_invocations import op_db

from benchmarks.torch_calls_probe import (
    Arguments,
    Pattern,
    Recorder,
    accepted_kinds,
    arguments_of,
    evaluate,
    overload_of,
    passes,
    patterns,
    reaches,
)
from fxwrap.converters.torch_calls import (
    ArgumentKind,
    Spelling,
    TorchCall,
    kind_of,
    parameters_of,
    spellings,
    torch_call,
)

T, N, F = ArgumentKind.TENSOR, ArgumentKind.INT, ArgumentKind.FLOAT


def call_on(name: str, arguments: Arguments) -> TorchCall | None:
    """The spelling for a call with these run-time arguments."""
    op, overload = name.split(".")
    kinds = {key: kind_of(value) for key, value in arguments.kwargs.items()}
    return torch_call(op, overload, tuple(map(kind_of, arguments.args)), kinds)


def known_entries() -> list[str]:
    """The entries for overloads that this version of torch has."""
    return [name for name in spellings() if parameters_of(name) is not None]


def covering_patterns(name: str, rng: random.Random) -> Iterator[Pattern]:
    """Some combinations of accepted kinds of an entry, among them each kind of each argument at least
    once."""
    choices = accepted_kinds(parameters_of(name) or (), spellings()[name])
    yield from patterns(choices, 8, rng)
    for parameter, kinds in choices.items():
        for kind in kinds:
            yield from patterns({**choices, parameter: (kind,)}, 1, rng)


def test_table_covers_most_overloads() -> None:
    assert len(known_entries()) > 1000


def test_every_entry_dispatches_to_its_overload() -> None:
    rng = random.Random(0)
    failures = []
    for name in known_entries():
        answers = []
        for pattern in covering_patterns(name, rng):
            arguments = arguments_of(name, pattern, rng)
            call = call_on(name, arguments)
            answer = call is not None and reaches(name, call, arguments)
            if answer is False:
                failures.append((name, {key: kind.value for key, kind in pattern.items()}, call))
            answers.append(answer)
        if True not in answers:
            failures.append((name, "refuses all arguments"))
    assert not failures


@pytest.mark.filterwarnings("ignore:This overload of add is deprecated")
@pytest.mark.parametrize("name", ["mul.Scalar", "add.Scalar", "div.Scalar", "arange.default"])
def test_a_wrong_entry_is_detected(name: str) -> None:
    rng = random.Random(0)
    choices = accepted_kinds(parameters_of(name) or (), Spelling("", False))
    wrong = Spelling(f"torch.{name.split('.')[0]}", False)
    assert False in {passes(name, wrong, pattern, rng) for pattern in patterns(choices, 20, rng)}


def operator_database_calls() -> Iterator[tuple[str, Arguments]]:
    """Calls of covered overloads made by torch's own samples, one for each combination of argument kinds."""
    seen = set()
    covered = spellings()
    for info in op_db:
        dtypes = info.supported_dtypes("cpu")
        if not dtypes:
            continue
        dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)
        for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), 3):
            for overload, args, kwargs in recorded_run(info, sample):
                name = str(overload).removeprefix("aten.")
                key = (name, tuple(map(kind_of, args)), tuple((k, kind_of(v)) for k, v in kwargs.items()))
                if name in covered and key not in seen:
                    seen.add(key)
                    yield name, Arguments(args, kwargs)


def recorded_run(info: Any, sample: Any) -> list[Any]:
    """What one sample of the operator database sends to the dispatcher, up to an error if it is meant to
    fail."""
    with torch.no_grad(), Recorder(run=True) as recorder:
        try:
            info(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001 - whatever a sample that is meant to fail raises
            return []
    return recorder.records


@pytest.mark.filterwarnings("ignore")
def test_opinfo_samples_match() -> None:
    checked: set[str] = set()
    failures = []
    for name, arguments in operator_database_calls():
        call = call_on(name, arguments)
        if call is None:
            continue
        checked.add(name)
        if not reaches(name, call, arguments) or not same_effect(name, call, arguments):
            failures.append((name, call))
    assert not failures
    assert len(checked) > 350


UNDEFINED = {"empty.memory_format", "empty_like.default", "empty_strided.default", "empty_permuted.default"}
UNDEFINED |= {"new_empty.default", "new_empty_strided.default", "geqrf.default"}
"""Overloads whose values are whatever the memory held; only metadata is compared."""


def same_effect(name: str, call: TorchCall, arguments: Arguments) -> bool:
    """Whether overload and spelling return equal values and metadata and leave equal arguments."""
    first, second = copy.deepcopy(arguments), copy.deepcopy(arguments)
    with torch.no_grad():
        torch.default_generator.manual_seed(0)
        wanted = overload_of(name)(*first.args, **first.kwargs)
        torch.default_generator.manual_seed(0)
        got = evaluate(call, second)
    values = name not in UNDEFINED
    return same(got, wanted, values) and same(second.args, first.args) and same(second.kwargs, first.kwargs)


def same(left: Any, right: Any, values: bool = True) -> bool:
    """Whether two results are equal, in dtype, device, shape and strides too; NaN equals NaN."""
    if isinstance(left, torch.Tensor):
        meta = [(x.dtype, x.device, x.shape, x.layout) for x in (left, right)]
        if left.layout is not torch.strided:
            return meta[0] == meta[1]
        equal = not values or torch.equal(left, right) or torch.allclose(left, right, 0, 0, equal_nan=True)
        return meta[0] == meta[1] and left.stride() == right.stride() and equal
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(x, y, values) for x, y in zip(left, right))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and (left == right or left != left)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "text"),
    [
        ("mul.Tensor", (T, T), {}, "torch.mul(a, b)"),
        ("mul.Tensor", (T, F), {}, "torch.mul(a, b)"),
        ("add.Tensor", (T, T), {"alpha": N}, "torch.add(a, b, alpha=alpha)"),
        ("add_.Tensor", (T, T), {}, "a.add_(b)"),
        ("copy_.default", (T, T), {}, "a.copy_(b)"),
        ("view.default", (T, ArgumentKind.INTS), {}, "a.view(b)"),
        ("permute.default", (T, ArgumentKind.INTS), {}, "torch.permute(a, b)"),
        ("mm.out", (T, T), {"out": T}, "torch.mm(a, b, out=out)"),
        ("max.dim_max", (T, N), {"max": T, "max_values": T}, "torch.max(a, b, out=(max, max_values))"),
        ("sum.dim_IntList", (T, ArgumentKind.INTS, ArgumentKind.TRUE), {}, "torch.sum(a, b, c)"),
        ("sum.dim_IntList", (T, ArgumentKind.INTS), {"dtype": ArgumentKind.DTYPE}, "torch.sum(a, b, dtype=dtype)"),
        ("sum.dim_IntList", (T,), {"dim": ArgumentKind.INTS}, "torch.sum(a, dim=dim)"),
        ("pow.Tensor_Scalar", (T, N), {}, "torch.pow(a, b)"),
        (
            "div.Tensor_mode",
            (T, N),
            {"rounding_mode": ArgumentKind.STRING},
            "torch.div(a, b, rounding_mode=rounding_mode)",
        ),
        ("_softmax.default", (T, N, ArgumentKind.FALSE), {}, "torch.softmax(a, b)"),
        ("_to_copy.default", (T,), {"dtype": ArgumentKind.DTYPE}, "a.to(dtype=dtype, copy=True)"),
        (
            "gelu.default",
            (T,),
            {"approximate": ArgumentKind.STRING},
            "torch.nn.functional.gelu(a, approximate=approximate)",
        ),
        ("addmm.default", (T, T, T), {}, "torch.addmm(a, b, c)"),
        ("cat.default", (ArgumentKind.TENSORS, N), {}, "torch.cat(a, b)"),
        ("where.self", (T, T, T), {}, "torch.where(a, b, c)"),
        ("embedding.default", (T, T, N), {}, "torch.embedding(a, b, c)"),
        ("native_layer_norm.default", (T, ArgumentKind.INTS, T, T, F), {}, "torch.native_layer_norm(a, b, c, d, e)"),
        ("linalg_inv_ex.default", (T,), {}, "torch.linalg.inv_ex(a)"),
        ("full.default", (ArgumentKind.INTS, F), {"device": ArgumentKind.DEVICE}, "torch.full(a, b, device=device)"),
    ],
)
def test_text(name: str, args: tuple[ArgumentKind, ...], kwargs: Mapping[str, ArgumentKind], text: str) -> None:
    call = torch_call(*name.split("."), args, kwargs)
    assert call is not None
    assert call.write("abcde"[: len(args)], {key: key for key in kwargs}) == text


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        # torch.mul(x, 2), torch.add(x, 2) and torch.div(x, 2) make the number a tensor.
        ("mul.Scalar", (T, F), {}),
        ("add.Scalar", (T, N), {}),
        ("div.Scalar", (T, N), {}),
        # Made of other operators: the public function is not what reaches the dispatcher.
        ("matmul.default", (T, T), {}),
        ("layer_norm.default", (T, ArgumentKind.INTS), {}),
        # The function would ask the default device, which a caller may have changed.
        ("full.default", (ArgumentKind.INTS, F), {}),
        ("full.default", (ArgumentKind.INTS, F), {"device": ArgumentKind.NONE}),
        # torch.std(x) is another overload.
        ("std.correction", (T,), {}),
        # torch.softmax has no such argument.
        ("_softmax.default", (T, N, ArgumentKind.TRUE), {}),
        ("_softmax.default", (T, N, ArgumentKind.BOOL), {}),
        # No public spelling at all.
        ("threshold_backward.default", (T, T, N), {}),
        ("_scaled_dot_product_flash_attention_for_cpu.default", (T, T, T), {}),
        # Not calls of the overload: unknown name, one twice, too many, one missing, a method without object.
        ("mul.Tensor", (T, T), {"alpha": N}),
        ("mul.Tensor", (T, T), {"other": T}),
        ("mul.Tensor", (T, T, T), {}),
        ("mul.Tensor", (T,), {}),
        ("add_.Tensor", (), {"self": T, "other": T}),
        ("mul.Tensor", (T, ArgumentKind.STRING), {}),
        ("no_such_operator.default", (T,), {}),
    ],
)
def test_calls_without_a_public_spelling(
    name: str, args: tuple[ArgumentKind, ...], kwargs: Mapping[str, ArgumentKind]
) -> None:
    assert torch_call(*name.split("."), args, kwargs) is None


def test_a_truth_value_known_only_at_run_time_is_accepted_where_both_literals_are() -> None:
    assert torch_call("sum", "dim_IntList", (T, ArgumentKind.INTS, ArgumentKind.BOOL), {}) == TorchCall(
        "torch.sum", False, 3
    )


def test_functions_missing_from_this_torch_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mm.default" in spellings.__wrapped__()
    monkeypatch.delattr(torch, "mm")
    assert "mm.default" not in spellings.__wrapped__()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.ones(1), T),
        (True, ArgumentKind.TRUE),
        (2, N),
        ([], ArgumentKind.EMPTY),
        ((1, 2), ArgumentKind.INTS),
        ([1, 2.0], ArgumentKind.OTHER),
        ([None, torch.ones(1)], ArgumentKind.OPTIONAL_TENSORS),
        (torch.float32, ArgumentKind.DTYPE),
        (torch.preserve_format, ArgumentKind.MEMORY_FORMAT),
        (object(), ArgumentKind.OTHER),
    ],
)
def test_kind_of_a_value(value: object, kind: ArgumentKind) -> None:
    assert kind_of(value) is kind

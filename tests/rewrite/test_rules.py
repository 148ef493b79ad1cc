"""Matches that are replaced, and those that are not: one rule a case, on programs as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap import rewrite as rw
from fxwrap.errors import RewriteError
from fxwrap.lines import Alloc, Free, Launch
from fxwrap.wrapper_ir import KernelDefinition, Program, TensorType, print_kernel

NUMBER = rw.number("n")
X, Y = rw.tensors("x y")
SIN, TANH, NEG, CLONE = "aten.sin.default", "aten.tanh.default", "aten.neg.default", "aten.clone.default"
TANH_OF_SIN = rw.call(TANH, rw.call(SIN, X))
AS_COS = rw.call("aten.cos.default", X)


def program(body: str, inputs: str = "%x: borrowed f32[4]@cpu", rest: str = "") -> Program:
    return fxwrap.verify(fxwrap.parse(f"program @p({inputs}) {{\n{body}\n}}\n{rest}"))


def lines(changed: Program) -> list[str]:
    return [line.strip() for line in str(changed).split("kernel @")[0].splitlines()[1:-1]]


SINE = "%a = extern.call @aten.sin.default(%x) : f32[4]@cpu"
HYPERBOLIC = "%b = extern.call @aten.tanh.default(%a) : f32[4]@cpu"
RETURN = "control.return(%b)"
BOTH = "%x: borrowed f32[4]@cpu, %y: borrowed f32[4]@cpu"
MUTABLE = "%x: mutable f32[4]@cpu"
RANDOM = '%{0} = extern.call @aten.rand_like.default(%x) effect_set=(random("cpu")) : f32[4]@cpu'


def test_a_match_is_replaced_and_keeps_its_result_name() -> None:
    done = rw.rewrite(program(f"{SINE}\n{HYPERBOLIC}\nmemory.free(%a)\n{RETURN}"), TANH_OF_SIN, AS_COS)
    assert lines(done.program) == ["%b = extern.call @aten.cos.default(%x) : f32[4]@cpu", RETURN]
    assert [len(match.lines) for match in done.matches] == [2]


def test_frees_are_recomputed() -> None:
    owned = "%x: owned f32[4]@cpu"
    before = program(f"{SINE}\nmemory.free(%x)\n{HYPERBOLIC}\nmemory.free(%a)\n{RETURN}", owned)
    done = rw.rewrite(before, TANH_OF_SIN, AS_COS)
    assert lines(done.program) == ["%b = extern.call @aten.cos.default(%x) : f32[4]@cpu", "memory.free(%x)", RETURN]


def test_out_variant_buffers_are_matched_and_removed_with_their_writer() -> None:
    filled = "%a = memory.alloc() : f32[4]@cpu\nextern.call @aten.sin.out(%x) outs=(%a)"
    pattern = rw.call(TANH, rw.call("aten.sin.out", X, ...))
    done = rw.rewrite(program(f"{filled}\n{HYPERBOLIC}\nmemory.free(%a)\n{RETURN}"), pattern, AS_COS)
    assert lines(done.program) == ["%b = extern.call @aten.cos.default(%x) : f32[4]@cpu", RETURN]


def test_a_buffer_filled_twice_is_two_values() -> None:
    filled = "%a = memory.alloc() : f32[4]@cpu\nextern.call @aten.sin.out(%x) outs=(%a)"
    again = "%c = extern.call @aten.neg.default(%a) : f32[4]@cpu\nextern.call @aten.cos.out(%x) outs=(%a)"
    before = program(f"{filled}\n{again}\n{HYPERBOLIC}\nmemory.free(%a)\ncontrol.return(%b, %c)")
    assert not rw.find(before, rw.call(TANH, rw.call("aten.sin.out", X, ...))).matches
    assert rw.find(before, rw.call(NEG, rw.call("aten.sin.out", X, ...))).matches
    assert rw.find(before, rw.call(TANH, rw.call("aten.cos.out", X, ...))).matches


def test_writes_to_inputs_are_copied_back() -> None:
    before = program("extern.mutate @aten.neg_.default(%x) writes=(%x)\ncontrol.return()", MUTABLE)
    done = rw.rewrite(before, rw.call("aten.neg_.default", X), rw.call("aten.neg.default", X))
    assert lines(done.program)[1] == "extern.mutate @aten.copy_.default(%x, %neg) writes=(%x)"


def test_a_builder_may_write_into_an_input_itself() -> None:
    def build(match: rw.Match, builder: rw.LineBuilder) -> Any:
        builder.mutate("aten.mul_.Scalar", match["x"], -1)
        return match["x"]

    before = program("extern.mutate @aten.neg_.default(%x) writes=(%x)\ncontrol.return()", MUTABLE)
    done = rw.rewrite(before, rw.call("aten.neg_.default", X), build)
    assert lines(done.program)[0] == "extern.mutate @aten.mul_.Scalar(%x, -1) writes=(%x)"


def test_in_place_updates_rename_the_value() -> None:
    before = program(
        f"{SINE}\n%c = extern.call @aten.neg.default(%a) : f32[4]@cpu\n"
        "extern.mutate @aten.tanh_.default(%a) writes=(%a)\ncontrol.return(%a, %c)"
    )
    done = rw.rewrite(before, rw.call("aten.tanh_.default", X), rw.call("aten.cos.default", X))
    assert lines(done.program)[1:] == [
        "%c = extern.call @aten.neg.default(%a) : f32[4]@cpu",
        "%cos = extern.call @aten.cos.default(%a) : f32[4]@cpu",
        "memory.free(%a)",
        "control.return(%cos, %c)",
    ]


def test_outputs_precede_their_first_use() -> None:
    """New lines stand where the first line of the match stood: the last one comes too late."""
    before = program(
        f"{SINE}\n%c = extern.call @aten.neg.default(%a) : f32[4]@cpu\nmemory.free(%a)\n"
        "%b = extern.call @aten.tanh.default(%x) : f32[4]@cpu\ncontrol.return(%b, %c)"
    )
    done = rw.rewrite(before, (rw.call(SIN, X), rw.call(TANH, X)), (rw.call("aten.cos.default", X), rw.call(NEG, X)))
    assert [text.partition("(")[0] for text in lines(done.program)] == [
        "%a = extern.call @aten.cos.default", "%b = extern.call @aten.neg.default",
        "%c = extern.call @aten.neg.default", "memory.free", "control.return",
    ]  # fmt: skip


def test_overwritten_operands_are_read_first() -> None:
    before = program(f"{SINE}\n{TO_NEGATIVE}\n{HYPERBOLIC}\nmemory.free(%a)\n{RETURN}", MUTABLE)
    done = rw.rewrite(before, TANH_OF_SIN, AS_COS)
    assert lines(done.program) == ["%b = extern.call @aten.cos.default(%x) : f32[4]@cpu", TO_NEGATIVE, RETURN]


def test_unused_results_are_dropped() -> None:
    before = program("%v, _ = extern.call @aten.max.dim(%x, 0) : f32[]@cpu, none\ncontrol.return(%v)")
    done = rw.rewrite(before, rw.call("aten.max.dim", X, 0).output(0), rw.call("aten.min.dim", X, 0).output(0))
    assert lines(done.program)[0] == "%v, _ = extern.call @aten.min.dim(%x, 0) : f32[]@cpu, none"


def test_blocks_and_functions_are_rewritten() -> None:
    call = "%{0} = extern.call @aten.sin.default(%{1}) : f32[4]@cpu\ncontrol.yield(%{0})"
    body = (
        "%c = control.cond(%flag, %x) : f32[4]@cpu {\n"
        f"^then(%t: f32[4]@cpu):\n{call.format('t1', 't')}\n^else(%e: f32[4]@cpu):\n{call.format('e1', 'e')}\n}}\n"
        "%d = control.call @f(%c) : f32[4]@cpu\nmemory.free(%c)\ncontrol.return(%d)"
    )
    function = f"function @f(%g: f32[4]@cpu) {{\n{call.format('g1', 'g')}\n}}\n"
    before = program(body, "%x: borrowed f32[4]@cpu, %flag: borrowed bool[]@cpu", function)
    done = rw.rewrite(before, rw.call(SIN, X), AS_COS)
    assert len(done.matches) == 3 and str(done.program).count("aten.cos.default") == 3
    with pytest.raises(RewriteError, match="a nested block can use its arguments only"):
        rw.rewrite(before, rw.call(SIN, X), lambda match, builder: builder.constant(torch.ones(4)))


def test_symbolic_sizes_are_inferred() -> None:
    before = program(
        "s0 = symbol.size(%x) dim=0 range=(2, 64) hint=8\n%a = extern.call @aten.sin.default(%x) : f32[s0, 2*s0]@cpu\n"
        "%b = extern.call @aten.tanh.default(%a) : f32[s0, 2*s0]@cpu\nmemory.free(%a)\ncontrol.return(%b)",
        "%x: borrowed f32[s0, 2*s0]@cpu",
    )

    def build(match: rw.Match, builder: rw.LineBuilder) -> Any:
        joined = builder.call("aten.cat.default", [match["x"], match["x"]], 1)
        assert str(joined.type.sizes) == "(s0, 4*s0)"
        rows = joined.type.sizes[0]
        return builder.call("aten.slice_copy.Tensor", joined, 1, 0, 2 * rows)

    assert "slice_copy" in lines(rw.rewrite(before, TANH_OF_SIN, build).program)[2]


def test_overlapping_matches_use_another_round() -> None:
    """The second pair moves up over the first one's last line: it is replaced in a round of its own."""
    body = "\n".join(
        f"%{name} = extern.call @aten.{operator}.default(%{operand}) : f32[4]@cpu"
        for name, operator, operand in [
            ("a", "sin", "x"), ("c", "sin", "y"), ("b", "tanh", "x"), ("e", "neg", "c"), ("d", "tanh", "y"),
        ]
    )  # fmt: skip
    before = program(f"{body}\nmemory.free(%c)\ncontrol.return(%a, %b, %d, %e)", BOTH)
    both = rw.call("aten.cos.default", X), rw.call(NEG, X)
    done = rw.rewrite(before, (rw.call(SIN, X), rw.call(TANH, X)), both)
    assert len(done.matches) == 2
    assert [text[:3] for text in lines(done.program)[:5]] == ["%c ", "%d ", "%a ", "%b ", "%e "]


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pattern", "matches"),
    [
        ("extern.call @aten.add.Tensor(%x, %y)", rw.call("aten.add.Tensor", X, Y), True),
        ("extern.call @aten.add.Tensor(%x, %y)", rw.call("aten.add.Tensor", X, X), False),
        ("extern.call @aten.add.Tensor(%x, %x)", rw.call("aten.add.Tensor", X, X), True),
        ("extern.call @aten.add.Tensor(%x, %y, alpha=2)", rw.call("aten.add.Tensor", X, Y), False),
        ("extern.call @aten.add.Tensor(%x, %y, alpha=1)", rw.call("aten.add.Tensor", X, Y), True),
        ("extern.call @aten.add.Tensor(%x, %y)", rw.call("aten.add.Tensor", X, Y, alpha=1), True),
        ("extern.call @aten.add.Tensor(%x, %y, alpha=2)", rw.call("aten.add.Tensor", X, ..., alpha=NUMBER), True),
        ("extern.call @aten.add.Tensor(%x, %y, alpha=2)", rw.call("aten.add.Tensor", ...), True),
        ("extern.call @aten.add.Scalar(%x, 2)", rw.call("aten.add.Scalar", X, 2), True),
        ("extern.call @aten.add.Scalar(%x, 2)", rw.call("aten.add.Scalar", X, 3), False),
        ("extern.call @aten.add.Scalar(%x, 1)", rw.call("aten.add.Scalar", X, True), False),
        ("extern.call @aten.roll.default(%x, [1], [0])", rw.call("aten.roll.default", X, [rw.number("n")], [0]), True),
        ("extern.call @aten.roll.default(%x, [1], [0])", rw.call("aten.roll.default", X, rw.anything("l"), ...), True),
        ("extern.call @aten.sin.default(%x)", rw.call((SIN, TANH), rw.tensor("x", dtype=torch.float16)), False),
        ("extern.call @aten.sin.default(%x)", rw.call((SIN, TANH), rw.tensor("x", rank=1, device="cpu")), True),
        ("extern.call @aten.sin.default(%x)", rw.call(SIN, X).typed(sizes=(5,)), False),
        ("extern.call @aten.sin.default(%x)", rw.call(SIN, X).where(lambda line: line.results[0].name == "b"), True),
        ("extern.call @aten.sin.default(%x)", rw.call(SIN, rw.tensor("x", where=lambda x: x.name == "y")), False),
        ("extern.call @aten.sin.default(%x)", rw.call(SIN, rw.one_of(rw.call(TANH, X), X)), True),
        ("extern.call @aten.atan2.default(%y, %x)", rw.with_operands_anywhere(rw.call("aten.atan2.default", X)), True),
        ("extern.call @aten.sin.default(%x)", rw.line(rw.Operation), False),
    ],
)  # fmt: skip
def test_operands(text: str, pattern: rw.Operation, matches: bool) -> None:
    result = rw.find(program(f"%b = {text} : f32[4]@cpu\n{RETURN}", BOTH), pattern)
    assert bool(result.matches) == matches, result.report()


def test_operands_in_either_order() -> None:
    body = f"{SINE}\n%b = extern.call @aten.add.Tensor(%y, %a) : f32[4]@cpu\nmemory.free(%a)\n{RETURN}"
    before = program(body, BOTH)
    pattern = rw.call("aten.add.Tensor", rw.call(SIN, X), Y)
    assert not rw.find(before, pattern).matches
    (match,) = rw.find(before, pattern.as_commutative()).matches
    assert match["x"].name == "x" and match["y"].name == "y"


@pytest.mark.parametrize("optional", [False, True])
def test_views_are_matched_by_name(optional: bool) -> None:
    sine = SINE.replace("f32[4]", "f32[2, 3]")
    for operand in ("%a", "%v"):
        view_line = "%v = memory.view(%a) : f32[3, 2 | 1, 3]@cpu\n" if operand == "%v" else ""
        size = "3, 2 | 1, 3" if operand == "%v" else "2, 3"
        tanh = f"%b = extern.call @aten.tanh.default({operand}) : f32[{size}]@cpu"
        body = f"{sine}\n{view_line}{tanh}\nmemory.free(%a)\n{RETURN}"
        before = program(body, "%x: borrowed f32[2, 3]@cpu")
        result = rw.find(before, rw.call(TANH, rw.view(rw.call(SIN, X), optional=optional)))
        assert bool(result.matches) == (optional or operand == "%v")


SOURCE = 'extern "C" void kernel(const float* a, float* b) {}\n'
KERNEL = KernelDefinition("double_0", "cpp", SOURCE, ("*f32", "*f32"))


def test_launches_are_matched_by_kernel_and_data_flow() -> None:
    body = (
        f"{SINE}\n%b = memory.alloc() : f32[4]@cpu\nkernel.launch @double_0(%a) outs=(%b)\nmemory.free(%a)\n"
        "kernel.launch @double_0(%x) outs=(%b)\ncontrol.return(%b)"
    )
    before = fxwrap.parse(f"program @p(%x: borrowed f32[4]@cpu) {{\n{body}\n}}\n" + print_kernel(KERNEL))
    assert len(rw.find(before, rw.launch("double_0", ...)).matches) == 2
    assert len(rw.find(before, rw.launch("double_0", rw.call(SIN, X))).matches) == 1
    assert len(rw.find(before, rw.launch("double_0", X, Y)).matches) == 1  # what %b held before is an operand
    assert len(rw.find(before, rw.launch(lambda kernel, line: kernel.language == "triton", ...)).matches) == 0
    (launch, _) = [line for line in before.lines() if isinstance(line, Launch)]
    done = rw.rewrite(before, rw.launch("double_0", ...), rw_double)
    assert not done.program.kernels and len(done.matches) == 2 and launch.kernel == "double_0"


def rw_double(match: rw.Match, builder: rw.LineBuilder) -> Any:
    return builder.call("aten.mul.Scalar", match.lines[0].arguments[0], 2)


# --- matches that are not replaced -----------------------------------------------------------------------------------

TO_NEGATIVE = "extern.mutate @aten.neg_.default(%x) writes=(%x)"
ENTER, EXIT = 'note.enter_range() name="r"', 'note.exit_range() name="r"'
NEGATIVE = "%c = extern.call @aten.neg.default(%x) : f32[4]@cpu"
NONZERO = "%a = extern.call @aten.nonzero.default(%x) : i64[u0, 1]@cpu\nu0 = symbol.bind(%a) path=(size(0))"
LATE = "%c = extern.call @aten.cos.default(%x) : f32[4]@cpu"
ATAN = "aten.atan2.default"
ANGLE = f"%b = extern.call @{ATAN}(%a, %c) : f32[4]@cpu\nmemory.free(%a)"
ANGLE_OF_SIN = rw.call(ATAN, rw.call(SIN, X), Y)


@pytest.mark.parametrize(
    ("body", "inputs", "pattern", "reason"),
    [
        (f"{SINE}\n{TO_NEGATIVE}\n{LATE}\n{ANGLE}\ncontrol.return(%b, %c)", MUTABLE, ANGLE_OF_SIN,
         "%x is written between the lines of the match: extern.mutate @aten.neg_.default"),
        (f"{SINE}\n{ENTER}\n{HYPERBOLIC}\n{EXIT}\nmemory.free(%a)\n{RETURN}", "", TANH_OF_SIN,
         "would leave its bracket"),
        (f"{RANDOM.format('a')}\n{RANDOM.format('c')}\n{ANGLE}\ncontrol.return(%b, %c)", "",
         rw.call(ATAN, rw.call("aten.rand_like.default", X), Y), "an effect whose order with another line is fixed"),
        (f"{SINE}\n{HYPERBOLIC}\ncontrol.return(%b, %a)", "", TANH_OF_SIN,
         "%a is used by another line too: control.return(%b, %a)"),
        (f"{SINE}\n{HYPERBOLIC}\nmemory.free(%a)\n{NEGATIVE}\ncontrol.return(%b, %c)", "",
         rw.call(TANH, rw.call(SIN, rw.tensor("x", no_other_uses=True))),
         "%x is read by another line too: %c = extern.call @aten.neg.default(%x)"),
        (f"{NONZERO}\ncontrol.return(%a)", "", rw.call("aten.nonzero.default", X),
         "the sizes of %a are known only at run time"),
    ],
)  # fmt: skip
def test_non_mergeable_matches_are_skipped(body: str, inputs: str, pattern: rw.Operation, reason: str) -> None:
    before = program(body, inputs or "%x: borrowed f32[4]@cpu")
    done = rw.rewrite(before, pattern, lambda match, builder: pytest.fail("it was not to be replaced"))
    assert done.program is before
    (failure,) = done.match_failures
    assert reason in failure.reason and reason in done.report()


def test_results_with_other_uses_remain_where_allowed() -> None:
    before = program(f"{SINE}\n{HYPERBOLIC}\ncontrol.return(%b, %a)")
    done = rw.rewrite(before, rw.call(TANH, rw.call(SIN, X).allow_other_uses()), AS_COS)
    cosine = "%b = extern.call @aten.cos.default(%x) : f32[4]@cpu"
    assert lines(done.program) == [SINE, cosine, "control.return(%b, %a)"]


def test_memory_freed_on_another_stream_is_skipped() -> None:
    before = program(f"{SINE}\n{HYPERBOLIC}\nmemory.free(%a) stream=1\n{RETURN}")
    (failure,) = rw.rewrite(before, TANH_OF_SIN, AS_COS).match_failures
    assert failure.reason == "%a is used by another line too: memory.free(%a) stream=1"


def return_operand(match: rw.Match, builder: rw.LineBuilder) -> Any:
    return match["x"]


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ("{0}\nmemory.free(%a)\ncontrol.return(%b)", ""),
        ("control.return(%a)", "%a is returned"),
        ("{0}\nextern.mutate @aten.neg_.default(%a) writes=(%a)\nmemory.free(%a)\ncontrol.return(%b)", "%a is written"),
        (f"{TO_NEGATIVE}\n{{0}}\nmemory.free(%a)\ncontrol.return(%b)", "%x would replace %a, but is written before"),
        (f"{{0}}\nmemory.free(%a)\n{TO_NEGATIVE}\ncontrol.return(%b)", ""),
    ],
)
def test_a_copy_is_elided_only_where_unobservable(after: str, reason: str) -> None:
    copied = "%a = extern.call @aten.clone.default(%x) : f32[4]@cpu"
    done = rw.rewrite(program(f"{copied}\n{after.format(HYPERBOLIC)}", MUTABLE), rw.call(CLONE, X), return_operand)
    assert bool(done.matches) == (not reason), done.report()
    assert not reason or reason in done.match_failures[0].reason
    assert ("aten.clone" in str(done.program)) == bool(reason)


def test_a_builder_may_decline_a_match() -> None:
    def build(match: rw.Match, builder: rw.LineBuilder) -> Any:
        raise rw.Skip("it is small")

    before = program(f"{SINE}\n{HYPERBOLIC}\nmemory.free(%a)\n{RETURN}")
    done = rw.rewrite(before, TANH_OF_SIN, build)
    assert done.program is before and done.match_failures[0].reason == "it is small"


# --- wrong patterns and replacements ----------------------------------------------------------------------------------

Wrong = Callable[[rw.Match, rw.LineBuilder], Any]


def type_(dtype: torch.dtype) -> TensorType:
    return TensorType.contiguous(dtype, (4,), torch.device("cpu"))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda match, builder: builder.call("aten._to_copy.default", match["x"], dtype=torch.float16),
         r"%b is f32\[4\]@cpu, but its replacement is f16\[4\]@cpu"),
        (lambda match, builder: builder.call("aten.max.dim", match["x"], 0), "the replacement returns 2 values"),
        (lambda match, builder: None, "the replacement returns None for %b"),
        (lambda match, builder: builder.call("aten.cos.default", match.line("sin").results[0]),
         "the replacement uses %a, which the match removes"),
        (lambda match, builder: match.line("sin").results[0], "the replacement returns %a, which the match removes"),
        (lambda match, builder: builder.mutate("aten.neg_.default", match["x"]),
         "the replacement writes %x, which the matched lines do not write"),
        (lambda match, builder: builder.call("aten.neg_.default", match["x"]), "aten.neg_.default writes its operands"),
        (lambda match, builder: builder.mutate("aten.neg.default", match["x"]), "aten.neg.default writes no operand"),
        (lambda match, builder: builder.call("vendor.nothing.default", match["x"]),
         "torch has no operator 'vendor.nothing.default'"),
        (lambda match, builder: builder.call("aten.mm.default", match["x"], match["x"]),
         "aten.mm.default fails on these inputs"),
        (lambda match, builder: builder.call("aten.nonzero.default", match["x"]), "are known only at run time"),
        (lambda match, builder: builder.add(Free(match["x"])), "the rewrite inserts frees"),
        (lambda match, builder: match["z"], "the pattern captures no 'z'; it has x"),
        (lambda match, builder: match.line("tan"), "the pattern names no operation 'tan'; it has sin"),
    ],
)  # fmt: skip
def test_an_invalid_replacement_is_reported_at_its_line(build: Wrong, reason: str) -> None:
    before = program(f"{SINE}\n{HYPERBOLIC}\nmemory.free(%a)\n{RETURN}", MUTABLE)
    with pytest.raises(RewriteError, match=reason) as caught:
        rw.rewrite(before, rw.call(TANH, rw.call(SIN, X).named("sin")), build)
    assert "replacing %b = extern.call @aten.tanh.default(%a)" in str(caught.value)


def test_unwritten_memory_is_detected() -> None:
    def build(match: rw.Match, builder: rw.LineBuilder) -> Any:
        result = builder.value(type_(torch.float32))
        builder.add(Alloc(result))
        return result

    before = program(f"{SINE}\n{HYPERBOLIC}\nmemory.free(%a)\n{RETURN}")
    with pytest.raises(fxwrap.errors.VerifyError, match="%b is read before it is written"):
        rw.rewrite(before, TANH_OF_SIN, build)


@pytest.mark.parametrize("pattern", [(), X, (X,), "aten.sin.default", rw.one_of(TANH_OF_SIN, X)])
def test_invalid_patterns_are_rejected(pattern: Any) -> None:
    with pytest.raises(RewriteError, match="a pattern"):
        rw.find(program(f"{SINE}\ncontrol.return(%a)"), pattern)


def test_invalid_replacements_are_rejected() -> None:
    before = program(f"{SINE}\ncontrol.return(%a)")
    with pytest.raises(RewriteError, match="a replacement is a function, or calls in terms of wildcards, not 'x'"):
        rw.rewrite(before, rw.call(SIN, X), "x")
    with pytest.raises(RewriteError, match="a replacement calls operators by name; for view, write a builder function"):
        rw.rewrite(before, rw.call(SIN, X), rw.view(X))


# --- collectives ------------------------------------------------------------------------------------------------------

STARTED = '%{0} = collective.start @_c10d_functional.all_reduce.default(%{1}, "sum", "{2}") group="{2}" : f32[4]@cpu'
AWAITED = '%{0} = collective.wait(%{1}) group="{2}" : f32[4]@cpu'
SUM = rw.call("_c10d_functional.all_reduce.default", X, "sum", rw.anything("group"))
SIN_OF_SUM = rw.call(SIN, rw.call("_c10d_functional.wait_tensor.default", SUM))
SINE_OF_SUM = "%c = extern.call @aten.sin.default(%b) : f32[4]@cpu\nmemory.free(%a)\ncontrol.return(%c)"


def collective(*between: str) -> Program:
    return program(
        "\n".join([STARTED.format("a", "x", "0"), *between, AWAITED.format("b", "a", "0"), SINE_OF_SUM]), BOTH
    )


def test_a_collective_is_matched_as_the_calls_that_it_is_in_a_graph() -> None:
    done = rw.rewrite(
        collective("%n = extern.call @aten.neg.default(%y) : f32[4]@cpu\nmemory.free(%n)"), SIN_OF_SUM, AS_COS
    )
    assert done.matches[0]["group"] == "0"
    assert lines(done.program)[-2:] == ["%c = extern.call @aten.cos.default(%x) : f32[4]@cpu", "control.return(%c)"]
    assert "collective" not in str(done.program)


def test_the_order_of_the_collectives_of_a_group_is_fixed() -> None:
    """The sum's second operand is known after the other collective, so the replacement would have to follow it."""

    def between(group: str) -> Program:
        other = [STARTED.format("d", "y", group), AWAITED.format("e", "d", group)]
        total = ["%c = extern.call @aten.add.Tensor(%b, %e) : f32[4]@cpu", "memory.free(%a)", "memory.free(%d)"]
        first = [STARTED.format("a", "x", "0"), *other, AWAITED.format("b", "a", "0")]
        return program("\n".join([*first, *total, "control.return(%c)"]), BOTH)

    pattern = rw.call("aten.add.Tensor", rw.call("_c10d_functional.wait_tensor.default", SUM), Y)
    declined = rw.rewrite(between("0"), pattern, rw.call("aten.sub.Tensor", X, Y))
    assert not declined.matches
    assert "has an effect whose order with another line is fixed" in declined.match_failures[0].reason
    assert len(rw.rewrite(between("1"), pattern, rw.call("aten.sub.Tensor", X, Y)).matches) == 1


@pytest.mark.parametrize(
    "pattern", [rw.call(SIN, rw.call("_c10d_functional.wait_tensor.default", X)), SUM], ids=["wait", "start"]
)
def test_one_half_of_a_collective_is_not_replaced(pattern: Any) -> None:
    declined = rw.rewrite(collective(), pattern, AS_COS)
    assert not declined.matches
    assert "cannot be moved without the other line of the collective" in declined.match_failures[0].reason


def test_a_predicate_on_calls_sees_no_collectives() -> None:
    assert len(rw.find(collective(), rw.call(lambda line: line.target == SIN, X)).matches) == 1

"""Evaluation, and the Python and C++ printers against it."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import hypothesis
import pytest
import sympy
from hypothesis import given, settings

from fxwrap.errors import ExpressionError
from fxwrap.runtime import native
from fxwrap.symbolic import (
    PYTHON_IMPORTS,
    CppPrinter,
    Expression,
    Number,
    PythonPrinter,
    canonicalize,
    cpp_prelude,
    evaluate,
    expression_kind,
    parse_expr,
    symbol_kind,
)
from fxwrap.torch_compat import sympy_functions
from tests.support.long_form import sample_size
from tests.support.strategies.expressions import any_expressions, environments

Case = tuple[Expression, dict[str, Number]]
HEADERS = Path(native.__file__).parent / "bridge"
RAISED = (ArithmeticError, ValueError, TypeError)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("floordiv(s0, 2)", -4),
        ("ceildiv(s0, 2)", -3),
        ("floordiv(s0, -2)", 3),
        ("mod(s0, 4)", 1),
        ("python_mod(s0, -4)", -3),
        ("modular_indexing(s0, 2, 3)", 2),
        ("max(s0, s1, 3)", 5),
        ("min(s0, s1, 3)", -7),
        ("s0**2 - 3*s1", 34),
        ("s1**-1", 0.2),
        ("1/2*s1", 2.5),
        ("pow_by_natural(2, s1)", 32),
        ("int_true_div(s0, 2)", -3.5),
        ("trunc_to_int(f0)", -2),
        ("floor_to_int(f0)", -3),
        ("ceil_to_int(f0)", -2),
        ("round_to_int(f0)", -2),
        ("round_to_int(f0 - 1.0)", -4),
        ("round_decimal(f0*0.35, 1)", -0.9),
        ("trunc_to_float(f0)", -2.0),
        ("to_float(s1)", 5.0),
        ("where(s0 < 0, s1, f0)", 5),
        ("where(not(s0 < 0), s1, f0)", -2.5),
        ("sqrt(4*s1 + 5)", 5.0),
        ("float_pow(s1, 0.5)", math.pow(5, 0.5)),
        ("bitwise_and(s1, 4)", 4),
        ("bitwise_or(s1, 8)", 13),
        ("bitwise_xor(s1, 4)", 1),
        ("identity(s1)", 5),
        ("and(s0 < s1, b0)", True),
        ("or(s0 == s1, s0 != s1 + 1)", True),
        ("s0 >= s1", False),
        ("inf", math.inf),
        ("-int_inf", -math.inf),
        ("f0 < inf", True),
    ],
)
def test_values_and_types(text: str, value: Number) -> None:
    environment: dict[str, Number] = {"s0": -7, "s1": 5, "f0": -2.5, "b0": True}
    result = evaluate(parse_expr(text), environment)
    assert result == value
    assert type(result) is type(value)


def test_division_by_zero_raises_where_it_is_evaluated() -> None:
    expression = parse_expr("where(s0 == 0, 1, floordiv(8, s0))")
    assert evaluate(expression, {"s0": 0}) == 1
    with pytest.raises(ZeroDivisionError):
        evaluate(parse_expr("floordiv(8, s0)"), {"s0": 0})
    with pytest.raises(ZeroDivisionError):
        evaluate(parse_expr("floordiv(8, 0)"), {})


def test_a_symbol_without_value_is_an_error() -> None:
    with pytest.raises(ExpressionError, match="symbol s1 has no value; symbols with one: s0"):
        evaluate(parse_expr("s0 + s1"), {"s0": 1})


def _evaluated(expression: Expression, environment: dict[str, Number]) -> Number | type[Exception]:
    try:
        return evaluate(expression, environment)
    except RAISED as error:
        return type(error)


def _python_source_value(source: str, environment: dict[str, Number]) -> Number | type[Exception]:
    scope: dict[str, object] = {}
    exec("\n".join(PYTHON_IMPORTS), scope)
    try:
        value: Number = eval(source, scope, dict(environment))  # the emitted source is what is under test
    except RAISED as error:
        return type(error)
    return value


def _same(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return left == right and type(left) is type(right)


@settings(max_examples=sample_size(200))
@given(any_expressions(), environments())
def test_python_source_equals_evaluation(expression: Expression, environment: dict[str, Number]) -> None:
    source = PythonPrinter().print(expression)
    assert _same(_python_source_value(source, environment), _evaluated(expression, environment)), source


@pytest.mark.parametrize(
    ("text", "python", "cpp"),
    [
        ("64*s0 + 3", "64*s0 + 3", "64*s0 + 3"),
        ("floordiv(s0, 2)", "s0 // 2", "fxwrap::floordiv(s0, 2)"),
        ("ceildiv(n0, 1024)", "-(-n0 // 1024)", "fxwrap::ceildiv(n0, 1024)"),
        ("ceildiv(n0, s0)", "(n0 + s0 - 1) // s0", "fxwrap::floordiv(n0 + s0 - 1, s0)"),
        ("2*floordiv(s0, 4)", "2*(s0 // 4)", "2*fxwrap::floordiv(s0, 4)"),
        ("floordiv(2*s0, 3)", "2*s0 // 3", "fxwrap::floordiv(2*s0, 3)"),
        ("max(s0, f0)", "max(f0, s0)", "fxwrap::max<double>(f0, static_cast<double>(s0))"),
        ("s0**2", "s0**2", "fxwrap::natural_power(s0, 2)"),
        ("and(s0 < 4, b0)", "b0 and s0 < 4", "b0 && s0 < 4"),
        ("1/2*s0", "1 / 2*s0", "1.0 / 2.0*s0"),
        ("where(b0, s0, s1) + 1", "(s0 if b0 else s1) + 1", "(b0 ? s0 : s1) + 1"),
    ],
)
def test_source_reads_as_written_by_hand(text: str, python: str, cpp: str) -> None:
    assert PythonPrinter().print(parse_expr(text)) == python
    assert CppPrinter().print(parse_expr(text)) == cpp


def test_symbols_use_the_requested_names() -> None:
    names = {"s0": "sizes[0]"}
    assert PythonPrinter(names).print(parse_expr("s0 + s1")) == "sizes[0] + s1"
    assert CppPrinter(names).print(parse_expr("s0 + s1")) == "sizes[0] + s1"


def _subexpressions_fit(expression: Expression, environment: dict[str, Number]) -> bool:
    """Whether C++ promises the same: every subexpression has a finite value below 2**53."""
    for node in sympy.preorder_traversal(expression):
        value = _evaluated(canonicalize(node), environment)
        if isinstance(value, type) or abs(value) >= 2**53 or not math.isfinite(value):
            return False
    return True


def _collect_cases(count: int) -> list[Case]:
    cases: list[Case] = []

    @settings(max_examples=count, database=None, derandomize=True)
    @given(any_expressions(), environments())
    def collect(expression: Expression, environment: dict[str, Number]) -> None:
        hypothesis.assume(_subexpressions_fit(expression, environment))
        cases.append((expression, environment))

    collect()
    return cases


EDGES = [
    ("floordiv(s0, s1)", [(-7, 2), (7, -2), (-7, -2), (-8, 2), (-(2**62), -1), (0, 5)]),
    ("mod(s0, s1)", [(-7, 4), (7, -4), (-8, 4), (5, -1)]),
    ("ceildiv(s0, 4)", [(-7, 0), (7, 0), (8, 0), (0, 0), (-8, 0)]),
    ("modular_indexing(s0, s1, 8)", [(-100, 4), (100, 4), (100, -4)]),
    ("max(s0, s1)", [(2**62, 2**62 - 1), (-3, 4)]),
    ("s0 + -9223372036854775808", [(0, 0), (5, 0)]),
    ("s0 < 4611686018427387905", [(2**62, 0), (2**62 + 1, 0)]),
]


def _edge_cases() -> list[Case]:
    return [(parse_expr(text), {"s0": first, "s1": second}) for text, pairs in EDGES for first, second in pairs]


_CPP_TYPES = {"int": "int64_t", "float": "double", "bool": "bool"}


def _cpp_literal(value: Number) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"INT64_C({value})" if isinstance(value, int) else f"({value!r})"


def _cpp_program(cases: list[Case]) -> str:
    functions = []
    for number, (expression, environment) in enumerate(cases):
        kind = expression_kind(expression)
        names = [] if isinstance(expression, int) else sorted(s.name for s in expression.free_symbols)
        declared = "".join(
            f"  {_CPP_TYPES[symbol_kind(name)]} {name} = {_cpp_literal(environment[name])};\n" for name in names
        )
        source = CppPrinter().print(expression)
        print_format = '"%.17g\\n", value' if kind == "float" else '"%lld\\n", static_cast<long long>(value)'
        functions.append(
            f"void case{number}() {{\n{declared}  {_CPP_TYPES[kind]} value = {source};\n"
            f"  std::printf({print_format});\n}}\n"
        )
    calls = "".join(f"  case{number}();\n" for number in range(len(cases)))
    caught = (
        'fxwrap::KernelFailure& failure) {\n  std::printf("%s: %s", failure.kind, failure.message);\n  return 1;\n}'
    )
    main = f"int main() try {{\n{calls}}} catch (const {caught}\n"
    return "#include <cstdio>\n" + cpp_prelude() + "".join(functions) + main


def _run_cpp(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++")
    assert compiler is not None, "the C++ printer's tests need g++ on the PATH"
    (folder / "program.cpp").write_text(source)
    command = [compiler, "-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Werror=narrowing", f"-I{HEADERS}"]
    built = subprocess.run([*command, "program.cpp", "-o", "program"], cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:4000]
    return subprocess.run([str(folder / "program")], capture_output=True, text=True)


def test_cpp_source_equals_evaluation(tmp_path: Path) -> None:
    cases = _collect_cases(sample_size(400)) + _edge_cases()
    result = _run_cpp(_cpp_program(cases), tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.split()
    assert len(lines) == len(cases) > sample_size(200)
    for (expression, environment), line in zip(cases, lines):
        expected = evaluate(expression, environment)
        if expression_kind(expression) == "float":
            assert math.isclose(float(line), expected, rel_tol=1e-12, abs_tol=1e-300), (expression, environment)
        else:
            assert int(line) == int(expected), (expression, environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("floordiv(8, s0)", "ZeroDivisionError: division or modulo by zero"),
        ("mod(8, s0)", "ZeroDivisionError: division or modulo by zero"),
        ("float_true_div(f0, f0 - f0*1.0 + s0)", "ZeroDivisionError: division or modulo by zero"),
        ("pow_by_natural(2, s0 - 1)", "TypeError: exponent of a natural power is negative"),
        ("floor_to_int(1e+30*f0)", "OverflowError: cannot convert 2000000000000000039769249677312.000000 to a 64-bit"),
    ],
)
def test_cpp_throws_where_python_raises(text: str, message: str, tmp_path: Path) -> None:
    expression = parse_expr(text)
    environment: dict[str, Number] = {"s0": 0, "f0": 2.0}
    if "64-bit" not in message:
        assert message.startswith(f"{_evaluated(expression, environment).__name__}:")
    result = _run_cpp(_cpp_program([(expression, environment)]), tmp_path)
    assert result.returncode == 1
    assert result.stdout.startswith(message)


def test_canonicalisation_preserves_meaning() -> None:
    s77, s3 = (sympy.Symbol("s77", integer=True, positive=True), sympy.Symbol("s3", integer=True, positive=True))
    built = sympy_functions.Max(1, sympy_functions.FloorDiv(s77 * s3 + 5, 4)) + sympy_functions.PythonMod(s77, s3)
    assert evaluate(canonicalize(built), {"s77": 9, "s3": 5}) == max(1, 50 // 4) + 9 % 5

"""The tokenizer: kinds, places, strings, line ends and errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxwrap.errors import ParseError
from fxwrap.symbolic import PUNCTUATION, Token, TokenStream, quote, tokenize
from tests.support.strategies.texts import CHARACTERS


def _kinds(text: str) -> list[tuple[str, str]]:
    return [(token.kind, token.text) for token in tokenize(text)][:-1]


def test_kinds_of_a_program_line() -> None:
    assert _kinds('%buf0 = extern.call @aten.mm.out(%x, 1.5e-3) note="a\\"b"') == [
        ("value", "buf0"),
        ("=", "="),
        ("name", "extern.call"),
        ("at", "aten.mm.out"),
        ("(", "("),
        ("value", "x"),
        (",", ","),
        ("number", "1.5e-3"),
        (")", ")"),
        ("name", "note"),
        ("=", "="),
        ("string", 'a"b'),
    ]


def test_the_type_of_a_tensor_with_plain_sizes_is_one_token() -> None:
    assert _kinds("f32[]@cpu, f16[2, 3 | 1, 2]@cuda:1: i64[7 | | 5]@npu") == [
        ("type", "f32[]@cpu"),
        (",", ","),
        ("type", "f16[2, 3 | 1, 2]@cuda:1"),
        (":", ":"),
        ("type", "i64[7 | | 5]@npu"),
    ]
    others = ("f32[s0]@cpu", 'f32[2]@npu<"", "tiled">', "f32[2]", "f32 [2]@cpu", "f32[2.0]@cpu")
    assert all("type" not in dict(_kinds(text)) for text in others)


def test_labels_devices_and_arrows() -> None:
    assert _kinds("^then(%t0): f32[s0]@cuda:0 -> x") == [
        ("label", "then"),
        ("(", "("),
        ("value", "t0"),
        (")", ")"),
        (":", ":"),
        ("name", "f32"),
        ("[", "["),
        ("name", "s0"),
        ("]", "]"),
        ("at", "cuda"),
        (":", ":"),
        ("number", "0"),
        ("->", "->"),
        ("name", "x"),
    ]


@pytest.mark.parametrize("mark", PUNCTUATION)
def test_every_punctuation_mark_is_its_own_kind(mark: str) -> None:
    assert tokenize(f"a {mark} b")[1] == Token(mark, mark, 1, 3)


@pytest.mark.parametrize("number", ["0", "12", "1.", ".5", "0.1", "1e16", "1e+16", "1e-07", "1.5E3"])
def test_numbers(number: str) -> None:
    assert _kinds(number) == [("number", number)]


def test_lines_and_columns_across_comments_blank_lines_and_raw_strings() -> None:
    text = '# head\n\na  # tail\n\n  b """x\ny""" c\n(d,\n e) f\n'
    positions = [(token.text, token.line, token.column) for token in tokenize(text)]
    assert positions == [
        ("a", 3, 1),
        ("\n", 3, 10),
        ("b", 5, 3),
        ("x\ny", 5, 5),
        ("c", 6, 6),
        ("\n", 6, 7),
        ("(", 7, 1),
        ("d", 7, 2),
        (",", 7, 3),
        ("e", 8, 2),
        (")", 8, 3),
        ("f", 8, 5),
        ("\n", 8, 6),
        ("", 9, 1),
    ]


def test_no_newline_tokens_inside_brackets_but_inside_braces() -> None:
    kinds = [token.kind for token in tokenize("[1,\n2] {\na\n}")]
    assert kinds == ["[", "number", ",", "number", "]", "{", "newline", "name", "newline", "}", "end"]


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ("a\n  $", 2, 3, "character '$' starts no token"),
        ('a\n\nb "open', 3, 3, "string that is not closed on its line"),
        ('x """open\nmore', 1, 3, 'string that is never closed by """'),
        ("hash=7c1f", 1, 6, "malformed number"),
        ('"ok" "a\\q"', 1, 8, "bad escape in string"),
        ("% x", 1, 1, "character '%' starts no token"),
    ],
)
def test_errors_have_line_and_column(text: str, line: int, column: int, reason: str) -> None:
    with pytest.raises(ParseError) as caught:
        tokenize(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert reason in caught.value.reason
    assert caught.value.text == text.split("\n")[line - 1]


@given(st.text(CHARACTERS), st.booleans())
def test_quoted_text_round_trips(text: str, raw: bool) -> None:
    assert _kinds(quote(text, raw=raw)) == [("string", text)]


def test_raw_quoting_keeps_source_readable_and_falls_back() -> None:
    assert quote("def f():\n  pass\n", raw=True) == '"""def f():\n  pass\n"""'
    assert quote('"""doc"""', raw=True).startswith('"\\"')


def test_token_stream_accept_peek_and_expect() -> None:
    stream = TokenStream("a = 3")
    assert stream.peek(1).kind == "="
    assert stream.peek(9).kind == "end"
    assert stream.accept("number") is None
    assert stream.expect("name").text == "a"
    assert stream.at("=")
    stream.next()
    assert stream.next().text == "3"
    assert stream.next().kind == "end"
    assert stream.next().kind == "end"


def test_token_stream_errors_name_expected_and_actual_token() -> None:
    stream = TokenStream("a\nb = (")
    for _ in range(3):
        stream.next()
    with pytest.raises(ParseError) as caught:
        stream.expect("name")
    assert str(caught.value) == "line 2, column 3: expected a name, found '='\n  b = (\n    ^"
    assert stream.error("wrong", Token("name", "b", 2, 1)).column == 1

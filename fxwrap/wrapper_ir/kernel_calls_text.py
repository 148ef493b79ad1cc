"""The calls of a launch as the text of a literal: `[[call, ...], [result, ...], [type, ...]]`.

A call is `["aten.sub.Tensor", [operand, ...], [["alpha", operand], ...], false]`. An operand that is no literal is a
list whose first item names its kind: `["operand", 0, false, false, "f32[8]@cpu"]`, `["result", 1, none]`, `["unread"]`
or `["tuple", operand, ...]`.
"""

from __future__ import annotations

from typing import Any

from fxwrap.caching import bounded_cache
from fxwrap.symbolic import TokenStream
from fxwrap.wrapper_ir.kernel_calls import (
    CallOperand,
    CallResult,
    KernelCall,
    KernelCalls,
    LaunchOperand,
    UnreadOperand,
)
from fxwrap.wrapper_ir.literal_parser import LiteralParser
from fxwrap.wrapper_ir.origin import Origin
from fxwrap.wrapper_ir.printer import print_literal, print_type
from fxwrap.wrapper_ir.types import Type


def launched_calls(origin: Origin | None) -> KernelCalls | None:
    """Returns the calls that the launch with an origin computes, None if they are unknown."""
    calls = None if origin is None else origin.calls
    return parse_kernel_calls(calls) if isinstance(calls, str) else calls


def print_kernel_calls(calls: KernelCalls) -> str | None:
    """Returns the text of a launch's calls, None if one of them has an operand without a text, such as a generator."""
    described = tuple([
        (call.target, tuple(map(_encode, call.arguments)),
         tuple([(name, _encode(item)) for name, item in call.keywords]), call.is_view)
        for call in calls.calls
    ])  # fmt: skip
    results, types = tuple(map(_encode, calls.results)), tuple(map(print_type, calls.result_types))
    try:
        return print_literal((described, results, types))
    except (TypeError, KeyError):
        return None


@bounded_cache(1024)
def parse_kernel_calls(text: str) -> KernelCalls:
    """Returns the calls that a text describes. Raises ParseError for other texts."""
    stream = TokenStream(text)
    literal: Any = LiteralParser(stream).operand()
    try:
        described, results, types = literal
        calls = [_decode_call(*item) for item in described]
        return KernelCalls(tuple(calls), tuple(map(_decode, results)), tuple(map(_parse_type, types)))
    except (ValueError, TypeError) as error:
        raise stream.error(f"it does not describe the calls of a launch: {error}", stream.peek()) from None


def _encode(item: CallOperand) -> Any:
    match item:
        case LaunchOperand(position, is_out, is_base, type_):
            return ("operand", position, is_out, is_base, None if type_ is None else print_type(type_))
        case CallResult(call, index):
            return ("result", call, index)
        case UnreadOperand():
            return ("unread",)
        case tuple():
            return ("tuple", *map(_encode, item))
        case _:
            return item  # print_literal raises for what is no literal


def _decode_call(target: Any, arguments: Any, keywords: Any, is_view: Any) -> KernelCall:
    named = tuple([(name, _decode(item)) for name, item in keywords])
    return KernelCall(target, tuple(map(_decode, arguments)), named, is_view)


def _decode(item: Any) -> Any:
    match item:
        case ("operand", position, is_out, is_base, type_):
            return LaunchOperand(position, is_out, is_base, None if type_ is None else _parse_type(type_))
        case ("result", call, index):
            return CallResult(call, index)
        case ("unread",):
            return UnreadOperand()
        case ("tuple", *items):
            return tuple(map(_decode, items))
        case tuple():
            raise ValueError(f"{item} is no operand")
        case _:
            return item


def _parse_type(text: Any) -> Type:
    if not isinstance(text, str):
        raise ValueError(f"{text} is not the text of a type")
    return LiteralParser(TokenStream(text)).type()

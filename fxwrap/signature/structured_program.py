"""Calls of a program with the arguments of the model, which return the model's result."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from typing_extensions import Self

from fxwrap.errors import InputError, JitTraceError, PickleError
from fxwrap.signature.convention import CallingConvention
from fxwrap.signature.kernel_errors import locate_kernel_error
from fxwrap.signature.leaves import ProgramInput, ProgramOutput, program_inputs, program_outputs, signature_text
from fxwrap.torch_compat import (
    any_requires_grad,
    has_functorch_level,
    has_tangent,
    is_intercepted_tensor,
    is_jit_tracing,
    tree_builder,
)
from fxwrap.wrapper_ir import Program

_is_grad_enabled = torch.is_grad_enabled


@dataclass(frozen=True)
class _Entry:
    """The parts of a call that are the same in each.

    `is_plain` is whether positional arguments are the flat inputs. `build` returns the result from the flat outputs;
    None if it is their tuple. If each of the `count` arguments is a flat input and none a constant, `readers[n]` reads
    those after the first n from keywords; otherwise it is empty.
    """

    flat: Callable[..., Any]
    is_plain: bool
    build: Callable[[Sequence[Any]], Any] | None
    count: int
    readers: tuple[Callable[[Mapping[str, object]], Sequence[object]], ...]


def _reader(names: Sequence[str]) -> Callable[[Mapping[str, object]], Sequence[object]]:
    """Returns the fastest function that returns these items of a mapping."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    name = names[0]
    return lambda keywords: (keywords[name],)


class StructuredProgram(ABC):
    """A program with the names and trees of the arguments and results of the model that it was compiled from.

    A call raises InputError for arguments that do not fit, and for inputs that require gradients, unless grad mode is
    off, or have tangents: the results would silently have none. It raises JitTraceError under torch.jit.trace.
    `copy.copy` returns the program itself; pickling and `copy.deepcopy` raise PickleError.
    """

    @property
    @abstractmethod
    def program(self) -> Program:
        """The program."""

    @property
    @abstractmethod
    def convention(self) -> CallingConvention:
        """How arguments become the flat inputs, and the flat outputs the result."""

    @property
    @abstractmethod
    def flat(self) -> Callable[..., Any]:
        """The flat entry, which takes the flat inputs and returns the tuple of flat outputs."""

    def __copy__(self) -> Self:
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise PickleError(type(self).__name__)

    def __call__(self, /, *arguments: object, **keywords: object) -> Any:
        entry = self._entry
        inputs = arguments if entry.is_plain and not keywords else self._bind(entry, arguments, keywords)
        if (_is_grad_enabled() and any_requires_grad(*inputs)) or has_tangent(inputs):
            raise self._gradient_error(inputs)
        if is_jit_tracing():
            raise JitTraceError
        try:
            outputs = self._call_as_graph(inputs) if has_functorch_level() else entry.flat(*inputs)
        except InputError:
            if not any(map(is_intercepted_tensor, inputs)):
                raise
            outputs = self._call_as_graph(inputs)
        except (IndexError, RuntimeError) as error:
            locate_kernel_error(error, self.program)
            raise
        return outputs if entry.build is None else entry.build(outputs)

    @cached_property
    def _entry(self) -> _Entry:
        convention = self.convention
        is_plain = convention.takes_plain_arguments and not convention.constants
        build = None if convention.returns_plain_tuple else tree_builder(convention.result)
        names = convention.arguments if convention.takes_leaves and not convention.constants else ()
        readers = [_reader(names[count:]) for count in range(min(len(names), convention.positional + 1))]
        return _Entry(self.flat, is_plain, build, len(names), tuple(readers))

    def _bind(self, entry: _Entry, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> Sequence[object]:
        count = len(arguments)
        if count < len(entry.readers) and count + len(keywords) == entry.count:
            try:
                return (*arguments, *entry.readers[count](keywords))
            except KeyError:
                pass  # described below
        convention = self.convention
        try:
            inputs = convention.bind(arguments, keywords)
            if convention.constants:
                convention.check_constants(inputs)
        except InputError as error:
            raise InputError(f"program '{self.program.name}': {error}") from None
        return inputs

    @abstractmethod
    def _call_as_graph(self, inputs: Sequence[object]) -> Any:
        """Returns the outputs of the program's FX graph, whose operators torch intercepts as the model's."""

    def _gradient_error(self, inputs: Sequence[object]) -> InputError:
        return gradient_error(inputs, self.convention.input_names)

    @property
    def inputs(self) -> tuple[ProgramInput, ...]:
        """The flat inputs: names, types, ranges of symbols, ownership."""
        return program_inputs(self.program, self.convention)

    @property
    def outputs(self) -> tuple[ProgramOutput, ...]:
        """The flat outputs: names, types, ranges of symbols, the input whose memory they share."""
        return program_outputs(self.program, self.convention)

    def __repr__(self) -> str:
        text = signature_text(self.program, self.convention)
        return f"<{type(self).__name__} '{self.program.name}', {self._repr_details()}\n{text}>"

    @abstractmethod
    def _repr_details(self) -> str:
        """Returns the first line of the program's repr after its name."""


def gradient_error(inputs: Sequence[object], names: Sequence[object]) -> InputError:
    """Returns the error for the first input that requires gradients or has a tangent."""
    position = next(place for place, item in enumerate(inputs) if any_requires_grad(item) or has_tangent([item]))
    recorded = "requires gradients" if any_requires_grad(inputs[position]) else "has a tangent"
    return InputError(
        f"input {names[position]!r} {recorded}, which a compiled graph does not record; call it under torch.no_grad(), "
        "pass input.detach(), or train with torch.compile(backend='fxwrap')"
    )

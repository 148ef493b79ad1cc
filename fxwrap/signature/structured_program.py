"""Calls of a program with the arguments of the model, which return the model's result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from fxwrap.errors import InputError
from fxwrap.signature.convention import CallingConvention
from fxwrap.signature.leaves import ProgramInput, ProgramOutput, program_inputs, program_outputs, signature_text
from fxwrap.torch_compat import any_requires_grad, tree_builder
from fxwrap.wrapper_ir import Program

_is_grad_enabled = torch.is_grad_enabled


class StructuredProgram(ABC):
    """A program with the names and trees of the arguments and results of the model that it was compiled from.

    A call raises InputError for arguments that do not fit, and for inputs that require gradients unless grad mode is
    off: the results would silently have none.
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

    def __call__(self, /, *arguments: object, **keywords: object) -> Any:
        flat, is_plain, build = self._entry
        inputs = arguments if is_plain and not keywords else self._bind(arguments, keywords)
        if _is_grad_enabled() and any_requires_grad(*inputs):
            raise self._gradient_error(inputs)
        try:
            outputs = flat(*inputs)
        except InputError as error:
            outputs = self._after_input_error(inputs, error)
        return outputs if build is None else build(outputs)

    @cached_property
    def _entry(self) -> tuple[Callable[..., Any], bool, Callable[[Sequence[Any]], Any] | None]:
        """The flat entry, whether positional arguments are its inputs, and what builds the result, if anything does."""
        convention = self.convention
        is_plain = convention.takes_plain_arguments and not convention.constants
        return self.flat, is_plain, None if convention.returns_plain_tuple else tree_builder(convention.result)

    def _bind(self, arguments: Sequence[object], keywords: Mapping[str, object]) -> Sequence[object]:
        convention = self.convention
        try:
            inputs = convention.bind(arguments, keywords)
            if convention.constants:
                convention.check_constants(inputs)
        except InputError as error:
            raise InputError(f"program '{self.program.name}': {error}") from None
        return inputs

    def _after_input_error(self, _inputs: Sequence[object], error: InputError) -> Any:
        """Returns the outputs for inputs that the flat entry rejects, or raises its error."""
        raise error

    def _gradient_error(self, inputs: Sequence[object]) -> InputError:
        position = next(place for place, item in enumerate(inputs) if any_requires_grad(item))
        return gradient_error(f"input '{self.convention.input_names[position]}'")

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


def gradient_error(label: str) -> InputError:
    """Returns the error for an input that requires gradients."""
    return InputError(
        f"{label} requires gradients, which a compiled graph does not record; call it under torch.no_grad(), pass "
        "input.detach(), or train with torch.compile(backend='fxwrap')"
    )

"""Emitted C++ that runs: its libraries, what they are linked with, and those of functions that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

from fxwrap.converters.cpp_replay import ReplayingProgram, function_program, replayed_functions
from fxwrap.converters.emitted import Emitted
from fxwrap.device_registry import language_facts
from fxwrap.device_spec import KernelLanguage
from fxwrap.lines import CallFunction
from fxwrap.runtime.cpp_kernels import KernelText, cpp_kernel_units
from fxwrap.runtime.native import NativeSource, compile_cpp, load_program, provided_program, source_key
from fxwrap.runtime.native import Program as NativeProgram
from fxwrap.runtime.triton_units import compiled_variants, variants_unit
from fxwrap.wrapper_ir import KernelDefinition, Program


class EmittedCpp(Emitted):
    """A program as a C++ translation unit, which is compiled when it is first called.

    A function that is recorded and replayed is a program of its own. `functions` are these, one for each line that
    calls one.
    """

    def __init__(
        self,
        source: str,
        program: Program,
        kernels: Sequence[KernelDefinition],
        replays: Sequence[CallFunction],
        emit: Callable[[Program], EmittedCpp],
    ) -> None:
        """`kernels` are those that it launches, `replays` the lines whose functions are replayed."""
        load = cache(self._load)
        super().__init__(source, lambda: load().boxed, load)  # native code runs below autograd: it needs no guard
        self._program = program
        self._kernels = tuple(kernels)
        self._replays = tuple(replays)
        self._emit = emit

    @cached_property
    def functions(self) -> tuple[EmittedCpp, ...]:
        """The functions that are replayed, in the order of the lines that call them."""
        return tuple([self._emit(function_program(self._program, line)) for line in self._replays])

    def libraries(self) -> Mapping[str, Path]:
        """Returns the library of the program, then those of its functions, each by the key of its source.

        What is not compiled yet is compiled now. Raises NativeBuildError where it does not compile.
        """
        own = {source_key(self.source): self.library()}
        return own | {key: path for function in self.functions for key, path in function.libraries().items()}

    def library(self) -> Path:
        """Returns the library of the program alone, compiled now where it is not yet. Raises NativeBuildError."""
        path = provided_program(self.source)
        if path is not None:
            return path
        kernels = [KernelText(item.language, item.source, item.signature, item.options) for item in self._kernels]
        return compile_cpp(self.source, name=self._program.name, extra_sources=linked_units(kernels))

    def _load(self) -> NativeProgram | ReplayingProgram:
        program, library = self._program, self.library()
        constants = [program.store.tensors[constant.value.name] for constant in program.constants]
        if not self._replays:
            return load_program(library, constants)
        functions = replayed_functions(program, self._replays, self.functions)
        return ReplayingProgram(load_program(library, [*constants, functions.handle]), functions)


def linked_units(kernels: Sequence[KernelText]) -> list[NativeSource]:
    """Returns what emitted C++ is linked with, of its kernels: those in C++, and what Triton has compiled by now."""
    in_cpp = [kernel for kernel in kernels if language_facts(kernel.language).linked]
    by_triton = [kernel for kernel in kernels if is_compiled_by_triton(language_facts(kernel.language))]
    variants = {kernel.symbol: compiled_variants(kernel) for kernel in by_triton}
    return [*cpp_kernel_units(in_cpp), *variants_unit(variants)]


def is_compiled_by_triton(facts: KernelLanguage) -> bool:
    """Says whether kernels of a language are launched with what Triton compiled before; the user's are tuned first."""
    return facts.is_triton and not facts.by_user

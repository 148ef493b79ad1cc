"""The shared libraries of emitted C++ programs and of their captured functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from fxwrap.converters.cpp.replay import ReplayingProgram, function_as_program, graphed_functions
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.devices import KernelLanguage, language_traits
from fxwrap.lines import CallFunction, Launch
from fxwrap.runtime import native
from fxwrap.runtime.cpp_kernels import KernelText, make_translation_units
from fxwrap.runtime.triton.binaries import compiled_variants, variants_unit
from fxwrap.wrapper_ir import Block, KernelDefinition, Program

LAUNCH_OPERATOR = "fxwrap_runtime.launch.default"
"""The operator of the runtime that launches a kernel by its text; Python implements it."""


@dataclass(frozen=True)
class ReplayedFunction:
    """A function that the runtime captures and replays: its call, its block, and its own emitted program."""

    line: CallFunction
    block: Block
    emitted: EmittedCpp


class EmittedCpp(EmittedProgram):
    """A program as a C++ translation unit, which is compiled at the first call.

    Each call of a captured function has its own program in `functions`, in the order of the calls.
    """

    def __init__(
        self,
        source: str,
        program: Program,
        kernels: Sequence[KernelDefinition],
        replayed_calls: Sequence[CallFunction],
        operators: Sequence[str],
        engine: str,
        emit: Callable[[Program], EmittedCpp],
    ) -> None:
        """`kernels` are the launched kernels, and `replayed_calls` the calls of captured functions.

        `operators` are the called operators as "namespace.name.overload", `engine` is the engine of the C runtime that
        they need: "cpu" or "torch".
        """
        load = cache(self._load)
        super().__init__(source, lambda: load().boxed, load)  # native code runs below autograd
        self._program = program
        self._texts = tuple([KernelText.of(item) for item in kernels])
        self._replayed_calls = tuple(replayed_calls)
        self.operators = tuple(operators)
        self.engine = engine
        self._emit = emit

    @property
    def triton_kernels(self) -> tuple[KernelText, ...]:
        """The launched kernels whose compiled Triton code is linked in, if there is any."""
        return tuple([text for text in self._texts if is_compiled_by_triton(language_traits(text.language))])

    @cached_property
    def functions(self) -> tuple[ReplayedFunction, ...]:
        """The captured functions, in the order of their calls."""
        blocks = dict(self._program.functions)
        return tuple([
            ReplayedFunction(line, blocks[line.function], self._emit(function_as_program(self._program, line)))
            for line in self._replayed_calls
        ])  # fmt: skip

    def units(self) -> tuple[EmittedCpp, ...]:
        """Returns the program and those of its captured functions, which have a library each."""
        return (self, *[unit for function in self.functions for unit in function.emitted.units()])

    def libraries(self, relink: bool = False) -> Mapping[str, Path]:
        """Compiles and returns the libraries of the program and its functions, by the key of the source.

        `relink` compiles even where a loaded file has the library. Raises NativeBuildError for a compilation error.
        """
        return {native.source_key(unit.source): unit.library(relink) for unit in self.units()}

    def library(self, relink: bool = False) -> Path:
        """Compiles and returns the library of the program, as `libraries` does."""
        path = None if relink else native.find_prebuilt_program(self.source)
        if path is not None:
            return path
        return native.compile_cpp(self.source, name=self._program.name, extra_sources=self.kernel_units())

    def kernel_units(self) -> list[native.NativeSource]:
        """Returns the translation units of the launched kernels, which are linked with `source`."""
        return linked_units(self._texts)

    def _load(self) -> native.NativeProgram | ReplayingProgram:
        program, library = self._program, self.library()
        contents = program.constant_operands()
        constants = [contents[constant.value.name] for constant in program.constants]
        if not self._replayed_calls:
            return native.load_program(library, constants)
        functions = graphed_functions(program, self._replayed_calls, [item.emitted for item in self.functions])
        return ReplayingProgram(native.load_program(library, [*constants, functions.handle]), functions)


def load_cpp(source: str, constants: Sequence[torch.Tensor]) -> EmittedProgram:
    """Returns the program of an emitted translation unit without captured functions, whose library is registered.

    `constants` are in the program's order.
    """

    @cache
    def load() -> native.NativeProgram:
        library = native.find_prebuilt_program(source)
        assert library is not None
        return native.load_program(library, constants)

    return EmittedProgram(source, lambda: load().boxed, load)


def linked_units(kernels: Sequence[KernelText]) -> list[native.NativeSource]:
    """Returns the sources linked into emitted C++: C++ kernels, and the Triton kernels compiled so far."""
    in_cpp = [kernel for kernel in kernels if language_traits(kernel.language).links_into_cpp]
    by_triton = [kernel for kernel in kernels if is_compiled_by_triton(language_traits(kernel.language))]
    variants = {kernel.symbol: compiled_variants(kernel) for kernel in by_triton}
    return [*make_translation_units(in_cpp), *variants_unit(variants)]


def is_compiled_by_triton(traits: KernelLanguage) -> bool:
    """Returns whether compiled Triton code of a language is linked in; a user's kernels are autotuned first."""
    return traits.is_triton and not traits.user_defined


def is_launched_by_python(line: Launch, kernel: KernelDefinition) -> bool:
    """Returns whether emitted C++ launches a kernel by `LAUNCH_OPERATOR`.

    These are kernels of other languages, Triton kernels of the user's, and those with more parameters than arguments.
    """
    traits = language_traits(kernel.language)
    if traits.links_into_cpp:
        return False
    return not is_compiled_by_triton(traits) or len(line.arguments) + len(line.outs) != len(kernel.signature)

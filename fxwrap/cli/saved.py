"""The commands for saved programs: `inspect`, `run`, `sign` and `export-cmake`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from fxwrap.artifact import LoadedProgram, load, read_saved
from fxwrap.artifact.cmake_export import export_cmake
from fxwrap.artifact.constants import read_tensor_file
from fxwrap.artifact.signing import make_signing_key, public_key_of, sign
from fxwrap.artifact.tensor_file import SAFETENSORS_DTYPES, header_bytes, tensor_bytes
from fxwrap.cli.flags import check_input_file, refuse_flags
from fxwrap.cli.target import random_input
from fxwrap.comparison.report import bytes_text
from fxwrap.errors import CommandError
from fxwrap.runtime.cache_folder import write_file
from fxwrap.signature import ProgramInput
from fxwrap.symbolic import Number, SymbolInfo, evaluate_size, symbol_kind
from fxwrap.wrapper_ir import Input, TensorType, Value, contiguous_strides, symbol_infos

SUFFIX = ".fxw"
"""The suffix of saved programs."""

_SMALL_SIZE = 2
"""The size that a symbol without a hint has in random inputs, if its range allows."""


def read_program_file(path: str) -> LoadedProgram:
    """Returns a saved program that does not run. Raises CommandError for a file that does not exist."""
    check_input_file(path)
    return read_saved(path)


def inspect_saved(chosen: argparse.Namespace) -> int:
    """Prints what a file contains: signature, versions, kernels, constants, compiled code, sizes."""
    print(inspection(read_program_file(chosen.target)))
    return 0


def sign_saved(chosen: argparse.Namespace) -> int:
    """Creates a private key, signs a file, prints the public key. Raises CommandError for a key file that exists."""
    try:
        if chosen.new:
            content = f"{make_signing_key()}\n".encode("ascii")
            write_file(Path(chosen.key), lambda file: file.write(content), 0o600, replaces=False)
        key = Path(chosen.key).read_text(encoding="ascii")
    except (OSError, UnicodeError) as error:
        raise CommandError(f"the key file '{chosen.key}': {error}") from error
    print(public_key_of(key) if chosen.target is None else sign(chosen.target, key))
    return 0


def inspection(saved: LoadedProgram) -> str:
    """Returns a description of a saved program for people."""
    manifest = saved.metadata
    versions = ", ".join([f"{name} {version}" for name, version in sorted(manifest["written_by"].items())])
    languages = [str(kernel["language"]) for kernel in manifest["kernels"]]
    counted = ", ".join([f"{languages.count(name)} {name}" for name in dict.fromkeys(languages)]) or "none"
    entries: Mapping[str, Any] = manifest["entries"]
    sizes = [f"  {bytes_text(int(item['size'])):>10}  {name}" for name, item in entries.items()]
    variants = [item["variant"] for item in manifest["binaries"].get("triton", ()) if item["variant"]]
    architectures = [f"sm_{capability}" for capability in sorted({item["capability"] for item in variants})]
    types = saved.convention.unknown_types
    constants = manifest["constants"]
    where = "in the file" if constants["inside"] else "not in the file: pass them to load_constants"
    rows = [
        repr(saved).strip("<>"),
        *([f"types of arguments and results: {', '.join(types)}"] if types else []),
        f"devices: {', '.join(manifest['devices']) or 'none'}",
        f"written by: {versions}",
        f"options: {manifest['options'] or 'the defaults'}",
        f"kernels: {counted}",
        *([f"Triton code for: {', '.join(architectures)}"] if architectures else []),
        f"constants: {len(saved.program.constants)}, {where}" if saved.program.constants else "constants: none",
        *[f"  {item.value.name}: {_short_type(item.value.tensor_type)}" for item in saved.program.constants],
        f"entries: {bytes_text(sum(int(item['size']) for item in entries.values()))}",
        *sizes,
    ]
    return "\n".join(rows)


def _short_type(type_: TensorType) -> str:
    return f"{str(type_.dtype).removeprefix('torch.')}[{', '.join(map(str, type_.sizes))}] on {type_.device}"


def export_saved(chosen: argparse.Namespace) -> int:
    """Writes the CMake project of a saved program, and prints its folder."""
    check_input_file(chosen.target)
    export_cmake(load(chosen.target, emitter="cpp"), Path(chosen.folder))
    print(chosen.folder)
    return 0


# --- running ----------------------------------------------------------------------------------------------------------


def run_saved(chosen: argparse.Namespace) -> int:
    """Runs a saved program on inputs from a file, or on random ones, and prints or writes its outputs."""
    check_input_file(chosen.target)
    if chosen.inputs is not None:
        refuse_flags(chosen, ("seed",), f"the inputs are those of '{chosen.inputs}'")
    program = load(chosen.target, emitter=chosen.emitter, trust=chosen.trust)
    torch.manual_seed(chosen.seed)
    if chosen.inputs is None:
        inputs = random_inputs_of(program, chosen.seed)
    else:
        inputs = _ordered(program, _read_values(Path(chosen.inputs)), chosen.inputs)
    with torch.no_grad():
        results = program.flat(*inputs)
    outputs = dict(zip(program.convention.output_names, results, strict=True))
    for name, value in outputs.items():
        print(f"{name}: {_summary(value)}")
    if chosen.output is not None:
        _write_values(Path(chosen.output), outputs)
    return 0


def random_inputs_of(program: LoadedProgram, seed: int) -> list[object]:
    """Returns random inputs of a program; symbols have their hints, else 2 or the nearest value of their range."""
    generator = torch.Generator().manual_seed(seed)
    values = {name: _symbol_value(info) for name, info in symbol_infos(program.program).items()}
    return [_random_value(item, values, generator) for item in program.inputs]


def _random_value(item: ProgramInput, values: Mapping[str, Number], generator: torch.Generator) -> object:
    if item.is_constant:
        return item.constant
    if isinstance(item.value, SymbolInfo):
        return values[item.value.name]
    if not isinstance(item.type, TensorType):
        return random_input(Input(item.value), generator)
    type_ = item.type
    sizes = tuple([evaluate_size(size, values) for size in type_.sizes])
    strides = tuple([evaluate_size(stride, values) for stride in type_.strides])
    dense = type_.strides == contiguous_strides(type_.sizes)
    concrete = TensorType(type_.dtype, sizes, contiguous_strides(sizes) if dense else strides, type_.device)
    return random_input(Input(Value(item.name, concrete)), generator)


def _symbol_value(info: SymbolInfo) -> Number:
    kind = symbol_kind(info.name)
    if info.hint is not None:
        return info.hint
    if kind != "int":
        return 0.5 if kind == "float" else True
    value = max(_SMALL_SIZE, info.lower or 0)
    return int(value if info.upper is None else min(value, info.upper))


def _read_values(path: Path) -> Mapping[str, object] | Sequence[object]:
    """Returns the values of a file: by name, or in order."""
    check_input_file(path)
    read = _READERS.get(path.suffix)
    if read is None:
        raise CommandError(f"'{path}' is not one of {', '.join(f'*{suffix}' for suffix in _READERS)}")
    try:
        values = read(path)
    except CommandError:
        raise
    except Exception as error:  # what readers raise for damaged files has no common class
        raise CommandError(f"'{path}' cannot be read: {error}") from error
    if isinstance(values, torch.Tensor):
        return [values]
    if not isinstance(values, Mapping | list | tuple):
        raise CommandError(f"'{path}' has a {type(values).__name__}, not tensors by name or a list of them")
    return values


def _read_arrays(path: Path) -> dict[str, torch.Tensor]:
    with _numpy().load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise CommandError("files of NumPy need the package numpy; install it, or use .pt or .safetensors") from error
    return numpy


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".pt": lambda path: torch.load(path, weights_only=True),
    ".safetensors": lambda path: read_tensor_file(str(path), mapped=False),
    ".npz": _read_arrays,
}


def _ordered(program: LoadedProgram, values: Mapping[str, object] | Sequence[object], path: str) -> list[object]:
    """Returns the flat inputs for the values of a file. Raises CommandError for missing and unexpected names."""
    needed = [item for item in program.inputs if not item.is_constant]
    names = [item.name for item in needed]
    if not isinstance(values, Mapping):
        if len(values) != len(names):
            raise CommandError(f"'{path}' has {len(values)} values; the program takes {len(names)}: {', '.join(names)}")
        values = dict(zip(names, values, strict=True))
    missing, unexpected = [name for name in names if name not in values], [key for key in values if key not in names]
    for verb, listed in (("misses", missing), ("has", unexpected)):
        if listed:
            raise CommandError(f"'{path}' {verb} {', '.join(map(repr, listed))}; the inputs are {', '.join(names)}")
    return [item.constant if item.is_constant else _value(item, values[item.name]) for item in program.inputs]


def _value(item: ProgramInput, value: object) -> object:
    """Returns a value from a file as the program takes it: a number, or a tensor on the program's device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(item.type.device) if isinstance(item.type, TensorType) else value.item()


def _summary(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}] on {value.device}"
    if value.numel() == 0 or value.is_complex() or value.dtype is torch.bool:
        return text
    real = value.detach().double()
    return f"{text}, mean {real.mean().item():.6g}, min {real.min().item():.6g}, max {real.max().item():.6g}"


def _write_values(path: Path, outputs: Mapping[str, object]) -> None:
    """Writes outputs by name. Raises CommandError for an unknown suffix, or values that the format cannot hold."""
    if path.suffix not in _READERS:
        raise CommandError(f"'{path}' is not one of {', '.join(f'*{suffix}' for suffix in _READERS)}")
    if path.suffix == ".pt":
        _write_file(path, lambda file: torch.save(dict(outputs), file))
        return
    items = {name: item for name, item in outputs.items() if isinstance(item, torch.Tensor)}
    tensors = {name: item.detach().cpu().contiguous() for name, item in items.items()}
    if path.suffix == ".npz":
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        _write_file(path, lambda file: _numpy().savez(file, **arrays))
        return
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_DTYPES]
    if unknown:
        raise CommandError(f"the safetensors format has no dtype for {', '.join(unknown)}; write a .pt file")
    header = header_bytes([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    content = [header, *[bytes(tensor_bytes(tensor)) for tensor in tensors.values()]]
    write_file(path, lambda file: file.writelines(content))


def _write_file(path: Path, write: Callable[[BytesIO], object]) -> None:
    """Writes a file atomically, by a function whose writer cannot handle a full disk."""
    content = BytesIO()
    write(content)
    write_file(path, lambda file: file.write(content.getbuffer()))

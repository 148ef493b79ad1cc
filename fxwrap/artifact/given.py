"""Constants that a caller gives to a loaded program: checked by name, dtype and sizes, laid out as it wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fxwrap.artifact.constants import ConstantLayout, Window
from fxwrap.wrapper_ir import DTYPE_NAMES

Refuse = Callable[[str, str], Exception]
"""Makes the error for constants that do not fit: what is wrong, and the remedy."""

_PREFIXES = ("", "p_", "b_", "c_")
"""What torch.export puts before the names of parameters, buffers and constants."""


def by_program_names(
    given: Mapping[str, torch.Tensor], names: Sequence[str], refuse: Refuse
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns tensors by the program's names for them, and the keys that name none of its constants.

    A key is such a name, or the name that the model has for the tensor ("layers.0.weight").
    """
    known = set(names)
    found: dict[str, torch.Tensor] = {}
    keys: dict[str, str] = {}
    surplus = []
    for key, tensor in given.items():
        plain = key.replace(".", "_")
        name = next((prefix + plain for prefix in _PREFIXES if prefix + plain in known), None)
        name = key if key in known else name
        if name is None:
            surplus.append(key)
        elif name in found:
            raise refuse(f"'{keys[name]}' and '{key}' both stand for the constant '{name}'", "Give one of them")
        else:
            found[name], keys[name] = tensor, key
    return found, surplus


def check_given(
    layout: ConstantLayout, given: Mapping[str, torch.Tensor], surplus: Sequence[str], refuse: Refuse, all_of_them: bool
) -> None:
    """Raises what `refuse` makes where tensors are missing, surplus, or of another dtype or size; it names them all.

    With `all_of_them` every piece of memory must be given whole, by constants that cover it.
    """
    windows = {window.name: window for window in layout.windows}
    wrong = [_mismatch(windows[name], tensor) for name, tensor in given.items()]
    found = {
        "missing": _missing(layout, given) if all_of_them else [],
        "surplus": [repr(key) for key in surplus],
        "of another type": [text for text in wrong if text],
    }
    if any(found.values()):
        texts = [f"{kind}: {', '.join(items)}" for kind, items in found.items() if items]
        known = ", ".join([repr(name) for name in list(windows)[:4]]) + (", ..." if len(windows) > 4 else "")
        remedy = f"Give a tensor for each of the program's constants ({known}), which `program.constants` describes"
        raise refuse(f"the constants do not fit the program; {'; '.join(texts)}", remedy)


def _missing(layout: ConstantLayout, given: Mapping[str, torch.Tensor]) -> list[str]:
    missing = []
    for key, group in layout.sharing().items():
        if key not in given:  # a constant that is all of the memory stands for those that are parts of it
            missing += [repr(window.name) for window in group if window.name not in given]
    return missing


def _mismatch(window: Window, tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"'{window.name}' is a {type(tensor).__name__}"
    if tensor.dtype == window.dtype and tuple(tensor.shape) == window.sizes:
        return ""
    wanted = f"{DTYPE_NAMES[window.dtype]}{list(window.sizes)}"
    return f"'{window.name}' is {DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))}{list(tensor.shape)}, not {wanted}"


def laid_out(
    layout: ConstantLayout, given: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device], refuse: Refuse
) -> dict[str, torch.Tensor]:
    """Returns constants on their devices, laid out as the program wants them; checked tensors come in.

    A tensor that is so already is taken as it is, without a copy. Where constants share memory, all are windows on what
    is given for the one that is all of it, if the others are such windows or are not given; else they are copied into
    memory that they share, and what is given for them must agree.
    """
    found: dict[str, torch.Tensor] = {}
    for key, group in layout.sharing().items():
        present = {window.name: given[window.name].detach() for window in group if window.name in given}
        if len(group) == 1:
            found[group[0].name] = _alone(group[0], present[group[0].name], devices[group[0].name])
        else:
            device = devices[group[0].name]
            found.update(_as_given(key, group, present, device) or _together(key, group, present, device, refuse))
    return {window.name: found[window.name] for window in layout.windows}


def _lies_as(window: Window, tensor: torch.Tensor) -> bool:
    same = all(size < 2 or a == b for size, a, b in zip(window.sizes, tensor.stride(), window.strides))
    return same and not tensor.is_conj() and not tensor.is_neg()


def _alone(window: Window, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.to(device)
    if _lies_as(window, tensor):
        return tensor
    made = torch.empty_strided(window.sizes, window.strides, dtype=window.dtype, device=device)
    _copy(made, tensor)
    return made


def _as_given(
    key: str, group: Sequence[Window], present: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Returns constants as windows on memory as it is given; None where it does not lie as the program has it."""
    windows = {window.name: window for window in group}
    whole = present.get(key)
    if whole is None or not all(_lies_as(windows[name], tensor) for name, tensor in present.items()):
        return None
    first = whole.data_ptr() - windows[key].start
    if any(tensor.device != whole.device or tensor.data_ptr() != first + windows[name].start
           for name, tensor in present.items()):  # fmt: skip
        return None
    whole = whole.to(device)
    start = int(whole.storage_offset()) * whole.element_size() - windows[key].start
    if any((start + window.start) % window.dtype.itemsize for window in group):
        return None
    return {window.name: _window(window, whole, start) for window in group}


def _window(window: Window, memory: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Returns a constant as a window on memory that begins at this byte of a tensor's storage."""
    return torch.empty(0, dtype=window.dtype, device=memory.device).set_(
        memory.untyped_storage(), (start + window.start) // window.dtype.itemsize, window.sizes, window.strides
    )


def _together(
    key: str, group: Sequence[Window], present: Mapping[str, torch.Tensor], device: torch.device, refuse: Refuse
) -> dict[str, torch.Tensor]:
    memory = torch.zeros(max(window.end for window in group), dtype=torch.uint8, device=device)
    made = {window.name: _window(window, memory) for window in group}
    order = sorted(present, key=lambda name: name != key)  # the one that is all of it first
    for name in order:
        _copy(made[name], present[name])
    for name in order:
        if not torch.equal(_bytes(made[name]), _bytes(present[name].to(device))):
            names = ", ".join([repr(window.name) for window in group])
            raise refuse(
                f"the constants {names} share memory in the program, and what is given for them differs",
                f"Give equal numbers, or only those for '{key}'",
            )
    return made


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies numbers; along dimensions in which all elements of the target are one, the first of them."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def overwrite(constants: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Writes checked tensors into the constants of these names."""
    with torch.no_grad():
        for name, tensor in given.items():
            _copy(constants[name], tensor)

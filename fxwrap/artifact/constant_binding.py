"""Binds a caller's tensors as the constants of a loaded program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from fxwrap.artifact.constants import ConstantLayout, SavedView
from fxwrap.torch_compat import DTYPE_NAMES

MakeError = Callable[[str, str], Exception]
"""Returns the error for constants that do not fit, from reason and remedy."""

_PREFIXES = ("", "p_", "b_", "c_")
"""torch.export's prefixes of parameter, buffer and constant names."""


def match_constant_names(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], make_error: MakeError
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns tensors by the program's names, and the keys that match none of its constants.

    A key is the name of a constant in the program or in the model ("layers.0.weight").
    """
    known = set(names)
    matched: dict[str, torch.Tensor] = {}
    keys: dict[str, str] = {}
    unexpected = []
    for key, tensor in tensors.items():
        plain = key.replace(".", "_")
        name = next((prefix + plain for prefix in _PREFIXES if prefix + plain in known), None)
        name = key if key in known else name
        if name is None:
            unexpected.append(key)
        elif name in matched:
            raise make_error(f"'{keys[name]}' and '{key}' both name the constant '{name}'", "Pass one of them")
        else:
            matched[name], keys[name] = tensor, key
    return matched, unexpected


def check_constants(
    layout: ConstantLayout,
    tensors: Mapping[str, torch.Tensor],
    unexpected: Sequence[str],
    make_error: MakeError,
    require_all: bool,
) -> None:
    """Raises `make_error`'s error for all tensors that are missing, unexpected, or of another dtype or size.

    With `require_all`, tensors must cover all storages.
    """
    views = {view.name: view for view in layout.views}
    wrong = [_mismatch(views[name], tensor) for name, tensor in tensors.items()]
    problems = {
        "missing": _missing(layout, tensors) if require_all else [],
        "unexpected": [repr(key) for key in unexpected],
        "of another type": [text for text in wrong if text],
    }
    if any(problems.values()):
        texts = [f"{kind}: {', '.join(items)}" for kind, items in problems.items() if items]
        known = ", ".join([repr(name) for name in list(views)[:4]]) + (", ..." if len(views) > 4 else "")
        remedy = f"Pass a tensor for each of the program's constants ({known}), see `program.constants`"
        raise make_error(f"the constants do not fit the program; {'; '.join(texts)}", remedy)


def _missing(layout: ConstantLayout, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    missing = []
    for key, group in layout.views_by_storage().items():
        if _covering(key, group, tensors) not in tensors:  # a constant that covers the storage replaces its parts
            missing += [repr(view.name) for view in group if view.name not in tensors]
    return missing


def _covering(key: str, group: Sequence[SavedView], tensors: Collection[str]) -> str:
    """Returns the name of a constant that covers its storage: if possible one that the caller passed."""
    start, end = min(view.start for view in group), max(view.end for view in group)
    names = [view.name for view in group if (view.start, view.end) == (start, end) and _has_no_gaps(view)]
    return next((name for name in names if name in tensors), key)


def _has_no_gaps(view: SavedView) -> bool:
    """Whether a constant covers the bytes from its start to its end, in any order of dimensions."""
    step = 1
    for stride, size in sorted(zip(view.strides, view.sizes, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _mismatch(view: SavedView, tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"'{view.name}' is a {type(tensor).__name__}"
    if tensor.dtype == view.dtype and tuple(tensor.shape) == view.sizes:
        return ""
    expected = f"{DTYPE_NAMES[view.dtype]}{list(view.sizes)}"
    return f"'{view.name}' is {DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))}{list(tensor.shape)}, not {expected}"


def bind_constants(
    layout: ConstantLayout,
    tensors: Mapping[str, torch.Tensor],
    devices: Mapping[str, torch.device],
    make_error: MakeError,
) -> dict[str, torch.Tensor]:
    """Returns constants on their devices with the program's layout, from checked tensors.

    Tensors that have it already are not copied. Constants that share memory become views of the tensor that covers it,
    if the other tensors are such views or missing; else they are copied into shared memory and must agree.
    """
    bound: dict[str, torch.Tensor] = {}
    for key, group in layout.views_by_storage().items():
        present = {view.name: tensors[view.name].detach() for view in group if view.name in tensors}
        if len(group) == 1:
            bound[group[0].name] = _bind_single(group[0], present[group[0].name], devices[group[0].name])
        else:
            device = devices[group[0].name]
            key = _covering(key, group, present)
            bound.update(
                _bind_shared_views(key, group, present, device)
                or _bind_shared_copy(key, group, present, device, make_error)
            )
    return {view.name: bound[view.name] for view in layout.views}


def _has_layout(view: SavedView, tensor: torch.Tensor) -> bool:
    same = all(size < 2 or a == b for size, a, b in zip(view.sizes, tensor.stride(), view.strides))
    return same and not tensor.is_conj() and not tensor.is_neg()


def _bind_single(view: SavedView, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.to(device)
    if _has_layout(view, tensor):
        return tensor
    target = torch.empty_strided(view.sizes, view.strides, dtype=view.dtype, device=device)
    _copy(target, tensor)
    return target


def _bind_shared_views(
    key: str, group: Sequence[SavedView], present: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Returns constants as views of existing memory; None if its layout differs from the program's."""
    views = {view.name: view for view in group}
    whole = present.get(key)
    if whole is None or not all(_has_layout(views[name], tensor) for name, tensor in present.items()):
        return None
    first = whole.data_ptr() - views[key].start
    if any(tensor.device != whole.device or tensor.data_ptr() != first + views[name].start
           for name, tensor in present.items()):  # fmt: skip
        return None
    whole = whole.to(device)
    start = int(whole.storage_offset()) * whole.element_size() - views[key].start
    if any((start + view.start) % view.dtype.itemsize for view in group):
        return None
    return {view.name: _make_view(view, whole, start) for view in group}


def _make_view(view: SavedView, memory: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Returns a constant as a view of a tensor's storage from byte `start` on."""
    return torch.empty(0, dtype=view.dtype, device=memory.device).set_(
        memory.untyped_storage(), (start + view.start) // view.dtype.itemsize, view.sizes, view.strides
    )


def _bind_shared_copy(
    key: str,
    group: Sequence[SavedView],
    present: Mapping[str, torch.Tensor],
    device: torch.device,
    make_error: MakeError,
) -> dict[str, torch.Tensor]:
    memory = torch.zeros(max(view.end for view in group), dtype=torch.uint8, device=device)
    views = {view.name: _make_view(view, memory) for view in group}
    order = sorted(present, key=lambda name: name != key)  # the one that covers all memory first
    for name in order:
        _copy(views[name], present[name])
    for name in order:
        if not torch.equal(_bytes(views[name]), _bytes(present[name].to(device))):
            names = ", ".join([repr(view.name) for view in group])
            raise make_error(
                f"the constants {names} share memory in the program, and their tensors differ",
                f"Pass equal values, or only those of '{key}'",
            )
    return views


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies elements; along expanded dimensions of the target, only the first."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def overwrite(constants: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies checked tensors into the constants of these names."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            _copy(constants[name], tensor)

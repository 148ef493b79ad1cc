"""The state of a training step: tensors that it reads and writes apart from its inputs.

State is found through the step's own references: closures, global variables that its code names, bound objects, default
arguments. Modules contribute parameters and buffers, optimizers their parameters, state and tensors among their
hyperparameters, other objects of the user's classes the tensors among their attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fxwrap.errors import StepError
from fxwrap.torch_compat import create_parameter_state, ddp_limit, fsdp_limit, is_ddp, is_fsdp2, module_tables


class _CellContents(dict[str, Any]):
    """A closure's cell as a container with the one key "contents"."""

    def __init__(self, cell: CellType) -> None:
        super().__init__()
        self.cell = cell

    def __getitem__(self, key: str) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self.cell.cell_contents = value


@dataclass(frozen=True)
class Slot:
    """A place that holds a tensor of the state: `container[key]`."""

    name: str
    container: Any
    key: Any

    def get(self) -> Any:
        """Returns the tensor that the place holds now."""
        return self.container[self.key]

    def set(self, value: object) -> None:
        """Puts another value there."""
        self.container[self.key] = value


@dataclass
class StepState:
    """The state of a step.

    Fields:
        slots: the places of tensors, several for a tensor that is shared.
        numbers: places of Python numbers in the user's objects and in optimizers, which are constants of the program.
        modules, optimizers: the objects by name.
        parallel: the modules of DDP and FSDP2.
    """

    slots: list[Slot] = field(default_factory=list)
    numbers: list[Slot] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    parallel: list[nn.Module] = field(default_factory=list)

    def unique(self) -> dict[int, Slot]:
        """Returns the first place of each tensor, by the identity of the tensor."""
        places: dict[int, Slot] = {}
        for slot in self.slots:
            places.setdefault(id(slot.get()), slot)
        return places


def find_state(step: Callable[..., object]) -> StepState:
    """Returns the state that a step reaches. Raises StepError for modules whose collectives are not traced."""
    finder = _Finder()
    finder.visit(step, "", None)
    for name, optimizer in finder.state.optimizers.items():
        finder.add_optimizer_state(name, optimizer)
    return finder.state


class _Finder:
    def __init__(self) -> None:
        self.state = StepState()
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that identities stay unique

    def visit(self, item: Any, name: str, place: Slot | None) -> None:
        """Adds the state that an object holds; `place` holds the object."""
        if isinstance(item, Tensor):
            if place is not None:
                self.state.slots.append(place)
            return
        if type(item) in (int, float, bool):
            if place is not None:
                self.state.numbers.append(place)
            return
        if id(item) in self._seen:
            return
        self._seen[id(item)] = item
        match item:
            case nn.Module():
                self._visit_module(item, name)
            case Optimizer():
                self.state.optimizers[name] = item
                self._visit_groups(item, name)
            case partial():
                self.visit(item.func, name, None)
                self.visit([*item.args, *item.keywords.values()], name, None)
            case MethodType():
                self.visit(item.__self__, name or "self", None)
                self.visit(item.__func__, name, None)
            case FunctionType():
                self._visit_function(item)
            case list():
                self._visit_items(item, dict(enumerate(item)), name)
            case tuple():
                self._visit_tuple(item, name)
            case dict():
                self._visit_items(item, dict(item), name)
            case _:
                if _is_user_object(item):
                    self._visit_items(vars(item), dict(vars(item)), name)

    def _visit_items(self, container: Any, items: dict[Any, Any], name: str) -> None:
        for key, value in items.items():
            inner = f"{name}.{key}" if name else str(key)
            self.visit(value, inner, Slot(inner, container, key))

    def _visit_tuple(self, items: tuple[Any, ...], name: str) -> None:
        """Visits a tuple, whose elements cannot be replaced; tensors elsewhere in the state may be there too."""
        for position, value in enumerate(items):
            self.visit(value, f"{name}.{position}" if name else str(position), None)

    def _visit_function(self, function: FunctionType) -> None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            container = _CellContents(cell)
            try:
                value = container["contents"]
            except ValueError:  # the variable has no value yet
                continue
            self.visit(value, variable, Slot(variable, container, "contents"))
        variables = function.__globals__
        for variable in _global_names(function.__code__):
            if variable in variables and _is_state_holder(variables[variable], variables):
                self.visit(variables[variable], variable, Slot(variable, variables, variable))
        self.visit([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()], "default", None)

    def _visit_module(self, module: nn.Module, name: str) -> None:
        self.state.modules[name] = module
        for path, part in module.named_modules(prefix=name or "module"):
            self._visit_parallel(part, path)
            for table in module_tables(part):
                for key, value in list(table.items()):
                    if isinstance(value, Tensor):
                        self.state.slots.append(Slot(f"{path}.{key}", table, key))
            self._seen[id(part)] = part

    def _visit_parallel(self, module: nn.Module, path: str) -> None:
        """Adds a module of DDP or FSDP2. Raises StepError for modules whose collectives cannot be traced."""
        if isinstance(module, _untraceable_classes()):
            raise StepError(
                f"'{path}' is a {type(module).__name__}, whose hooks run collectives that no graph contains",
                "Use DistributedDataParallel or fully_shard",
            )
        if not is_ddp(module) and not is_fsdp2(module):
            return
        limit = ddp_limit(module) if is_ddp(module) else fsdp_limit(module)
        if limit:
            raise StepError(
                f"'{path}' is a {type(module).__name__} with {limit}, which its functional form lacks",
                "Remove it, or compile the module with torch.compile(backend='fxwrap')",
            )
        if is_fsdp2(module):
            module.reshard()  # type: ignore[operator]  # the optimizer has the sharded parameters
        self.state.parallel.append(module)

    def _visit_groups(self, optimizer: Optimizer, name: str) -> None:
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                inner = f"{name}.param_groups.{number}.{key}"
                if isinstance(value, Tensor):
                    self.state.slots.append(Slot(inner, group, key))
                elif key != "params":
                    self.state.numbers.append(Slot(inner, group, key))

    def add_optimizer_state(self, name: str, optimizer: Optimizer) -> None:
        """Adds an optimizer's state; names are those of the parameters."""
        names = {identity: slot.name for identity, slot in self.state.unique().items()}
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                label = names.get(id(parameter))
                if label is None:  # a parameter that the step reaches through its optimizer alone
                    label = f"{name}.param_groups.{number}.params.{position}"
                    self.state.slots.append(Slot(label, group["params"], position))
                values = optimizer.state.get(parameter, {})
                self._visit_items(values, values, f"{name}.state.{label}")


def _untraceable_classes() -> tuple[type, ...]:
    """Returns classes of modules whose collectives are in no graph; torch imports some of them on demand only."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (nn.DataParallel,) if fsdp is None else (nn.DataParallel, fsdp.FullyShardedDataParallel)


def _global_names(code: CodeType) -> set[str]:
    """Returns the names that a function's code and the functions within it may look up among global variables."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def _is_state_holder(item: object, variables: object) -> bool:
    """Whether a global variable may hold state: functions count if they are of the same module."""
    if isinstance(item, FunctionType):
        return item.__globals__ is variables
    return isinstance(item, Tensor | nn.Module | Optimizer | partial | list | dict) or _is_user_object(item)


_LIBRARIES = ("builtins", "torch", "numpy", "functools", "collections", "typing", "types", "contextlib", "logging")


def _is_user_object(item: object) -> bool:
    """Whether an object's attributes may hold state: an instance of a class outside of the libraries."""
    kind = type(item)
    return hasattr(item, "__dict__") and not isinstance(item, type) and kind.__module__.split(".")[0] not in _LIBRARIES


def optimizer_numbers(state: StepState) -> list[Slot]:
    """Returns the places of the hyperparameters that are constants of the program."""
    groups = {id(group) for optimizer in state.optimizers.values() for group in optimizer.param_groups}
    return [slot for slot in state.numbers if id(slot.container) in groups]


# --- optimizer state --------------------------------------------------------------------------------------------------


def create_optimizer_state(state: StepState) -> list[tuple[Optimizer, Tensor]]:
    """Creates the state that torch's optimizers create in their first step; returns the parameters that have it now."""
    return [
        (optimizer, parameter)
        for optimizer in state.optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        and not optimizer.state.get(parameter)
        and create_parameter_state(optimizer, group, parameter)
    ]


@contextmanager
def substituted(state: StepState, replacements: dict[int, Any]) -> Iterator[None]:
    """Replaces the tensors of the state, by identity, in all their places; restores them at the end."""
    places = [(slot, slot.get()) for slot in state.slots]
    optimizers = [(item, item.state, [group["params"] for group in item.param_groups])
                  for item in state.optimizers.values()]  # fmt: skip
    try:
        for slot, tensor in places:
            slot.set(replacements[id(tensor)])
        for optimizer, values, _ in optimizers:
            optimizer.state = type(values)(values.default_factory)
            for parameter, items in values.items():
                optimizer.state[replacements[id(parameter)]] = items
            for group in optimizer.param_groups:
                group["params"] = [replacements.get(id(item), item) for item in group["params"]]
        yield
    finally:
        for optimizer, values, groups in optimizers:
            optimizer.state = values
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        for slot, tensor in places:
            slot.set(tensor)

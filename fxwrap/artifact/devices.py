"""Moves a program to other devices of the same type, in all types, literals, names and effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.devices import registered_spec
from fxwrap.memory_planning import MemoryPlan, PoolPlan

Devices = Mapping[torch.device, torch.device]


def program_devices(program: ir.Program) -> list[torch.device]:
    """Returns the devices of a program's tensors, in order of appearance."""
    devices: dict[torch.device, None] = {}

    def note(leaf: object) -> object:
        if isinstance(leaf, ir.Value) and isinstance(leaf.type, ir.TensorType):
            devices.setdefault(leaf.type.device)
        return leaf

    for value in (*[item.value for item in program.inputs], *[item.value for item in program.constants]):
        note(value)
    for line in program.lines():
        ir.map_line(line, note)
    return list(devices)


def device_map(present: list[torch.device], wanted: Any) -> dict[torch.device, torch.device]:
    """Returns the new device of each device of a program; `wanted` is a device, or a mapping of devices.

    Raises ValueError with the reason for an invalid mapping: kernels are for one device type.
    """
    if wanted is None:
        return {}
    if isinstance(wanted, Mapping):
        pairs = {torch.device(old): torch.device(new) for old, new in wanted.items()}
    else:
        new = torch.device(wanted)
        same = [device for device in present if device.type == new.type]
        if len(same) > 1:
            raise ValueError(f"it uses {', '.join(map(str, same))}, so pass a mapping of devices")
        if not same:
            raise ValueError(f"it was compiled for {', '.join(map(str, present)) or 'no device'}, not for {new.type}")
        pairs = {same[0]: new}
    for old, new in pairs.items():
        if old not in present:
            raise ValueError(f"it does not use {old}, only {', '.join(map(str, present))}")
        if old.type != new.type:
            raise ValueError(f"its kernels for {old.type} do not run on {new.type}")
        spec = registered_spec(new.type)
        if (spec is None or spec.supports_multiple_devices) and new.index is None:
            raise ValueError(f"'{new}' has no index; use '{new}:0'")
    return {old: new for old, new in pairs.items() if old != new}


def move_program(program: ir.Program, devices: Devices) -> ir.Program:
    """Returns the program with devices replaced; payloads of constants do not move."""
    if not devices:
        return program
    inputs = tuple([
        ir.Input(_value(item.value, devices), item.ownership) if isinstance(item.value, ir.Value) else item
        for item in program.inputs
    ])  # fmt: skip
    constants = tuple([ir.ProgramConstant(_value(item.value, devices), item.mutable) for item in program.constants])
    functions = tuple([(name, _block(block, devices)) for name, block in program.functions])
    names = {str(old): str(new) for old, new in devices.items()}
    header = tuple([(key, ", ".join([names.get(part, part) for part in text.split(", ")]))
                    for key, text in program.header])  # fmt: skip
    body = _block(program.body, devices)
    return program.replace(inputs=inputs, constants=constants, functions=functions, body=body, header=header)


def move_plan(plan: MemoryPlan, devices: Devices) -> MemoryPlan:
    """Returns the plan with devices replaced."""
    if not devices:
        return plan
    return MemoryPlan(tuple([
        dataclasses.replace(block, pools=tuple([_pool(pool, devices) for pool in block.pools])) for block in plan.blocks
    ]))  # fmt: skip


def _pool(pool: PoolPlan, devices: Devices) -> PoolPlan:
    device = devices.get(pool.device, pool.device)
    allocations = [dataclasses.replace(item, range=dataclasses.replace(item.range, device=device))
                   for item in pool.allocations]  # fmt: skip
    return dataclasses.replace(pool, device=device, allocations=tuple(allocations))


def _block(block: ir.Block, devices: Devices) -> ir.Block:
    arguments = tuple([_value(value, devices) for value in block.arguments])
    return ir.Block(arguments, tuple([_line(line, devices) for line in block.lines]))


def _line(line: ir.LineBase, devices: Devices) -> ir.LineBase:
    changed: ir.LineBase = ir.map_line(line, partial(_leaf, devices=devices))
    name = str(devices.get(torch.device(changed.device), changed.device)) if changed.device else ""
    return changed if name == changed.device else changed.replace(device=name)


def _leaf(leaf: object, devices: Devices) -> object:
    match leaf:
        case ir.Value():
            return _value(leaf, devices)
        case ir.Block():
            return _block(leaf, devices)
        case torch.device():
            return devices.get(leaf, leaf)
        case ir.Tag("random", (str(name),)):
            return ir.Tag("random", (str(devices.get(torch.device(name), name)),))
        case ir.TensorType() | ir.ListType() | ir.OptionalType():
            return _type(leaf, devices)
        case _:
            return leaf


def _value(value: ir.Value, devices: Devices) -> ir.Value:
    type_ = _type(value.type, devices)
    return value if type_ is value.type else ir.Value(value.name, type_)


def _type(type_: ir.Type, devices: Devices) -> ir.Type:
    match type_:
        case ir.TensorType():
            device = devices.get(type_.device)
            return type_ if device is None else dataclasses.replace(type_, device=device)
        case ir.ListType() | ir.OptionalType():
            return type(type_)(_type(type_.element, devices))
        case _:
            return type_

"""Lines that save and restore the state of random number generators, for checkpointed dropout."""

from __future__ import annotations

from fxwrap.lines.operands import device_error
from fxwrap.wrapper_ir import GENERATOR, Effect, LineBase, Value, attribute, define, line_class, random_effect, read


@line_class("random.save")
class SaveRngState(LineBase):
    """Copies the state of a device's default generator to a new uint8 tensor on the CPU.

    Example: `%state = random.save() device="cpu" : u8[5056]@cpu`
    """

    result: Value = define()
    device: str = attribute()

    def verify_self(self) -> str | None:
        return device_error(self.device)

    def effects(self) -> tuple[Effect, ...]:
        return (random_effect(self.device),)


@line_class("random.restore")
class RestoreRngState(LineBase):
    """Restores the state of a device's default generator.

    Example: `random.restore(%state) device="cpu"`
    """

    state: Value = read()
    device: str = attribute()

    def verify_self(self) -> str | None:
        return device_error(self.device)

    def effects(self) -> tuple[Effect, ...]:
        return (random_effect(self.device),)


@line_class("random.exchange")
class ExchangeRngState(LineBase):
    """Swaps the states of a device's default generator and another generator.

    Example: `random.exchange(%generator) device="cpu"`
    """

    generator: Value = read()
    device: str = attribute()

    def verify_self(self) -> str | None:
        if self.generator.type != GENERATOR:
            return f"%{self.generator.name} is not a generator"
        return device_error(self.device)

    def effects(self) -> tuple[Effect, ...]:
        return (random_effect(self.device),)

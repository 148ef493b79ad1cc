"""Lines about the state of a device's default random number generator (checkpointed dropout)."""

from __future__ import annotations

from fxwrap.wrapper_ir import GENERATOR, Effect, LineBase, Value, attribute, define, line_class, random_effect, read


@line_class("random.save")
class SaveState(LineBase):
    """Reads the generator's state into a new uint8 tensor on the CPU.

    Example: `%state = random.save() device="cpu" : u8[5056]@cpu`
    """

    result: Value = define()
    device: str = attribute()

    def effects(self) -> tuple[Effect, ...]:
        return (random_effect(self.device),)


@line_class("random.restore")
class RestoreState(LineBase):
    """Sets the generator to a saved state.

    Example: `random.restore(%state) device="cpu"`
    """

    state: Value = read()
    device: str = attribute()

    def effects(self) -> tuple[Effect, ...]:
        return (random_effect(self.device),)


@line_class("random.exchange")
class ExchangeState(LineBase):
    """Exchanges the states of a device's default generator and another one, so that operators draw from that.

    Example: `random.exchange(%generator) device="cpu"`
    """

    generator: Value = read()
    device: str = attribute()

    def verify_self(self) -> str | None:
        return None if self.generator.type == GENERATOR else f"%{self.generator.name} is no generator"

    def effects(self) -> tuple[Effect, ...]:
        return (random_effect(self.device),)

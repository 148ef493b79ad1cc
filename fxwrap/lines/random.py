"""Lines that save and restore the state of a device's default random number generator (checkpointed dropout)."""

from __future__ import annotations

from fxwrap.wrapper_ir import Effect, LineBase, Value, attribute, define, line_class, random_effect, read


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

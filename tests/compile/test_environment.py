"""The key for caches outside: equal for equal environments and options, different for anything else."""

from __future__ import annotations

import pytest

import fxwrap
from fxwrap import Options, environment_key
from fxwrap.artifact import environment


def test_the_key_is_stable_and_covers_the_options() -> None:
    assert environment_key() == environment_key(Options())
    chosen = (Options(), Options(emitter="cpp"), Options(preserve_ops=frozenset({"aten.gelu.default"})))
    keys = {environment_key(options) for options in chosen}
    assert len(keys) == 3
    assert all(len(key) == 64 for key in keys)


def test_functions_are_keyed_by_name() -> None:
    first, second = Options(passes=(fxwrap.verify,)), Options(passes=(fxwrap.run,))
    assert environment_key(first) != environment_key(second)
    assert environment_key(first) == environment_key(Options(passes=(fxwrap.verify,)))


@pytest.mark.parametrize("package", environment.PACKAGES)
def test_a_package_version_changes_the_key(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = environment_key(), environment.version
    monkeypatch.setattr(environment, "version", lambda name: "9.9.9" if name == package else version(name))
    assert environment_key() != before

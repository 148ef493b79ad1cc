"""The conformance suite: devices that conform pass, wrong kernels and missing functions are named."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxwrap.cli import conformance, main
from fxwrap.devices import DeviceRuntime, KernelRuntime, registered_spec
from fxwrap.errors import CommandError, DeviceError, FxwrapError
from fxwrap.testing.conformance import CASES, GROUPS, ConformanceCase, run_case, run_conformance
from tests.devices import abacus, abacus_runtime
from tests.devices.registration import on_abacus
from tests.support.child_processes import run_python
from tests.support.long_form import LONG

SPEC = dataclasses.replace(abacus.SPEC, supports_streams=False)


def test_the_abacus_conforms() -> None:
    with on_abacus(spec=SPEC):
        report = run_conformance("cpu", emitters=("python",))
    assert report.passes, str(report)
    skipped = {item.name: item.reason for item in report.results if item.status == "not supported"}
    assert skipped == {
        "two streams": "DeviceSpec.supports_streams is false",
        "captured work": "DeviceSpec.supports_graph_capture is false",
    }
    assert all(item.kernels for item in report.results if item.group == "kernels")
    assert str(report).endswith(f"cpu: {len(CASES) - 2} passed, 0 failed, 2 not supported")


@pytest.mark.parametrize("emitter", ["fx", "interpreter"])
def test_other_emitters_conform(emitter: str) -> None:
    with on_abacus(spec=SPEC):
        assert run_conformance("cpu", groups=("mutation",), emitters=(emitter,)).passes


def conformance_case(name: str) -> ConformanceCase:
    return next(item for item in CASES if item.name == name)


def run_with(name: str, **registration: Any) -> tuple[str, str]:
    """The status and reason of a case on an Abacus with some of it replaced."""
    with on_abacus(**{"spec": SPEC, **registration}):
        spec = registered_spec("cpu")
        assert spec is not None
        result = run_case(conformance_case(name), torch.device("cpu"), spec, "python")
    return result.status, result.reason


def loads_with(change: Callable[[str], str]) -> DeviceRuntime:
    """A runtime that changes each kernel's text before it runs."""

    def load(source: str, signature: tuple[str, ...], options: Any) -> Callable[..., None]:
        return abacus_runtime.load(change(source), signature, options)

    return DeviceRuntime(kernels=KernelRuntime(load=load))


def test_a_wrong_kernel_fails() -> None:
    wrong = loads_with(lambda text: text.replace("unit.relu", "unit.neg").replace("unit.add", "unit.sub"))
    status, reason = run_with("writes to inputs", runtime=wrong)
    assert status == "failed" and reason.startswith("result 0 differs by ")


def test_a_wrong_gradient_fails() -> None:
    """Of tanh, whose derivative is 1 - tanh(x)^2."""
    wrong = loads_with(lambda text: text.replace("unit.number(1.0", "unit.number(2.0"))
    status, reason = run_with("embeddings", runtime=wrong)
    assert status == "failed" and reason.startswith("the gradient of input 0 differs by ")


def test_an_error_of_the_device_is_the_reason() -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("the driver is missing\nand more")

    runtime = DeviceRuntime(kernels=KernelRuntime(load=fails))
    assert run_with("returned inputs", runtime=runtime) == ("failed", "ValueError: the driver is missing")


def test_a_missing_function_is_not_supported() -> None:
    def fails(*_: Any) -> Any:
        raise DeviceError("cpu", "its runtime has no function 'guard'", "Register one")

    status, reason = run_with("returned inputs", runtime=DeviceRuntime(kernels=KernelRuntime(load=fails)))
    assert (status, reason) == ("not supported", "device 'cpu': its runtime has no function 'guard'. Register one")


@pytest.mark.filterwarnings("ignore:(?s).* called instead")
def test_operators_of_declined_kernels_are_named() -> None:
    def declines(_request: Any) -> Any:
        raise FxwrapError("the Abacus has no beads")

    status, reason = run_with("writes to inputs", printer=declines)
    assert status == "passed" and "the Abacus has no beads" in reason


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(CommandError, match=r"device 'npu' is not registered; registered: .*cpu.* Import the vendor's"):
        run_conformance("npu")
    with pytest.raises(CommandError, match="device 'no such' is not registered"):
        run_conformance("no such")
    with pytest.raises(CommandError, match="unknown group 'streets'; known: operators, kernels"):
        run_conformance("cpu", groups=("streets",))
    with pytest.raises(CommandError, match="unknown emitter 'basic'"):
        run_conformance("cpu", emitters=("basic",))


def test_each_group_has_cases() -> None:
    assert {item.group for item in CASES} == set(GROUPS)
    assert len({item.name for item in CASES}) == len(CASES)


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["conformance", "--device", "cpu", "--group", "streams", "--group", "capture", "--json"]
    with on_abacus(spec=SPEC):
        assert main([*arguments, str(tmp_path / "a.json"), "--emitter", "python"]) == 1  # nothing passed
    assert "cpu: 0 passed, 0 failed, 2 not supported" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "a.json").read_text())["results"]) == 2
    assert main(["conformance", "--device", "cpu", "--import", "no_such_package"]) == 2
    assert "cannot import 'no_such_package'" in capsys.readouterr().err


class RunHere:
    """A command of `--jobs`, run in this process: one of its own takes seconds to import torch."""

    def __init__(self, command: list[str], **_streams: object) -> None:
        assert command[:3] == [sys.executable, "-m", "fxwrap"]
        self.returncode = self.run(command[3:])

    def run(self, arguments: list[str]) -> int:
        return main(arguments)

    def communicate(self) -> tuple[str, str]:
        return "", "first line\nlast line\n"


class Die(RunHere):
    def run(self, arguments: list[str]) -> int:
        return -9


def test_jobs_share_the_cases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conformance, "subprocess", SimpleNamespace(Popen=RunHere, DEVNULL=None, PIPE=None))
    command = [
        "conformance",
        "--device",
        "cpu",
        "--group",
        "mutation",
        "--group",
        "streams",
        "--emitter",
        "interpreter",
    ]
    reports = []
    with on_abacus(spec=SPEC):
        for number, more in enumerate(([], ["--jobs", "2"])):
            assert main([*command, *more, "--json", str(tmp_path / f"{number}.json")]) == 0
            reports.append(json.loads((tmp_path / f"{number}.json").read_text())["results"])
        monkeypatch.setattr(conformance, "subprocess", SimpleNamespace(Popen=Die, DEVNULL=None, PIPE=None))
        assert main([*command, "--jobs", "2"]) == 2
    assert "a process of the run ended with code -9: last line; use --jobs 1" in capsys.readouterr().err
    names = [[(item["group"], item["name"], item["status"]) for item in report] for report in reports]
    assert names[0] == names[1] and len(names[0]) == len(
        [item for item in CASES if item.group in ("mutation", "streams")]
    )


def test_the_vendor_template_conforms() -> None:
    """It registers a private device with torch, which a process can do once."""
    command = ["-m", "fxwrap", "conformance", "--device", "npu", "--import", "examples.vendor_template"]
    names = ("training", *(("operators", "views", "mutation", "control flow") if LONG else ()))
    groups = [f"--group={group}" for group in names]
    result = run_python([*command, "--jobs", "2" if LONG else "1", "--emitter", "python", *groups])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 failed, 0 not supported" in result.stdout
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()[1:-1]]
    assert rows == sorted(rows, key=GROUPS.index) and len(rows) == len(
        [item for item in CASES if f"--group={item.group}" in groups]
    )


@pytest.mark.long  # the vendor template is a private device too
@pytest.mark.parametrize("emitters", [("python",), ("cpp", "fx", "interpreter")])
def test_the_private_device_runs_a_model(emitters: tuple[str, ...]) -> None:
    result = run_python(["-m", "examples.private_device.run", "bert", *emitters])
    assert result.returncode == 0, result.stdout + result.stderr
    rows = result.stdout.splitlines()
    assert tuple([row.split()[0] for row in rows]) == emitters
    assert all("largest error" in row and "'launch'" in row for row in rows)

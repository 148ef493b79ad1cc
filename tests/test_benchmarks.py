"""The figures in documents are those of the result files, and scripts write files that the tables can render."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import distributed, kernel_resources
from benchmarks.dashboard import Dashboard, order_of, parsed_arguments
from benchmarks.dashboard_rows import RowFile, is_complete, table_cells
from benchmarks.dashboard_tables import details, inductor_side, summary, worst
from benchmarks.decoding_models import Decoder, weight_bytes
from benchmarks.decoding_reads import reads_of_token
from benchmarks.distributed import uncovered, without_waits
from benchmarks.flex_attention import Case, Sizes, run_cases
from benchmarks.results import FOLDER, Report, cell_text
from benchmarks.tables import BLOCK, DOCUMENTS, markdown, rendered

FIGURE = re.compile(r"\d\.\d|\d ?(us|ms|seconds|s|MB|GB|%|times)\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_tables_match_the_result_files(document: Path) -> None:
    text = document.read_text()
    assert BLOCK.search(text)
    assert rendered(text) == text, "run python -m benchmarks.tables"


def test_no_figure_is_written_by_hand() -> None:
    prose = BLOCK.sub("", (FOLDER.parent / "README.md").read_text())
    assert [line for line in prose.splitlines() if FIGURE.search(line)] == []


def test_no_document_reports_a_measurement() -> None:
    units = re.compile(r"\d(\.\d+)? (us|ms|seconds|s|MB|GB|times as (fast|long))\b")
    documents = sorted((FOLDER.parents[1] / "docs").glob("*.md"))
    assert [line for path in documents for line in path.read_text().splitlines() if units.search(line)] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_file_says_where_it_is_from(path: Path) -> None:
    result = json.loads(path.read_text())
    assert (FOLDER.parents[1] / result["script"]).exists()
    assert path.stem.startswith(Path(result["script"]).stem)
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", result["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert {"device", "cores"} <= set(result["machine"]) and {"torch", "python"} <= set(result["versions"])
    assert len({tuple(row) for row in result["rows"]}) == 1
    assert len(result["raw"]) == len(result["rows"])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_errors_are_about_those_of_eager_mode(path: Path) -> None:
    """A side that computes something else is a defect, however fast it is."""
    rows = [row for row in json.loads(path.read_text())["rows"] if isinstance(row.get("error"), float)]
    eager = {_case_of(row): row["error"] for row in rows if row.get("side") == "eager"}
    errors = [(row, eager[_case_of(row)]) for row in rows if _case_of(row) in eager]
    assert [row for row, bound in errors if not row["error"] <= 3 * bound + 1e-3] == []


def _case_of(row: dict[str, object]) -> tuple[tuple[str, object], ...]:
    """Returns the cells that name what a row measures."""
    names = [name for name, cell in row.items() if isinstance(cell, str) and name not in ("side", "note")]
    return tuple([(name, row[name]) for name in (*names, "rows", "tokens") if name in row])


def test_a_report_prints_and_records_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("ops-cpu", argparse.Namespace(record="busy"), note="two other jobs", folder=tmp_path)
    report.add({"operator": "softmax", "time, us": 12.3, "error": None}, raw=[12.1, 12.3, 13.0])
    report.add({"operator": "pad", "time, us": 0.5, "error": 1e-7})
    result = json.loads((tmp_path / "ops-cpu-busy.json").read_text())
    assert result["rows"][0] == {"operator": "softmax", "time, us": 12.3, "error": None}
    assert result["raw"] == [[12.1, 12.3, 13.0], None]
    assert result["note"] == "two other jobs"
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == ["operator | time, us | error", "softmax | 12.3 | -", "pad | 0.50 | 1.0e-07"]
    assert markdown(result["rows"])[2] == "| softmax | 12.3 | - |"


def test_a_report_keeps_the_rows_of_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = [{"operator": "pad", "error": 0.5}]
    report = Report("ops-cpu", argparse.Namespace(record=""), folder=tmp_path, earlier=earlier)
    report.add({"operator": "softmax", "error": None}, raw=[1.0])
    result = json.loads((tmp_path / "ops-cpu.json").read_text())
    assert result["rows"] == [*earlier, {"operator": "softmax", "error": None}] and result["raw"] == [None, [1.0]]
    assert capsys.readouterr().out.splitlines()[-2:] == ["operator | error", "softmax | -"]


def test_a_report_without_record_writes_nothing(tmp_path: Path) -> None:
    Report("ops-cpu", argparse.Namespace(record=None), folder=tmp_path).add({"operator": "pad"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cell", "text"),
    [(None, "-"), (7, "7"), ("-", "-"), (0.9, "0.90"), (12.0, "12.0"), (1.0083, "1.008"), (2878.8, "2879"),
     (3.4e-8, "3.4e-08")],
)  # fmt: skip
def test_cells(cell: str | int | float | None, text: str) -> None:
    assert cell_text(cell) == text


def test_exposed_communication_is_outside_of_all_kernels() -> None:
    """Overlapping collectives count once, and covers may overlap each other."""
    assert uncovered([(0, 4), (2, 6), (10, 12)], [(1, 3), (2, 5), (11, 20)]) == 1 + 1 + 1
    assert uncovered([], [(0, 1)]) == uncovered([(0, 1)], [(0, 2)]) == 0


def test_waits_for_slower_ranks_are_not_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of one name are matched, whatever runs between them; the other rank's reductions take 1 and 5."""
    other = torch.tensor([2.0, 1.0, 5.0], dtype=torch.float64)  # a gather, then the reductions
    monkeypatch.setattr(distributed, "on_all_ranks", lambda value, _tokens: [value, value])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda spans, _operator: spans.copy_(spans.minimum(other)))
    spans = [("reduce", 0.0, 3.0), ("gather", 1.0, 2.0), ("reduce", 4.0, 8.0)]
    assert without_waits(spans, torch.zeros(1)) == [(1.0, 2.0), (2.0, 3.0), (4.0, 8.0)]
    monkeypatch.setattr(distributed, "on_all_ranks", lambda value, _tokens: [value, value + 1])
    assert without_waits(spans, torch.zeros(1)) == [(1.0, 2.0), (0.0, 3.0), (4.0, 8.0)]


def _dashboard(folder: Path, *arguments: str) -> Dashboard:
    common = ["--only", "^(T5Small|resnet50)$", "--modes", "inference-float32-static"]
    chosen = parsed_arguments([*common, "--sides", "inductor,fxwrap", *arguments])
    return Dashboard(chosen, folder, RowFile(folder / "rows.json", "base models"), float("inf"))


def _measured(seconds: float, passes: bool = True) -> dict[str, object]:
    compile_, memory = {"seconds": 10 * seconds}, {"peak": 1e6 * seconds}
    return {"compile": compile_, "accuracy": {"passes": passes}, "memory": memory, "time": {"seconds": [seconds] * 3}}


def test_dashboard_rows_that_are_there_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([({"eager": _measured(0.1)}, "exit code -11: "), ({}, "stopped after 5 s")])
    monkeypatch.setattr(Dashboard, "_run", lambda *_: next(outcomes))
    monkeypatch.setattr(Dashboard, "_next", lambda _, waiting: waiting.popleft() if waiting else None)
    assert [row[1] for row in _dashboard(tmp_path).missing()] == ["resnet50", "T5Small"]
    assert [row[1] for part in ("1/2", "2/2") for row in _dashboard(tmp_path, "--shard", part).missing()] == [
        "resnet50", "T5Small",
    ]  # fmt: skip
    replace(_dashboard(tmp_path), until=time.monotonic() + 300).run()
    assert [row[1] for row in _dashboard(tmp_path).missing()] == ["T5Small"], (
        "a crash is a row, an interrupted row none"
    )
    (row,) = RowFile(tmp_path / "rows.json", "base models").rows.values()
    assert table_cells(row, ["fxwrap"])["fxwrap: status"] == "exit code -11: "
    assert list(tmp_path.rglob("*.tmp")) == []
    assert len(_dashboard(tmp_path, "--sides", "inductor,fxwrap,fxwrap:freezing").missing()) == 2
    assert [len(_dashboard(tmp_path, "--since", day).missing()) for day in (str(row["date"]), "9999-01-01")] == [1, 2]
    rows = RowFile(tmp_path / "rows.json", "base models")
    for failure, left in (("", ""), ("stopped after 5 s", ""), ("exit code 1: ", "exit code 1: ")):
        rows.add({**row, "failure": failure})
        (row,) = rows.rows.values()
        assert row["failure"] == left, "a row that its limit stopped replaces no whole one"
    with pytest.raises(ValueError, match=r"rows of other sizes: 'base models; rows of .*', not 'small models'"):
        RowFile(tmp_path / "rows.json", "small models")


def test_dashboard_rows_that_exhaust_a_shared_device_are_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, int]] = []

    def run(self: Dashboard, model: str, mode: str, seconds: float, gpu: int) -> tuple[dict[str, object], str]:
        runs.append((model, gpu))
        failed = {"failure": {"text": "OutOfMemoryError: CUDA out of memory."}}
        sides = {"eager": _measured(0.2), "inductor": _measured(0.1), "fxwrap": _measured(0.1)}
        return sides | ({"inductor": failed} if model == "resnet50" and len(runs) < 3 else {}), ""

    monkeypatch.setattr(Dashboard, "_run", run)
    dashboard = _dashboard(tmp_path, "--gpus", "2", "--parallel", "2")
    dashboard.run()
    assert len(runs) == 3 and runs[2][0] == "resnet50" and {gpu for _, gpu in runs} <= {0, 1}
    assert not dashboard.missing() and {line["passing"] for line in summary(dashboard.rows.tables())} == {"1 of 1"}


def test_dashboard_processes_have_one_device_and_a_part_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    dashboard = _dashboard(tmp_path, "--device", "cuda", "--gpus", "2", "--parallel", "6")
    assert dashboard.limits(1) == {
        "TORCHINDUCTOR_COMPILE_THREADS": "5", "FXWRAP_COMPILE_WORKERS": "5", "CUDA_VISIBLE_DEVICES": "6",
    }  # fmt: skip


def test_dashboard_rows_are_complete_with_the_times_of_all_sides() -> None:
    sides = {"inductor": _measured(0.1), "fxwrap": {"failure": {"text": "RuntimeError: no"}}}
    assert is_complete(sides, ["inductor", "fxwrap"])
    assert not is_complete(sides, ["inductor", "fxwrap", "fxwrap:freezing"])
    assert not is_complete({"inductor": {"compile": {"seconds": 1.0}}}, ["inductor"])


def test_dashboard_groups_of_modes_follow_each_other(tmp_path: Path) -> None:
    later = ["--modes", "training-amp-static,training-bfloat16-static"]
    rows = [(model, mode) for _, model, mode in _dashboard(tmp_path, *later).missing()]
    assert rows == [
        ("resnet50", "inference-float32-static"), ("T5Small", "inference-float32-static"),
        ("resnet50", "training-amp-static"), ("resnet50", "training-bfloat16-static"),
        ("T5Small", "training-amp-static"), ("T5Small", "training-bfloat16-static"),
    ]  # fmt: skip


def test_dashboard_figures_are_of_rows_that_both_sides_pass() -> None:
    def row(model: str, **sides: object) -> dict[str, object]:
        cells = {"library": "timm", "model": model, "mode": "inference-float32-static", "failure": "", "sides": sides}
        cells["chosen sides"] = ["inductor", "fxwrap"]
        return table_cells(cells, ["inductor", "fxwrap"])

    eager, failed = _measured(0.4), {"failure": {"text": "RuntimeError: no"}}
    own_parts = {**_measured(0.1), "compile": {"seconds": 1.0, "backend": 0.25, "dynamo": 0.5}}
    rows = [
        row("a", eager=eager, inductor=_measured(0.2), fxwrap=own_parts),
        row("b", eager=eager, inductor=_measured(0.2), fxwrap=_measured(0.1, passes=False)),
        row("c", eager=eager, inductor=failed, fxwrap=_measured(0.4)),
        row("d", eager=failed),
    ]
    inductor, own = summary(rows)
    assert inductor["passing"] == own["passing"] == "2 of 3"
    assert own["speedup"] == pytest.approx(2.0) and own["speedup / Inductor"] == pytest.approx(2.0)
    assert own["compile / Inductor"] == own["memory / Inductor"] == pytest.approx(0.5)
    assert own["front end / Inductor"] == pytest.approx((1.0 - 0.25) / 2.0)
    assert own["Dynamo / Inductor"] == pytest.approx(0.5 / 2.0)
    assert inductor["front end / Inductor"] is inductor["Dynamo / Inductor"] is None, "measured without its parts"
    assert [line["fxwrap"] for line in details(rows)] == [4.0, "wrong", 1.0, "-"]
    assert worst(rows, "fxwrap") == [("a inference-float32-static", 2.0)]


def test_dashboard_sides_take_turns_to_be_compiled_first() -> None:
    """What a process compiles later finds more of torch's own caches filled."""
    sides = ["inductor", "fxwrap", "aot_eager"]
    orders = Counter([order_of(sides, f"model {row}") for row in range(600)])
    assert len(orders) == 6 and min(orders.values()) > 70
    assert inductor_side("aot_eager") == "inductor" and inductor_side("fxwrap:freezing") == "inductor:freezing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--shard", "3/2"], "'3/2' is not a part such as 1/4"), (["--sides", "inductor,tvm"], "unknown sides: tvm"),
     (["--modes", "training-amp"], "unknown modes: training-amp")],
)  # fmt: skip
def test_dashboard_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed_arguments(arguments)
    assert message in capsys.readouterr().err


def test_launches_that_only_read_have_all_bytes_of_a_token() -> None:
    """The weights, without the embedding, and the keys and values up to the token's position, once each."""
    sizes = {"width": 64, "hidden": 96, "heads": 4, "key_heads": 2, "vocabulary": 50, "layers": 2, "batch": 3}
    model = Decoder(argparse.Namespace(**sizes, length=16, ranks=1, top=0))
    reads = reads_of_token(model)
    cached = 2 * 3 * (16 // 2 + 1) * 2 * 16 * 4
    assert sum(reads) == weight_bytes(model) + 2 * cached
    assert len(reads) == 2 * 9 + 2 and reads[3] == cached and reads[7] == 2 * 64 * 96 * 4


def test_cases_of_flex_attention_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the time is over, and in later runs those that are left."""
    measured: list[str] = []

    def measure(case: Case, _: argparse.Namespace) -> tuple[dict[str, object], object]:
        measured.append(str(case.sizes))
        return {**case.head, "/ inductor": 0.9}, None

    monkeypatch.setattr("benchmarks.flex_attention.measure", measure)
    chosen = argparse.Namespace(
        record="x", device="cpu", sizes=[Sizes.parse("1x8/2x64x16"), Sizes.parse("1x8x64x16")], passes=["decode"],
        variants=["window"], seconds=0.0, parallel=0, lock=None,
    )  # fmt: skip
    for _ in range(3):
        run_cases(chosen, time.monotonic() - 1e-3, tmp_path)
        chosen.seconds = 1000.0
    assert measured == ["1x8/2x64x16", "1x8x64x16"]
    with pytest.raises(argparse.ArgumentTypeError, match="is not BATCHxHEADS"):
        Sizes.parse("1x8x64")


def test_resources_of_kernels_are_those_of_the_gpus_code() -> None:
    """Of kernels that are compiled for a GPU that is not here."""
    (kernel,) = kernel_resources.compile_case(kernel_resources.CASES["softmax"]).program.kernels
    usage = kernel_resources.usage(kernel)
    assert usage["stack"] == usage["local"] == 0, "the kernel keeps values in local memory"
    registers, threads, blocks = [int(usage[name]) for name in ("registers", "threads", "blocks")]
    assert 8 <= registers <= 255 and threads % 32 == 0 and 1 <= blocks <= 32


@pytest.mark.parametrize(
    "case",
    ["flex-attention-128", "attention-128", "experts-prefill",
     *[pytest.param(name, marks=pytest.mark.long) for name in ("flex-attention-64", "attention-64", "matmul-4096")]],
)  # fmt: skip
def test_matrix_instructions_overlap(case: str) -> None:
    kernels = kernel_resources.compile_case(kernel_resources.CASES[case]).program.kernels
    usages = [kernel_resources.usage(item) for item in kernels if "tl.dot" in item.source]
    assert usages and all(item["serialised"] == "" for item in usages)

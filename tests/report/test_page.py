"""The report: one HTML page, whose parts are linked by origins, without links to other files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.events import EventLog
from fxwrap.report import LineTime, ReportContent, report_page
from fxwrap.wrapper_ir import live_bytes, print_program
from tests.conftest import NO_CHROMIUM
from tests.support.capture import capture_graphs
from tests.support.long_form import long_only
from tests.support.models import SHALLOW

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x @ weight, -1)
    z = y.sort(-1).values  # </script> in a source line must not end the data
    return torch.tanh(torch.tanh(z @ weight) @ weight).sum(0)


@cache
def record() -> fxwrap.CompileRecord:
    """A graph with a fused kernel, a library call, an operator without a rule, and pools."""
    compiled = torch.compile(block, backend="fxwrap", options={"memory_planning": "auto"})
    compiled(torch.randn(8, 16), torch.randn(16, 16))
    return fxwrap.inspect(compiled)[0]


class Page(HTMLParser):
    """The elements of a page: ids, links, scripts and their texts."""

    VOID = frozenset({"meta", "input", "link", "img", "br", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if attributes.get("id") else []  # type: ignore[list-item]
        self.links += [str(attributes[name]) for name in ("href", "src") if name in attributes]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


@cache
def page() -> tuple[str, Page, dict[str, Any]]:
    """The text of the page, its elements, and the data of its graph."""
    text = report_page([record().content()], "a <title> & more")
    parsed = Page(text)
    data = next(content for attributes, content in parsed.scripts if attributes.get("id") == "data")
    return text, parsed, json.loads(data)["graphs"][0]


def test_the_page_is_whole_and_loads_nothing() -> None:
    text, parsed, _ = page()
    assert parsed.open == [] and len(parsed.ids) == len(set(parsed.ids))
    assert "<title>a &lt;title&gt; &amp; more</title>" in text
    assert parsed.links and all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.links)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", text.partition('id="data"')[0])
    assert len(parsed.scripts) == 2 and not re.search(r"\{\{[A-Z]+\}\}", text)


def test_stages_are_the_programs_with_their_differences() -> None:
    _, _, data = page()
    texts = [[data["rows"][row][0] for row in stage["rows"]] for stage in data["stages"]]
    for (_, program), rows in zip(record().content().stages, texts, strict=True):
        shown = re.sub(r"\s+", "", "".join(rows))
        assert shown == re.sub(r"\s+", "", print_program(program.replace(kernels=())))
    for before, rows, stage in zip(texts[:-1], texts[1:], data["stages"][1:], strict=True):
        rebuilt, position = list[str](), 0
        for removed, removed_end, added, added_end in stage["changes"]:
            rebuilt += before[position:removed] + rows[added:added_end]
            position = removed_end
        assert rebuilt + before[position:] == rows and stage["changes"]


def origins_of(data: dict[str, Any], text: str, rows: list[list[Any]]) -> set[int]:
    return {row[1] for row in rows if text in row[0] and row[1] >= 0}


def test_lines_nodes_sources_and_emitted_code_are_linked() -> None:
    _, _, data = page()
    node = data["nodes"].index("_softmax")
    (launch,) = [index for index, (_, handle, nodes) in enumerate(data["origins"]) if node in nodes and ":" in handle]
    file, line, _ = data["nodeSources"][node]
    shown = dict(data["files"][file]["lines"])
    assert data["files"][file]["name"] == __file__ and "torch.softmax(x @ weight, -1)" in shown[line]
    assert [row[1] for row in data["graph"] if row[0].startswith("%_softmax")] == [node]
    (kernel,) = [item for item in data["kernels"] if launch in item["origins"]]
    name = kernel["name"]
    assert origins_of(data, f"kernel.launch @{name}(", data["rows"]) == {launch}
    assert origins_of(data, f"kernel_{name}(", data["emitted"]["python"]) == {launch}
    assert origins_of(data, f"KERNEL(f, {name}, ", data["emitted"]["cpp"]) == {launch}
    assert launch in {row[1] for row in data["emitted"]["fx"]}
    assert any(len(row) == 3 and launch in row[2] for row in data["emitted"]["python"])  # the text of the kernel


def test_coverage_separates_library_calls_from_missing_rules() -> None:
    _, _, data = page()
    reasons = {operator: reason for _, operator, kind, reason, *_ in data["coverage"] if kind == "call"}
    assert reasons["aten.mm.default"].startswith("a library call, by design")
    assert reasons["aten.sort.default"] == "it has no lowering rule yet"


def test_memory_is_that_of_the_program() -> None:
    _, _, data = page()
    memory, live = data["memory"], live_bytes(record().program)
    assert (memory["peak"], memory["position"], memory["live"]) == (live.peak, live.position, list(live.at_line))
    for line, total in enumerate(live.at_line):
        assert sum(item["bytes"] for item in memory["buffers"] if item["first"] <= line < item["end"]) == total
    (pool,) = memory["pools"]
    assert [item["owner"] for item in memory["buffers"] if item["name"] == pool["name"]] == ["pool"]
    assert all(item["offset"] + item["bytes"] <= pool["bytes"] for item in pool["buffers"])


def test_a_graph_with_blocks_symbols_and_functions() -> None:
    """Rows of nested blocks keep their origins; sizes have the values of hints."""
    program = fxwrap.parse(
        """
program @nested(s0: int range=(2, 64) hint=8, %p: borrowed bool[]@cpu, %x: borrowed f32[s0]@cpu) {
  %y = control.cond(%p, %x) : f32[s0]@cpu {
    ^then(%a: f32[s0]@cpu):
      %b = extern.call @aten.sin.default(%a) : f32[s0]@cpu
      control.yield(%b)
    ^else(%c: f32[s0]@cpu):
      %d = extern.call @aten.cos.default(%c) : f32[s0]@cpu
      control.yield(%d)
  }
  control.return(%y)
}
"""
    )
    content = ReportContent(
        "nested", "graph", "", "", "", "interpreter", str(program), False, (("input", program),), (), None,
        EventLog("nested"),
    )  # fmt: skip
    (_, text), *_ = Page(report_page([content], "nested")).scripts
    data = json.loads(text)["graphs"][0]
    rows = [data["rows"][row][0] for row in data["stages"][0]["rows"]]
    assert [row.strip() for row in rows if "extern.call" in row] == [
        "%b = extern.call @aten.sin.default(%a) : f32[s0]@cpu", "%d = extern.call @aten.cos.default(%c) : f32[s0]@cpu",
    ]  # fmt: skip
    assert data["memory"]["hints"] == {"s0": "8"}
    assert {item["name"]: item["bytes"] for item in data["memory"]["buffers"]}["x"] == 32


CLICKS = """
const result = {};
const row = (pane, text) => pane.rows.findIndex(item => item.text.includes(text));
const [source, nodes, program, emitted] = panes;
const isMarked = (pane, index) => pane.elements[index].classList.contains("hit");
const hits = pane => pane.rows.filter((item, index) => isMarked(pane, index)).map(item => item.text);
const clicked = [
  ["node", nodes, "%_softmax:"], ["source", source, "torch.softmax(x @"], ["line", program, "kernel.launch"],
];
for (const [name, pane, text] of clicked) {
  pane.elements[row(pane, text)].click();
  result[name] = [source, nodes, program, emitted].map(hits);
}
document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
result.cleared = [source, nodes, program, emitted].flatMap(hits);
result.panes = 0;
for (const [key] of contents()) {
  emitted.show(key);
  result.panes += Number(emitted.rows.length > 0);
}
result.contents = contents().length;
for (const name of ["coverage", "memory", "compile"]) { location.hash = name; showSection(); }
result.tables = document.querySelectorAll("table").length;
result.charts = document.querySelectorAll("canvas").length;
result.timeHidden = document.querySelector('nav a[href="#time"]').hidden;
document.body.replaceChildren(JSON.stringify(result));
"""


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_clicks_in_a_browser(tmp_path: Path) -> None:
    """A click highlights the same call in all panes; all contents and charts are drawn without an error."""
    result = run_in_browser(page()[0], CLICKS, tmp_path)
    for name in ("node", "source", "line"):
        source, nodes, program, emitted = result[name]
        assert any("torch.softmax(x @" in row for row in source), name
        assert any(row.startswith("%_softmax:") for row in nodes), name
        assert any("kernel.launch" in row for row in program), name
        assert any(re.search(r"kernel_\w+\(", row) for row in emitted), name
    assert result["cleared"] == []
    assert result["panes"] == result["contents"] and result["tables"] >= 4 and result["charts"] == 2
    assert result["timeHidden"]


TIMES = """
const result = {};
result.shown = panes[2].rows.filter(item => item.time).map(item => [item.text.trim(), item.time]);
const index = panes[2].rows.findIndex(item => item.time);
panes[2].elements[index].click();
result.details = document.getElementById("details").textContent;
location.hash = "time";
showSection();
result.calls = [...document.querySelectorAll("#time td:first-child")].map(item => item.textContent);
result.text = document.getElementById("time").textContent;
result.timeHidden = document.querySelector('nav a[href="#time"]').hidden;
document.body.replaceChildren(JSON.stringify(result));
"""


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_times_in_a_browser(tmp_path: Path) -> None:
    """The times of a profile are beside the program's lines, and in a table with the most to gain first."""
    handles = [*record().compiled.provenance.calls]  # type: ignore[union-attr]
    times = {handle: LineTime(1e-3 * (n + 1), 1e-6, 1000, 2000) for n, handle in enumerate(handles)}
    result = run_in_browser(report_page([record().content(times)], "times"), TIMES, tmp_path)
    assert not result["timeHidden"] and result["calls"] == handles[::-1]
    assert [time for _, time in result["shown"]] == [f"{n + 1}.0 ms" for n in range(len(handles))]
    assert all("kernel.launch" in text or "extern.call" in text for text, _ in result["shown"])
    assert "Time: 1.0 ms" in result["details"] and "1000 B" in result["text"] and "GFLOP/s" in result["text"]


OPENED = """
addEventListener("load", () => {
  const rows = document.querySelectorAll(".row").length + document.body.offsetHeight;  // lays the page out
  document.body.replaceChildren(JSON.stringify({milliseconds: performance.now(), rows}));
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
@pytest.mark.parametrize(
    ("name", "layers"), [("a layer", 1), ("gpt2", 1), long_only("gpt2", 12), long_only("llama", 32)]
)
def test_a_report_opens_in_two_seconds(name: str, layers: int, tmp_path: Path) -> None:
    """From the navigation until the page is laid out, by the browser's clock."""
    contents = [record().content()]
    if name != "a layer":
        graphs = capture_graphs(replace(SHALLOW[name], layers=layers), training=False)
        compiled = [fxwrap.compile_graph(graph.graph_module, graph.example_inputs) for graph in graphs]
        contents = [item.content() for graph in compiled for item in fxwrap.inspect(graph)]
    text = report_page(contents, name)
    opened = run_in_browser(text, OPENED, tmp_path, virtual_time=False)
    assert opened["rows"] > 100 and opened["milliseconds"] < 2000, (opened, len(text))


def run_in_browser(text: str, code: str, tmp_path: Path, *, virtual_time: bool = True) -> Any:
    """Returns the JSON that a script writes into a page's body."""
    script = f"<script>try {{ {code} }} catch (error) {{ document.body.replaceChildren(String(error)); }}</script>"
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{script}</body>"))
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        *(["--virtual-time-budget=5000"] if virtual_time else []), "--window-size=1600,900", "--dump-dom",
        (tmp_path / "page.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    body = re.search(r"<body[^>]*>(.*)</body>", done.stdout, re.DOTALL)
    assert body is not None, done.stderr
    return json.loads(body[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


@pytest.fixture(autouse=True, scope="module")
def released() -> Iterator[None]:
    """Compiles anew, and drops the compiled graph after the module."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    record.cache_clear()
    page.cache_clear()

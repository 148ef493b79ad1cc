"""The artifacts of compiles in torch's structured trace."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.support.child_processes import child_environment, run_python

# The process is forked from one in which torch has read TORCH_TRACE.
RUN = """
import runpy, sys, torch
torch._logging._internal.LOG_TRACE_HANDLER.root_dir = sys.argv[2]
runpy.run_path(sys.argv[1], run_name="__main__")
"""
SCRIPT = """
import torch, fxwrap
options = {"fuse": False, "emitter": "python"}  # nothing is compiled to machine code, the bridge neither
compiled = torch.compile(torch.nn.Linear(4, 3), backend="fxwrap", options=options)
compiled(torch.randn(2, 4)).sum().backward()
torch.compiler.reset()
torch.compile(torch.nn.Linear(4, 3), backend="fxwrap", options=options)(torch.randn(2, 4))
torch.compile(lambda x: x.relu(), backend="fxwrap", options={**options, "emitter": "fx"})(torch.ones(2))
graph = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
fxwrap.compile_graph(graph, options=fxwrap.Options(**options), name="two words/caf\\udce9")
"""


def artifacts(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Returns the metadata and payload of each artifact of fxwrap in torch's trace."""
    (path,) = folder.iterdir()
    payloads: list[tuple[dict[str, Any], str]] = []
    payload: list[str] = []
    for line in path.read_text().splitlines()[::-1]:
        if line.startswith("\t"):
            payload.append(line[1:])
            continue
        metadata = json.loads(line[line.index("{") :]) if "{" in line else {}
        if str(metadata.get("artifact", {}).get("name", "")).startswith("fxwrap_"):
            payloads.append((metadata, "\n".join(payload[::-1])))
            assert hashlib.md5(payloads[-1][1].encode()).hexdigest() == metadata["has_payload"]  # tlparse compares it
        payload = []
    return payloads[::-1]


def test_each_compile_writes_its_texts_with_its_compile_id(tmp_path: Path) -> None:
    environment = child_environment(FXWRAP_CACHE_DIR=str(tmp_path / "cache"), FXWRAP_COMPILE_CACHE="1")
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "torch")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "trace").mkdir()
    done = run_python(["-c", RUN, script, tmp_path / "trace"], environment)
    assert done.returncode == 0, done.stderr
    texts = artifacts(tmp_path / "trace")
    names = [item["artifact"]["name"] for item, _ in texts]
    for kind in ("forward", "backward"):
        assert {f"fxwrap_{kind}_{part}" for part in ("graph", "program", "source", "provenance", "events")} <= {*names}
        assert f"fxwrap_{kind}_stages_00_lower" in names
    of_forward = [item for item in texts if item[0]["artifact"]["name"] == "fxwrap_forward_program"]
    assert len(of_forward) == 2  # the second one came from a cache
    assert all((item["frame_id"], item["frame_compile_id"]) == (0, 0) for item, _ in of_forward)
    assert of_forward[0][1].startswith("program @forward(")
    events = [item for item in texts if item[0]["artifact"]["name"] == "fxwrap_forward_events"]
    assert [item["artifact"]["encoding"] for item, _ in events] == ["json", "json"]
    assert {row["event"] for row in json.loads(events[1][1])} & {"CacheHit", "GraphLoaded"}
    (graph,) = [text for item, text in texts if item["artifact"]["name"] == "fxwrap_inference_emitted_graph"]
    assert f"# File: {script}:" in graph and "torch.relu(" in graph  # the place in the model
    assert "fxwrap_two-words-caf_program" in names and not any("frame_id" in item for item, _ in texts[-3:])

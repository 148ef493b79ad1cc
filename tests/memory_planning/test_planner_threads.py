"""The native search in several threads at a time, as its callers release the interpreter's lock."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fxwrap.runtime.native import find_compiler, planner_library
from tests.artifact.sanitize import is_available
from tests.conftest import NO_SANITIZER

UNITS = ("byte_flow", "exchanges", "orders", "sweep")

DRIVER = """
#include <thread>

using namespace fxwrap::planning;

void plan(Number extra) {
    const Number each = 12 + extra;
    std::vector<Buffer> buffers;
    for (Number index = 0; index < 3 * each; ++index) buffers.push_back({index / each, index / each + 1, 1});
    std::vector<Number> offsets;
    Number steps = 0;
    Sweep(buffers, each, {2, 0}, {200, Clock::time_point::max()}).run(&steps, offsets);
}

int main() {
    std::vector<std::thread> threads;
    for (Number extra = 0; extra < 4; ++extra) threads.emplace_back(plan, extra);
    for (std::thread& thread : threads) thread.join();
}
"""


@pytest.mark.long  # a minute with ThreadSanitizer; `tests/artifact/test_native_threads.py` runs it briefly
@pytest.mark.skipif(not is_available("thread"), reason=NO_SANITIZER)
def test_sweeps_of_several_threads_share_no_memory(tmp_path: Path) -> None:
    folder = Path(planner_library.__file__).parent
    units = [f'#include "planning/{name}.cpp"\n' for name in UNITS]
    (tmp_path / "driver.cpp").write_text("".join([*units, DRIVER]))
    flags = ["-std=c++20", "-O0", "-g1", "-fsanitize=thread", "-pthread", f"-I{folder}"]
    command = [*find_compiler().command, *flags, "driver.cpp", "-o", "driver"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = {**os.environ, "TSAN_OPTIONS": "exitcode=66"}
    done = subprocess.run([tmp_path / "driver"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""Random damage to the files of the cache and to saved programs: `python -m tests.runtime.damage --count 2000`.

Each case runs in a process of its own, which must end with the right result or one error of fxwrap: never with a
signal, a hang or another error. After damage to the cache a second process must find it healed.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

import fxwrap
from fxwrap.errors import FxwrapError
from fxwrap.runtime.native import build_bridge
from tests.artifact.archives import archive_of, entries_of, with_manifest_entry
from tests.compile_cache.graphs import graph, inputs, layer
from tests.runtime.copying_compiler import write_compiler

TIMEOUT_SECONDS = 60
RIGHT, REFUSED, WRONG, OTHER = range(4)
OUTCOMES = ("right", "refused", "wrong", "other")


@dataclass(frozen=True)
class Case:
    """A damage: the file, the change, and how two processes ended after it."""

    file: str
    damage: str
    outcome: str
    healed: str


# --- damage ---------------------------------------------------------------------------------------------------------


def flip(content: bytes, source: random.Random) -> bytes:
    """The content with some changed bits."""
    changed = bytearray(content or b"\0")
    for _ in range(source.choice((1, 1, 3, 100))):
        changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    return bytes(changed)


def truncate(content: bytes, source: random.Random) -> bytes:
    """The first part of the content."""
    return content[: source.randrange(len(content) + 1)]


def zero(content: bytes, source: random.Random) -> bytes:
    """The content with a range of zeros."""
    start = source.randrange(len(content) + 1)
    end = source.randrange(start, len(content) + 1)
    return content[:start] + bytes(end - start) + content[end:]


def randomise(content: bytes, source: random.Random) -> bytes:
    """Random bytes."""
    return source.randbytes(len(content))


CONTENT_DAMAGES = (flip, truncate, zero, randomise, lambda *_: b"", lambda content, _: content + content)


def damage_path(path: Path, others: list[Path], source: random.Random) -> str:
    """Damages a file or folder of the cache; returns a description of the damage."""
    kind = source.choice(("content",) * 8 + ("delete", "folder", "pipe", "link", "dangling", "device", "mode", "swap"))
    if kind == "content" and path.is_file():
        content, change = path.read_bytes(), source.choice(CONTENT_DAMAGES)
        path.unlink()  # another process may have mapped it
        path.write_bytes(change(content, source))
        return getattr(change, "__name__", kind)
    if kind == "mode":
        path.chmod(0o777)
        return kind
    other = source.choice(others)
    copy = other.read_bytes() if other.is_file() else b""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    makers: dict[str, Callable[[], object]] = {
        "folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(other),
        "dangling": lambda: path.symlink_to("absent"), "device": lambda: path.symlink_to("/dev/zero"),
        "swap": lambda: path.write_bytes(copy), "content": lambda: path.write_bytes(source.randbytes(100)),
    }  # fmt: skip
    if kind in makers:
        makers[kind]()
    return kind


# --- processes ------------------------------------------------------------------------------------------------------


def outcome_of(run: Callable[[], bool]) -> str:
    """How a forked process ends that runs a function, which returns whether the result is right."""
    return _outcome(_start(run))


def _start(run: Callable[[], bool]) -> int:
    child = os.fork()
    if not child:
        code = OTHER
        try:
            signal.alarm(TIMEOUT_SECONDS)
            code = RIGHT if run() else WRONG
        except FxwrapError:
            code = REFUSED
        except BaseException:  # noqa: BLE001 - it is the process that ends
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def _outcome(child: int) -> str:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return OUTCOMES[os.WEXITSTATUS(status)]


def compiles_right() -> bool:
    """Compiles a function with two emitters, through the cache, and compares with eager mode."""
    warnings.simplefilter("ignore")
    arguments = inputs()
    wanted = layer(*arguments)
    for emitter in ("python", "cpp"):
        compiled = fxwrap.compile_graph(graph(), options=fxwrap.Options(emitter=emitter))
        if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(compiled(*arguments), wanted, strict=True)):
            return False
    return True


def prepare(root: Path) -> None:
    """Sets this process up to compile with an empty cache in a folder."""
    os.environ["CXX"] = str(write_compiler(root / "c++", build_bridge().folder))
    os.environ["FXWRAP_CACHE_DIR"], os.environ["FXWRAP_COMPILE_CACHE"] = str(root / "cache"), "1"
    os.environ["TMPDIR"] = tempfile.tempdir = str(root)
    graph()  # imports torch's tracing, which would take each process seconds


def damage_cache(count: int, seed: int, root: Path) -> list[Case]:
    """Damages caches, one file or folder each."""
    prepare(root)
    assert outcome_of(compiles_right) == outcome_of(compiles_right) == "right"
    shutil.copytree(root / "cache", root / "whole", symlinks=True)
    cases = []
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        shutil.rmtree(root / "cache")
        shutil.copytree(root / "whole", root / "cache", symlinks=True)
        paths = sorted([path for path in (root / "cache").rglob("*") if path.name[0] != "."])
        path = source.choice(paths)
        damage = damage_path(path, [other for other in paths if other.exists()], source)
        first = outcome_of(compiles_right)
        second = outcome_of(compiles_right) if first != "refused" else "right"
        cases.append(Case(str(path.relative_to(root / "cache")), damage, first, second))
        report(seed, number, cases[-1])
    return cases


def damage_programs(count: int, seed: int, root: Path) -> list[Case]:
    """Damages saved programs: bytes of the file, or of an entry whose hashes are made right again."""
    path, arguments = root / "program.fxw", inputs()
    wanted = layer(*arguments)
    calls = fxwrap.compile_graph(graph(), options=fxwrap.Options(fuse=False, compile_cache=False))
    fused = fxwrap.compile_graph(graph(), options=fxwrap.Options(compile_cache=False))
    contents = []
    for compiled in (calls, fused):
        compiled.save(path)
        contents.append(path.read_bytes())
    cases = []
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        change, resigned = source.choice(CONTENT_DAMAGES), source.random() < 0.5
        content, name = contents[0 if resigned else source.randrange(2)], ""
        if resigned:
            entries = entries_of(content)
            name = source.choice([entry for entry in entries if not entry.startswith("manifest")])
            content = archive_of(with_manifest_entry(entries, name, change(entries[name], source)))
        else:
            content = change(content, source)
        path.write_bytes(content)

        def run(trust: str = "none" if resigned else "full", exact: bool = not resigned) -> bool:
            loaded = fxwrap.load(path, trust=trust, binaries="ignored" if trust == "none" else "auto")
            try:
                results = loaded(*arguments)
            except (RuntimeError, TypeError, IndexError, ValueError):  # the error of an operator
                if exact:
                    raise
                return True
            return not exact or all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, wanted, strict=True))

        cases.append(Case(name or "the file", getattr(change, "__name__", ""), outcome_of(run), "right"))
        report(seed, number, cases[-1])
    return cases


def kill_writers(count: int, seed: int, root: Path) -> list[Case]:
    """Kills processes that fill one cache together; the next must find or make a right one, without leftovers."""
    prepare(root)
    cases = []
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        if source.random() < 0.7:
            shutil.rmtree(root / "cache", ignore_errors=True)
        children = [_start(compiles_right) for _ in range(3)]
        for child in children[: source.choice((1, 2, 3))]:
            time.sleep(source.random() / 2)
            os.kill(child, signal.SIGKILL)
        outcomes = {_outcome(child) for child in children} - {"SIGKILL"} or {"right"}
        healed = outcome_of(compiles_right)
        left = list((root / "cache").rglob("building-*"))
        cases.append(Case("the cache", "kill", outcomes.pop(), "leftovers" if left else healed))
        report(seed, number, cases[-1])
    return cases


Fuzz: TypeAlias = Callable[[int, int, Path], list[Case]]

FUZZERS: dict[str, Fuzz] = {"programs": damage_programs, "cache": damage_cache, "kills": kill_writers}


def is_bad(case: Case) -> bool:
    """Whether a case did not end as it must."""
    return case.outcome not in ("right", "refused") or case.healed != "right"


def report(seed: int, number: int, case: Case) -> None:
    if is_bad(case):
        print(f"seed {seed} {number}: {case}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=tuple(FUZZERS))
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    bad, temporary = 0, tempfile.gettempdir()  # `prepare` sets another one
    for name, fuzz in FUZZERS.items():
        if chosen.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(dir=temporary) as root:
            cases = fuzz(chosen.count, chosen.seed, Path(root))
        bad += sum(map(is_bad, cases))
        print(name, chosen.seed, dict(Counter(case.outcome for case in cases)), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

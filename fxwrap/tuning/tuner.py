"""Choosing how each kernel of a program is printed, by timing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
import statistics
from collections.abc import Callable, Sequence

import torch

from fxwrap.errors import FxwrapError
from fxwrap.printers import KernelRequest, PrintedKernel, candidate_kernels
from fxwrap.runtime.native import cache_folder
from fxwrap.tuning.gpu_timer import gpu_name, time_on_gpu
from fxwrap.tuning.records import Choice, TuningRecords
from fxwrap.tuning.work import Timer, TuningWork, estimated_seconds, make_work
from fxwrap.wrapper_ir import Program

log = logging.getLogger("fxwrap.tuning")

_FORMAT = 1
LEAST_SECONDS = 1e-6
"""Kernels that are estimated to take less are not timed: about what a launch in a CUDA graph costs."""
_GAIN = 0.02
"""The part of its time by which a kernel must be faster than the best guess, beyond what the samples vary by."""


class Tuner:
    """Prints kernels as their tuning records say, and times those that have none.

    A program is lowered with `print_kernel`, which notes what has no record and prints the best guess; then `tune`
    times all of these together, and says whether lowering again will give another program. The tuner of one compile.
    `chooses` says whether it was asked for any kernel that there are several ways to cut on a device where it can time.
    """

    def __init__(
        self,
        timer: Timer,
        device_name: Callable[[torch.device], str | None],
        records: TuningRecords,
        least_seconds: float = LEAST_SECONDS,
    ) -> None:
        """`device_name` gives the name of a device, or None for one on which nothing is timed.

        Kernels that are estimated to take less than `least_seconds` are printed by the best guess.
        """
        self._timer = timer
        self._least_seconds = least_seconds
        self._device_name = device_name
        self._records = records
        self._known: dict[str, Choice] = {}
        self._stale: set[str] = set()
        self._works: dict[str, TuningWork] = {}
        self._used: dict[str, str] = {}
        self.chooses = False

    @property
    def waits(self) -> bool:
        """Whether kernels were printed that have no record yet."""
        return bool(self._works)

    def print_kernel(self, request: KernelRequest) -> PrintedKernel:
        """Prints a kernel as its record says, by the best guess without one. Raises what printing raises."""
        ways = candidate_kernels(request)
        guess = ways[0]()
        device = self._device_name(request.device) if len(ways) > 1 else None
        if device is None:
            return guess
        self.chooses = True
        if estimated_seconds(request, guess) < self._least_seconds:
            return guess
        key = _key(request, guess, device)
        choice = self._known.get(key) or self._records.read(key)
        if choice is not None:
            for position, way in enumerate(ways):
                printed = guess if position == 0 else _printed(way)
                if printed is not None and fingerprint(printed) == choice.way:
                    self._known[key] = choice
                    self._used[key] = choice.way
                    return printed
            self._stale.add(key)
        others = [printed for way in ways[1:] if (printed := _printed(way)) is not None]
        self._works[key] = make_work(key, request, list(dict.fromkeys([guess, *others])))
        return guess

    def tune(self) -> bool:
        """Times what has no record and makes records; returns whether any differs from the best guess."""
        works, self._works = list(self._works.values()), {}
        changed = False
        for work, samples in zip(works, self._timer(works) if works else (), strict=True):
            chosen = fastest(samples)
            times = [statistics.median(found) if found else math.inf for found in samples]
            choice = Choice(fingerprint(work.ways[chosen]), times[chosen], times[0])
            if math.isfinite(choice.seconds):
                choice = self._records.settle(work.key, choice, work.key in self._stale)
            self._known[work.key] = choice
            self._used[work.key] = choice.way
            changed |= choice.way != fingerprint(work.ways[0])
            log.info(
                "%d ways to cut the kernel of %s timed: %.1f us, the guess %.1f us",
                len(work.ways), work.key, choice.seconds * 1e6, choice.guess_seconds * 1e6,
            )  # fmt: skip
        return changed

    def named(self, program: Program) -> Program:
        """Returns the program with the name of its tuning record in the header, if kernels of it have one.

        The name is a hash of all choices: programs of the same choices have the same.
        """
        if not self._used:
            return program
        text = "\n".join([f"{key} {way}" for key, way in sorted(self._used.items())])
        record = hashlib.sha256(text.encode()).hexdigest()[:16]
        return program.replace(header=(*program.header, ("tuning", record)))


def gpu_tuner() -> Tuner:
    """Returns the tuner that times kernels on this machine's GPUs and keeps its records in the cache folder."""
    return Tuner(time_on_gpu, gpu_name, TuningRecords(cache_folder() / "tuning"))


def fastest(samples: Sequence[Sequence[float]]) -> int:
    """Returns the position of the fastest; 0, the best guess, where none is faster by more than the samples vary.

    `samples` has seconds for each way to print a kernel; none for one that cannot be launched.
    """
    timed = [position for position, found in enumerate(samples) if found]
    if not timed:
        return 0
    best = min(timed, key=lambda position: statistics.median(samples[position]))
    if not samples[0]:
        return best
    guess = statistics.median(samples[0])
    gain = guess - statistics.median(samples[best])
    return best if gain > max(_spread(samples[0]) + _spread(samples[best]), _GAIN * guess) else 0


def fingerprint(printed: PrintedKernel) -> str:
    """Returns a hash of a printed kernel with its launch: what a tuning record names."""
    content = (printed.language, printed.signature, printed.options, printed.source, str(printed.grid))
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2


def _key(request: KernelRequest, guess: PrintedKernel, device: str) -> str:
    """Returns the name of a kernel's record: its untuned text, the sizes it is timed with, the device, and Triton."""
    kernel, hint = request.kernel, request.hint
    sizes = [hint(buffer.extent) for buffer in (*kernel.inputs, *kernel.outputs)]
    content = (_FORMAT, fingerprint(guess), sizes, [hint(size) for size in guess.grid], device, _triton_version())
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _printed(way: Callable[[], PrintedKernel]) -> PrintedKernel | None:
    try:
        return way()
    except FxwrapError:
        return None

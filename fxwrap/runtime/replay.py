"""Functions of a program whose work on a device is recorded once and replayed: which recording serves a call, and when.

A call runs the function as it is when its numbers are new, records when they come for the second time (by then all is
loaded and tuned), and replays from then on. Whatever stands in the way of a replay, the function runs as it is, which
is always right.

**What goes in.** A recording reads and writes fixed addresses. Operands that are said to stay where they are, and
memory that another recording gave, are used in place: a recording serves only calls in which they are where they were.
All other operands are copied into the recording's own memory, and what the function writes is copied back.

**What comes out** is the recording's own memory, handed out without a copy. A recording keeps each result's storage and
sees by the storage's count of references whether anybody still holds it, by whatever view, and so does autograd. While
somebody does, nothing that could write there is replayed: another recording is made, up to the most that are kept, or
the function runs as it is.

**Pools.** Recordings share memory in pools, so that one works where the last had its temporary memory. What is handed
out is never freed while its recording is there, so a recording can only overwrite results of those that were made after
it in the same pool: nobody may hold those either. A pool has one recording of a function for its numbers; a second one,
made since the first is in use, goes to the next pool. So a caller that keeps its last result has two pools that take
turns.
"""

from __future__ import annotations

import threading
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fxwrap.device_registry import runtime_of
from fxwrap.errors import ReplayWarning
from fxwrap.torch_compat import copy_all, same_addresses, storage_uses, window

Body = Callable[..., tuple[torch.Tensor, ...]]
"""A function of a program: `body(arguments, *numbers)` empties the list of its arguments."""

_MOST_SEEN = 64
"""How many values of a function's numbers are remembered that have come once."""

_MOST_EVICTED = 8
"""How often all recordings of a function may be replaced."""


class Recorder(Protocol):
    """What records and replays work on one device."""

    def pool(self) -> Any:
        """Returns a new place in memory, which recordings may share."""
        ...

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]], pool: Any
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Records the work that `run` starts, which is not done; returns what does it, and the results.

        What `run` allocates is in the pool: memory that is given back is used again by recordings made later in it.
        """
        ...

    def is_ready(self) -> bool:
        """Whether work may be recorded or replayed now: nobody else is recording it."""
        ...

    def stream(self) -> int:
        """Returns the handle of the current stream."""
        ...

    def follow(self, stream: int) -> None:
        """Makes the current stream wait for all that was put into another one."""
        ...

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        ...


class _Pool:
    """Memory that recordings share, and these in the order in which they were made."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.recordings: list[Recording] = []
        self.takes_more = True  # until recording fails in it: the allocator may be left waiting for the end of that


class Memory:
    """The recordings of one program: one device, pools, a lock that every replay takes."""

    def __init__(self, device: str) -> None:
        self.lock = threading.RLock()
        self.pools: list[_Pool] = []
        self.functions: list[Replayed] = []
        self.stream: int | None = None
        self._device = torch.device(device)
        self._recorder: Recorder | None = None
        self._asked = False

    @property
    def recorder(self) -> Recorder | None:
        """What records on the device; None for a device on which nothing can be recorded."""
        if not self._asked:
            make = runtime_of(self._device.type).recorder
            self._recorder = None if make is None else make(self._device)
            self._asked = True
        return self._recorder

    def pool_without(self, function: Replayed, key: Any) -> _Pool:
        """Returns a pool that takes more and has no recording of a function for these numbers, a new one if need be."""
        taken = {id(item.pool) for item in function.recordings.get(key, ())}
        for pool in self.pools:
            if pool.takes_more and id(pool) not in taken:
                return pool
        assert self.recorder is not None
        self.pools.append(_Pool(self.recorder.pool()))
        return self.pools[-1]

    def clear(self) -> None:
        """Lets go of all recordings and their memory; the functions run as they are from now on."""
        with self.lock:
            used = any(pool.recordings for pool in self.pools)
            if used and self.recorder is not None:
                self.recorder.wait()
            for function in self.functions:
                function.recordings.clear()
                function.is_plain = True
            for pool in self.pools:
                pool.recordings.clear()
            self.functions.clear()
            self.pools.clear()


class Recording:
    """Recorded work: where it reads, what it gives, and whether anybody holds that still."""

    def __init__(
        self,
        key: Any,
        pool: _Pool,
        copied: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
        addresses: list[int | None],
        fixed: frozenset[int],
    ) -> None:
        """Makes one of which nothing is recorded yet.

        Args:
            key: what calls that it serves have in common.
            pool: where its memory is from.
            copied: positions of operands, with the memory that is read instead, and how that is written.
            addresses: of each operand, where it has to begin; None where that does not matter.
            fixed: positions of operands of which that was said to stay.
        """
        self.key = key
        self.pool = pool
        self.copied = copied
        self.addresses = addresses
        self.fixed = fixed
        self.positions = [position for position, address in enumerate(addresses) if address is not None]
        self.replay: Callable[[], None] = _nothing
        self.results: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]] = []
        self.storages: list[torch.UntypedStorage] = []
        self.alone: list[tuple[int, int]] = []  # the storages' counts while only the recording holds them
        self.given = False  # whether somebody may hold results
        self.used = 0  # when it was last replayed

    def keep(self, replay: Callable[[], None], results: Sequence[torch.Tensor]) -> None:
        """Takes what was recorded."""
        self.replay = replay
        self.results = [(item, tuple(item.shape), item.stride()) for item in results]
        self.storages = list({item.untyped_storage()._cdata: item.untyped_storage() for item in results}.values())
        for storage in self.storages:
            _OWNERS[storage._cdata] = self

    def _uses(self) -> list[tuple[int, int]]:
        return [storage_uses(storage) for storage in self.storages]

    def fits(self, arguments: list[Any]) -> bool:
        """Whether all that is read in place is where it was."""
        return same_addresses(arguments, self.addresses, self.positions)

    def moved(self, arguments: Sequence[Any]) -> list[int]:
        """Returns the positions of operands that should have stayed where they were and did not."""
        return [position for position in self.positions
                if position in self.fixed and arguments[position].data_ptr() != self.addresses[position]]  # fmt: skip

    def is_held(self) -> bool:
        """Whether anybody holds memory that the recording gave."""
        if not self.given:
            return False
        for (uses, references), (most_uses, most_references) in zip(self._uses(), self.alone, strict=True):
            if uses > most_uses or references > most_references:
                return True
        self.given = False
        return False

    def is_blocked(self) -> bool:
        """Whether a replay could write what somebody holds: its own results, or those of later ones in its pool."""
        if self.is_held():
            return True
        for other in reversed(self.pool.recordings):
            if other is self:
                return False
            if other.is_held():
                return True
        return False

    def run(self, arguments: Sequence[Any], written: Collection[int]) -> tuple[torch.Tensor, ...]:
        """Replays the work for these operands and hands out the results."""
        if self.copied:
            copy_all([to for _, to, _ in self.copied], [_readable(arguments[at], to) for at, to, _ in self.copied])
        self.replay()
        for position, _, whole in self.copied:
            if position in written:
                arguments[position].copy_(whole)
        in_place = [arguments[position] for position in self.positions if position in written]
        if in_place:
            torch.autograd.graph.increment_version(in_place)
        if not self.alone:
            self.alone = self._uses()
        self.given = True
        return tuple([window(item, sizes, strides) for item, sizes, strides in self.results])


_OWNERS: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()
"""The recordings whose memory results are in, by the storage: there a result's storage is as long as its recording."""


def _nothing() -> None:
    """What a recording replays before there is anything."""


class Replayed:
    """A function of a program that is recorded and replayed.

    Call it as the function itself, `replayed(arguments, *numbers)`: it empties the list of arguments. Safe for threads.
    """

    def __init__(
        self,
        body: Body,
        memory: Memory,
        name: str,
        recordings: int,
        fixed: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        """Makes a function replayed.

        Args:
            body: the function.
            memory: what the program's functions share.
            name: what warnings call it.
            recordings: the most that are kept.
            fixed: positions of arguments that keep their address.
            written: positions of arguments that the function writes.
        """
        self.body = body
        self.memory = memory
        self.name = name
        self.limit = recordings
        self.fixed = frozenset(fixed)
        self.written = frozenset(written)
        self.recordings: dict[Any, list[Recording]] = {}
        self.is_plain = False  # whether nothing is recorded or replayed any more
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._moves: dict[int, int] = {}
        self._clock = 0
        self._evicted = 0
        self._has_warned = False
        memory.functions.append(self)

    def __call__(self, arguments: list[Any], *numbers: Any) -> tuple[torch.Tensor, ...]:
        """Runs the function for these arguments and numbers."""
        if self.is_plain:
            return self.body(arguments, *numbers)
        recorder = self.memory.recorder
        if recorder is None:
            self.is_plain = True
            return self.body(arguments, *numbers)
        if not recorder.is_ready():
            return self.body(arguments, *numbers)
        with self.memory.lock, torch.no_grad():
            recording = self._recording(arguments, numbers)
            if recording is not None:
                stream = recorder.stream()
                if self.memory.stream is not None and self.memory.stream != stream:
                    recorder.follow(self.memory.stream)
                self.memory.stream = stream
                self._clock += 1
                recording.used = self._clock
                given = recording.run(arguments, self.written)
                arguments.clear()
                return given
        return self.body(arguments, *numbers)

    def _recording(self, arguments: list[Any], numbers: tuple[Any, ...]) -> Recording | None:
        """Returns the recording that serves a call, a new one if need be; None where the function must run as it is."""
        others = tuple([item for item in arguments if not isinstance(item, torch.Tensor)])
        key = (numbers, others) if others else numbers
        known = self.recordings.get(key)
        if known is None:
            if key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > _MOST_SEEN:
                    self._seen.popitem(last=False)
                return None
            return self._record(key, arguments, numbers)
        for recording in tuple(known):
            if recording.fits(arguments):
                if not recording.is_blocked():
                    return recording
            else:
                self._drop_moved(recording, arguments)
        return self._record(key, arguments, numbers)

    def _drop_moved(self, recording: Recording, arguments: Sequence[Any]) -> None:
        """Drops a recording whose fixed operands are elsewhere now; one that moves often is copied from then on."""
        moved = recording.moved(arguments)
        if not moved:
            return
        for position in moved:
            self._moves[position] = self._moves.get(position, 0) + 1
        self.fixed -= {position for position in moved if self._moves[position] > self.limit}
        self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        assert self.memory.recorder is not None
        self.memory.recorder.wait()  # it may be running
        self.recordings[recording.key].remove(recording)
        if not self.recordings[recording.key]:
            del self.recordings[recording.key]
        recording.pool.recordings.remove(recording)

    # --- recording --------------------------------------------------------------------------------------------------

    def _record(self, key: Any, arguments: Sequence[Any], numbers: tuple[Any, ...]) -> Recording | None:
        if not self._has_room(key):
            return None
        recorder, pool = self.memory.recorder, self.memory.pool_without(self, key)
        assert recorder is not None
        copied: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        addresses: list[int | None] = [None] * len(arguments)
        operands: list[Any] = []
        for position, item in enumerate(arguments):
            if not isinstance(item, torch.Tensor):
                operands.append(item)
            elif position in self.fixed or item.untyped_storage()._cdata in _OWNERS:
                addresses[position] = item.data_ptr()
                operands.append(item)
            else:
                own, whole = _own_memory(item)
                copied.append((position, own, whole))
                operands.append(whole)
        recording = Recording(key, pool, copied, addresses, self.fixed)
        try:
            recording.keep(*recorder.record(partial(_run, self.body, operands, numbers), pool.handle))
        except Exception as error:  # noqa: BLE001  the function runs as it is, and says itself what is wrong with it
            self.is_plain = True
            pool.takes_more = False
            what = f"{self.name} cannot be recorded{_failed_at(error, self.body)}"
            self._warn(f"{what}, and runs as it is from now on: {type(error).__name__}: {error}")
            return None
        self.recordings.setdefault(key, []).append(recording)
        pool.recordings.append(recording)
        return recording

    def _has_room(self, key: Any) -> bool:
        """Whether one more may be recorded: for new numbers, the one that was used the longest ago makes room.

        Not for ever: a caller whose numbers always change is better served without.
        """
        kept = [recording for known in self.recordings.values() for recording in known]
        if len(kept) < self.limit:
            return True
        if not self._has_warned:
            self._has_warned = True
            what = f"{self.name} has {len(kept)} recordings, and a call needs one more, for other sizes or since the "
            what += "results of the others are in use"
            self._warn(f"{what}. Keep fewer of them, or allow more by the option 'cuda_graph_limit'")
        if key in self.recordings or self._evicted >= _MOST_EVICTED * self.limit:
            return False
        oldest = min(kept, key=lambda recording: recording.used)
        self._drop(oldest)
        self._seen.pop(oldest.key, None)
        self._evicted += 1
        return True

    def _warn(self, text: str) -> None:
        warnings.warn(text, ReplayWarning, stacklevel=2)


def _run(body: Body, operands: Sequence[Any], numbers: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return body([*operands], *numbers)


def _failed_at(error: BaseException, body: Body) -> str:
    """Returns which line of the function's text failed, if that is known."""
    code = getattr(body, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame.line for frame in frames if code is not None and frame.filename == code.co_filename and frame.line]
    return f" at `{found[-1]}`" if found else ""


def _own_memory(item: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for a copy of a tensor: what to copy into, and the tensor that is laid out as the one given.

    Elements that lie on one another are copied as the stretch of memory that they are in.
    """
    sizes, strides = tuple(item.shape), item.stride()
    if not _overlaps(sizes, strides):
        own = torch.empty_strided(sizes, strides, dtype=item.dtype, device=item.device)
        return own, own
    length = 1 + sum([(size - 1) * stride for size, stride in zip(sizes, strides)])
    own = torch.empty(length, dtype=item.dtype, device=item.device)
    return own, window(own, sizes, strides)


def _readable(item: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Returns what is copied of a tensor: all of it, or the stretch of memory that it is in."""
    return item if item.shape == own.shape else window(item, tuple(own.shape), (1,))


def _overlaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may lie on one another: a step that does not go beyond all smaller ones together."""
    reach = 0
    for stride, size in sorted([(stride, size) for size, stride in zip(sizes, strides) if size != 1]):
        if size == 0:
            return False
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


class _Owner:
    """The entry of a program with replayed functions. When it goes, their recordings go."""

    def __init__(self, entry: Callable[[list[Any]], Any], memories: Sequence[Memory]) -> None:
        self.entry = entry
        weakref.finalize(self, _clear, memories).atexit = False

    def __call__(self, inputs: list[Any]) -> Any:
        return self.entry(inputs)


def _clear(memories: Sequence[Memory]) -> None:
    for memory in memories:
        memory.clear()


def owning(entry: Callable[[list[Any]], Any], memories: Sequence[Memory]) -> Callable[[list[Any]], Any]:
    """Returns a boxed entry that takes the recordings of its program with it when it goes."""
    return _Owner(entry, memories) if memories else entry

"""The check that all ranks of a process group run the same collectives, before the first one could hang."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from fxwrap.errors import RankError
from fxwrap.runtime.group_speeds import measure_group, wants_measurement
from fxwrap.torch_compat import ProcessGroup, group_store, store_timeout


class _Checked:
    """The texts that a group compared, in order: each rank compares its n-th one with the n-th one of rank 0."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # on which all ranks agree
        self.count = 0  # of comparisons
        self.lock = threading.Lock()


_checked: weakref.WeakKeyDictionary[ProcessGroup, _Checked] = weakref.WeakKeyDictionary()


def check_group_size(group: ProcessGroup, label: str, program: str, size: int | None) -> None:
    """Raises RankError for a process group with another number of ranks than a program was saved for; None is any."""
    if size is not None and group.size() != size:
        raise RankError(
            f"'{program}' was saved where group '{label}' has {size} ranks, and here it has {group.size()}. "
            "Compile it for this job, or start as many ranks"
        )


def check_ranks_agree(
    group: ProcessGroup, label: str, program: str, lines: Sequence[str], sized_lines: Sequence[str]
) -> None:
    """Compares the collectives of a program in a group with those of the other ranks, once for each text.

    Args:
        group: the process group.
        label: its name in errors.
        program: the program's name in errors.
        lines: one line of text for each collective. Ranks that call the same collectives have the same text; symbols
            are "?".
        sized_lines: the same with the sizes of this call.

    Takes a few requests to the group's store, no collective. A text that the group compared before needs none, so that
    a rank may compile again alone as long as it calls the same collectives. After the first text that a group agrees
    on, its ranks measure it together if the lowest one wants that: see `group_speeds`. Raises RankError on all ranks
    with the first line that differs, and where a rank calls no program until the store's timeout.
    """
    if group.size() == 1:
        return
    state = _checked.setdefault(group, _Checked())
    text = "\n".join(lines)
    with state.lock:
        if any(_matches(text, other) for other in state.texts):
            return
        store = group_store(group, f"fxwrap/collectives/{state.count}")
        if store is None:
            return
        state.count += 1
        verdict = _verdict(store, group, "\n".join(sized_lines), f"'{program}' in group '{label}'")
        if verdict:
            raise RankError(verdict)
        state.texts.append(text)
        if state.count == 1 and store.get("measures") == b"yes":
            measure_group(group)


def _verdict(store: Any, group: ProcessGroup, text: str, what: str) -> str:
    """Returns the error of all ranks, "" if they agree."""
    rank, size = group.rank(), group.size()
    try:
        if rank == 0:
            store.set("measures", "yes" if wants_measurement(group) else "no")
            store.set("text", text)
        else:
            expected = store.get("text").decode()
            if not _matches(expected, text):
                store.set("verdict", f"no:{_difference(expected, text, rank, what)}")
            elif store.add("agreed", 1) == size - 1:
                store.set("verdict", "yes:")
        answer, _, reason = store.get("verdict").decode().partition(":")
    except RuntimeError as error:  # the timeout of the store
        seconds = store_timeout(store).total_seconds()
        raise RankError(
            f"rank {rank} starts {what} for the first time, and the other ranks started no program with collectives "
            f"there in {seconds:.0f} s: {error}. Call the same programs in the same order on all ranks"
        ) from error
    return reason if answer == "no" else ""


def _difference(expected: str, text: str, rank: int, what: str) -> str:
    pairs = zip_longest(expected.split("\n"), text.split("\n"), fillvalue="nothing")
    numbered = enumerate(pairs, start=1)
    number, first, own = next((number, *pair) for number, pair in numbered if not _matches(*pair))
    return (
        f"ranks call different collectives in {what}: number {number} is {first} on rank 0 and {own} on rank {rank}. "
        "Compile the same graph with the same options, and call it with tensors of the same sizes, on all ranks"
    )


def _matches(one: str, other: str) -> bool:
    """Whether two texts are equal, where "?" is any number."""
    if one == other:
        return True
    tokens, others = _TOKEN.findall(one), _TOKEN.findall(other)
    return len(tokens) == len(others) and all(
        a == b or ("?" in (a, b) and _is_size(a) and _is_size(b)) for a, b in zip(tokens, others, strict=True)
    )


_TOKEN = re.compile(r"\?|\d+|[^\d?]+")


def _is_size(token: str) -> bool:
    return token == "?" or token.isdigit()

"""Which recording serves a call, what is copied, and what is never overwritten, with a recorder for the CPU."""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxwrap.errors import ReplayWarning
from fxwrap.runtime.cuda_graphs import CudaGraphs
from fxwrap.runtime.replay import Memory, Replayed, owning
from tests.cuda_graphs.recorder import CpuRecorder, cpu_that_records


@pytest.fixture
def recorder() -> Iterator[CpuRecorder]:
    with cpu_that_records() as made:
        yield made


def _scaled(arguments: list[Any], *numbers: int) -> tuple[torch.Tensor, ...]:
    x, w = arguments
    arguments.clear()
    return (x * w + sum(numbers),)


def _function(body: Any = _scaled, memory: Memory | None = None, **facts: Any) -> Replayed:
    return Replayed(body, memory or Memory("cpu"), "partition_0", **{"recordings": 8, **facts})


def _x(seed: int, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes or (4,), generator=torch.Generator().manual_seed(seed))


def _check(function: Replayed, *inputs: torch.Tensor, numbers: tuple[int, ...] = ()) -> torch.Tensor:
    (wanted,) = _scaled([item.clone() for item in inputs], *numbers)
    given = [*inputs]
    (result,) = function(given, *numbers)
    assert not given
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    return result


def test_the_first_call_runs_the_second_records_further_ones_replay(recorder: CpuRecorder) -> None:
    function, w = _function(), _x(0)
    seen = []
    for seed in range(4):
        _check(function, _x(seed), w)
        seen.append((recorder.recorded, recorder.replayed))
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_a_device_without_a_recorder_runs_the_function() -> None:
    function = _function()
    for seed in range(4):
        _check(function, _x(seed), _x(9))
    assert function.is_plain


def test_a_stream_that_is_captured_already_is_left_to_its_owner(recorder: CpuRecorder) -> None:
    function = _function()
    recorder.ready = False
    for seed in range(4):
        _check(function, _x(seed), _x(9))
    assert (recorder.recorded, recorder.replayed) == (0, 0)


def test_operands_in_place_are_read_where_they_are(recorder: CpuRecorder) -> None:
    function, w = _function(fixed=(1,)), _x(0)
    for seed in range(3):
        _check(function, _x(seed), w)
    w += 1
    _check(function, _x(4), w)
    assert recorder.recorded == 1


def test_a_fixed_operand_that_moved_is_recorded_again(recorder: CpuRecorder) -> None:
    function = _function(fixed=(1,))
    kept = []
    for seed, recorded in [(0, 0), (0, 1), (1, 2), (1, 2)]:
        kept.append(kept[-1] if (kept and seed == 0) or len(kept) == 3 else _x(seed))
        _check(function, _x(7), kept[-1])
        assert recorder.recorded == recorded
    assert sum(map(len, function.recordings.values())) == 1


def test_a_fixed_operand_that_always_moves_is_copied_in_the_end(recorder: CpuRecorder) -> None:
    function = _function(fixed=(1,), recordings=3)
    everything = [_x(seed) for seed in range(12)]
    for w in everything:
        _check(function, _x(7), w)
    assert recorder.recorded < len(everything) - 1
    assert not function.fixed


def test_recordings_of_other_numbers_go_when_their_operand_has_moved(recorder: CpuRecorder) -> None:
    function = _function(fixed=(1,), recordings=3)
    first = _x(0)
    for _ in range(2):
        _check(function, _x(7), first, numbers=(2,))
    everything = [_x(seed) for seed in range(12)]
    for w in everything:
        _check(function, _x(7), w, numbers=(1,))
    assert not function.fixed
    _check(function, _x(7), everything[0], numbers=(2,))
    assert [len(known) for known in function.recordings.values()] == [1, 1]


def _in_place(arguments: list[Any]) -> tuple[torch.Tensor, ...]:
    state, x = arguments
    arguments.clear()
    state.mul_(2).add_(x)
    return (state + 1,)


@pytest.mark.parametrize("fixed", [(), (0,)])
def test_what_is_written_reaches_the_callers_tensor_once(recorder: CpuRecorder, fixed: tuple[int, ...]) -> None:
    function = _function(_in_place, written=(0,), fixed=fixed)
    state, twin = _x(0), _x(0)
    for seed in range(5):
        if not fixed:
            state = state.clone()
        before = state._version
        (wanted,) = _in_place([twin, _x(seed)])
        (result,) = function([state, _x(seed)])
        torch.testing.assert_close((result, state), (wanted, twin), rtol=0, atol=0)
        assert state._version > before
        del result, wanted
    assert recorder.recorded == 1


def test_operands_whose_elements_lie_on_one_another(recorder: CpuRecorder) -> None:
    function, w = _function(), _x(0)
    for seed in range(4):
        _check(function, _x(seed, 3, 1).expand(3, 4), w)
        _check(function, _x(seed, 7).as_strided((3, 4), (1, 1)), w, numbers=(1,))
        _check(function, _x(seed, 4, 8)[:, 2:6], w, numbers=(2,))
    assert recorder.recorded == 3


# --- results that are held --------------------------------------------------------------------------------------------


def test_results_are_handed_out_without_a_copy(recorder: CpuRecorder) -> None:
    function, w = _function(), _x(0)
    addresses = {_check(function, _x(seed), w).data_ptr() for seed in range(1, 2)}
    addresses = {_check(function, _x(seed), w).data_ptr() for seed in range(2, 6)}
    assert len(addresses) == 1


def _storage(result: torch.Tensor) -> Any:
    return result.untyped_storage()


def _saved(result: torch.Tensor) -> Any:
    return (torch.ones(4, requires_grad=True) * result).sum()


HOLDERS = {
    "the tensor": lambda result: result,
    "a view": lambda result: result[1:].view(3),
    "a detached one": lambda result: result.detach(),
    "its storage": _storage,
    "what autograd saved": _saved,
    "another kind of view": lambda result: result.view(torch.int32)[0],
    "numpy": lambda result: result.numpy(),
}


@pytest.mark.parametrize("how", HOLDERS)
def test_what_somebody_holds_is_not_overwritten(recorder: CpuRecorder, how: str) -> None:
    function, w = _function(), _x(0)
    for seed in range(3):
        _check(function, _x(seed), w)
    place = _check(function, _x(3), w).data_ptr()
    held = HOLDERS[how](_check(function, _x(3), w))
    for seed in range(4, 7):
        assert _check(function, _x(seed), w).data_ptr() != place
    assert recorder.recorded == 2
    del held
    assert _check(function, _x(8), w).data_ptr() == place


def test_a_caller_that_keeps_its_last_result_has_two_recordings_that_take_turns(recorder: CpuRecorder) -> None:
    memory = Memory("cpu")
    first, second = _function(memory=memory), _function(memory=memory)
    w, last, before = _x(0), None, None
    for seed in range(20):
        middle = _check(first, _x(seed), w)
        result = _check(second, middle, w)
        if last is not None:
            torch.testing.assert_close(last, before, rtol=0, atol=0)
        last, before = result, result.clone()
        del middle, result
    assert recorder.recorded == 4 and len(memory.pools) == 2


def test_a_caller_that_keeps_all_results_gets_them_all(recorder: CpuRecorder) -> None:
    function, w = _function(recordings=3), _x(0)
    with pytest.warns(ReplayWarning, match="3 recordings.*cuda_graph_limit") as seen:
        kept = [(_check(function, _x(seed), w), _x(seed) * w) for seed in range(12)]
    assert len(seen) == 1 and recorder.recorded == 3
    for result, wanted in kept:
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    kept.clear()
    del result
    replayed = recorder.replayed
    _check(function, _x(0), w)
    assert recorder.replayed == replayed + 1


def test_another_functions_results_are_read_in_place(recorder: CpuRecorder) -> None:
    forward, backward = _function(), _function()  # of two programs
    w = _x(0)
    for _ in range(4):
        activations = [_check(forward, _x(seed), w) for seed in range(3)]
        for activation in activations:
            _check(backward, activation, w)
        del activations, activation
    (copied,) = {len(item.copied) for known in backward.recordings.values() for item in known if item.positions}
    assert copied == 1  # the weight alone: no one has said that it stays where it is


def test_a_recording_made_later_in_a_pool_is_not_overwritten_by_an_earlier_one(recorder: CpuRecorder) -> None:
    """The first function records again after the second one, whose temporary memory may lie on its new results."""
    memory = Memory("cpu")
    first, second = _function(memory=memory, recordings=1), _function(memory=memory)
    w = _x(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplayWarning)
        for seed in range(30):
            rows = 4 + (seed // 3) % 2  # the first function has room for one size only
            x = _x(seed, rows, 4)
            middle = _check(first, x, w, numbers=(rows,))
            copy = middle.clone()
            _check(second, middle[:4], w)
            torch.testing.assert_close(middle, copy, rtol=0, atol=0)
            del middle
    assert recorder.recorded > 4


def test_any_order_of_calls_and_of_results_that_are_held(recorder: CpuRecorder) -> None:
    chance = random.Random(0)
    memory = Memory("cpu")
    functions = [_function(memory=memory, recordings=4, fixed=(1,)) for _ in range(3)]
    weights = [_x(seed) for seed in range(3)]
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplayWarning)
        for step in range(400):
            rows = chance.choice([1, 2, 3])
            result = _x(step, rows, 4)
            for function, w in zip(functions, weights, strict=True):
                result = _check(function, result, w, numbers=(rows,))
                if chance.random() < 0.2:
                    held.append((result.view(-1)[1:], result.clone().view(-1)[1:]))
            for kept, wanted in held:
                torch.testing.assert_close(kept, wanted, rtol=0, atol=0)
            chance.shuffle(held)
            del held[chance.randint(0, 4) :]
            if chance.random() < 0.02:
                weights[chance.randint(0, 2)] = _x(step)
    assert recorder.replayed > 300


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_each_size_has_a_recording_and_the_oldest_makes_room(recorder: CpuRecorder) -> None:
    function, w = _function(recordings=2), _x(0)

    def twice(rows: int) -> None:
        for seed in range(2):
            _check(function, _x(seed, rows, 4), w, numbers=(rows,))

    twice(1), twice(2)
    assert recorder.recorded == 2
    with pytest.warns(ReplayWarning, match="2 recordings"):
        twice(3)
    assert set(function.recordings) == {(2,), (3,)} and recorder.waits == 1
    twice(2)
    assert recorder.recorded == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        twice(1)
    assert set(function.recordings) == {(2,), (1,)}


def test_sizes_that_always_change_are_not_recorded_for_ever(recorder: CpuRecorder) -> None:
    function, w = _function(recordings=2), _x(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplayWarning)
        for step in range(200):
            rows = 1 + step // 2 % 5
            _check(function, _x(step, rows, 4), w, numbers=(rows,))
    assert recorder.recorded <= 2 + 2 * 8


# --- errors, threads, ends --------------------------------------------------------------------------------------------


def test_what_cannot_be_recorded_runs_as_it_is(recorder: CpuRecorder) -> None:
    function = _function(_in_place, written=(0,))
    recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    state, twin = _x(0), _x(0)
    with pytest.warns(ReplayWarning, match="partition_0 cannot be recorded.*not permitted") as seen:
        for seed in range(4):
            _in_place([twin, _x(seed)])
            function([state, _x(seed)])
            torch.testing.assert_close(state, twin, rtol=0, atol=0)
    assert len(seen) == 1
    recorder.fails = None
    other = _function(memory=function.memory)
    for seed in range(3):
        _check(other, _x(seed), _x(9))
    assert [len(pool.recordings) for pool in function.memory.pools] == [0, 1], "one takes no more"


@pytest.mark.parametrize("by", ["variable", "call"])
def test_a_capture_without_torchs_caching_allocator_is_not_begun(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "variable":
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    else:  # what torch with CUDA says after `torch.cuda.memory.caching_allocator_enable(False)`
        monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: False, raising=False)

    def run() -> tuple[torch.Tensor, ...]:
        raise AssertionError("nothing may have begun")

    with pytest.raises(RuntimeError, match="unset PYTORCH_NO_CUDA_MEMORY_CACHING, or compile with cuda_graphs=False"):
        CudaGraphs(torch.device("cuda:0")).record(run, None)


def test_a_warning_shows_the_line_that_failed(recorder: CpuRecorder) -> None:
    calls = []

    def body(arguments: list[Any]) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no")  # as it is recorded
        return (arguments[0] + 1,)

    function = _function(body)
    function([_x(0)])
    with pytest.warns(ReplayWarning, match=r"at `raise RuntimeError\(\"no\"\)"):
        (result,) = function([_x(1)])
    torch.testing.assert_close(result, _x(1) + 1)


def test_another_stream_waits_for_the_one_before(recorder: CpuRecorder) -> None:
    function, w = _function(), _x(0)
    for seed, stream in enumerate([1, 1, 1, 2, 2, 1]):
        recorder.current = stream
        _check(function, _x(seed), w)
    assert recorder.followed == [1, 2]


def test_threads_get_their_own_results(recorder: CpuRecorder) -> None:
    memory = Memory("cpu")
    first, second = _function(memory=memory), _function(memory=memory, fixed=(1,))
    w, failures = _x(0), []

    def work(start: int) -> None:
        try:
            for seed in range(start, start + 60):
                _check(second, _check(first, _x(seed), w), w)
        except BaseException as error:  # noqa: BLE001  whatever it is, the test says it
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplayWarning)
        threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and recorder.replayed > 100


def test_recordings_go_with_the_programs_entry(recorder: CpuRecorder) -> None:
    memory = Memory("cpu")
    function, w = _function(memory=memory), _x(0)
    entry = owning(lambda inputs: function(inputs), [memory])
    (held,) = entry([_x(1), w])
    for seed in range(3):
        (held,) = entry([_x(seed), w])
    storages = [weakref.ref(pool.recordings[0]) for pool in memory.pools]
    wanted = held.clone()
    del entry
    gc.collect()
    assert storages and all(found() is None for found in storages) and not memory.pools
    torch.testing.assert_close(held, wanted, rtol=0, atol=0)  # what is held stays

"""Graph selection, copied operands and preserved results, with a graph capturer for the CPU."""

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

from fxwrap.errors import GraphCaptureWarning
from fxwrap.runtime.graph_capture.cuda_graphs import CudaGraphCapturer
from fxwrap.runtime.graph_capture.replay import GraphedFunction, GraphManager, bind_graph_lifetime
from tests.runtime.cuda_graphs.cpu_graph_capturer import CpuGraphCapturer, cpu_with_graph_capture
from tests.support.garbage import freeze_heap


@pytest.fixture
def recorder() -> Iterator[CpuGraphCapturer]:
    with cpu_with_graph_capture() as capturer:
        yield capturer


def _scaled(arguments: list[Any], *numbers: int) -> tuple[torch.Tensor, ...]:
    x, w = arguments
    arguments.clear()
    return (x * w + sum(numbers),)


def _function(body: Any = _scaled, memory: GraphManager | None = None, **settings: Any) -> GraphedFunction:
    return GraphedFunction(body, memory or GraphManager("cpu"), "partition_0", **{"max_captures": 8, **settings})


def _x(seed: int, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes or (4,), generator=torch.Generator().manual_seed(seed))


def _check(function: GraphedFunction, *inputs: torch.Tensor, numbers: tuple[int, ...] = ()) -> torch.Tensor:
    (wanted,) = _scaled([item.clone() for item in inputs], *numbers)
    arguments = [*inputs]
    (result,) = function(arguments, *numbers)
    assert not arguments
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    return result


def test_first_call_runs_second_captures_later_replay(recorder: CpuGraphCapturer) -> None:
    function, w = _function(), _x(0)
    seen = []
    for seed in range(4):
        _check(function, _x(seed), w)
        seen.append((recorder.recorded, recorder.replayed))
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_a_device_without_capture_runs_the_function() -> None:
    function = _function()
    for seed in range(4):
        _check(function, _x(seed), _x(9))
    assert function.capture_disabled


def test_an_outer_capture_is_not_nested(recorder: CpuGraphCapturer) -> None:
    function = _function()
    recorder.ready = False
    for seed in range(4):
        _check(function, _x(seed), _x(9))
    assert (recorder.recorded, recorder.replayed) == (0, 0)


def test_static_operands_are_read_in_place(recorder: CpuGraphCapturer) -> None:
    function, w = _function(static_operands=(1,)), _x(0)
    for seed in range(3):
        _check(function, _x(seed), w)
    w += 1
    _check(function, _x(4), w)
    assert recorder.recorded == 1


def test_a_static_operand_that_moved_triggers_recapture(recorder: CpuGraphCapturer) -> None:
    function = _function(static_operands=(1,))
    operands = []
    for seed, recorded in [(0, 0), (0, 1), (1, 2), (1, 2)]:
        operands.append(operands[-1] if (operands and seed == 0) or len(operands) == 3 else _x(seed))
        _check(function, _x(7), operands[-1])
        assert recorder.recorded == recorded
    assert sum(map(len, function.graphs.values())) == 1


def test_a_static_operand_that_keeps_moving_is_copied(recorder: CpuGraphCapturer) -> None:
    function = _function(static_operands=(1,), max_captures=3)
    everything = [_x(seed) for seed in range(12)]
    for w in everything:
        _check(function, _x(7), w)
    assert recorder.recorded < len(everything) - 1
    assert not function.static_operands


def test_stale_captures_are_dropped_when_an_operand_moves(recorder: CpuGraphCapturer) -> None:
    function = _function(static_operands=(1,), max_captures=3)
    first = _x(0)
    for _ in range(2):
        _check(function, _x(7), first, numbers=(2,))
    everything = [_x(seed) for seed in range(12)]
    for w in everything:
        _check(function, _x(7), w, numbers=(1,))
    assert not function.static_operands
    _check(function, _x(7), everything[0], numbers=(2,))
    assert [len(known) for known in function.graphs.values()] == [1, 1]


def _in_place(arguments: list[Any]) -> tuple[torch.Tensor, ...]:
    state, x = arguments
    arguments.clear()
    state.mul_(2).add_(x)
    return (state + 1,)


@pytest.mark.parametrize("fixed", [(), (0,)])
def test_mutations_are_copied_back_once(recorder: CpuGraphCapturer, fixed: tuple[int, ...]) -> None:
    function = _function(_in_place, mutated_operands=(0,), static_operands=fixed)
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


def test_operands_with_internal_overlap(recorder: CpuGraphCapturer) -> None:
    function, w = _function(), _x(0)
    for seed in range(4):
        _check(function, _x(seed, 3, 1).expand(3, 4), w)
        _check(function, _x(seed, 7).as_strided((3, 4), (1, 1)), w, numbers=(1,))
        _check(function, _x(seed, 4, 8)[:, 2:6], w, numbers=(2,))
    assert recorder.recorded == 3


# --- results that are held --------------------------------------------------------------------------------------------


def test_results_are_returned_without_a_copy(recorder: CpuGraphCapturer) -> None:
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
def test_live_results_are_not_overwritten(recorder: CpuGraphCapturer, how: str) -> None:
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


def test_holding_the_last_result_alternates_two_captures(recorder: CpuGraphCapturer) -> None:
    memory = GraphManager("cpu")
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


def test_holding_all_results_preserves_them(recorder: CpuGraphCapturer) -> None:
    function, w = _function(max_captures=3), _x(0)
    with pytest.warns(GraphCaptureWarning, match="3 captured graphs.*cuda_graph_limit") as seen:
        pairs = [(_check(function, _x(seed), w), _x(seed) * w) for seed in range(12)]
    assert len(seen) == 1 and recorder.recorded == 3
    for result, wanted in pairs:
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    pairs.clear()
    del result
    replayed = recorder.replayed
    _check(function, _x(0), w)
    assert recorder.replayed == replayed + 1


def test_results_of_other_captures_are_read_in_place(recorder: CpuGraphCapturer) -> None:
    forward, backward = _function(), _function()  # of two programs
    w = _x(0)
    for _ in range(4):
        activations = [_check(forward, _x(seed), w) for seed in range(3)]
        for activation in activations:
            _check(backward, activation, w)
        del activations, activation
    (copied,) = {len(item.copied) for known in backward.graphs.values() for item in known if item.positions}
    assert copied == 1  # the weight alone: it is not declared static


def test_captures_sharing_a_pool_do_not_overwrite_each_other(recorder: CpuGraphCapturer) -> None:
    """The first function is captured again after the second one, whose temporary memory may overlap its new results."""
    memory = GraphManager("cpu")
    first, second = _function(memory=memory, max_captures=1), _function(memory=memory)
    w = _x(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCaptureWarning)
        for seed in range(30):
            rows = 4 + (seed // 3) % 2  # the first function has room for one size only
            x = _x(seed, rows, 4)
            middle = _check(first, x, w, numbers=(rows,))
            copy = middle.clone()
            _check(second, middle[:4], w)
            torch.testing.assert_close(middle, copy, rtol=0, atol=0)
            del middle
    assert recorder.recorded > 4


def test_random_call_orders_and_result_lifetimes(recorder: CpuGraphCapturer) -> None:
    chance = random.Random(0)
    memory = GraphManager("cpu")
    functions = [_function(memory=memory, max_captures=4, static_operands=(1,)) for _ in range(3)]
    weights = [_x(seed) for seed in range(3)]
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCaptureWarning)
        for step in range(400):
            rows = chance.choice([1, 2, 3])
            result = _x(step, rows, 4)
            for function, w in zip(functions, weights, strict=True):
                result = _check(function, result, w, numbers=(rows,))
                if chance.random() < 0.2:
                    held.append((result.view(-1)[1:], result.clone().view(-1)[1:]))
            for actual, wanted in held:
                torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
            chance.shuffle(held)
            del held[chance.randint(0, 4) :]
            if chance.random() < 0.02:
                weights[chance.randint(0, 2)] = _x(step)
    assert recorder.replayed > 300


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_captures_per_size_are_evicted_oldest_first(recorder: CpuGraphCapturer) -> None:
    function, w = _function(max_captures=2), _x(0)

    def twice(rows: int) -> None:
        for seed in range(2):
            _check(function, _x(seed, rows, 4), w, numbers=(rows,))

    twice(1), twice(2)
    assert recorder.recorded == 2
    with pytest.warns(GraphCaptureWarning, match="2 captured graphs"):
        twice(3)
    assert set(function.graphs) == {(2,), (3,)} and recorder.waits == 1
    twice(2)
    assert recorder.recorded == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        twice(1)
    assert set(function.graphs) == {(2,), (1,)}


def test_ever_changing_sizes_stop_being_captured(recorder: CpuGraphCapturer) -> None:
    function, w = _function(max_captures=2), _x(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCaptureWarning)
        for step in range(200):
            rows = 1 + step // 2 % 5
            _check(function, _x(step, rows, 4), w, numbers=(rows,))
    assert recorder.recorded <= 2 + 2 * 8


# --- errors, threads, ends --------------------------------------------------------------------------------------------


def test_uncapturable_functions_run_eagerly(recorder: CpuGraphCapturer) -> None:
    function = _function(_in_place, mutated_operands=(0,))
    recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    state, twin = _x(0), _x(0)
    with pytest.warns(GraphCaptureWarning, match="partition_0 cannot be captured.*not permitted") as seen:
        for seed in range(4):
            _in_place([twin, _x(seed)])
            function([state, _x(seed)])
            torch.testing.assert_close(state, twin, rtol=0, atol=0)
    assert len(seen) == 1
    recorder.fails = None
    other = _function(memory=function.manager)
    for seed in range(3):
        _check(other, _x(seed), _x(9))
    assert [len(pool.graphs) for pool in function.manager.pools] == [0, 1], "one takes no more"


@pytest.mark.parametrize("by", ["variable", "call"])
def test_no_capture_begins_without_the_caching_allocator(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "variable":
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        capturer = CudaGraphCapturer(torch.device("cuda:0"))
    else:  # as after `torch.cuda.memory.caching_allocator_enable(False)`
        capturer = CudaGraphCapturer(torch.device("cuda:0"), is_allocator_enabled=lambda: False)

    def run() -> tuple[torch.Tensor, ...]:
        raise AssertionError("nothing may have begun")

    with pytest.raises(RuntimeError, match="unset PYTORCH_NO_CUDA_MEMORY_CACHING, or compile with cuda_graphs=False"):
        capturer.capture(run, None)


def test_a_warning_shows_the_line_that_failed(recorder: CpuGraphCapturer) -> None:
    calls = []

    def body(arguments: list[Any]) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no")  # during capture
        return (arguments[0] + 1,)

    function = _function(body)
    function([_x(0)])
    with pytest.warns(GraphCaptureWarning, match=r"at `raise RuntimeError\(\"no\"\)"):
        (result,) = function([_x(1)])
    torch.testing.assert_close(result, _x(1) + 1)


def test_replays_on_another_stream_are_ordered(recorder: CpuGraphCapturer) -> None:
    function, w = _function(), _x(0)
    for seed, stream in enumerate([1, 1, 1, 2, 2, 1]):
        recorder.current = stream
        _check(function, _x(seed), w)
    assert recorder.followed == [1, 2]


def test_threads_get_their_own_results(recorder: CpuGraphCapturer) -> None:
    memory = GraphManager("cpu")
    first, second = _function(memory=memory), _function(memory=memory, static_operands=(1,))
    w, failures = _x(0), []

    def work(start: int) -> None:
        try:
            for seed in range(start, start + 60):
                _check(second, _check(first, _x(seed), w), w)
        except BaseException as error:  # noqa: BLE001  the test reports any error
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCaptureWarning)
        threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and recorder.replayed > 100


def test_captures_are_released_with_the_program(recorder: CpuGraphCapturer) -> None:
    freeze_heap()
    memory = GraphManager("cpu")
    function, w = _function(memory=memory), _x(0)
    entry = bind_graph_lifetime(lambda inputs: function(inputs), [memory])
    (held,) = entry([_x(1), w])
    for seed in range(3):
        (held,) = entry([_x(seed), w])
    storages = [weakref.ref(pool.graphs[0]) for pool in memory.pools]
    wanted = held.clone()
    del entry
    gc.collect()
    assert storages and all(storage() is None for storage in storages) and not memory.pools
    torch.testing.assert_close(held, wanted, rtol=0, atol=0)  # held results are preserved

import gc
import types

import pytest
import torch

from helpers.bench import clocks


@pytest.fixture
def world(monkeypatch):
    """A clock that advances as pretended work is done on a host and a device."""
    world = types.SimpleNamespace(now=0.0, queue=0.0, log=[])

    def work(name, host, device=0.0):
        def call():
            world.log.append(name)
            world.now += host
            world.queue = max(world.queue, world.now) + device

        return call

    def drain():
        world.now = max(world.now, world.queue)

    world.work = work
    monkeypatch.setattr(clocks, "synchronize", drain)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: world.now)
    return world


@pytest.mark.parametrize(("wait", "expected"), [(False, {"a": 1.0, "b": 3.0}), (True, {"a": 6.0, "b": 10.0})])
def test_host_time_without_and_with_the_device(world, wait, expected):
    calls = {"a": world.work("a", 1.0, 5.0), "b": world.work("b", 3.0, 7.0)}
    times = clocks.host_seconds(calls, 4, 6, wait)
    assert times == {name: pytest.approx([value] * 4) for name, value in expected.items()}


def test_contenders_alternate_and_take_turns_in_going_first(world):
    clocks.host_seconds({name: world.work(name, 1.0) for name in "abc"}, 3, 2)
    batches = [world.log[i] for i in range(0, len(world.log), 3)]  # one untimed call and two timed ones
    assert batches == list("abc") + list("bca") + list("cab")


def test_the_garbage_collector_is_off_while_timing_and_back_on_after():
    seen = []

    def call():
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        clocks.host_seconds({"a": call}, 1, 1)
    assert seen == [False] and gc.isenabled()


@pytest.mark.gpu
def test_a_graph_replays_every_call_and_returns_the_last():
    outs = torch.zeros(5, device="cuda")
    graph, last = clocks.capture([lambda i=i: outs[i].fill_(i + 1) for i in range(5)])
    outs.zero_()
    graph.replay()
    assert outs.tolist() == [1, 2, 3, 4, 5] and last.data_ptr() == outs[4].data_ptr()

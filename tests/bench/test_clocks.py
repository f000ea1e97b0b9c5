import statistics

import pytest
import torch

from helpers.bench import clocks


class World:
    """A clock that advances as pretended work is done on a host and a device."""

    def __init__(self):
        self.now, self.queue, self.log = 0.0, 0.0, []

    def work(self, name, host, device):
        def call():
            self.log.append(name)
            self.now += host
            self.queue = max(self.queue, self.now) + device

        return call

    def drain(self):
        self.log.append("drain")
        self.now = max(self.now, self.queue)


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(clocks, "synchronize", world.drain)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: world.now)
    return world


@pytest.mark.parametrize(("wait", "expected"), [(False, {"a": 1.0, "b": 3.0}), (True, {"a": 6.0, "b": 10.0})])
def test_host_time_without_and_with_the_device(world, wait, expected):
    calls = {"a": world.work("a", 1.0, 5.0), "b": world.work("b", 3.0, 7.0)}
    times = clocks.host_seconds(calls, 4, 6, wait)
    assert times == {name: pytest.approx([value] * 4) for name, value in expected.items()}


def test_contenders_alternate_and_take_turns_in_going_first(world):
    clocks.host_seconds({name: world.work(name, 1.0, 0.0) for name in "abc"}, 3, 2)
    calls = [entry for entry in world.log if entry != "drain"]
    batches = [calls[i] for i in range(0, len(calls), 3)]  # one untimed call and two timed ones
    assert batches == list("abc") + list("bca") + list("cab")


def test_first_calls_are_timed_one_by_one_with_the_device_idle(world):
    calls = {
        name: [world.work(f"{name}{i}", cost, 9.0) for i in range(2)] for name, cost in (("a", 1), ("b", 3))
    }
    assert clocks.first_seconds(calls) == {"a": [1.0, 1.0], "b": [3.0, 3.0]}
    assert [entry for entry in world.log if entry != "drain"] == ["a0", "b0", "a1", "b1"]


def test_the_garbage_collector_is_off_while_timing_and_back_on_after(world):
    import gc

    seen = []
    clocks.host_seconds({"a": lambda: seen.append(gc.isenabled())}, 1, 1)
    assert not any(seen) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        clocks.host_seconds({"a": lambda: 1 / 0}, 1, 1)
    assert gc.isenabled()


def test_a_graph_replays_every_call_and_returns_the_last(device):
    outs = [torch.zeros(1000, device=device) for _ in range(5)]
    graph, last = clocks.capture(lambda i: outs[i].fill_(i + 1), 5)
    for out in outs:
        out.zero_()
    graph.replay()
    clocks.synchronize()
    assert [out[0].item() for out in outs] == [1, 2, 3, 4, 5]
    assert last.data_ptr() == outs[4].data_ptr() and clocks.free_bytes() > 0


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_raises_and_leaves_the_device_usable():
    x = torch.ones(10, device="cuda")
    with pytest.raises(Exception):  # noqa: B017  which class depends on the torch version
        clocks.capture(lambda _: x.sum().item(), 2)
    graph, _ = clocks.capture(lambda _: x.mul_(2), 1, warm=0)
    graph.replay()
    assert x.sum().item() == 20


@pytest.mark.gpu
def test_replay_time_is_the_time_of_one_call():
    outs = [torch.empty(64_000_000, dtype=torch.uint8, device="cuda") for _ in range(8)]
    graphs = {
        "once": (clocks.capture(lambda i: outs[i].fill_(1), 8)[0], 8),
        "twice": (clocks.capture(lambda i: outs[i].fill_(1).fill_(2), 8)[0], 8),
    }
    times = clocks.gpu_seconds(graphs, 5)
    assert {len(values) for values in times.values()} == {5}
    assert 1.6 < statistics.median(times["twice"]) / statistics.median(times["once"]) < 2.4
    assert 1e-6 < statistics.median(times["once"]) < 1e-2

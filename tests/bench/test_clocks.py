import random
import statistics

import pytest
import torch

from helpers.bench import clocks


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    chance = random.Random(0)
    for count in (15, 60):
        held = 0
        for _ in range(1000):
            low, high = clocks.median_interval([chance.lognormvariate(0, 1) for _ in range(count)])
            held += low <= 1 <= high  # the median of this distribution
        assert 0.93 <= held / 1000 <= 0.985
    assert clocks.median_interval([2.0]) == (2.0, 2.0)
    assert clocks.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


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

    def clock(self):
        return self.now


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(clocks, "synchronize", world.drain)
    monkeypatch.setattr(clocks.time, "perf_counter", world.clock)
    return world


@pytest.mark.parametrize(("wait", "expected"), [(False, {"a": 1.0, "b": 3.0}), (True, {"a": 6.0, "b": 10.0})])
def test_host_time_without_and_with_the_device(world, wait, expected):
    fns = {"a": world.work("a", 1.0, 5.0), "b": world.work("b", 3.0, 7.0)}
    times = clocks.time_interleaved(fns, 4, 6, wait)
    assert times == {name: pytest.approx([value] * 4) for name, value in expected.items()}


def test_candidates_alternate_and_take_turns_in_going_first(world):
    fns = {name: world.work(name, 1.0, 0.0) for name in "abc"}
    clocks.time_interleaved(fns, 3, 2)
    calls = [entry for entry in world.log if entry != "drain"]
    batches = [calls[i] for i in range(0, len(calls), 3)]  # one untimed call and two timed ones
    assert batches == list("abc") + list("bca") + list("cab")


def test_the_garbage_collector_is_off_while_timing_and_back_on_after(world):
    import gc

    seen = []
    clocks.time_interleaved({"a": lambda: seen.append(gc.isenabled())}, 1, 1)
    assert not any(seen) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        clocks.time_interleaved({"a": lambda: 1 / 0}, 1, 1)
    assert gc.isenabled()


def test_each_batch_runs_inside_its_context(world):
    import contextlib

    @contextlib.contextmanager
    def around(name):
        world.log.append(f"enter {name}")
        yield
        world.log.append(f"leave {name}")

    calls = {name: world.work(name, 1.0, 0.0) for name in "ab"}
    clocks.time_interleaved(calls, 1, 2, around=around)
    log = [entry for entry in world.log if entry != "drain"]
    assert log == ["enter a", *"aaa", "leave a", "enter b", *"bbb", "leave b"]


@pytest.mark.gpu
def test_a_graph_replays_every_call_and_returns_the_last():
    outs = [torch.zeros(1000, device="cuda") for _ in range(5)]
    graph, last = clocks.capture(lambda i: outs[i].add_(i + 1), 5)
    for out in outs:
        out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert [out[0].item() for out in outs] == [1, 2, 3, 4, 5]
    assert last.data_ptr() == outs[4].data_ptr()


@pytest.mark.gpu
def test_kept_outputs_do_not_share_memory():
    seen = []
    clocks.capture(
        lambda i: seen.append(torch.full((1000,), i, device="cuda")) or seen[-1], 4, warm=0, keep=True
    )
    assert len({out.data_ptr() for out in seen}) == 4


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
    times = clocks.replay_interleaved(graphs, 5)
    assert {len(values) for values in times.values()} == {5}
    assert 1.6 < statistics.median(times["twice"]) / statistics.median(times["once"]) < 2.4
    assert 1e-6 < statistics.median(times["once"]) < 1e-2


@pytest.mark.gpu
def test_what_a_call_starts_is_counted():
    x = torch.ones(1000, device="cuda")
    assert clocks.graph_nodes(lambda: x.add_(1)) == 1
    assert clocks.graph_nodes(lambda: x.add_(1).mul_(2).sub_(3)) == 3


@pytest.mark.gpu
def test_allocations_are_counted():
    x = torch.ones(1000, device="cuda")
    assert clocks.allocations(lambda: x + 1) == 1 and clocks.allocations(lambda: x.add_(1)) == 0
    assert clocks.free_bytes() > 0

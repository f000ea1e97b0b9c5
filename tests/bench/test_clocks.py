import pytest
import torch

from helpers.bench import clocks


def test_contenders_take_turns_in_going_first():
    order = []
    timers = {name: lambda name=name: order.append(name) or name for name in "abc"}
    assert clocks.in_turns(timers, 3) == {name: [name] * 3 for name in "abc"}
    assert "".join(order) == "abcbcacab"


def test_where_the_clock_waits(monkeypatch):
    order = []
    monkeypatch.setattr(clocks, "synchronize", lambda: order.append("|"))
    clocks.host_timer(lambda: order.append("."), 2)()
    assert "".join(order) == ".|..|"


@pytest.mark.gpu
def test_a_graph_replays_every_call_and_returns_the_last():
    total = torch.zeros(1, device="cuda")
    graph, last = clocks.capture([lambda: total.add_(1)] * 5)
    total.zero_()
    graph.replay()
    assert total.item() == 5 and last is total

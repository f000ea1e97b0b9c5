import gc

import pytest
import torch

from helpers.bench import clocks


def test_contenders_take_turns_in_going_first():
    assert "".join(clocks.turns("abc", 3)) == "abcbcacab"


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

from helpers.bench import clocks


def test_contenders_take_turns_in_going_first():
    order = []
    timers = {name: lambda name=name: order.append(name) or name for name in "abc"}
    assert clocks.in_turns(timers, 3) == {name: [name] * 3 for name in "abc"}
    assert "".join(order) == "abcbcacab"


def test_where_the_clock_waits(monkeypatch):
    order = []
    monkeypatch.setattr(clocks, "synchronize", lambda: order.append("|"))
    monkeypatch.setattr(clocks, "INNER", 2)
    clocks.host_us(lambda: order.append("."))
    assert "".join(order) == ".|.."

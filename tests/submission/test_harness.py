"""The protocol: its order, its checks, what is timed, and that no wrong candidate gets a time."""

import json
from types import SimpleNamespace

import pytest
import torch

from helpers.oracle import baselines, reference
from helpers.submission import harness

pytest.importorskip("bitsandbytes")


def exact(layer):
    return reference.dequantize(layer.weight, layer.weight.quant_state)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    return request.param


def test_official_configurations():
    """Sizes, seeds, dtypes and order as the puzzle states them."""
    fp16, bf16 = torch.float16, torch.bfloat16
    assert [(c.batch, c.seq, c.hidden, c.intermediate, c.seed, c.dtype) for c in harness.OFFICIAL] == [
        (2, 3333, 2048, 8192, 3407, fp16),
        (5, 777, 1024, 4096, 3409, bf16),
        (3, 2048, 4096, 14336, 3408, bf16),
    ]
    assert {c.dtype for c in harness.SMALL} == {fp16, bf16}
    assert all(c.hidden % 64 == 0 and c.intermediate % 64 == 0 for c in harness.SMALL)


def test_exact_candidate_passes(where):
    result = harness.test_dequantize(exact, configs=harness.SMALL, rounds=2, device=where)
    assert [row["config"] for row in result.per_config] == [c.label for c in harness.SMALL]
    assert all(row["identical"] for row in result.per_config)
    assert result.rounds == 2
    partner = baselines.available()["unsloth_today"]
    assert result.checked_against == (partner.label if partner.fn else "bitsandbytes")
    if where == "cpu":
        assert result.elapsed is None and result.elapsed_text == "not measured (needs an NVIDIA GPU)"
    else:
        assert result.elapsed == pytest.approx(sum(row["seconds"] for row in result.per_config))


def wrong_code(layer):
    weight = exact(layer)
    weight.view(-1)[-1] += 0.25
    return weight


WRONG = {
    "scaled": (lambda layer: exact(layer) * 1.01, "MLP output"),
    "one wrong element": (wrong_code, "weight|MLP output"),
    "another dtype": (lambda layer: exact(layer).to(torch.float64), "dtype|float64|Double"),
    "other strides": (lambda layer: exact(layer).t().contiguous().t(), "weight: .*[Ss]tride"),
    "wrong shape": (lambda layer: exact(layer)[:-1], "shape|size|match"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_candidate_is_caught(name, device):
    candidate, message = WRONG[name]
    with pytest.raises((AssertionError, RuntimeError), match=f"(?s){message}"):
        harness.test_dequantize(candidate, configs=harness.SMALL[:1], rounds=1, device=device)


def test_tolerances_are_the_defaults(device, monkeypatch):
    """Off by 3 in the tenth bit: inside loosened tolerances, outside of fp16's default 1e-3."""
    seen = []
    original = torch.testing.assert_close
    monkeypatch.setattr(
        torch.testing, "assert_close", lambda *a, **k: (seen.append(set(k) | {len(a)}), original(*a, **k))
    )
    with pytest.raises(AssertionError):
        harness.test_dequantize(lambda layer: exact(layer) * (1 + 3 / 1024), harness.SMALL[:1], 1, device)
    assert seen and all(keywords == {2, "check_stride", "msg"} for keywords in seen)


def test_each_weight_is_compared(device):
    """Right inside the MLP and wrong when asked for the weight alone: caught in each of the three places."""
    for position, name in ((4, "up"), (5, "gate"), (6, "down")):
        calls = []

        def candidate(layer, calls=calls, position=position):
            calls.append(layer)
            return exact(layer) * (2 if len(calls) == position else 1)

        with pytest.raises(AssertionError, match=f"{name} weight"):
            harness.test_dequantize(candidate, configs=harness.SMALL[:1], rounds=1, device=device)


def test_order_and_synchronizes(monkeypatch):
    """Warm-up and timed rounds call up, gate, down; timed rounds synchronize after each one of them."""
    log = []
    monkeypatch.setattr(harness, "_synchronizer", lambda device: lambda: log.append("sync"))
    names = {}

    class Named(harness.Mlp):
        def __init__(self, config, device):
            super().__init__(config, device)
            names.update({id(self.up_proj): "up", id(self.gate_proj): "gate", id(self.down_proj): "down"})

    monkeypatch.setattr(harness, "Mlp", Named)

    def candidate(layer):
        log.append(names[id(layer)])
        return exact(layer)

    harness.test_dequantize(candidate, configs=harness.SMALL[1:2], rounds=2, device="cpu")
    one_round = ["up", "sync", "gate", "sync", "down", "sync"]
    partner = ["sync"] * 3
    warmup = ["up", "gate", "down", *one_round, *partner]
    assert log == ["sync", *warmup, *warmup, "sync", *one_round, *one_round]


def test_layers_are_reproducible_from_the_seed(device):
    config = harness.SMALL[0]
    torch.set_default_dtype(torch.float32)
    (a, x), (b, y) = harness._build(config, device), harness._build(config, device)
    assert torch.equal(x, y) and x.shape == (2, 33, 128) and x.dtype == torch.float16
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(a, name).weight.data, getattr(b, name).weight.data)
    assert not torch.equal(a.gate_proj.weight.data, a.up_proj.weight.data)
    assert a.down_proj.weight.quant_state.shape == (128, 448)
    assert a.training, "an evaluation forward on the CPU may repack the weights"


def test_default_dtype_is_restored(device):
    torch.set_default_dtype(torch.float64)
    try:
        harness.test_dequantize(exact, configs=harness.SMALL[1:2], rounds=1, device=device)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: setattr(s, "dtype", torch.bfloat16), "quant_state.dtype is torch.bfloat16"),
        (lambda s: setattr(s, "absmax", s.absmax.float()), "absmax.dtype"),
        (lambda s: setattr(s, "blocksize", 128), "blocksize is 128, expected 64"),
        (lambda s: setattr(s.state2, "blocksize", 64), "state2.blocksize is 64"),
        (lambda s: setattr(s.state2, "code", s.state2.code.half()), "state2.code.dtype"),
        (lambda s: setattr(s, "offset", s.offset.double()), "offset.dtype"),
    ],
)
def test_quant_state_checks(make_layer, change, message):
    layer = make_layer(64, 64, torch.float16)
    harness.check_quant_state(layer, torch.float16)
    change(layer.weight.quant_state)
    with pytest.raises(AssertionError, match=message):
        harness.check_quant_state(layer, torch.float16)


def test_compare_records_failures_and_absences(where):
    candidates = {"ours": exact, "scaled": lambda layer: exact(layer) * 2, "crash": lambda layer: 1 / 0}
    against = {
        "bitsandbytes": baselines.available()["bitsandbytes"],
        "peft": baselines.Baseline("peft", "PEFT", reason="not installed"),
    }
    ticks = []
    found = harness.compare(
        candidates, harness.SMALL[:2], 2, 3, where, against=against, tick=lambda: ticks.append(1)
    )
    entries = found.entries
    assert list(entries) == ["ours", "scaled", "crash", "bitsandbytes", "peft"]
    assert entries["ours"].identical and not entries["ours"].failure
    assert "not close" in entries["scaled"].failure and entries["scaled"].identical is None
    assert "ZeroDivisionError" in entries["crash"].failure
    assert entries["peft"].reason == "not installed" and not entries["peft"].seconds
    assert not entries["scaled"].seconds and not entries["crash"].seconds
    assert found.speedup("scaled", "bitsandbytes") is None and found.speedup("ours", "peft") is None
    json.dumps(found.to_dict())
    if where == "cpu":
        assert not entries["ours"].seconds and found.speedup("ours", "bitsandbytes") is None and not ticks
    else:
        assert len(entries["ours"].seconds) == len(entries["bitsandbytes"].seconds) == 3
        assert found.speedup("ours", "ours") == 1.0
        assert len(ticks) == 2 * 3 * 2


def fake_gpu(monkeypatch, clock):
    """Lets the CPU pass for a GPU, with `clock(name)` seconds for a timed part."""
    order = []

    def timed(dequantize, mlp, rounds, device):
        order.append(dequantize.__name__)
        return clock(dequantize.__name__)

    monkeypatch.setattr(harness, "_is_gpu", lambda device: True)
    monkeypatch.setattr(harness, "_synchronizer", lambda device: lambda: None)
    monkeypatch.setattr(harness, "_free", lambda device: None)
    monkeypatch.setattr(harness, "_timed", timed)
    return order


def fast(layer):
    return exact(layer)


def slow(layer):
    return exact(layer)


def late(layer):
    """Right in fp16, wrong in bf16: it fails after it was timed."""
    weight = exact(layer)
    return weight * 2 if weight.dtype == torch.bfloat16 else weight


def test_compare_interleaves_and_takes_medians(monkeypatch):
    order = fake_gpu(monkeypatch, lambda name: {"fast": 1.0, "slow": 1.5, "late": 0.1}[name])
    candidates = {"fast": fast, "slow": slow, "late": late}
    found = harness.compare(candidates, harness.SMALL[:2], 10, 3, "cpu", against={})
    fp16_part, bf16_part = order[:9], order[9:]
    assert fp16_part == ["fast", "slow", "late", "slow", "late", "fast", "late", "fast", "slow"]
    assert bf16_part == ["fast", "slow", "slow", "fast", "fast", "slow"]
    assert found.entries["fast"].seconds == [2.0, 2.0, 2.0]
    assert found.speedup("fast", "slow") == 1.5
    assert found.to_dict()["entries"]["fast"]["speedup_over"] == {"fast": 1.0, "slow": 1.5}
    assert found.entries["slow"].spread == {"p20": 3.0, "p50": 3.0, "p80": 3.0}


def test_a_candidate_that_fails_late_keeps_no_time(monkeypatch):
    fake_gpu(monkeypatch, lambda name: 1.0)
    entry = harness.compare({"late": late}, harness.SMALL[:2], 10, 3, "cpu", against={}).entries["late"]
    assert "bfloat16" in entry.failure
    assert entry.seconds == [] and entry.per_config == {} and entry.spread is None


def test_without_bitsandbytes_the_error_says_so(monkeypatch):
    absent = {
        name: SimpleNamespace(fn=None, reason="not installed", label=name)
        for name in ("unsloth_today", "bitsandbytes")
    }
    monkeypatch.setattr(baselines, "available", lambda: absent)
    with pytest.raises(RuntimeError, match="needs bitsandbytes: not installed"):
        harness.test_dequantize(exact)


def test_a_candidate_that_breaks_while_timed_is_recorded(monkeypatch):
    def clock(name):
        if name == "slow":
            raise RuntimeError("out of memory")
        return 1.0

    fake_gpu(monkeypatch, clock)
    entries = harness.compare(
        {"fast": fast, "slow": slow}, harness.SMALL[:1], 10, 3, "cpu", against={}
    ).entries
    assert "out of memory" in entries["slow"].failure and entries["slow"].seconds == []
    assert entries["fast"].seconds == [1.0, 1.0, 1.0]


@pytest.mark.gpu
def test_official_protocol_on_the_gpu(kernel):
    result = harness.test_dequantize(kernel.your_dequantize_nf4, rounds=10)
    assert result.elapsed > 0 and all(row["identical"] for row in result.per_config)

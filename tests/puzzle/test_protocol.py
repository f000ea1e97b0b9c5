"""The protocol: its shapes and checks, what is timed and watched, and that no wrong candidate gets a time."""

import itertools
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from helpers.nf4 import reference
from helpers.puzzle import protocol
from states import DTYPES

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16
ONE = protocol.SMALL[1:2]
GONE = {"bitsandbytes": protocol.Baseline("b", None, "bitsandbytes: gone")}


def exact(layer):
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def compare(candidate, configs=ONE):
    return protocol.compare({"it": candidate}, 4, 1, configs, {}).entries["it"]


def test_official_configurations():
    """Sizes, seeds, dtypes and order as the puzzle states them; small ones for the interpreter."""
    assert [tuple(config) for config in protocol.OFFICIAL] == [
        (2, 3333, 2048, 8192, 3407, FP16),
        (5, 777, 1024, 4096, 3409, BF16),
        (3, 2048, 4096, 14336, 3408, BF16),
    ]
    assert protocol.ROUNDS == 1000 and {config.dtype for config in protocol.SMALL} == {FP16, BF16}


def test_the_puzzles_test_returns_seconds_or_what_it_needs(monkeypatch):
    seconds = protocol.test_dequantize(exact)
    if protocol.ON_GPU:
        assert seconds > 0
    else:
        assert repr(seconds) == "not measured (needs an NVIDIA GPU); all weights are correct"
    with pytest.raises(AssertionError, match="MLP output"):
        protocol.test_dequantize(lambda layer: exact(layer) * 1.01)
    absent = protocol.NotMeasured("unsloth: gone")
    missing = {repr(protocol.test_dequantize(absent)), repr(absent / 2.0), repr(2.0 / absent)}
    assert missing == {"not measured (needs unsloth: gone)"}
    known = protocol.baselines() | GONE
    monkeypatch.setattr(protocol, "baselines", lambda: known)
    assert repr(protocol.test_dequantize(exact)) == "not measured (needs bitsandbytes: gone)"


def test_the_puzzles_test_checks_each_mlp_and_times_1000_rounds(monkeypatch):
    log = []
    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(protocol, "build", lambda config: (config, "X"))
    monkeypatch.setattr(protocol, "warm_up", lambda fx, X, mlp, dtype: log.append(("check", mlp, dtype)))
    monkeypatch.setattr(protocol, "mlp_dequantize", lambda X, mlp, fx: log.append(mlp))
    assert protocol.test_dequantize(exact) >= 0
    assert log == sum(([("check", c, c.dtype), *[c] * 1000] for c in protocol.OFFICIAL), [])


def wrong_code(layer):
    weight = exact(layer)
    weight.view(-1)[-1] += 0.25
    return weight


WRONG = {
    "scaled": (lambda layer: exact(layer) * 1.01, "MLP output"),
    "one wrong element": (wrong_code, "proj|MLP output"),
    "another dtype": (lambda layer: exact(layer).to(torch.float64), "dtype|float64|Double"),
    "other strides": (lambda layer: exact(layer).t().contiguous().t(), "proj: .*[Ss]tride"),
    "wrong shape": (lambda layer: exact(layer)[:-1], "shape|size|match"),
    "an error": (lambda layer: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_gets_no_time(name):
    candidate, message = WRONG[name]
    entry = compare(candidate)
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        protocol.must(not entry.failure, entry.failure)
    assert entry.seconds == [] and entry.per_config == {}


def test_tolerances_are_the_defaults_and_each_weight_is_compared(monkeypatch):
    """Off by 3 in the tenth bit is outside fp16's 1e-3; a weight wrong when asked for alone is seen."""
    seen, original = [], torch.testing.assert_close
    with monkeypatch.context() as patch:
        patch.setattr(torch.testing, "assert_close", lambda *a, **k: (seen.append(set(k)), original(*a, **k)))
        assert compare(lambda layer: exact(layer) * (1 + 3 / 1024), protocol.SMALL[:1]).failure
    assert seen and all(keywords == {"check_stride", "msg"} for keywords in seen)
    for position, name in ((4, "up"), (5, "gate"), (6, "down")):
        calls = []

        def candidate(layer, calls=calls, position=position):
            calls.append(layer)
            return exact(layer) * (2 if len(calls) == position else 1)

        assert f"AssertionError: {name}_proj" in compare(candidate).failure


def test_a_round_synchronizes_after_each_of_up_gate_down(monkeypatch):
    log = []
    mlp = SimpleNamespace(**{name: name for name in protocol.WEIGHTS})
    monkeypatch.setattr(protocol, "synchronize", lambda: log.append("sync"))
    protocol.mlp_dequantize(None, mlp, lambda layer: log.append(layer) or torch.zeros(1, 2))
    assert log == ["up_proj", "sync", "gate_proj", "sync", "down_proj", "sync"]


def test_layers_are_reproducible_from_the_seed():
    torch.set_default_dtype(torch.float64)
    try:
        (a, x), (b, y) = protocol.build(protocol.SMALL[0]), protocol.build(protocol.SMALL[0])
        assert torch.get_default_dtype() == torch.float64, "as it was"
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(x, y) and x.shape == (2, 33, 128) and x.dtype == FP16
    assert all(torch.equal(getattr(a, n).weight.data, getattr(b, n).weight.data) for n in protocol.WEIGHTS)
    assert not torch.equal(a.gate_proj.weight.data, a.up_proj.weight.data)
    assert a.training, "an evaluation forward on the CPU may repack the weights"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: setattr(s, "dtype", BF16),
        lambda s: setattr(s, "absmax", s.absmax.float()),
        lambda s: setattr(s, "blocksize", 128),
        lambda s: setattr(s.state2, "blocksize", 64),
        lambda s: setattr(s.state2, "code", s.state2.code.half()),
        lambda s: setattr(s, "offset", s.offset.double()),
    ],
)
def test_quant_state_checks(make_layer, change):
    layer = make_layer(64, 64, FP16)
    protocol.assert_correct_bnb(layer, FP16)
    change(layer.weight.quant_state)
    with pytest.raises(AssertionError, match="quant_state"):
        protocol.assert_correct_bnb(layer, FP16)


# --- the watch ---


def tensors(layer):
    state = layer.weight.quant_state
    return layer.weight, state.absmax, state.state2.absmax, state.offset


@pytest.mark.parametrize("how, kinds", [("values", {0, 1, 2, 3}), ("byte", {0, 1}), ("nothing", set())])
def test_a_change_leaves_no_trace_but_in_the_values(how, kinds):
    """One tensor of each layer changes, at the same address, and no version counter moves."""
    mlp, touched = protocol.build(ONE[0])[0], set()
    layers = [getattr(mlp, name) for name in protocol.WEIGHTS]
    for _ in range(12):
        before = [exact(layer).clone() for layer in layers]
        marks = [(x.data_ptr(), x._version) for layer in layers for x in tensors(layer)]
        values = [[x.data.clone() for x in tensors(layer)] for layer in layers]
        protocol.change(mlp, how)
        assert [(x.data_ptr(), x._version) for layer in layers for x in tensors(layer)] == marks
        for i, layer in enumerate(layers):
            differ = [int((a != b.data).sum()) for a, b in zip(values[i], tensors(layer), strict=True)]
            touched |= {kind for kind in range(4) if differ[kind]}
            assert sum(map(bool, differ)) == (how != "nothing") and (how != "byte" or sum(differ) == 1)
            if differ[0] or how == "values":  # one scale may change too little to show
                assert not reference.same_bits(before[i], exact(layer))
    assert touched == kinds


def test_results_are_plain_exact_and_overwritten_once_compared():
    mlp, X = protocol.build(ONE[0])
    results = protocol.mlp_dequantize(X, mlp, exact)
    protocol.assert_exact(results, mlp)
    assert all(result.isnan().all() for result in results)
    with pytest.raises(AssertionError, match="up_proj, watched: .* elements differ"):
        protocol.assert_exact(results, mlp)
    results = [torch.nn.Parameter(result) for result in protocol.mlp_dequantize(X, mlp, exact)]
    with pytest.raises(AssertionError, match="up_proj: the result is a Parameter, not a Tensor"):
        protocol.assert_exact(results, mlp)


def test_the_clock_stops_at_other_rounds_each_time(monkeypatch):
    """The rounds add up; changes (or none) and comparisons alternate and are not on the clock."""
    now, log = [0.0], []

    def step(name, seconds):
        now[0] += seconds
        log.append(name)
        return ()

    monkeypatch.setattr(protocol, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(protocol, "mlp_dequantize", lambda X, mlp, fx: step("round", 1))
    monkeypatch.setattr(protocol, "change", lambda mlp, how: step(how, 100))
    monkeypatch.setattr(protocol, "assert_exact", lambda results, mlp: step("compare", 100))
    places, orders = set(), set()
    for _ in range(5):
        log.clear()
        assert protocol.timed(None, None, None, 1000) == 1000 == log.count("round")
        stops = [name for name in log if name != "round"]
        assert stops[1::2] == ["compare"] * 10 and log[-1] == "compare"
        assert stops[0] == "values" and sorted(stops[::2]) == ["byte"] * 3 + ["nothing"] * 3 + ["values"] * 4
        places.add(tuple(i for i, name in enumerate(log) if name != "round"))
        orders.add(tuple(stops))
    assert len(places) == 5 and len(orders) > 1
    log.clear()
    protocol.timed(None, None, None, 6)
    assert {"values", "byte", "nothing"} <= set(log), "all three on a CPU, too"


def test_after_the_timed_rounds_the_gpu_runs_what_it_ran_before(monkeypatch):
    import triton.testing

    mlp, X = protocol.build(ONE[0])
    card, good = SimpleNamespace(L2_cache_size=1 << 10), [("kernel", 1e-3, 1 << 10)] * 3
    monkeypatch.setattr(triton.testing, "get_dram_gbps", lambda: 4800.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)

    def profiled(events, before=None):
        monkeypatch.setattr(protocol, "gpu_events", lambda call, count: events)
        return protocol.profiled(exact, X, mlp, before)

    assert profiled(good) == ["kernel"] * 3 == profiled(good, ["kernel"] * 3)
    for events, why in (
        (good + good[:1], "after the timed rounds"),
        ([("kernel", 1e-3, 16)] * 3, "48 threads cannot"),
        ([("kernel", 1e-9, 1 << 20)] * 3, "its bytes take"),
        ([], "0 threads cannot"),
    ):
        with pytest.raises(AssertionError, match=why):
            profiled(events, ["kernel"] * 3)


# --- several in turns ---


def slow(layer):
    return exact(layer)


def late(layer):
    """Right in fp16, wrong in bf16: it fails after it was timed."""
    return exact(layer) * (2 if layer.weight.quant_state.dtype == BF16 else 1)


def test_turns_medians_and_failures(monkeypatch):
    order, profiles = [], []
    seconds = {"exact": 1.0, "slow": 1.5, "late": 0.1}

    def timed(fx, X, mlp, rounds):
        order.append(fx.__name__)
        return seconds[fx.__name__] / (fx.__name__ != "late" or len(order) < 9)  # out of memory, say

    def profiled(fx, X, mlp, before=None):
        profiles.append((fx.__name__, before))
        return ["kernel"]

    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(protocol, "synchronize", lambda: None)
    monkeypatch.setattr(protocol, "profiled", profiled)
    monkeypatch.setattr(protocol, "timed", timed)
    candidates, configs = {"ours": exact, "slow": slow, "late": late}, protocol.SMALL[:2]
    comparison = protocol.compare(candidates, 9, 3, configs, {})
    assert order[:9] == ["exact", "slow", "late", "slow", "late", "exact", "late", "exact", "slow"]
    assert order[9:] == ["exact", "slow", "slow", "exact", "exact", "slow"]
    assert profiles[:6] == [(n, before) for before in (None, ["kernel"]) for n in ("exact", "slow", "late")]
    assert comparison.forms == ["slow", "late"]
    ours, other, failed = comparison.entries.values()
    assert ours.seconds == [2.0, 2.0, 2.0] and comparison.speedup("ours", "slow") == 1.5
    assert "bf16: AssertionError" in failed.failure and failed.seconds == [] and failed.per_config == {}
    assert comparison.speedup("late", "slow") is None and comparison.speedup("ours", "nobody") is None
    other.seconds, comparison.forms = [4.0, 2.0, 3.0], []
    text = str(comparison)
    assert (
        "median s   ours is faster by   each turn" in text and "late                 FAILED: 64x128" in text
    )
    assert "3.0000   1.500x              4.0000 2.0000 3.0000" in text, "every turn is shown"
    monkeypatch.setattr(protocol, "timed", lambda *arguments: 1 / 0)
    failed = protocol.compare({"ours": exact}, 9, 3, ONE, {}).entries["ours"]
    assert "ZeroDivisionError" in failed.failure and failed.seconds == []


@pytest.mark.parametrize(
    "capability, forced, wanted",
    [((9, 0), "", (5, 5, 5, 5)), ((7, 5), "", (3, 3, 1, 1)), ((9, 0), "t4", (3, 3, 1, 1))],
)
def test_a_t4_has_time_for_fewer_turns(monkeypatch, capability, forced, wanted):
    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setenv("NF4_FORCE", forced)
    names = ("ours", "unsloth_today", "unsloth_classic", "kernel[grid]")
    assert tuple(protocol.turns_of(name, "ours") for name in names) == wanted


@pytest.mark.gpu
def test_launch_forms_are_exact_for_each_layer_passed(candidate, make_layer):
    """Both public forms launch on the tensors of the layer passed, with what a first call compiled."""
    forms = protocol.launch_forms(candidate)
    assert list(forms) == ["your_dequantize_nf4", "kernel[grid]", "compiled[grid]"]
    for dtype, seed, form in itertools.product((FP16, BF16), (1, 2), forms.values()):
        layer = make_layer(192, 320, dtype, seed=seed)
        assert reference.same_bits(form(layer), exact(layer))


# --- the libraries ---


def test_each_baseline_is_exact_or_says_what_it_needs(make_layer):
    known = protocol.baselines()
    assert list(known) == ["unsloth_today", "unsloth_classic", "bitsandbytes", "peft"]
    for baseline in known.values():
        assert (baseline.fn is None) == bool(baseline.reason)
        for dtype in (FP16, BF16) if baseline.fn else ():
            layer = make_layer(128, 192, dtype)
            assert reference.same_bits(baseline.fn(layer).detach(), exact(layer)), (baseline.label, dtype)
    if not protocol.ON_GPU:
        assert {known[name].reason for name in ("unsloth_today", "unsloth_classic")} == {"an NVIDIA GPU"}


@pytest.fixture
def fresh():
    """Lets a test see what the libraries would give it, without what was cached before or after."""
    protocol.baselines.cache_clear()
    yield
    protocol.baselines.cache_clear()


@pytest.mark.parametrize(
    "reason", ["not installed", "pip could not install it", "RuntimeError: no libcudart"]
)
def test_an_absent_or_broken_library_is_named_with_the_reason(fresh, monkeypatch, reason):
    """The second reason is the notebook's, whose install cell has tried. No entry has a traceback."""

    def absent(package):
        if "RuntimeError" in reason:
            raise RuntimeError("no libcudart")
        raise protocol.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(protocol.importlib.metadata, "version", absent)
    monkeypatch.setattr(protocol, "NOT_INSTALLED", reason)
    assert repr(protocol.baseline("bitsandbytes")) == f"not measured (needs bitsandbytes: {reason})"
    assert str(protocol.compare({"ours": exact})).count(f"(needs bitsandbytes: {reason})") == 5


def test_both_paths_of_unsloth():
    layer = SimpleNamespace(weight=SimpleNamespace(quant_state="state"))
    utils = SimpleNamespace(
        fast_dequantize=lambda w, state: ("fast", w, state),
        _fast_dequantize_ctypes=lambda w, state, out, use_global_buffer: ("ctypes", out, use_global_buffer),
    )
    today = protocol.layer_to_weight("unsloth_today", utils)
    utils.fast_dequantize = None
    assert today(layer) == ("fast", layer.weight, "state"), "looked up once"
    assert protocol.layer_to_weight("unsloth_classic", utils)(layer) == ("ctypes", None, False)


def test_bitsandbytes_is_its_own_function_whatever_stands_in_its_place(fresh, monkeypatch, make_layer):
    """Importing Unsloth wraps it, also for PEFT; replaced for good, it is refused."""
    from bitsandbytes import functional

    own, layer = protocol.own_dequantize_4bit(functional), make_layer(64, 64, FP16)

    def wrapper(A, *args, **kwargs):
        raise AssertionError("the wrapper was called")

    wrapper.__wrapped__ = own
    monkeypatch.setattr(functional, "dequantize_4bit", wrapper)
    assert protocol.own_dequantize_4bit(functional) is own
    known = protocol.baselines()
    assert reference.same_bits(known["bitsandbytes"].fn(layer), exact(layer))
    with pytest.raises(AssertionError, match="the wrapper was called"):
        known["peft"].fn(layer)
    with protocol.own_libraries():
        assert reference.same_bits(known["peft"].fn(layer), exact(layer))
    assert functional.dequantize_4bit is wrapper, "and users keep what they had"
    protocol.baselines.cache_clear()
    monkeypatch.setattr(functional, "dequantize_4bit", exact)
    assert "replaced bitsandbytes.functional.dequantize_4bit" in protocol.baselines()["bitsandbytes"].reason


@pytest.mark.parametrize("size", [(128, 64), (70, 33), (129, 1), (1, 1), (2, 1)])
def test_expected_is_bitsandbytes_for_all_sizes(make_layer, size):
    """Also where its CPU code would take wrong blocks (rows of 70): the oracle agrees."""
    for dtype in DTYPES:
        layer = make_layer(*size, dtype)
        assert reference.same_bits(protocol.expected(layer), exact(layer))


# --- on a GPU ---


@pytest.mark.gpu
def test_both_unsloths_are_reached_on_the_gpu(make_layer):
    """One launch against three: the two names stand for different code."""
    pytest.importorskip("unsloth")
    layer = make_layer(1024, 1024, FP16)
    functions = [protocol.baseline(name) for name in ("unsloth_today", "unsloth_classic")]
    assert [len(protocol.gpu_events(lambda fn=fn: fn(layer), 1)) for fn in functions] == [1, 3]


@pytest.mark.gpu
def test_official_protocol_on_the_gpu(candidate):
    """Also in its three launch forms, of which the direct one is the fastest."""
    comparison = protocol.compare(protocol.launch_forms(candidate), rounds=100, repeats=2)
    failures = {name: entry.failure for name, entry in comparison.entries.items() if entry.failure}
    assert not failures and all(len(x.seconds) == 2 for x in comparison.entries.values() if not x.reason)
    for name in ("compiled[grid]", "kernel[grid]", "unsloth_today"):
        assert (comparison.speedup("your_dequantize_nf4", name) or 2) > 1, comparison


@pytest.mark.gpu
def test_watching_costs_the_clock_little(candidate):
    """The timed part with stops against the same rounds without."""
    mlp, X = protocol.build(protocol.OFFICIAL[1])
    ratios = []
    for _ in range(5):
        watched = protocol.timed(candidate, X, mlp, 1000)
        start = time.perf_counter()
        for _ in range(1000):
            protocol.mlp_dequantize(X, mlp, candidate)
        ratios.append(watched / (time.perf_counter() - start))
    assert statistics.median(ratios) < 1.05, ratios

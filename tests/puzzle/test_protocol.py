"""The protocol: its shapes and checks, what is timed and watched, and that no wrong candidate gets a time."""

import inspect
import json
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers import machine
from helpers.nf4 import reference
from helpers.results import store as results
from helpers.puzzle import protocol

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16
ONE = protocol.SMALL[1:2]


def exact(layer):
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def entry_of(candidate, configs=ONE, **options):
    return protocol.compare({"it": candidate}, 4, 1, configs, {}, **options).entries["it"]


def test_official_configurations():
    """Sizes, seeds, dtypes and order as the puzzle states them."""
    assert [tuple(config) for config in protocol.OFFICIAL] == [
        (2, 3333, 2048, 8192, 3407, FP16),
        (5, 777, 1024, 4096, 3409, BF16),
        (3, 2048, 4096, 14336, 3408, BF16),
    ]
    assert {config.dtype for config in protocol.SMALL} == {FP16, BF16}
    assert all(config.hidden % 64 == config.intermediate % 64 == 0 for config in protocol.SMALL)
    assert inspect.signature(protocol.compare).parameters["rounds"].default == 1000


def test_the_puzzles_names_are_there():
    names = "unsloth_dequantize bnb_Linear4bit assert_same MLP mlp_forward mlp_dequantize assert_correct_bnb"
    assert all(callable(getattr(protocol, name)) for name in [*names.split(), "test_dequantize"])


def test_the_official_run_of_an_exact_candidate():
    seconds = protocol.test_dequantize(exact)
    assert seconds is None if not protocol.ON_GPU else seconds > 0


def test_a_wrong_candidate_raises_from_the_official_run():
    with pytest.raises(AssertionError, match="(?s)128x448 float16.*MLP output|2048x8192 float16.*MLP output"):
        protocol.test_dequantize(lambda layer: exact(layer) * 1.01)


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
def test_wrong_candidate_is_caught(name):
    candidate, message = WRONG[name]
    entry = entry_of(candidate)
    assert entry.failure and pytest.raises(AssertionError, protocol.must, False, entry.failure).match(
        f"(?s){message}"
    )
    assert entry.seconds == [] and entry.per_config == {} and entry.identical is None


def test_tolerances_are_the_defaults(monkeypatch):
    """Off by 3 in the tenth bit: inside loosened tolerances, outside of fp16's default 1e-3."""
    seen, original = [], torch.testing.assert_close
    monkeypatch.setattr(
        torch.testing, "assert_close", lambda *a, **k: (seen.append(set(k) | {len(a)}), original(*a, **k))
    )
    assert entry_of(lambda layer: exact(layer) * (1 + 3 / 1024), protocol.SMALL[:1]).failure
    assert seen and all(keywords == {2, "check_stride", "msg"} for keywords in seen)


def test_each_weight_is_compared():
    """Right inside the MLP and wrong when asked for the weight alone: caught in each of the three places."""
    for position, name in ((4, "up"), (5, "gate"), (6, "down")):
        calls = []

        def candidate(layer, calls=calls, position=position):
            calls.append(layer)
            return exact(layer) * (2 if len(calls) == position else 1)

        assert f"AssertionError: {name}_proj" in entry_of(candidate).failure


def test_order_and_synchronizes(monkeypatch):
    """Checks and timed rounds call up, gate, down; a round synchronizes after each one of them."""
    log, names = [], {}
    monkeypatch.setattr(protocol, "synchronize", lambda: log.append("sync"))
    original = protocol.build

    def build(config):
        mlp, X = original(config)
        names.update({id(getattr(mlp, name)): name.split("_")[0] for name in protocol.WEIGHTS})
        return mlp, X

    def candidate(layer):
        log.append(names[id(layer)])
        return exact(layer)

    monkeypatch.setattr(protocol, "build", build)
    monkeypatch.setattr(protocol, "uncounted", lambda: 0)
    monkeypatch.setattr(protocol, "unsloth_dequantize", exact)
    monkeypatch.setattr(protocol, "STOPS", 1)
    entry_of(candidate)
    one_round = ["up", "sync", "gate", "sync", "down", "sync"]
    warm_up = ["up", "gate", "down", *one_round, *["sync"] * 3]
    assert log[: 2 * len(warm_up)] == warm_up * 2
    timed = log[2 * len(warm_up) :]
    assert len(timed) == 4 * 6 + 2, "four rounds in two parts, each after a synchronize"
    cut = next(i for i in range(6, 25, 6) if timed[1 + i] == "sync")
    assert timed == ["sync", *one_round * (cut // 6), "sync", *one_round * (4 - cut // 6)]


def test_layers_are_reproducible_from_the_seed():
    torch.set_default_dtype(torch.float64)
    try:
        (a, x), (b, y) = protocol.build(protocol.SMALL[0]), protocol.build(protocol.SMALL[0])
        assert torch.get_default_dtype() == torch.float64, "as it was"
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(x, y) and x.shape == (2, 33, 128) and x.dtype == FP16
    for name in protocol.WEIGHTS:
        assert torch.equal(getattr(a, name).weight.data, getattr(b, name).weight.data)
    assert not torch.equal(a.gate_proj.weight.data, a.up_proj.weight.data)
    assert a.down_proj.weight.quant_state.shape == (128, 448)
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


@pytest.mark.parametrize("count", range(4))
def test_a_change_makes_every_earlier_result_wrong_and_leaves_no_trace(count):
    """Other values in each layer, at the same addresses, and no version counter moves."""
    mlp, _ = protocol.build(ONE[0])
    layers = [getattr(mlp, name) for name in protocol.WEIGHTS]

    def tensors(layer):
        state = layer.weight.quant_state
        return layer.weight, state.absmax, state.state2.absmax, state.offset

    before = [exact(layer).clone() for layer in layers]
    marks = [(x.data_ptr(), x._version) for layer in layers for x in tensors(layer)]
    values = [[x.data.clone() for x in tensors(layer)] for layer in layers]
    protocol.change(mlp, count)
    assert [(x.data_ptr(), x._version) for layer in layers for x in tensors(layer)] == marks
    for i, layer in enumerate(layers):
        assert not protocol.same_bits(before[i], exact(layer))
        touched = [not torch.equal(a, b.data) for a, b in zip(values[i], tensors(layer), strict=True)]
        assert touched == [kind == (count + i) % 4 for kind in range(4)]


def test_results_are_overwritten_once_compared():
    mlp, X = protocol.build(ONE[0])
    results = protocol.mlp_dequantize(X, mlp, exact)
    protocol.assert_right_now(results, mlp)
    assert all(result.isnan().all() for result in results)
    with pytest.raises(AssertionError, match="up_proj while timed"):
        protocol.assert_right_now(results, mlp)


def test_the_clock_stops_at_other_rounds_each_time(monkeypatch):
    """The rounds add up, stops alternate, and what happens at a stop is not on the clock."""
    now, log = [0.0], []

    def round_of_one_second(X, mlp, fx):
        now[0] += 1
        log.append("round")
        return ()

    def stop(name):
        def run(*_):
            now[0] += 100
            log.append(name)

        return run

    monkeypatch.setattr(protocol, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(protocol, "mlp_dequantize", round_of_one_second)
    monkeypatch.setattr(protocol, "change", stop("change"))
    monkeypatch.setattr(protocol, "assert_right_now", stop("compare"))
    places = set()
    for _ in range(5):
        log.clear()
        assert protocol.timed(None, None, None, 1000) == 1000
        assert log.count("round") == 1000
        stops = [name for name in log if name != "round"]
        assert stops == ["change", "compare"] * 10 and log[-1] == "compare"
        places.add(tuple(i for i, name in enumerate(log) if name != "round"))
    assert len(places) == 5


def test_memory_past_torch_fails_only_where_each_configuration_grows(monkeypatch):
    """In each of three tries: other processes share the card."""
    limit = protocol.LEFT_BEHIND
    for grown, failed in (([limit + 1] * 3, True), ([limit + 1, 0, limit + 1], False)):
        state = SimpleNamespace(total=0, calls=0)

        def candidate(layer, state=state, grown=grown):
            state.calls += 1
            state.total += grown[state.config] if state.first else 0
            state.first = False
            return exact(layer)

        def build(config, state=state, original=protocol.build):
            state.config, state.first = protocol.SMALL.index(config), True
            return original(config)

        with monkeypatch.context() as patch:
            patch.setattr(protocol, "build", build)
            patch.setattr(protocol, "uncounted", lambda state=state: state.total)
            failure = entry_of(candidate, protocol.SMALL).failure
        assert ("past torch in each configuration" in failure) is failed


# --- several in turns ---


def slow(layer):
    return exact(layer)


def late(layer):
    """Right in fp16, wrong in bf16: it fails after it was timed."""
    return exact(layer) * (2 if layer.weight.quant_state.dtype == BF16 else 1)


def scripted(monkeypatch, seconds):
    """Lets the CPU pass for a GPU, with `seconds` of a timed part by the function's name."""
    order = []

    def timed(fx, X, mlp, rounds):
        order.append(fx.__name__)
        if isinstance(seconds[fx.__name__], Exception):
            raise seconds[fx.__name__]
        return seconds[fx.__name__]

    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(protocol, "synchronize", lambda: None)
    monkeypatch.setattr(protocol, "uncounted", lambda: 0)
    monkeypatch.setattr(protocol, "timed", timed)
    return order


def test_turns_and_medians(monkeypatch):
    order = scripted(monkeypatch, {"exact": 1.0, "slow": 1.5, "late": 0.1})
    candidates = {"ours": exact, "slow": slow, "late": late}
    ticks = []
    comparison = protocol.compare(candidates, 9, 3, protocol.SMALL[:2], {}, lambda: ticks.append(1))
    assert order[:9] == ["exact", "slow", "late", "slow", "late", "exact", "late", "exact", "slow"]
    assert order[9:] == ["exact", "slow", "slow", "exact", "exact", "slow"]
    assert len(ticks) == 2 * 3 * 3
    ours, other, failed = comparison.entries.values()
    assert ours.seconds == [2.0, 2.0, 2.0] and comparison.speedup("ours", "slow") == 1.5
    assert "bfloat16" in failed.failure and failed.seconds == [] and failed.per_config == {}
    assert comparison.speedup("late", "slow") is None and comparison.speedup("ours", "nobody") is None
    other.seconds = [4.0, 2.0, 3.0]
    text = str(comparison)
    assert "3.0000 s  1.500x  of 4.0000 2.0000 3.0000" in text, "every repeat is shown"
    assert comparison.speedup("ours", "slow") == statistics.median(other.seconds) / 2.0


def test_a_contender_that_breaks_while_timed_is_recorded(monkeypatch):
    order = scripted(monkeypatch, {"exact": 1.0, "slow": RuntimeError("out of memory")})
    entries = protocol.compare({"ours": exact, "slow": slow}, 9, 3, ONE, {}).entries
    assert "out of memory" in entries["slow"].failure and entries["slow"].seconds == []
    assert entries["ours"].seconds == [1.0, 1.0, 1.0] and order.count("slow") == 1


@pytest.mark.parametrize(
    "capability, forced, wanted",
    [((9, 0), "", (5, 5, 5, 5)), ((7, 5), "", (3, 3, 1, 1)), ((9, 0), "t4", (3, 3, 1, 1))],
)
def test_a_t4_has_time_for_fewer_turns(monkeypatch, capability, forced, wanted):
    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setenv("NF4_FORCE", forced)
    names = ("ours", "unsloth_today", "unsloth_classic", "peft")
    assert tuple(protocol.turns_of(name, name != "ours") for name in names) == wanted


def test_absent_baselines_say_why_and_the_result_has_the_form_of_a_result_file():
    against = {
        "bitsandbytes": protocol.baselines()["bitsandbytes"],
        "peft": protocol.Baseline("peft", "PEFT", reason="not installed"),
    }
    comparison = protocol.compare({"ours": exact}, 4, 1, ONE, against)
    assert comparison.entries["peft"].reason == "not installed" and "not installed" in str(comparison)
    assert comparison.entries["ours"].identical and comparison.entries["bitsandbytes"].identical
    import msgspec

    json.dumps(comparison.to_dict())
    stored = msgspec.convert(comparison.to_dict(), results.Protocol)
    assert stored.entries["ours"].identical
    if not protocol.ON_GPU:
        assert "not timed (needs an NVIDIA GPU)" in str(comparison) and stored.entries["ours"].p50 is None


# --- the libraries ---


def test_importing_the_protocol_loads_no_library_and_no_triton():
    libraries = "('unsloth', 'bitsandbytes', 'peft', 'transformers', 'triton')"
    code = f"import sys, helpers.puzzle.protocol; print([m for m in {libraries} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=machine.ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_each_baseline_is_exact_or_says_why_it_is_absent(make_layer):
    known = protocol.baselines()
    assert list(known) == ["unsloth_today", "unsloth_classic", "bitsandbytes", "peft"]
    for baseline in known.values():
        assert (baseline.fn is None) == bool(baseline.reason)
        for dtype in (FP16, BF16) if baseline.fn else ():
            layer = make_layer(128, 192, dtype)
            assert protocol.same_bits(baseline.fn(layer).detach(), exact(layer)), (baseline.name, dtype)


@pytest.fixture
def fresh():
    """Lets a test see what the libraries would give it, without what was cached before or after."""
    protocol.baselines.cache_clear()
    yield
    protocol.baselines.cache_clear()


def test_a_broken_installation_says_so(fresh, monkeypatch):
    def broken(name):
        raise RuntimeError("libcudart is missing")

    monkeypatch.setattr(protocol.importlib, "import_module", broken)
    assert protocol.baselines()["bitsandbytes"].reason == "RuntimeError: libcudart is missing"


def test_without_a_gpu_unsloth_is_not_imported(fresh, monkeypatch):
    monkeypatch.setattr(protocol, "ON_GPU", False)
    monkeypatch.setitem(sys.modules, "unsloth", None)  # importing it would raise
    known = protocol.baselines()
    assert known["unsloth_today"].fn is None and known["unsloth_classic"].fn is None


def test_both_paths_of_unsloth(fresh, monkeypatch):
    layer = SimpleNamespace(weight=SimpleNamespace(quant_state="state"))
    utils = SimpleNamespace(
        fast_dequantize=lambda w, state: ("fast", w, state),
        _fast_dequantize_ctypes=lambda w, state, out, use_global_buffer: ("ctypes", out, use_global_buffer),
    )
    assert protocol.layer_to_weight("unsloth_today", utils)(layer) == ("fast", layer.weight, "state")
    assert protocol.layer_to_weight("unsloth_classic", utils)(layer) == ("ctypes", None, False)
    del utils._fast_dequantize_ctypes
    with pytest.raises(AttributeError, match="_fast_dequantize_ctypes"):
        protocol.layer_to_weight("unsloth_classic", utils)


def wrapped_as_unsloth_zoo_does(original):
    def dequantize_4bit(A, *args, **kwargs):
        raise AssertionError("the wrapper was called")

    dequantize_4bit.__wrapped__ = original
    return dequantize_4bit


def test_bitsandbytes_is_its_own_function_whatever_stands_in_its_place(fresh, monkeypatch, make_layer):
    """Item 12: importing Unsloth replaces it. The same for PEFT, which looks it up there."""
    from bitsandbytes import functional

    own, layer = protocol.own_dequantize_4bit(functional), make_layer(64, 64, FP16)
    monkeypatch.setattr(functional, "dequantize_4bit", wrapped_as_unsloth_zoo_does(own))
    replaced = functional.dequantize_4bit
    assert protocol.own_dequantize_4bit(functional) is own
    known = protocol.baselines()
    assert protocol.same_bits(known["bitsandbytes"].fn(layer), exact(layer))
    with pytest.raises(AssertionError, match="the wrapper was called"):
        known["peft"].fn(layer)
    with protocol.own_libraries():
        assert protocol.same_bits(known["peft"].fn(layer), exact(layer))
    assert functional.dequantize_4bit is replaced, "and users keep what they had"
    assert not protocol.compare({"ours": exact}, 4, 1, ONE).entries["peft"].failure


def test_a_function_replaced_for_good_is_not_called_bitsandbytes(fresh, monkeypatch):
    from bitsandbytes import functional

    monkeypatch.setattr(functional, "dequantize_4bit", exact)
    baseline = protocol.baselines()["bitsandbytes"]
    assert baseline.fn is None and "replaced bitsandbytes.functional.dequantize_4bit" in baseline.reason


@pytest.mark.parametrize("size", [(128, 64), (70, 33), (129, 1), (1, 1), (2, 1)])
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_expected_is_bitsandbytes_for_all_sizes(make_layer, size, dtype):
    """Also where its CPU code would take wrong blocks (rows of 70): the oracle agrees."""
    layer = make_layer(*size, dtype)
    assert protocol.same_bits(protocol.expected(layer), exact(layer))


def test_bits_are_compared_and_counted():
    zeros = torch.tensor([0.0, 1.0, float("nan")])
    assert protocol.different(zeros, torch.tensor([-0.0, 1.0, -float("nan")])) == 1
    assert not protocol.same_bits(zeros, zeros.half()) and not protocol.same_bits(zeros, zeros[:2])
    assert protocol.different(
        torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match="cannot compare"):
        protocol.different(zeros, zeros[:2])


@pytest.mark.gpu
def test_both_unsloths_and_bitsandbytes_are_reached_on_the_gpu(make_layer):
    """One launch against three: the two names stand for different code."""
    pytest.importorskip("unsloth")
    from helpers.puzzle import checks as evidence

    known = protocol.baselines()
    layer = make_layer(1024, 1024, FP16)
    names = ("unsloth_today", "unsloth_classic")
    launches = [len(evidence.gpu_events(lambda fn=known[name].fn: fn(layer), 1)) for name in names]
    assert launches == [1, 3]
    own = known["bitsandbytes"].fn.__closure__[0].cell_contents
    assert own.__module__ == "bitsandbytes.functional"


@pytest.mark.gpu
def test_official_protocol_on_the_gpu(kernel):
    comparison = protocol.compare({"ours": kernel.your_dequantize_nf4}, rounds=100, repeats=2)
    failures = {name: entry.failure for name, entry in comparison.entries.items() if entry.failure}
    assert not failures and comparison.speedup("ours", "unsloth_today") > 1
    assert all(len(entry.seconds) == 2 for entry in comparison.entries.values() if not entry.reason)


@pytest.mark.gpu
def test_watching_costs_the_clock_little(kernel):
    """The timed part with stops against the same rounds without."""
    import time

    mlp, X = protocol.build(protocol.OFFICIAL[1])
    fx, ratios = kernel.your_dequantize_nf4, []
    for _ in range(5):
        watched = protocol.timed(fx, X, mlp, 1000)
        start = time.perf_counter()
        for _ in range(1000):
            protocol.mlp_dequantize(X, mlp, fx)
        ratios.append(watched / (time.perf_counter() - start))
    assert statistics.median(ratios) < 1.05, ratios

"""The sections at small sizes. Without a GPU times mean nothing; what is compared, timed and kept does."""

import dataclasses
import math
import statistics
import sys
import types

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.bench import bench, clocks, contenders
from helpers.nf4.reference import dequantize
from helpers.results import store
from helpers.results.store import Row

pytest.importorskip("bitsandbytes")
MLP = bench.official.Config(1, 3, 64, 128, 3407, torch.float16)
TINY = dataclasses.replace(bench.ON_CPU, sizes=(2**10,), configs=(MLP,))
LIBRARIES = {"bitsandbytes"} | ({"unsloth_today", "unsloth_classic"} & contenders.all_contenders().keys())
FORMS = {"ours"} | ({"ordinary", "compiled_grid"} if clocks.ON_GPU else set())


def run(name, scope=TINY):
    """A section's rows as {case: {contender: values}}, and its problems."""
    rows, problems = bench.run(name, scope)
    cases = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.contender] = row.values
    return cases, problems


@pytest.mark.skipif(clocks.ON_GPU, reason="timed below")
def test_protocol(capsys):
    assert bench.run("protocol", TINY) == ([], [])
    lines = capsys.readouterr().out.splitlines()
    exact = {line.split()[0] for line in lines if "exact; not measured" in line}
    assert exact == {"your_dequantize_nf4", "bitsandbytes", "PEFT"}


def test_rows_of_the_protocol(monkeypatch):
    entry = types.SimpleNamespace(failure="", seconds=[1.0], per_config={"64x128 fp16": [1.0]})
    lost = types.SimpleNamespace(failure="wrong", seconds=[])
    entries = {**dict.fromkeys([*bench.FORMS, "unsloth_today", "peft"], entry), "bitsandbytes": lost}
    comparison = types.SimpleNamespace(entries=entries)
    monkeypatch.setattr(bench.official, "compare", lambda *arguments, **more: comparison)
    rows, problems = bench.run("protocol", TINY)
    found = [(row.section, row.case, row.contender) for row in rows]
    names, cases = ("ours", "unsloth_today", "peft"), ("total", "64x128 fp16")
    protocol = [("protocol", case, name) for name in names for case in cases]
    forms = ("direct", "ordinary", "compiled_grid", "unsloth_today")
    assert found == protocol + [("launch_forms", "total", name) for name in forms]
    assert problems == ["bitsandbytes: wrong"]


def test_gpu_time():
    cases, problems = run("gpu_time")
    assert not problems and list(cases) == ["1024 fp16", "1024 bf16"]
    for found in cases.values():
        assert found.keys() == {"ours", "copy_kernel"} | LIBRARIES
        assert all(len(values) == TINY.rounds for values in found.values())


def test_settings_are_restored_and_each_is_timed_beside_the_default(kernel):
    with kernel.force(card="t4"):  # a change is made to the settings in force
        before = kernel.settings()
        cases, problems = run("settings")
        assert kernel.settings() == before and not problems and len(cases) > 5
    assert all(case.endswith(" at 1024 bf16") for case in cases)
    assert all(found.keys() == {"default", "changed"} for found in cases.values())


@pytest.mark.parametrize("card", [None, "t4"])
@pytest.mark.parametrize("numel", [2**10, 2**28])
def test_changes_are_real_changes_of_existing_settings(kernel, card, numel):
    with kernel.force(card=card, hints=True, stage=True, num_warps=4):
        now = dataclasses.asdict(kernel.settings())
        found = bench.changes(kernel.settings(), numel, "bf16")
    assert {"hints=False", "stage=False", "num_warps=8"} <= found.keys() and "num_warps=4" not in found
    for change in found.values():
        assert change.keys() <= now.keys() and any(now[name] != value for name, value in change.items())


def test_host_time():
    cases, problems = run("host_time")
    assert not problems and {"until_return", "synchronized", "first_call_new_layer"} <= cases.keys()
    for case, found in cases.items():
        assert case == "first_call" or found.keys() == FORMS | LIBRARIES | {"peft"}


def test_compiled_is_exact_and_one_graph_serves_every_number_of_tokens():
    counters.clear()
    cases, problems = run("compiled", dataclasses.replace(TINY, tokens=(8, 16)))
    assert not problems and counters["stats"]["unique_graphs"] == len(cases["forward 8 tokens"]) // 2
    names = {"products_only", "ours"} | LIBRARIES - {"unsloth_classic"}
    forward = [cases[f"forward {tokens} tokens"] for tokens in (8, 16)]
    assert all(found.keys() == names | {f"{name}_eager" for name in names} for found in forward)
    ratios = [statistics.median(x["bitsandbytes"]) / statistics.median(x["ours"]) for x in forward]
    assert cases["geometric mean"]["bitsandbytes"] == pytest.approx((statistics.geometric_mean(ratios),))


@pytest.mark.parametrize("section", ["gpu_time", "settings", "host_time", "compiled"])
def test_one_wrong_bit_is_reported_and_not_timed(section, monkeypatch):
    def nearly(layer):
        weight = dequantize(layer.weight, layer.weight.quant_state)
        weight.view(torch.int16).view(-1)[-1] ^= 1 << 14  # the exponent's highest bit: a zero becomes 2.0
        return weight

    monkeypatch.setattr(contenders.launch, "your_dequantize_nf4", nearly)
    cases, problems = run(section)
    assert problems and all("not bit-identical" in text for text in problems)
    cases.pop("first_call", None)  # of other processes
    assert not any("ours" in found or "default" in found for found in cases.values())


def refuses_capture(*arguments, **more):
    raise RuntimeError("not permitted\nwhile capturing")


def captures_nothing(calls, pool, whole=clocks.capture):
    return types.SimpleNamespace(replay=int, pool=lambda: None), whole(calls, pool)[1]


def lost_bytes(layer, words, num_warps):
    return bench.copy_kernel.written(layer, words, num_warps) & 255


@pytest.mark.parametrize(
    ("module", "name", "fault", "problem"),
    [
        (bench.copy_kernel, "copy", lost_bytes, "copy_kernel {'words': 2"),
        (clocks, "capture", refuses_capture, "ours at 1024 fp16: RuntimeError: not permitted"),
        (clocks, "capture", captures_nothing, "ours at 1024 fp16: AssertionError: not bit-identical"),
    ],
)
def test_what_cannot_be_measured_is_named(module, name, fault, problem, monkeypatch):
    monkeypatch.setattr(module, name, fault)
    cases, problems = run("gpu_time")
    assert any(text.startswith(problem) for text in problems), problems
    assert problem.split()[0] not in cases.get("1024 fp16", {})


def test_the_memory_bound_reference_is_its_fastest_variant(monkeypatch):
    names = [f"copy_kernel {how}" for how in bench.copy_kernel.VARIANTS]
    seconds = {name: [1.0 + index] for index, name in enumerate(names[::-1])} | {"ours": [9.0]}
    monkeypatch.setattr(bench, "gpu_seconds", lambda *arguments: dict(seconds))
    assert run("gpu_time")[0]["1024 fp16"] == {"ours": (9e6,), "copy_kernel": (1e6,)}


# --- the command ---


def good(scope, problems):
    yield Row("gpu_time", "64 fp16", "ours", "us", [1.0, 2.0])
    yield Row("other", "a", "ours", "s", [3.0])


def bad(scope, problems):
    problems.append("peft: not bit-identical")
    yield Row("settings", "a", "default", "us", [1.0])


def broken(scope, problems):
    yield Row("host_time", "a", "ours", "us", [1.0])
    raise ValueError("first line\nsecond line")


def cut(scope, problems):
    raise KeyboardInterrupt


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """A machine with a GPU whose rows go to tmp_path; stored() gives their sections."""
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    monkeypatch.setattr(clocks, "ON_GPU", True)
    monkeypatch.setattr(bench, "DEFAULT", ("good", "bad"))
    monkeypatch.setattr(bench, "SECTIONS", dict(good=good, bad=bad, broken=broken, cut=cut))
    monkeypatch.setattr(contenders, "missing", lambda: {"peft": "no such thing"})
    return lambda: [row.section for folder in tmp_path.iterdir() for row in store.rows(folder.name)]


def test_sections_are_stored_with_what_went_wrong(stored, tmp_path, capsys):
    assert bench.main(["--only", "good"]) == 0 and stored() == ["gpu_time", "other"]
    assert bench.main([]) == 1
    shown = capsys.readouterr().out
    assert "peft: not measured (needs no such thing)" in shown and "FAILED peft: not bit-identical" in shown
    assert "(1 to 2)" in shown and stored() == ["gpu_time", "other", "settings"]
    [card] = tmp_path.iterdir()
    assert store.meta(card.name)["sections"]["settings"]["note"] == "peft: not bit-identical"


def test_a_broken_section_stops_no_other_and_keeps_what_it_has(stored, capsys):
    assert bench.main(["--only", "broken", "good"]) == 1 and stored() == ["host_time", "gpu_time", "other"]
    assert "FAILED ValueError: first line\n" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--only", "bad", "cut"])
    assert stored() == ["host_time", "gpu_time", "other", "settings"]


def test_without_a_gpu_no_time_is_shown_or_stored(stored, monkeypatch, capsys):
    monkeypatch.setattr(clocks, "ON_GPU", False)
    monkeypatch.setattr(bench.machine, "no_gpu", lambda: "No GPU here.")
    assert bench.main(["--only", "good"]) == 0 and stored() == []
    shown = capsys.readouterr().out
    assert "No GPU here." in shown and "bit-identical, not timed" in shown and "1.5" not in shown


def test_ratios_are_to_the_first_row_of_a_case(monkeypatch):
    monkeypatch.setattr(clocks, "ON_GPU", True)
    rows = [
        Row("s", case, name, "us", [us]) for case, name, us in (("a", "x", 2), ("a", "y", 3), ("b", "y", 4))
    ]
    assert [line.split()[-1] for line in bench.text(rows).splitlines()] == ["1.00x", "1.50x", "1.00x"]


@pytest.mark.parametrize(("fused", "failed"), [(True, 0), (False, 1)])
def test_unsloths_fallback_to_its_classic_path_is_a_problem(stored, monkeypatch, fused, failed):
    utils = types.SimpleNamespace(_USE_NF4_KERNELS=fused)
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", utils)
    assert bench.main(["--only", "good"]) == failed


@pytest.mark.gpu
def test_on_a_gpu_nobody_fails():
    scope = dataclasses.replace(
        bench.FULL, sizes=(2**16, 2**22), settings=((2**20, "bf16"),), tokens=(64,), weights=4, rounds=5,
        configs=bench.FULL.configs[:1],
    )  # fmt: skip
    for section in bench.DEFAULT:
        cases, problems = run(section, scope)
        assert not problems and cases, section
        assert not any(math.isnan(x) for found in cases.values() for values in found.values() for x in values)
        if section == "host_time":
            medians = {name: statistics.median(values) for name, values in cases["until_return"].items()}
            assert medians["ours"] < min(medians["ordinary"], medians["compiled_grid"])
            assert cases["first_call"].keys() == {"ours", "ours_empty_cache"}

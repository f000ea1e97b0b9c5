"""The sections at small sizes. Without a GPU times mean nothing; what is compared, timed and kept does."""

import dataclasses
import math
import statistics

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.bench import bench, clocks, contenders
from helpers.nf4.reference import dequantize
from helpers.results import store
from helpers.results.store import Row

pytest.importorskip("bitsandbytes")
MLP = bench.official.Config(1, 3, 64, 128, 3407, torch.float16)
TINY = dataclasses.replace(bench.ON_CPU, sizes=(2**10,), configs=(MLP,), backend="eager")
LIBRARIES = {"bitsandbytes"} | ({"unsloth_today", "unsloth_classic"} & contenders.all_contenders().keys())
FORMS = {"ours", "ordinary"} | ({"compiled_grid"} if clocks.ON_GPU else set())


def run(name, scope=TINY):
    """A section's rows as {case: {contender: values}}, and its problems."""
    rows, problems = bench.run(name, scope)
    cases = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.contender] = row.values
    return cases, problems


def test_protocol():
    rows, problems = bench.run("protocol", TINY)
    assert not problems and {row.section for row in rows} == {"protocol", "launch_forms"}
    totals = {row.contender for row in store.select(rows, "protocol", "total", unit="s")}
    assert totals >= {"ours", "bitsandbytes", "peft"} and not totals & {"ordinary", "compiled_grid"}
    assert {row.contender for row in store.select(rows, "launch_forms")} >= FORMS - {"ours"} | {"direct"}


def test_gpu_time():
    cases, problems = run("gpu_time")
    assert not problems and list(cases) == ["1024 fp16", "1024 bf16"]
    for found in cases.values():
        assert found.keys() >= {"ours", "copy_kernel"} | LIBRARIES and "peft" not in found
        assert all(len(values) == TINY.rounds for values in found.values())


def test_settings_are_restored_and_each_is_timed_beside_the_default(kernel):
    before = kernel.settings()
    cases, problems = run("settings")
    assert kernel.settings() == before and not problems and len(cases) > 5
    assert all(case.endswith(" at 1024 bf16") for case in cases)
    assert all(found.keys() == {"default", "changed"} for found in cases.values())
    assert len({found["default"] for found in cases.values()}) == 1, "one measurement of the default"


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
    for found in cases.values() if not clocks.ON_GPU else ():
        assert found.keys() == FORMS | LIBRARIES | {"peft"} and all(len(v) == 2 for v in found.values())


def test_compiled_is_exact_and_one_graph_serves_every_number_of_tokens():
    counters.clear()
    cases, problems = run("compiled", dataclasses.replace(TINY, tokens=(8, 16)))
    assert not problems and counters["stats"]["unique_graphs"] == len(cases["forward 8 tokens"]) // 2
    names = {"products_only", "ours"} | LIBRARIES - {"unsloth_classic"}
    for tokens in (8, 16):
        assert cases[f"forward {tokens} tokens"].keys() == names | {f"{name}_eager" for name in names}
    ratios = [
        statistics.median(cases[f"forward {tokens} tokens"]["bitsandbytes"])
        / statistics.median(cases[f"forward {tokens} tokens"]["ours"])
        for tokens in (8, 16)
    ]
    [ratio] = cases["geometric mean"]["bitsandbytes"]
    assert ratio == pytest.approx(statistics.geometric_mean(ratios))


@pytest.mark.parametrize("section", ["gpu_time", "settings", "host_time", "compiled"])
def test_one_wrong_bit_is_reported_and_not_timed(section, monkeypatch):
    def nearly(layer):
        weight = dequantize(layer.weight, layer.weight.quant_state)
        weight.view(torch.int16).view(-1)[-1] ^= 1 << 13
        return weight

    monkeypatch.setattr(contenders.launch, "your_dequantize_nf4", nearly)
    monkeypatch.setattr(bench, "copies", lambda layers, problems: {})
    cases, problems = run(section)
    assert problems and all("not bit-identical" in text for text in problems)
    assert not any("ours" in found or "default" in found for found in cases.values())


def copies_nothing(monkeypatch):
    monkeypatch.setattr(bench.copy_kernel, "copy", lambda layer, out, *variant: None)
    return "copy_kernel (2, 4): does not move every byte", {"ours"}, {"copy_kernel"}


def refuses_capture(monkeypatch):
    def refuse(*arguments, **more):
        raise RuntimeError("not permitted\nwhile capturing")

    monkeypatch.setattr(clocks, "capture", refuse)
    monkeypatch.setattr(bench, "copies", lambda layers, problems: {})
    return "ours at 1024 fp16: cannot be captured: RuntimeError: not permitted", set(), {"ours"}


def captures_nothing(monkeypatch):
    class Empty:
        def replay(self):
            pass

        def pool(self):
            return None

    whole = clocks.capture
    monkeypatch.setattr(clocks, "capture", lambda *a, **more: (Empty(), whole(*a, **more)[1]))
    return "ours at 1024 fp16: not bit-identical", set(), {"ours", "copy_kernel"}


def no_memory(monkeypatch):
    monkeypatch.setattr(clocks, "free_bytes", lambda: 1000)
    return "1024 elements: not measured (needs 0.0 GB of free GPU memory)", set(), {"ours"}


@pytest.mark.parametrize("fault", [copies_nothing, refuses_capture, captures_nothing, no_memory])
def test_what_cannot_be_measured_is_named(fault, monkeypatch):
    problem, present, absent = fault(monkeypatch)
    cases, problems = run("gpu_time")
    assert any(text.startswith(problem) for text in problems), problems
    found = cases.get("1024 fp16", {}).keys()
    assert present <= found and not absent & found


def test_the_memory_bound_reference_is_its_fastest_variant(monkeypatch):
    def seconds(graphs, rounds):
        return {name: [1 / (1 + sum(name)) if isinstance(name, tuple) else 1.0] for name in graphs}

    monkeypatch.setattr(clocks, "gpu_seconds", seconds)
    monkeypatch.setattr(bench, "captured", lambda *arguments: {})
    monkeypatch.setattr(bench, "copies", lambda *arguments: dict.fromkeys(bench.copy_kernel.VARIANTS))
    cases, _ = run("gpu_time")
    assert cases["1024 fp16"]["copy_kernel"] == pytest.approx((1e6 / 17,))  # of 8 words and 8 warps


# --- the command ---


def good(scope, problems):
    return [Row("gpu_time", "64 fp16", "ours", "us", [1.0, 2.0]), Row("other", "a", "ours", "s", [3.0])]


def bad(scope, problems):
    problems.append("peft: not bit-identical")
    return [Row("settings", "a", "default", "us", [1.0])]


def broken(scope, problems):
    raise ValueError("first line\nsecond line")


def cut(scope, problems):
    raise KeyboardInterrupt


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """A machine with a GPU whose rows go to tmp_path; stored() reads them."""
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    monkeypatch.setattr(clocks, "ON_GPU", True)
    monkeypatch.setattr(bench, "DEFAULT", ("good", "bad"))
    monkeypatch.setattr(bench, "SECTIONS", dict(good=good, bad=bad, broken=broken, cut=cut))
    monkeypatch.setattr(contenders, "missing", lambda: {"peft": "no such thing"})
    return lambda: [row for folder in tmp_path.iterdir() for row in store.rows(folder.name)]


def test_sections_are_stored_with_what_went_wrong(stored, tmp_path, capsys):
    assert bench.main(["--only", "good"]) == 0
    assert [row.section for row in stored()] == ["gpu_time", "other"]
    assert bench.main([]) == 1
    shown = capsys.readouterr().out
    assert "peft: not measured (needs no such thing)" in shown and "FAILED peft: not bit-identical" in shown
    assert [row.section for row in stored()] == ["gpu_time", "other", "settings"]
    [card] = tmp_path.iterdir()
    assert store.meta(card.name)["sections"]["settings"]["note"] == "peft: not bit-identical"


def test_a_broken_section_stops_no_other_and_a_cut_one_loses_none(stored, capsys):
    assert bench.main(["--only", "broken", "good"]) == 1 and len(stored()) == 2
    assert "FAILED ValueError: first line\n" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--only", "bad", "cut"])
    assert [row.section for row in stored()] == ["gpu_time", "other", "settings"]


def test_a_quick_run_stores_nothing(stored, capsys):
    assert bench.main(["--quick", "--only", "good"]) == 0 and stored() == []
    assert "(1 to 2)" in capsys.readouterr().out


def test_without_a_gpu_no_time_is_shown_or_stored(stored, monkeypatch, capsys):
    monkeypatch.setattr(clocks, "ON_GPU", False)
    monkeypatch.setattr(bench.machine, "no_gpu", lambda: "No GPU here.")
    assert bench.main(["--only", "good"]) == 0 and stored() == []
    shown = capsys.readouterr().out
    assert "No GPU here." in shown and "bit-identical, not timed" in shown and "1.5" not in shown


def test_ratios_are_to_the_first_row_of_a_case():
    rows = [
        Row("s", case, name, "us", [value])
        for case, name, value in (("a", "x", 2), ("a", "y", 3), ("b", "y", 4))
    ]
    ratios = [line.split()[-1] for line in bench.text(rows).splitlines()]
    assert ratios == ["1.00x", "1.50x", "1.00x"]


def test_unsloths_fallback_to_its_classic_path_is_a_problem(stored, monkeypatch):
    import sys
    import types

    for fused, failed in ((True, 0), (False, 1)):
        utils = types.SimpleNamespace(_USE_NF4_KERNELS=fused)
        monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", utils)
        assert bench.main(["--only", "good"]) == failed


@pytest.mark.gpu
def test_on_a_gpu_nobody_fails():
    scope = dataclasses.replace(
        bench.QUICK, sizes=(2**16, 2**22), settings=((2**20, "bf16"),), tokens=(64,), weights=4,
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

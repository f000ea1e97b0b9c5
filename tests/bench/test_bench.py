"""The sections at small sizes. Without a GPU times mean nothing; what is compared, timed and kept does."""

import dataclasses
import math
import re
import sys
import types

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.bench import bench, clocks, contenders, experts, gpu
from helpers.results.store import Row
from nf4_triton import reference, settings

pytest.importorskip("bitsandbytes")
TINY = dataclasses.replace(bench.ON_CPU, sizes=(2**10,))
EVERYONE = contenders.all_contenders().keys()
LIBRARIES = {"bitsandbytes"} | ({"unsloth_today", "unsloth_classic"} & EVERYONE)


def run(name, scope=TINY):
    """A section's rows as {case: {contender: values}}, and its problems."""
    rows, problems = bench.run_section(name, scope)
    cases = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.contender] = row.values
    return cases, problems


def test_gpu_time():
    cases, problems = run("gpu_time")
    assert not problems and list(cases) == ["1024 fp16", "1024 bf16"]
    assert all(found.keys() == {"ours", "copy_kernel"} | LIBRARIES for found in cases.values())


def test_experts():
    cases, problems = run("experts")
    assert not problems and list(cases) == ["1 of 2x64x256", "2 of 2x64x256"]
    assert all({"rows", "whole"} <= found.keys() for found in cases.values())


def test_settings_that_change_the_launch_are_timed_and_put_back():
    with settings.force(card="t4", rows=32, num_warps=2, hints=True):  # changes are made to these
        before = settings.settings()
        cases, problems = run("settings")
        assert settings.settings() == before and not problems
    [timed] = cases.values()
    assert {"default", "hints=False", "rows=16", "rows=64", "rows=128", "num_warps=4"} <= timed.keys()
    assert not {"rows=32", "num_warps=2"} & timed.keys()


def test_host_time():
    cases, problems = run("host_time")
    assert not problems and list(cases) == ["until_return", "synchronized"]
    assert all(found.keys() == EVERYONE | {"ours_out", "ours_rows"} for found in cases.values())


def test_compiled_is_exact_and_one_graph_serves_every_number_of_tokens():
    counters.clear()
    cases, problems = run("compiled", dataclasses.replace(TINY, tokens=(8, 16)))
    names = {"products_only", "ours"} | LIBRARIES - {"unsloth_classic"}
    assert not problems and counters["stats"]["unique_graphs"] == 2 * len(names)
    assert len(cases) == 4 and all(found.keys() == names for found in cases.values())


@pytest.mark.parametrize("section", ["gpu_time", "experts", "settings", "host_time", "compiled"])
def test_one_wrong_bit_is_reported_and_not_timed(section, monkeypatch):
    def nearly(weight):
        weight.view(torch.int16).view(-1)[-1] ^= 1 << 14  # the exponent's highest bit: a zero becomes 2.0
        return weight

    def ours(layer):
        return nearly(contenders.exact_weight(layer))

    def packed_weight(packed, rows=None):
        return nearly(reference.dequantize(packed) if rows is None else reference.dequantize(packed)[rows])

    monkeypatch.setattr(contenders.launch, "your_dequantize_nf4", ours)
    monkeypatch.setattr(gpu, "your_dequantize_nf4", ours)
    monkeypatch.setattr(experts, "dequantize_packed", packed_weight)
    cases, problems = run(section)
    assert problems and all("not bit-identical" in text for text in problems)
    assert not any({"ours", "default", "rows", "whole"} & found.keys() for found in cases.values())


# --- the command ---


def good(scope, problems):
    yield Row("good", "64 fp16", "ours", "us", [1.0, 2.0])
    yield Row("good", "64 fp16", "peft", "us", [3.0])


def broken(scope, problems):
    problems.append("peft: not bit-identical")
    yield Row("broken", "a", "ours", "us", [1.0])
    raise ValueError("first line\nsecond line")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    return tmp_path


def test_a_broken_section_stops_no_other_and_keeps_what_it_has(folder, monkeypatch, capsys):
    monkeypatch.setattr(clocks, "ON_GPU", True)
    monkeypatch.setattr(bench, "SECTIONS", dict(broken=broken, good=good))
    monkeypatch.setattr(contenders, "missing", lambda: {"peft": "no such thing"})
    assert bench.main(["--only", "good"]) == 0 and bench.main(["--only", "broken", "good"]) == 1
    shown = capsys.readouterr().out
    assert "peft: not measured (needs no such thing)" in shown
    assert "FAILED peft: not bit-identical\nFAILED ValueError: first line\n" in shown
    assert re.search(r"64 fp16 +ours +us +1.5 +1 +2\n", shown)
    [card] = folder.iterdir()
    lines = (card / "rows.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["section", "broken", "good", "good"]
    assert "peft: not bit-identical; ValueError: first line" in (card / "meta.json").read_text()
    assert bench.main(["--only", "good", "--into", "some-card-triton-3.9"]) == 0
    assert (folder / "some-card-triton-3.9" / "rows.csv").exists()


@pytest.mark.skipif(clocks.ON_GPU, reason="there is a GPU")
def test_without_a_gpu_no_time_is_shown_or_stored(folder, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SECTIONS", dict(good=good))
    assert bench.main(["--only", "good"]) == 0 and not list(folder.iterdir())
    shown = capsys.readouterr().out
    assert "nothing is timed or stored" in shown and "1.5" not in shown


def test_unsloths_fallback_to_its_classic_path_is_a_problem(monkeypatch):
    utils = types.SimpleNamespace(_USE_NF4_KERNELS=False)
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", utils)
    assert any("Unsloth gave up its fused kernel" in problem for problem in run("settings")[1])


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(0)
def test_on_a_gpu_nobody_fails():
    scope = dataclasses.replace(
        bench.FULL,
        sizes=(2**16, 2**22),
        experts=((8, 64, 256),),
        active=(4,),
        settings=((2**20, "bf16"),),
        tokens=(64,),
        weights=4,
        rounds=5,
    )
    for section in bench.DEFAULT:
        cases, problems = run(section, scope)
        assert cases and not problems, section
        assert not any(math.isnan(x) for found in cases.values() for values in found.values() for x in values)

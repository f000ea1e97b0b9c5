"""The sections at small sizes. Without a GPU times mean nothing; what is compared, timed and kept does."""

import pytest
import torch

from helpers.bench import bench, clocks, contenders, experts, gpu, host
from helpers.results import store
from helpers.results.store import Row
from nf4_triton import reference, settings

pytest.importorskip("bitsandbytes")
EVERYONE = contenders.all_contenders().keys()
LIBRARIES = {"bitsandbytes"} | ({"unsloth_today", "unsloth_classic"} & EVERYONE)
SMALL = {
    gpu: dict(SIZES=(2**10,), CHANGED=((2**10, "bf16"),)),
    # Each selected row is a program, which the interpreter runs for 15 ms.
    host: dict(LAYER=(64, 8), WEIGHTS=2, TOKENS=(8, 16)),
    experts: dict(STACKS=((2, 64, 256),), ACTIVE=(1,)),
    clocks: dict(ROUNDS=2, INNER=1),
}


FOUND = {  # section: its cases, and who is timed in each of them
    "gpu_time": (["1024 fp16", "1024 bf16"], {"ours", "copy_kernel"} | LIBRARIES),
    "experts": (["1 of 2x64x256", "2 of 2x64x256"], {"rows", "slice"}),
    "settings": (["1024 bf16"], gpu.CHANGES.keys()),
    "host_time": (["until_return", "synchronized"], EVERYONE | {"ours_out", "ours_rows"}),
    "compiled": (
        [f"forward {tokens} tokens, {mode}" for mode in host.MODES for tokens in (8, 16)],
        {"products_only", "ours"} | LIBRARIES - {"unsloth_classic"},
    ),
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where rows go; every section is small."""
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    for module, values in SMALL.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    return tmp_path


def run(name):
    """A section's rows as {case: who is timed}, and its problems."""
    rows, problems = bench.run_section(name)
    cases = {}
    for row in rows:
        cases.setdefault(row.case, set()).add(row.contender)
    return cases, problems


@pytest.mark.parametrize("section", FOUND)
def test_everyone_is_exact_and_timed(section):
    before = settings.settings()
    found, problems = run(section)
    cases, names = FOUND[section]
    assert not problems and list(found) == cases and settings.settings() == before
    assert all(names <= timed for timed in found.values())


@pytest.mark.parametrize("section", FOUND)
def test_what_differs_from_the_reference_is_reported_and_not_timed(section, monkeypatch):
    def nearly(packed):
        weight = reference.dequantize(packed)
        weight.view(torch.int16)[..., -1] ^= 1 << 14  # the exponent's highest bit: a zero becomes 2.0
        return weight

    monkeypatch.setattr(contenders, "dequantize", nearly)
    monkeypatch.setattr(experts, "dequantize", nearly)
    found, problems = run(section)
    assert problems and all("not bit-identical" in text for text in problems)
    assert all(timed <= {"copy_kernel", "products_only"} for timed in found.values())


# --- the command ---


def good(problems):
    yield Row("good", "64 fp16", "ours", "us", [1.0, 2.0])


def broken(problems):
    problems.append("peft: not bit-identical")
    yield Row("broken", "a", "ours", "us", [1.0])
    raise ValueError("first line\nsecond line")


def test_a_broken_section_stops_no_other_and_keeps_what_it_has(folder, monkeypatch, capsys):
    monkeypatch.setattr(clocks, "ON_GPU", True)
    monkeypatch.setattr(bench, "SECTIONS", dict(broken=broken, good=good))
    assert bench.main(["--only", "broken", "good", "--into", "some-card"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED peft: not bit-identical\nFAILED ValueError: first line\n" in shown
    assert "64 fp16, ours: 1.5 us (1 to 2)\n" in shown
    assert [row.section for row in store.rows("some-card")] == ["broken", "good"]
    note = store.meta("some-card")["sections"]["broken"]["note"]
    assert note == "peft: not bit-identical; ValueError: first line"
    assert bench.main(["--only", "good"]) == 0 and len(store.cards()) == 2


@pytest.mark.skipif(clocks.ON_GPU, reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed_or_stored(monkeypatch):
    monkeypatch.setattr(bench, "SECTIONS", dict(good=good))
    assert bench.main(["--only", "good"]) == 1 and not store.cards()

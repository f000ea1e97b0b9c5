"""The sections at small sizes. Without a GPU, times mean nothing, but comparisons and stored rows do."""

import os
from unittest import mock

import pytest
import torch

from helpers.bench import bench, clocks, contenders, gpu, host, training
from helpers.puzzle import turns
from helpers.results import store

pytest.importorskip("bitsandbytes")
SMALL = (
    (gpu, "SIZES", (2**10,)),
    (gpu, "MOST_LAYERS", 2),
    (host, "LAYER", (64, 2)),  # each selected row is a program, which the interpreter runs for 15 ms
    (clocks, "ROUNDS", 1),
    (clocks, "GPU_ROUNDS", 1),
    (clocks, "INNER", 1),
)

FOUND = {  # section: its cases, and contenders that are timed in each case, among others
    "gpu_time": (
        ["1024 fp16", "1024 bf16"],
        {"ours", "torch's copy", "dequantize, flat", "bitsandbytes, flat"},
    ),
    "host_time": (list(host.KINDS), {"dequantize(layer)", "dequantize(out=)", "bitsandbytes, switched"}),
}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Every section is small, and rows go to a temporary folder."""
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    for module, name, value in SMALL:
        monkeypatch.setattr(module, name, value)


def run(name):
    """Return a section's {case: contenders that are timed}, and its problems."""
    problems = []
    return {case: found.keys() for case, _, found in bench.SECTIONS[name](problems)}, problems


@pytest.mark.parametrize("section", bench.DEFAULT)
def test_everyone_is_exact_and_timed(section):
    found, problems = run(section)
    cases, names = FOUND[section]
    assert not problems and list(found) == cases
    assert all(names <= timed for timed in found.values())


@pytest.mark.parametrize("section", bench.DEFAULT)
def test_what_differs_from_the_reference_is_reported_and_not_timed(section, monkeypatch):
    exact_weight = contenders.exact_weight

    def nearly(layer):
        weight = exact_weight(layer)
        weight.view(torch.int16)[..., -1] ^= 1 << 14  # the exponent's highest bit: a zero becomes 2.0
        return weight

    monkeypatch.setattr(contenders, "exact_weight", nearly)
    found, problems = run(section)
    assert problems and all("not bit-identical" in text for text in problems)
    references = {"torch's copy", "allocate and fill"}
    assert all(timed <= references for timed in found.values())


def test_the_notebooks_clock_is_asked_as_it_wants_to_be(monkeypatch):
    """It returns three times; the second is the GPU's. Tests on a GPU call the real clock."""
    monkeypatch.setattr(gpu, "ON_GPU", True)
    monkeypatch.setattr(turns, "times_of", mock.create_autospec(turns.times_of, return_value=(9.0, 2.5, 0.1)))
    assert gpu.gpu_us(len, [None]) == 2.5


def test_a_row_of_a_training_section_has_a_value_of_each_process(monkeypatch):
    first = [("a", "ms", "without", 2), ("a", "ms", "with", 1)], []
    done = iter([first, ([("a", "ms", "with", 3)], ["slow"])])
    monkeypatch.setattr(training, "in_new_process", lambda function, *arguments: next(done))
    rows, problems = bench.run_section("step_gpu_time")
    assert problems == ["slow"]
    assert [row[1:] for row in rows] == [("a", "without", "ms", [2]), ("a", "with", "ms", [1, 3])]


def test_a_switched_off_unsloth_is_reported(monkeypatch):
    monkeypatch.setattr(bench.protocol, "baselines", lambda: {"unsloth_today": None})
    monkeypatch.setattr(bench.protocol, "needed", lambda name: "its launcher")
    monkeypatch.setattr(bench, "SECTIONS", {"good": good})
    assert bench.run_section("good")[1] == ["unsloth_today: needs its launcher"]


# --- the command ---


def good(problems):
    yield "64 fp16", "us", {"ours": [1.0, 2.0]}


def broken(problems):
    problems.append("peft: not bit-identical")
    yield "a", "us", {"ours": [1.0]}
    raise ValueError("first line\nsecond line")


def interrupted(_):
    yield "a", "us", {"ours": [1.0]}
    raise KeyboardInterrupt


def test_a_broken_section_stops_no_other_and_keeps_what_it_has(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ON_GPU", False)
    assert bench.main("bogus") == 2 and bench.main() == 1  # without a GPU nothing is timed
    monkeypatch.setattr(bench, "ON_GPU", True)
    sections = {one.__name__: one for one in (broken, good, interrupted)}
    monkeypatch.setattr(bench, "SECTIONS", sections)
    assert bench.main("broken", "good") == 1
    shown = capsys.readouterr().out
    assert "FAILED peft: not bit-identical\nFAILED ValueError: first line\n" in shown
    assert "64 fp16, ours: 1.5 us (1 to 2)\n" in shown
    [card] = os.listdir(store.root())
    assert [row.section for row in store.rows(card)] == ["broken", "good"]
    note = store.records(card)["broken"].environment["note"]
    assert note == "peft: not bit-identical; ValueError: first line"
    assert bench.main("interrupted", "good") == 130  # as from a shell's Ctrl-C
    assert store.records(card)["interrupted"].environment["note"] == "interrupted"
    assert bench.main("good") == 0

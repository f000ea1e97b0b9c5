"""The sums about a T4: the issue's figures from the stored simulation, and a first result from a real T4."""

import json
import shutil

import pytest

from helpers.machine import ROOT
from helpers.results import names, store as results
from helpers.puzzle import protocol
from helpers.t4 import simulated

SHARES = (0.362, 0.466)  # our host time over Unsloth today's on the H200's host, 2026-11-21


@pytest.fixture(scope="module")
def simulation():
    return simulated.stored()[0].data


@pytest.fixture
def stored(tmp_path):
    """The stored files that the sums read, as a results folder of its own."""
    for folder, name in (("t4-simulated", "simulation"), (names.CARD, "benchmark"), (names.CARD, "notebook")):
        (tmp_path / folder).mkdir(exist_ok=True)
        shutil.copy(ROOT / "results" / folder / f"{name}.json", tmp_path / folder)
    return tmp_path


def test_the_official_protocol_has_9000_calls():
    assert simulated.CALLS == 9000 and len(protocol.OFFICIAL) == 3


def test_the_range_of_the_official_total(simulation):
    """2.7 to 3.2 s ours, 3.1 to 3.7 Unsloth today, 3.8 to 4.4 classic; 1.09 to 1.24, middle 1.16."""
    totals = {name: str(total.both) for name, total in simulated.totals(simulation, SHARES).items()}
    assert totals == {"kernel": "2.7 to 3.2", "unsloth_today": "3.1 to 3.7", "unsloth_classic": "3.8 to 4.4"}
    ratio = simulated.ratio(simulation, SHARES, "unsloth_today")
    assert [f"{value:.2f}" for value in ratio] == ["1.09", "1.16", "1.24"]


def test_a_total_by_hand(simulation):
    ours = simulated.totals(simulation, (0.5,))["kernel"]
    assert ours.kernels == pytest.approx((2.53, 2.53 * 1.13))
    assert ours.calls == pytest.approx((9000 * 60e-6 * 0.5, 9000 * 77e-6 * 0.5))
    low, middle, high = simulated.ratio(simulation, (1.0,), "unsloth_classic")
    assert low == pytest.approx((3.26 + 0.54) / (2.53 + 0.693))  # the slower DRAM lessens the cost of calls
    assert high == pytest.approx((3.26 * 1.13 + 0.693) / (2.53 * 1.13 + 0.54))
    assert middle == pytest.approx((3.26 * 1.065 + 0.6165) / (2.53 * 1.065 + 0.6165))


def test_a_dearer_call_of_ours_lowers_the_ratio(simulation):
    cheap, dear = (simulated.ratio(simulation, (share,), "unsloth_today") for share in (0.3, 0.9))
    assert all(a > b for a, b in zip(cheap, dear, strict=True))


@pytest.mark.parametrize("value, line", [(1.04, "none"), (1.05, "1.05"), (1.149, "1.10"), (1.2, "1.15")])
def test_lines_of_the_puzzle(value, line):
    assert simulated.tier(value) == line


def test_the_error_is_against_published_seconds(simulation):
    low, high = simulation.error()
    assert low == pytest.approx(3.26 / 3.37 - 1) and high == pytest.approx(3.26 / 3.22 - 1)


def test_our_share_of_a_call_is_the_stored_one(stored):
    benchmark = results.read("benchmark", stored / names.CARD).data
    shares = simulated.stored(stored)[1]
    assert len(shares) == 2 and all(0 < share < 1 for share in shares)
    (case,) = [case for case in benchmark.host.cases if case.shape == names.HOST_SHAPE]
    assert shares[0] == case.returned["kernel"].p50 / case.returned["unsloth_today"].p50
    (stored / names.CARD / "benchmark.json").unlink()
    assert simulated.stored(stored)[1] == simulated.UNKNOWN
    assert "ours not measured." in " ".join(simulated.lines(stored))


def test_the_sentences_say_which_kernel_and_the_table_that_nothing_was_measured(stored):
    sentences = " ".join(simulated.lines(stored))
    assert f"Kernel 8898263178c50c11: {simulated.CAPTION}." in sentences and "Accel-Sim" in sentences
    assert "1.05 at the low end, 1.15 in the middle" in sentences and "Measured" not in sentences
    rows = simulated.table(stored)
    assert [row[0] for row in rows[1:]] == [names.label(name) for name in simulated.CONTENDERS]
    assert {cell for row in rows[1:] for cell in row[-2:]} == {"not measured"}
    assert len({len(row) for row in rows}) == 1


def test_kernels_alone_over_ours_of_the_same_dtype(stored):
    head, *rows = simulated.kernel_table(stored)
    cells = {row[0]: row[1:] for row in rows}
    assert cells["unsloth today fp16"] == ["46.7 (1.06)", "49.1 (1.11)"]
    assert cells["unsloth today bf16"] == ["47.7 (1.08)", "52.4 (1.16)"]
    assert cells["ours bf16 staged"][0] == "43.7 (0.99)" and cells["classic fp16 three launches"][1] == "-"
    assert len(head) == 3


def test_the_first_run_on_a_t4_is_shown_by_itself(stored):
    """A made-up file where `python -m helpers bench --quick` would write it."""
    made = json.loads((stored / names.CARD / "benchmark.json").read_text())
    made["environment"] |= {"gpu": "Tesla T4", "capability": [7, 5], "date": "2027-01-02T03:04:05+00:00"}
    for name, seconds in (("kernel", 3.0), ("unsloth_today", 3.6), ("unsloth_classic", 4.2)):
        made["data"]["protocol"]["entries"][name]["seconds"] = [seconds]
    (stored / names.T4).mkdir()
    (stored / names.T4 / "benchmark.json").write_text(json.dumps(made))
    assert simulated.measured(stored).environment.gpu == "Tesla T4"
    assert [row[-2:] for row in simulated.table(stored)[1:]] == [
        ["3.00", "1.00"],
        ["3.60", "1.20"],
        ["4.20", "1.40"],
    ]
    assert simulated.lines(stored)[-1].startswith("Measured: Tesla T4 | 2027-01-02")


def test_nothing_measured_is_no_run_on_a_t4():
    path = ROOT / "results" / names.T4 / "benchmark.json"
    assert (simulated.measured() is None) == (not path.exists())


class TestRunAll:
    def test_the_sum_is_that_of_its_parts(self, stored):
        *parts, whole = simulated.run_all(stored)
        assert [what for what, *_ in parts][:2] == ["set-up", "protocol, timed once"] and whole[0] == "in all"
        assert whole[1] == pytest.approx([sum(span[end] for _, span, _ in parts) for end in (0, 1)])
        assert all(source for *_, source in parts)
        cells = results.read("notebook", stored / names.CARD).data.cells
        rest = sum(c.seconds for c in cells if not (c.protocol or c.setup or c.not_on_a_t4))
        assert parts[-1][1] == pytest.approx((2 * rest, 3 * rest))

"""The model of a card: rates with sources, the bound that decides, and the bytes of each contender."""

import pytest

from helpers.t4 import estimate, cards

CARDS = pytest.mark.parametrize("card", cards.CARDS.values(), ids=lambda card: card.name)


@CARDS
def test_every_rate_has_a_value_and_a_source(card):
    rates = [card.sms, *card.clock_ghz, *card.dram_gb_s, card.peak_gb_s, card.l1_bytes, *card.lanes.values()]
    assert all(rate.value > 0 and rate.source for rate in rates)
    assert card.clock_ghz[0].value <= card.clock_ghz[1].value
    assert card.dram_gb_s[0].value <= card.dram_gb_s[1].value <= card.peak_gb_s.value


@pytest.mark.parametrize(
    "opcode, pipe",
    [
        ("LDG.E.128.SYS", "load/store"),
        ("SHFL.IDX", "load/store"),
        ("F2F.F16.F32", "conversion"),
        ("IMAD.MOV.U32", "fp"),
        ("PRMT", "int"),
        ("ULDC.64", "uniform"),
        ("EXIT", "control"),
        ("FROBNICATE.X", "unknown"),
    ],
)
def test_pipes_of_opcodes(opcode, pipe):
    assert cards.pipe_of(opcode) == pipe


def test_no_opcode_is_in_two_pipes():
    stems = [stem for text in cards.PIPES.values() for stem in text.split()]
    assert len(stems) == len(set(stems))


def test_bytes_an_element():
    assert cards.dram_bytes(16384) / 16384 == 0.5 + 1 / 64 + 4 / 16384 + 2
    assert cards.dram_bytes(16384, nested=False) / 16384 == 0.5 + 4 / 64 + 2
    classic = sum(nbytes for *_, nbytes in cards.classic_kernels(16384)) / 16384
    assert classic == pytest.approx(2.766, abs=1e-3)


def test_the_memory_bounds_a_light_kernel():
    light = cards.predict(cards.T4, 2**24, cards.dram_bytes(2**24), {"total": 5, "int": 2})
    assert light.bound_low == light.bound_high == "DRAM"
    fast = cards.T4.dram_gb_s[1].value
    assert light.low == pytest.approx(cards.dram_bytes(2**24) / fast / 1e3)
    assert light.low < light.high


def test_a_busy_pipe_bounds_a_heavy_kernel_and_clocks_make_the_range():
    counts = {"total": 60, "load/store": 40}
    heavy = cards.predict(cards.T4, 2**24, cards.dram_bytes(2**24), counts)
    assert heavy.bound_low == heavy.bound_high == "load/store"
    slow, fast = (rate.value for rate in cards.T4.clock_ghz)
    assert heavy.high / heavy.low == pytest.approx(fast / slow)
    assert heavy.busiest[0] == "load/store" and heavy.busiest[1] > 1


def test_a_pipe_time_by_hand():
    # 40 SMs, 16 conversions a clock each: 6400 conversions take 10 clocks, at 1 GHz 10 ns.
    assert cards.pipe_times(cards.T4, 6400, {"conversion": 1}, 1.0)["conversion"] == pytest.approx(0.01)


def test_a_measured_bandwidth_replaces_the_cards_own():
    found = cards.predict(cards.H200, 2**28, 1e9, {}, gb_s=4000)
    assert found.low == found.high == pytest.approx(250)


@pytest.mark.parametrize(
    "card, threads, registers, shared, share",
    [
        (cards.T4, 128, 64, 0, 1.0),
        (cards.T4, 128, 65, 0, 0.875),  # 72 registers a thread are allotted: 28 warps
        (cards.T4, 64, 16, 0, 1.0),  # 16 blocks of 64
        (cards.T4, 32, 16, 0, 0.5),  # 16 blocks are the most an SM holds
        (cards.T4, 128, 32, 32 * 1024, 0.25),
        (cards.H200, 128, 32, 0, 1.0),
    ],
)
def test_occupancy(card, threads, registers, shared, share):
    assert cards.occupancy(card, threads, registers, shared) == share


def test_the_official_protocol_is_the_harness_one():
    from helpers.submission import harness

    expected = [
        (c.hidden * c.intermediate, str(c.dtype).removeprefix("torch."), 3000) for c in harness.OFFICIAL
    ]
    assert list(cards.OFFICIAL) == expected


def test_call_cost_scales_between_the_ratios():
    low, high = cards.PUBLISHED_CALL_US
    assert cards.call_cost([1.0]) == pytest.approx((9000 * low * 1e-6, 9000 * high * 1e-6))
    assert cards.call_cost([0.5, 0.25]) == pytest.approx((9000 * low * 0.25e-6, 9000 * high * 0.5e-6))


class TestRunAll:
    """The estimate counts only what it has figures for, and says what it lacks."""

    def stored(self):
        spread = {"unsloth_classic": 0.5, "bitsandbytes": 0.6, "peft": 0.7}
        entries = {name: {"spread": {"p50": seconds}} for name, seconds in spread.items()}
        cold = {"kernel": {"empty": {"median": {"first_call": 1.0}}}}
        cells = [
            {"seconds": 100.0, "protocol": True, "setup": False},
            {"seconds": 50.0, "protocol": False, "setup": True},  # has a line of its own
            {"seconds": 30.0, "protocol": False, "setup": False, "not_on_a_t4": True},
            {"seconds": 10.0, "protocol": False, "setup": False},
        ]
        return {"benchmark": {"protocol": {"entries": entries}, "cold": cold}, "notebook": {"cells": cells}}

    def test_without_results(self):
        found = estimate.estimate_run_all()
        unknown = [line["what"] for line in found["lines"] if line["low_s"] is None]
        assert len(unknown) == len(found["missing"]) == 4
        assert "protocol, peft" in unknown and "all other cells" in unknown
        assert "not measured" in estimate.render_estimate(found) and found["fits"] is None

    def test_with_results(self):
        found = estimate.estimate_run_all(self.stored())
        lines = {line["what"]: (line["low_s"], line["high_s"]) for line in found["lines"]}
        low, high = cards.PUBLISHED_TOTALS["Unsloth classic"]
        assert lines["protocol, peft"] == pytest.approx((low * 1.4, high * 1.4))
        assert lines["all other cells"] == (20.0, 30.0)
        assert not found["missing"]
        assert found["total_s"] == pytest.approx(
            tuple(sum(ends) for ends in zip(*lines.values(), strict=True))
        )
        assert max(map(len, estimate.render_estimate(found).splitlines())) <= 110

    def test_more_repeats_take_longer(self):
        once, twice = (estimate.estimate_run_all(repeats=n)["total_s"] for n in (1, 2))
        assert twice[0] > once[0] and twice[1] > once[1]

    def test_the_checks_before_the_clock_do_not_repeat(self):
        once, twice = (
            {line["what"]: line["high_s"] for line in estimate.estimate_run_all(self.stored(), n)["lines"]}
            for n in (1, 2)
        )
        repeated = {what for what in once if twice[what] != once[what]}
        assert repeated == {f"protocol, {who}" for who in self.WHO}

    WHO = ("ours", "Unsloth today", "Unsloth classic", "bitsandbytes", "peft")

    @pytest.mark.parametrize("seconds, fits", [(0.5, True), (60.0, None), (1000.0, False)])
    def test_the_verdict_is_that_of_the_ends(self, seconds, fits):
        stored = self.stored()
        stored["notebook"]["cells"][-1]["seconds"] = seconds
        found = estimate.estimate_run_all(stored)
        low, high = found["total_s"]
        assert found["fits"] is fits and low < found["middle_s"] < high
        assert (high <= 300, low > 300) == (fits is True, fits is False)
        text = estimate.render_estimate(found)
        assert ("upper end is above 300" in text) is (
            fits is None
        ) and f"middle is {(low + high) / 2:.0f}" in text

    def test_the_sweep_is_the_notebooks(self):
        """What its cell measures with `quick`: the same sizes and rounds, and every graph counted."""
        from helpers.measure import contenders, gpu_time

        assert gpu_time.QUICK_SIZES[-1] > 2e8 and gpu_time.ROUNDS[1] < gpu_time.ROUNDS[0]
        assert set(gpu_time.DTYPES) == set(contenders.DTYPES)
        line = next(x for x in estimate.estimate_run_all()["lines"] if x["what"].startswith("sweep"))
        assert 1 < line["low_s"] < line["high_s"] < 20

    def test_memory_fits_and_counts_the_largest_configuration(self):
        found = estimate.estimate_run_all()
        assert found["fits_15_gb"] is (found["peak_gb"][1] < 15)
        most = max(line["high_gb"] for line in found["memory"])
        assert most < found["peak_gb"][1] < sum(line["high_gb"] for line in found["memory"])
        weights = {line["what"]: line["low_gb"] for line in found["memory"]}["packed weights"]
        assert weights == pytest.approx(3 * 4096 * 14336 * 0.516 / 1e9, rel=1e-3)

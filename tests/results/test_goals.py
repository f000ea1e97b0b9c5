import pytest

from helpers.results import goals, names
from helpers.results.old_store import Benchmark

SHARE = "GPU time, share of a no-arithmetic CUDA C kernel"


def verdicts(data) -> dict[str, bool | None]:
    return {goal.name: goal.met for goal in goals.goals(data)}


def goal(data, start: str) -> goals.Goal:
    (found,) = [goal for goal in goals.goals(data) if goal.name.startswith(start)]
    return found


def change(data, path: str, value):
    """Set what a path such as 'gpu.sizes.3.rows.kernel.p50' leads to."""
    *parents, last = path.split(".")
    for name in parents:
        data = (
            data[int(name)]
            if isinstance(data, list)
            else data[name]
            if isinstance(data, dict)
            else getattr(data, name)
        )
    data.__setitem__(last, value) if isinstance(data, dict) else setattr(data, last, value)


def test_all_met_at_the_bars_themselves(data):
    found = verdicts(data)
    assert len(found) == 17 and all(found.values())


def test_figures_are_the_files(data):
    first = goal(data, "official protocol, speedup over Unsloth classic")
    assert (first.today, first.ours, first.must_reach) == ("1.25", "2.00", ">= 2.00")
    assert goal(data, "official protocol, share").ours == "0.95"
    host = goal(data, "host time until the call returns")
    assert (host.today, host.ours) == ("2.90", "1.05")
    share = goal(data, f"{SHARE}, 58.7M")
    assert (share.today, share.ours) == ("0.884 / 0.884", "0.990 / 0.990")
    assert goal(data, "GPU time, speedup over Unsloth today, lowest").ours == "1.000 (at 1G fp16)"
    assert goal(data, "first call ever").ours == "1.00 s"
    worst = [goal.ours for goal in goals.goals(data) if goal.name.startswith("torch.compile")]
    assert worst == ["1.00", "1.20", "2.20"]


COMPILED = "torch.compile, 24 weights and products, this kernel compiled"
SEVERAL = "GPU time, speedup over Unsloth today"
# The cases of the fixture: 64K, the four sizes with a share to reach, 1G; fp16 before bf16.
MISSED = {
    "official protocol, speedup over Unsloth today": ("protocol.entries.unsloth_today.seconds", [0.399]),
    "official protocol, speedup over Unsloth classic": ("protocol.entries.unsloth_classic.seconds", [0.499]),
    "official protocol, share": ("byte_mover.seconds.byte_mover", [0.949]),
    "host time until": ("host.cases.0.returned.kernel.p50", 10.51),
    "host time with": ("host.cases.0.synchronized.kernel.p50", 10.51),
    f"{SHARE}, 4.19M": ("gpu.sizes.2.rows.ceiling_cuda.p50", 95.9),
    f"{SHARE}, 16.8M": ("gpu.sizes.4.rows.ceiling_cuda.p50", 97.9),
    f"{SHARE}, 58.7M": ("gpu.sizes.6.rows.ceiling_cuda.p50", 98.9),
    f"{SHARE}, 235M": ("gpu.sizes.9.rows.ceiling_cuda.p50", 98.9),
    f"{SEVERAL}, lowest": ("gpu.sizes.10.rows.unsloth_today.p50", 99.9),
    f"{SEVERAL}, geometric mean": ("gpu.sizes.0.rows.unsloth_today.p50", 100.0),
    f"{COMPILED} over this kernel eager": ("compile.cases.1.eager.kernel.p50", 799.0),
    f"{COMPILED} under Unsloth today": ("compile.cases.3.compiled.unsloth_today.p50", 959.0),
    f"{COMPILED} under bitsandbytes": ("compile.cases.0.compiled.bitsandbytes.p50", 1759.0),
    "compiles": ("compiles.rows.0.compiles", 2),
    "first call ever": ("cold.kernel.empty.0.first_call", 1.01),
    "first call in a new process": ("cold.kernel.warm.0.first_call", 0.21),
}


@pytest.mark.parametrize("start", MISSED)
def test_each_goal_can_be_missed_alone(data, start):
    change(data, *MISSED[start])
    missed = [name for name, met in verdicts(data).items() if not met]
    assert len(missed) == 1 and missed[0].startswith(start)


def test_nothing_measured_gives_no_verdict():
    found = goals.goals(Benchmark(quick=False))
    assert len(found) == 17
    assert all(goal.met is None and goal.ours == goals.NOT_MEASURED for goal in found)


def test_one_missing_dtype_gives_no_verdict(data):
    data.gpu.sizes = [case for case in data.gpu.sizes if case.dtype == "float16"]
    found = {name: met for name, met in verdicts(data).items() if name.startswith("GPU time")}
    assert len(found) == 6 and set(found.values()) == {None}


def test_a_shorter_span_of_sizes_gives_no_verdict(data):
    data.gpu.sizes = [case for case in data.gpu.sizes if case.numel < 2**30]
    lowest = goal(data, "GPU time, speedup over Unsloth today, lowest")
    assert lowest.met is None and "64K to 235M" in lowest.name


def test_fewer_rounds_than_the_official_protocol_give_no_verdict(data):
    data.protocol.rounds = data.byte_mover.rounds = 100
    official = goal(data, "official protocol, speedup over Unsloth today")
    assert official.met is None and "100 rounds only" in official.name and official.ours == "1.60"
    assert goal(data, "official protocol, share").met is None


def test_without_the_ceiling_its_shares_are_not_measured(data):
    for case in data.gpu.sizes:
        del case.rows[names.CEILING]
    share = goal(data, f"{SHARE}, 4.19M")
    assert share.ours == goals.NOT_MEASURED and share.met is None


def test_a_case_without_compiled_times_gives_no_verdict(data):
    del data.compile.cases[2].compiled["kernel"]
    assert {met for name, met in verdicts(data).items() if name.startswith("torch.compile")} == {None}


def test_the_table_holds_every_cell(data):
    data.compiles.rows[0]["compiles"] = 3
    data.cold = None
    header, *lines = goals.table(data)
    assert header == list(goals.HEADER)
    for found, line in zip(goals.goals(data), lines, strict=True):
        verdict = {True: "yes", False: "no", None: goals.NOT_MEASURED}[found.met]
        assert line == [found.name, found.today, found.ours, found.must_reach, verdict]
    assert {line[-1] for line in lines} == {"yes", "no", goals.NOT_MEASURED}

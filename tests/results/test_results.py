import json
import random
import statistics

import msgspec
import pytest

from helpers import machine
from helpers.results import names, old_store as results
from helpers.results.old_store import Times

ROOT = machine.ROOT
STORED = sorted((ROOT / "results").glob("*/*.json"))
TYPED = [path for path in STORED if path.stem in results.SCHEMA]


def test_there_are_stored_results():
    assert {path.stem for path in TYPED} >= {
        "benchmark",
        "notebook",
        "training",
        "libraries",
        "soak",
    }


@pytest.mark.parametrize("path", STORED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_stored_file_is_of_its_type_and_keeps_every_figure(path, tmp_path):
    result = results.read(path.stem, path.parent)
    assert result.environment.date and result.kernel.label
    again = results.save(path.stem, result, tmp_path)
    assert json.loads(again.read_text()) == json.loads(path.read_text())


# The simulated T4 stays that of the kernel that was simulated, and every place that shows it says so.
MEASURED = [path for path in STORED if path.parent.name != "t4-simulated"]


@pytest.mark.release
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_stored_result_is_stale(path):
    result = results.read(path.stem, path.parent)
    assert not results.stale(result), f"measured with kernel {result.kernel.label}: run what wrote it again"


def test_what_is_written_is_read_back_typed(tmp_path, data):
    path = results.write("benchmark", data, tmp_path)
    result = results.read("benchmark", tmp_path)
    assert path == tmp_path / "benchmark.json" and result.data == data
    assert result.environment.python == machine.describe()["python"]
    assert result.kernel.settings and not results.stale(result)
    assert results.find("benchmark", tmp_path) == result and results.find("score", tmp_path) is None


def test_plain_data_must_fit_the_type_of_its_name(tmp_path):
    run = {"passed": 1, "skipped": 0, "failed": [], "launches": {"nf4": 2}}
    data = dict(bitsandbytes="0.50", tests="t", selection="s", original=run, failed_only_with_this_kernel=[])
    results.write("bitsandbytes_own.json", data | {"substituted": run}, tmp_path)
    assert results.read("bitsandbytes_own", tmp_path).data.substituted.launches == {"nf4": 2}
    with pytest.raises(msgspec.ValidationError, match="whom"):
        results.write("bitsandbytes_own", data | {"substituted": run | {"whom": 2}}, tmp_path)
    with pytest.raises(FileNotFoundError):
        results.read("score", tmp_path / "elsewhere")


def test_a_file_of_another_name_says_its_type(tmp_path, data):
    results.write("mine.json", data, tmp_path, schema=results.Benchmark)
    assert results.read("mine", tmp_path, schema=results.Benchmark).data == data


def test_percentiles_are_a_median_and_values_that_were_measured():
    values = [float(x) for x in range(11)]
    random.Random(0).shuffle(values)
    assert results.percentiles(values) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}
    assert results.percentiles([3.0, 1.0, 2.0]) == {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    assert results.percentiles([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}
    with pytest.raises(ValueError, match="at least one"):
        results.percentiles([])


def test_many_rounds_are_a_median_and_measured_quantiles():
    seconds = [value * 1e-6 for value in (9, 1, 8, 2, 7, 3, 6, 4, 5, 10, 11)]
    times = Times.of(seconds)
    assert (times.p50, times.p20, times.p80) == pytest.approx((6, 3, 9)) and times.repeats == []
    assert times.rounds == 11


def test_of_few_rounds_every_one_is_kept():
    times = Times.of([3e-6, 1e-6, 2e-6])
    assert times.repeats == pytest.approx([3, 1, 2]) and times.p50 == pytest.approx(2)
    assert times.p20 is None and times.p80 is None
    with pytest.raises(ValueError, match="at least one"):
        Times.of([])


def test_the_ratio_is_of_medians():
    a, b = [1e-6, 2e-6, 9e-6], [4e-6, 4e-6, 1e-6]
    rows = {"a": Times.of(a), "b": Times.of(b)}
    assert results.ratio(rows, "a", "b") == pytest.approx(statistics.median(a) / statistics.median(b))
    assert results.ratio(rows, "a", "c") is None


def test_a_caption_names_card_date_kernel_and_versions(data):
    result = results.now(data)
    facts = {"gpu": "NVIDIA H200", "date": "2026-11-21T15:00:00", "torch": "2.11.0", "triton": "3.6.0"}
    result.environment = msgspec.structs.replace(result.environment, forced="t4", **facts)
    result.data.quick = True
    text = results.caption(result)
    assert text.startswith(
        f"NVIDIA H200 (T4's decisions forced) | 2026-11-21, quick run | kernel {result.kernel.label}"
    )
    assert "torch 2.11.0, triton 3.6.0" in text
    assert results.caption(None) == "no result file"


@pytest.mark.parametrize(
    ("numel", "text"),
    [(2**16, "64K"), (2**20, "1M"), (2**30, "1G"), (58_720_256, "58.7M"), (114_688, "115k")],
)
def test_sizes_in_words(numel, text):
    assert names.size_text(numel) == text


def test_bytes_of_an_element():
    n = 2**24
    assert names.bytes_moved(n) / n == 0.5 + 1 / 64 + 4 / 16384 + 2


def test_partial_blocks_are_rounded_up():
    assert names.bytes_moved(65) == 33 + 2 + 4 + 130
    assert names.bytes_moved(16_385) == 8193 + 257 + 8 + 2 * 16_385
    assert names.bytes_moved(2**30) / 2**30 == pytest.approx(2.516, abs=5e-4)


def test_a_card_has_the_folder_that_the_machine_writes_to(monkeypatch):
    monkeypatch.setattr(machine, "gpu_name", lambda: "Tesla T4")
    monkeypatch.delenv("NF4_FORCE", raising=False)
    assert machine.result_folder().name == names.T4

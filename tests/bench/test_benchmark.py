import json

import msgspec
import pytest

from helpers import machine
from helpers.bench import benchmark
from helpers.results import store as results
from helpers.results.store import Benchmark, Gpu


def test_protocol_runs_everyone(bench):
    found = benchmark.protocol(bench)
    assert {"kernel", "bitsandbytes"} <= found.entries.keys()
    assert not benchmark.failures(msgspec.to_builtins(found))
    assert len(found.configs) == len(bench.scope.configs) == 1


def test_every_section_has_a_place_in_the_result_file():
    fields = Benchmark.__struct_fields__
    assert (
        benchmark.SECTIONS.keys() <= set(fields)
        and set(benchmark.QUICK_SECTIONS) <= benchmark.SECTIONS.keys()
    )


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """A machine with a GPU whose results go to tmp_path/some-card; its sections are one that succeeds and,
    as long as it is in the returned set, one that fails."""
    failing = set()

    def cold(bench):
        if "cold" in failing:
            raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "result_folder", lambda: tmp_path / "some-card")
    monkeypatch.setattr(machine, "capability", lambda device=None: None)
    monkeypatch.setattr(machine, "gpu_name", lambda: "some card")
    monkeypatch.setattr(machine, "native_bf16", lambda: False)
    sections = {"gpu": lambda bench: Gpu(sizes=[]), "cold": cold}
    monkeypatch.setattr(benchmark, "SECTIONS", sections)
    monkeypatch.setattr(benchmark, "QUICK_SECTIONS", tuple(sections))
    assert machine.describe()["gpu"] == "some card"
    return failing


def test_a_failing_section_is_reported_and_the_others_still_run(on_a_gpu, capsys):
    on_a_gpu.add("cold")
    data = benchmark.measure()
    assert data.failed == {"cold": "RuntimeError: first line"} and data.gpu.sizes == []
    assert benchmark.main(["--quick"]) == 1
    assert "FAILED cold: RuntimeError: first line" in capsys.readouterr().out


def test_failures_are_found_anywhere():
    data = {
        "gpu": {"sizes": [{"failures": {"kernel": "wrong"}}, {"failures": {}}]},
        "failed": {"cold": "no"},
        "protocol": {"entries": {"a": {"label": "PEFT", "failure": "far off"}, "b": {"label": "B"}}},
    }
    assert benchmark.failures(data) == ["cold: no", "kernel: wrong", "PEFT: far off"]


def test_a_quick_run_never_replaces_a_full_one(on_a_gpu, tmp_path):
    folder = tmp_path / "some-card"
    for arguments, quick in ((["--quick"], True), (["--quick"], True), ([], False), (["--quick"], False)):
        assert benchmark.main(arguments) == 0
        assert results.read("benchmark", folder).data.quick is quick


def test_one_section_and_a_file_asked_for_leave_the_cards_result_alone(on_a_gpu, tmp_path):
    assert benchmark.main(["--only", "gpu"]) == 0
    assert benchmark.main(["--json", str(tmp_path / "mine.json")]) == 0
    assert not (tmp_path / "some-card").exists()
    assert results.read("mine", tmp_path, Benchmark).data.gpu.sizes == []


def test_a_run_that_is_cut_short_keeps_its_sections(on_a_gpu, monkeypatch, tmp_path):
    def cut(bench):
        raise KeyboardInterrupt

    monkeypatch.setitem(benchmark.SECTIONS, "gemm", cut)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(["--only", "gpu", "gemm", "--json", str(tmp_path / "part.json")])
    data = results.read("part", tmp_path, Benchmark).data
    assert data.gpu.sizes == [] and data.gemm is None


def test_without_a_gpu_every_section_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    assert benchmark.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: not measured (needs an NVIDIA GPU)" for name in benchmark.SECTIONS
    ]
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_reason_goes_into_the_file_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    path = tmp_path / "folder" / "reason.json"
    assert benchmark.main(["--json", str(path), "--only", "gpu"]) == 0
    result = results.read("reason", path.parent, Benchmark)
    assert result.data.not_measured == {"gpu": "needs an NVIDIA GPU"} and not results.stale(result)


class TestMerge:
    """Sections measured apart become one result, if they belong together."""

    @pytest.fixture
    def part(self, tmp_path, monkeypatch):
        sections = {"gpu": Gpu(sizes=[]), "gemm": results.Cases(cases=[]), "host": None}
        monkeypatch.setattr(benchmark, "SECTIONS", {"gpu": None, "gemm": None})

        def write(number, *names, quick=False, **changes):
            data = Benchmark(quick=quick, unsloth_fused=True)
            for name in names:
                setattr(data, name, sections[name])
            result = results.now(data)
            result.environment.date = f"2026-11-21T10:00:0{number}"
            for name, value in changes.items():
                setattr(result.kernel if name == "label" else result.environment, name, value)
            return results.save(str(number), result, tmp_path)

        return write

    def test_all_sections_once(self, part, tmp_path, capsys):
        files = [part(1, "gpu"), part(2, "gemm")]
        merged = benchmark.merge(files)
        assert merged.environment.date.endswith("1") and merged.data.gemm.cases == []
        assert merged.data.gpu.sizes == [] and merged.data.unsloth_fused
        out = tmp_path / "whole.json"
        assert benchmark.main(["--merge", *map(str, files), "--json", str(out)]) == 0
        assert results.read("whole", tmp_path, Benchmark).data == merged.data

    @pytest.mark.parametrize("wrong", ["kernel", "card", "missing", "twice", "quick"])
    def test_what_does_not_belong_together_is_refused(self, part, wrong, capsys):
        changes = {"kernel": {"label": "another"}, "card": {"gpu": "Tesla T4"}, "quick": {"quick": True}}
        names = {"missing": (), "twice": ("gpu", "gemm")}.get(wrong, ("gemm",))
        files = [part(1, "gpu"), part(2, *names, **changes.get(wrong, {}))]
        with pytest.raises(ValueError, match="expected|another"):
            benchmark.merge(files)
        with pytest.raises(SystemExit):
            benchmark.main(["--merge", *map(str, files)])
        assert "error: " in capsys.readouterr().err


def test_a_t4s_quick_run_goes_to_its_own_folder(on_a_gpu, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(machine, "gpu_name", lambda: "Tesla T4")
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    monkeypatch.delenv("NF4_FORCE", raising=False)
    path = results.write("benchmark", Benchmark(quick=True))
    assert path == tmp_path / "tesla-t4" / "benchmark.json"
    assert json.loads(path.read_text())["data"] == {"quick": True}

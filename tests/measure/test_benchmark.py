"""The sections' logic on the CPU: the kernel in Triton's interpreter, a stand-in for what only a GPU can do.

Times of the stand-in mean nothing and are never looked at; what is timed, gated, named and counted is.
"""

import json
import math
import statistics
import types

import pytest
import torch

from helpers.record import hashes
from helpers.machine import environment
from helpers.measure import benchmark, ceilings, gpu_time, host_time, clocks, workload
from helpers.submission import protocol
from helpers.measure.contenders import Bench, wrong_bits

pytest.importorskip("bitsandbytes")
SECTIONS = ("host", "protocol", "gpu", "gemm", "cold", "compiles", "sass", "ablation")


class Recording:
    """Instead of a CUDA graph: calls again what was captured."""

    def __init__(self, call, count, out):
        self.call, self.count, self.out = call, count, out

    def replay(self):
        for index in range(self.count):
            last = self.call(index)
        if isinstance(self.out, torch.Tensor):
            self.out.copy_(last)

    def pool(self):
        return None


def stand_in_capture(call, count, warm=1, pool=None, keep=False, graph=None):
    for index in range(count):
        out = call(index)
    return Recording(call, count, out), out


def stand_in_replay(graphs, rounds):
    """A microsecond a call for the first candidate, two for the second, ..."""
    return {name: [(place + 1) * 1e-6] * rounds for place, name in enumerate(graphs)}


@pytest.fixture
def bench(monkeypatch, kernel):
    """A small benchmark without a GPU. Where there is one, the real sections run in test_on_a_gpu instead."""
    if environment.has_gpu():
        pytest.skip("there is a GPU: the stand-in is for the CPU")
    counter = iter(range(10**9))
    cuda = {
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (10**12, 10**12),
        "memory_stats": lambda: {"allocation.all.allocated": next(counter)},
        "current_stream": lambda *_: types.SimpleNamespace(cuda_stream=0),
        "current_device": lambda: 0,
        "get_device_properties": lambda _: types.SimpleNamespace(L2_cache_size=1),
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(clocks, "capture", stand_in_capture)
    monkeypatch.setattr(clocks, "replay_interleaved", stand_in_replay)
    monkeypatch.setattr(clocks, "graph_nodes", lambda call: 3)
    monkeypatch.setattr(clocks, "device_events", lambda call, count=1: [("kernel", 1e-6)] * count)
    monkeypatch.setattr(host_time, "CASES", (((64, 128), "bfloat16"), ((128, 192), "float16")))
    monkeypatch.setattr(host_time, "INNER", 1)
    monkeypatch.setattr(gpu_time, "SMALL", 2048)
    monkeypatch.setattr(workload, "SIZES", (4096, 8192))
    monkeypatch.setattr(workload, "TARGET_SIZES", (4096, 8192))
    monkeypatch.setattr(workload, "LAYERS", {"A": ((64, 64), (64, 128)), "B": ((128, 64),)})
    monkeypatch.setattr(workload, "rotation", lambda numel, **_: 3)
    monkeypatch.setattr(ceilings, "variants", lambda *_: [{"words": 2, "threads": 128, "store": ".cs"}])
    monkeypatch.setattr(protocol, "OFFICIAL", protocol.SMALL[:1])
    return Bench(kernel, protocol.baselines(), device="cpu")


def test_host_rows_hold_everyone_and_the_yardstick(bench, monkeypatch):
    monkeypatch.setattr(Bench, "rounds", lambda self, full, quick: 2)
    found = host_time.host(bench)
    for case, (shape, dtype) in zip(found["cases"], host_time.CASES, strict=True):
        assert (tuple(case["shape"]), case["dtype"], case["failures"]) == (shape, dtype, {})
        for what in ("returned", "synchronized"):
            assert {"kernel", "bitsandbytes", host_time.YARDSTICK} <= set(case[what])
            assert case[what][host_time.YARDSTICK]["ratio"] == 1
            for row in case[what].values():
                assert row["p20"] <= row["p50"] <= row["p80"]
                assert row["gb_s"] == pytest.approx(ceilings.bytes_moved(math.prod(shape)) / row["p50"] / 1e3)
    for parts in found["parts"].values():
        total = parts["allocate_us"] + parts["launch_us"] + parts["rest_us"]
        assert total == pytest.approx(parts["returned_us"]) and parts["kernels"] == 3
    json.dumps(found)


def test_gpu_rows_shares_and_ratios(bench):
    found = gpu_time.gpu(bench)
    assert {(case["numel"], case["dtype"]) for case in found["sizes"]} == {
        (numel, dtype) for numel in (4096, 8192) for dtype in ("float16", "bfloat16")
    }
    for case in found["sizes"]:
        assert case["failures"] == {} and case["not_captured"] == {}
        assert set(case["rows"]) == {"kernel", "bitsandbytes", "copy", "fill", "floor_triton"}
        assert case["bytes_rotated"] == 3 * case["bytes"] == 3 * ceilings.bytes_moved(case["numel"])
        order = ("kernel", "bitsandbytes", "copy", "fill", "floor_triton")
        place = {name: i + 1 for i, name in enumerate(order)}
        for name, row in case["rows"].items():
            own = {"copy": 4 * case["numel"], "fill": 2 * case["numel"]}.get(name, case["bytes"])
            assert row["bytes"] == own and row["way"] == "graph"
            assert row["p50"] == pytest.approx(place[name])
        assert case["rows"]["floor_triton"]["variant"] == "2 128 .cs"
        shares = case["share"]["floor_triton"]
        assert shares == pytest.approx({"kernel": 5.0, "bitsandbytes": 2.5})
        assert case["vs"] == pytest.approx({"bitsandbytes": 2.0})
        assert "floor_cuda" in case["absent"] and "peft" in case["absent"]
    assert [case["layers"] for case in found["layers"]][::2] == [["A 64x64"], ["A 64x128", "B 128x64"]]
    assert "vs_unsloth_today" not in found
    json.dumps(found)


def test_a_wrong_result_is_recorded_and_not_timed(bench, monkeypatch):
    right = bench.module._your_dequantize_nf4

    def one_bit_off(weight, quant_state, out=None):
        result = right(weight, quant_state, out)
        result.view(torch.int16).view(-1)[-1] ^= 1
        return result

    broken = types.SimpleNamespace(
        _your_dequantize_nf4=one_bit_off,
        your_dequantize_nf4=lambda layer: one_bit_off(layer.weight, layer.weight.quant_state),
        settings=bench.module.settings,
        force=bench.module.force,
    )
    monkeypatch.setattr(Bench, "rounds", lambda self, full, quick: 1)
    bench = Bench(broken, bench.found, device="cpu")
    for case in gpu_time.gpu(bench)["sizes"]:
        assert "not bit-identical" in case["failures"]["kernel"] and "kernel" not in case["rows"]
        assert "vs" not in case and "kernel" not in case["share"]["floor_triton"]
    for case in host_time.host(bench)["cases"]:
        assert "kernel" in case["failures"] and "kernel" not in case["returned"]
    for case in gpu_time.gemm(bench)["cases"]:
        assert "kernel" in case["failures"] and "kernel" not in case["rows"]
    for case in gpu_time.ablation(bench)["cases"]:
        assert case["failures"] and case["rows"] == {}


def test_elements_left_unwritten_are_seen(bench):
    buffers = workload.make_buffers((64, 64), torch.float16, 1, device="cpu")
    expected = buffers.expected(0)
    out = expected.clone()
    assert wrong_bits(lambda: out, expected, out)
    assert not wrong_bits(lambda: out.copy_(expected), expected, out)
    assert "ValueError: no" in wrong_bits(lambda: (_ for _ in ()).throw(ValueError("no")), expected)


def test_what_refuses_capture_is_profiled_and_says_so(bench, monkeypatch):
    launchers = Bench.launchers
    capturing = []

    def refuse(*arguments):
        if capturing:
            raise RuntimeError("not permitted while capturing")
        return launchers(bench)["bitsandbytes"](*arguments)

    def capture(call, count, **more):
        capturing.append(call)
        try:
            return stand_in_capture(call, count, **more)
        finally:
            capturing.pop()

    monkeypatch.setattr(Bench, "launchers", lambda self: launchers(self) | {"bitsandbytes": refuse})
    monkeypatch.setattr(clocks, "capture", capture)
    case = gpu_time.gpu(bench)["sizes"][0]
    assert case["rows"]["bitsandbytes"]["way"] == "profiler" and case["rows"]["kernel"]["way"] == "graph"
    assert "not permitted" in case["not_captured"]["bitsandbytes"]


def test_an_empty_graph_is_not_taken_for_a_fast_one(bench, monkeypatch):
    monkeypatch.setattr(Recording, "replay", lambda self: None)
    case = gpu_time.gpu(bench)["sizes"][0]
    assert "does not write the result" in case["not_captured"]["kernel"]
    assert case["rows"]["kernel"]["way"] == "profiler"


def test_sizes_that_do_not_fit_are_skipped_with_the_reason(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    found = gpu_time.gpu(bench)
    assert all("GB of free GPU memory" in case["skipped"] for case in found["sizes"] + found["layers"])


def test_against_today_is_the_geometric_mean_and_the_lowest(bench):
    cases = [
        {"numel": 64, "dtype": "float16", "vs": {"unsloth_today": 2.0}},
        {"numel": 128, "dtype": "bfloat16", "vs": {"unsloth_today": 0.5}},
        {"numel": 256, "dtype": "float16", "skipped": "no memory"},
    ]
    found = gpu_time._against_today(cases)["vs_unsloth_today"]
    assert found == {"geometric_mean": 1.0, "lowest": 0.5, "lowest_at": [128, "bfloat16"], "cases": 2}


def test_gemm_compares_store_policies_with_multiplication_alone(bench):
    found = gpu_time.gemm(bench)
    config = protocol.OFFICIAL[0]
    assert [case["shape"] for case in found["cases"]] == [
        [config.intermediate, config.hidden],
        [config.hidden, config.intermediate],
    ]
    for case in found["cases"]:
        assert case["failures"] == {} and case["tokens"] == config.batch * config.seq
        assert {"kernel", "kernel, plain stores, no hints", "multiplication alone"} == set(case["rows"])
        assert case["rows"]["multiplication alone"]["vs_multiplication_alone"] == 1


def test_ablation_changes_one_decision_at_a_time_and_restores_it(bench):
    before = bench.module.settings()
    found = gpu_time.ablation(bench)
    assert bench.module.settings() == before
    for case in found["cases"]:
        assert case["failures"] == {} and "as chosen" in case["rows"] and len(case["rows"]) > 5
        assert case["rows"]["as chosen"]["vs_chosen"] == 1
        assert ("bf16 rounded in integers" in case["rows"]) == (
            case["dtype"] == "bfloat16" and not before.int_bf16
        )
    json.dumps(found)


def test_steps_are_real_changes_of_existing_settings(kernel):
    chosen = vars(kernel.settings())
    for numel in (2**10, 2**28):
        steps = gpu_time._steps(kernel, numel, "bfloat16")
        assert steps.pop("as chosen") == {}
        for override in steps.values():
            with kernel.force(**override):
                changed = {name for name, value in vars(kernel.settings()).items() if value != chosen[name]}
                assert changed == set(override)


def test_protocol_runs_everyone(bench):
    found = benchmark.protocol(bench)
    assert {"kernel", "bitsandbytes"} <= set(found["entries"]) and found["failures"] == {}
    assert found["entries"]["kernel"]["identical"] is True
    json.dumps(found)


def test_every_section_has_a_function():
    assert tuple(benchmark.SECTIONS) == SECTIONS and set(benchmark.QUICK) <= set(SECTIONS)


def test_a_failing_section_is_reported_and_the_others_still_run(bench, monkeypatch, capsys, tmp_path):
    def fail(_):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(benchmark, "SECTIONS", {"host": fail, "gpu": lambda _: {"sizes": []}})
    monkeypatch.setattr(benchmark, "QUICK", ("host", "gpu"))
    monkeypatch.setattr(benchmark.results, "write", lambda name, data, folder=None: tmp_path / name)
    data = benchmark.measure()
    assert data["host"]["failed"] == "host: RuntimeError: first line" and data["gpu"]["sizes"] == []
    assert benchmark.main(["--quick"]) == 1
    assert "FAILED host: RuntimeError: first line" in capsys.readouterr().out


def test_failures_are_found_anywhere():
    data = {
        "gpu": {"sizes": [{"failures": {"kernel": "wrong"}}, {"failures": {}}]},
        "cold": {"failed": "cold: no"},
    }
    assert benchmark._failures(data) == ["kernel: wrong", "cold: no"]


def test_only_a_full_run_is_stored_by_itself(bench, monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(benchmark, "SECTIONS", {"gpu": lambda _: {"sizes": []}})
    monkeypatch.setattr(benchmark, "QUICK", ("gpu",))

    def write(name, data, folder=None):
        written.append((name, folder))
        path = tmp_path / "card" / f"{name.removesuffix('.json')}.json"
        path.parent.mkdir(exist_ok=True)
        found = {"environment": {"gpu": "some card", "date": "2026-01-01"}, "kernel_hash": "0", "data": data}
        path.write_text(json.dumps(found))
        return path

    monkeypatch.setattr(benchmark.results, "write", write)
    assert benchmark.main([]) == 0
    assert written == [("benchmark", None)]
    assert (tmp_path / "card" / "figures" / "speedup_by_size.png").exists(), "figures are drawn from the file"
    assert benchmark.main(["--quick"]) == 0
    assert benchmark.main(["--only", "gpu"]) == 0
    assert len(written) == 1
    assert benchmark.main(["--quick", "--json", str(tmp_path / "mine.json")]) == 0
    assert written[1] == ("mine.json", tmp_path)


def test_without_a_gpu_every_section_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(benchmark.results, "write", lambda *_: pytest.fail("nothing was measured"))
    assert benchmark.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: not measured (needs an NVIDIA GPU)" for name in SECTIONS
    ]


def test_without_a_gpu_the_reason_goes_into_the_file_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    path = tmp_path / "folder" / "reason.json"
    assert benchmark.main(["--json", str(path), "--only", "gpu"]) == 0
    content = json.loads(path.read_text())
    assert content["data"]["gpu"] == {"not_measured": "needs an NVIDIA GPU"}
    assert content["kernel_hash"] == hashes.kernel_hash() and "date" in content["environment"]


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_the_sections_measure_without_failures(kernel, monkeypatch):
    sizes = (2**16, 2**22)
    monkeypatch.setattr(host_time, "INNER", 1)
    monkeypatch.setattr(gpu_time, "SMALL", 2048)
    monkeypatch.setattr(workload, "SIZES", sizes)
    monkeypatch.setattr(workload, "LAYERS", {"A": ((1024, 4096),)})
    monkeypatch.setattr(Bench, "rounds", lambda self, full, quick: 3)
    bench = Bench(kernel, protocol.baselines())
    found = gpu_time.gpu(bench)
    for case in found["sizes"]:
        assert case["failures"] == {} and case["not_captured"] == {}
        best = min(row["p50"] for name, row in case["rows"].items() if name.startswith("floor"))
        assert best <= case["rows"]["kernel"]["p50"] * 1.1
        assert statistics.median(row["gb_s"] for row in case["rows"].values()) > 1
    host = host_time.host(bench)
    assert host["parts"]["kernel"]["kernels"] == 1 and host["parts"]["kernel"]["allocations"] == 1
    assert not any(case["failures"] for case in host["cases"])


def test_machine_code_fills_the_targets_row():
    sass = pytest.importorskip("helpers.t4.sass")
    try:
        found = benchmark.machine_code(None)
    except sass.ToolMissing as error:
        pytest.skip(str(error))
    assert set(found["rows"]) == {"float16", "bfloat16"}
    (row,) = [row for row in benchmark.targets({"sass": found}) if row["name"].startswith("SASS")]
    assert row["ours"] == " / ".join(
        f"{found['rows'][dtype]['ours']:.2f}" for dtype in ("float16", "bfloat16")
    )
    assert row["met"] is not any(entry["over_budget"] for entry in found["rows"].values())


def test_the_ceiling_is_the_fastest_floor(bench, monkeypatch):
    monkeypatch.setattr(clocks, "replay_interleaved", lambda graphs, rounds: dict.fromkeys(graphs, [2e-6]))
    nbytes = workload.make_buffers((64, 64), torch.float16, count=1, device="cpu").bytes_moved
    assert gpu_time.ceiling("cpu", side=64) == pytest.approx(nbytes / 2e-6 / 1e9)


class TestMerge:
    """Sections measured apart become one result, if they belong together."""

    @pytest.fixture
    def part(self, tmp_path):
        def write(name, sections, **changes):
            data = {"quick": False, "unsloth_fused": True, "seconds": 2.0} | dict.fromkeys(
                sections, {"x": name}
            )
            facts = {"gpu": "NVIDIA H200", "date": f"2026-11-21T10:00:0{name}"}
            content = {
                "environment": facts,
                "kernel_hash": "0123",
                "data": data | changes.pop("data", {}),
            } | changes
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
            return tmp_path / f"{name}.json"

        return write

    def test_all_sections_once(self, part):
        first, *rest = benchmark.SECTIONS
        found = benchmark.merge([part(1, [first]), part(2, rest)])
        assert found["environment"]["date"].endswith("1") and found["kernel_hash"] == "0123"
        assert found["data"][first] == {"x": 1} and found["data"][rest[0]] == {"x": 2}
        assert found["data"]["seconds"] == 4.0 and found["data"]["measured_apart"][rest[0]].endswith("2")

    @pytest.mark.parametrize("wrong", ["kernel", "card", "missing", "twice", "quick"])
    def test_what_does_not_belong_together_is_refused(self, part, wrong):
        first, *rest = benchmark.SECTIONS
        changes = {
            "kernel": {"kernel_hash": "4567"},
            "card": {"environment": {"gpu": "Tesla T4", "date": ""}},
            "quick": {"data": {"quick": True}},
        }.get(wrong, {})
        sections = {"missing": rest[1:], "twice": [first, *rest]}.get(wrong, rest)
        with pytest.raises(ValueError, match="expected"):
            benchmark.merge([part(1, [first]), part(2, sections, **changes)])

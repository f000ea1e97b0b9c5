"""The report on machine code, and the gates: budgets and order of loads of our kernel on every generation."""

import json
import re

import pytest

from helpers.t4 import machine_code, sass
from helpers.t4.cards import CARDS
from helpers.t4.cross_compile import Built, Request, build
from helpers.t4.load_order import Order


def ours(codes, **wanted):
    return [
        code
        for code in codes
        if code.contender == "kernel" and all(getattr(code, name) == value for name, value in wanted.items())
    ]


@pytest.mark.parametrize("arch", CARDS)
def test_gate(codes, arch):
    """Instructions, spills, width of stores, occupancy, order of loads, shared memory."""
    rows = ours(codes, arch=arch)
    assert len(rows) == (12 if arch == 75 else len(sass.OTHERS))
    assert {row.dtype for row in rows if row.nested} == set(sass.SHORT)
    missed = {f"{row.label} {row.dtype}": row.missed for row in rows if row.missed}
    assert not missed


@pytest.mark.parametrize("dtype", sass.HALF)
def test_on_a_t4_every_load_is_under_way_before_the_first_wait(codes, dtype):
    for row in ours(codes, arch=75, dtype=dtype, nested=True):
        words = 2 if row.small else 8
        before, _, _ = row.order.partition("<wait")
        assert len(re.findall(r"words@\d+", before)) == words, row.order
        assert row.late_words == 0 and row.latencies <= 2
        assert row.hinted == {"loads": words + 1, "stores": words}


def test_bitsandbytes_is_disassembled(codes):
    pytest.importorskip("bitsandbytes")
    rows = {(code.label, code.dtype): code for code in codes if code.contender == "bitsandbytes"}
    weight = rows.get(("bitsandbytes, weight", "float16"))
    if weight is None:
        pytest.skip(f"bitsandbytes: {next(iter(rows.values())).failed}")
    assert weight.instructions > 10 and weight.shared > 0


def test_the_report_fits_and_names_everyone(codes):
    text = sass.report(codes)
    lines = text.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= sass.WIDTH
    assert all(f"sm_{arch} " in text for arch in CARDS)
    assert "bitsandbytes" in text and "Unsloth" in text


def test_the_table_has_the_official_kinds_of_everyone(codes):
    head, *rows = sass.table(codes)
    assert all(len(row) == len(head) for row in rows)
    ours = [row for row in rows if row[0] == "ours, nested"]
    assert [row[1:3] for row in ours] == [
        [f"sm_{arch}", dtype] for arch in CARDS for dtype in ("fp16", "bf16")
    ]
    assert not [row for row in rows if "small" in row[0] or "flat" in row[0] or "absmax" in row[0]]


@pytest.mark.parametrize("missed", [False, True])
def test_the_command(codes, missed, monkeypatch, tmp_path, capsys):
    def collect(archs):
        assert archs == [75]
        return [
            sass.Code(arch=75, contender="kernel", label="x", failed="why", missed=["why"] if missed else [])
        ]

    monkeypatch.setattr(sass, "collect", collect)
    monkeypatch.setattr(sass, "FOLDER", tmp_path)
    monkeypatch.setattr(sass, "ROOT", tmp_path)
    assert sass.main(["--arch", "75", "--store"]) == int(missed)
    assert json.loads((tmp_path / "machine_code.json").read_text())["data"]["code"][0]["arch"] == 75
    assert sass.stored(tmp_path.parent).data.code == collect([75])
    assert ("met" in capsys.readouterr().out) is not missed


def test_the_order_of_loads_is_printed(monkeypatch, capsys):
    kind = dict(arch=90, contender="kernel", label="ours", dtype="float16")
    code = sass.Code(**kind, order="words@1 store@2")
    monkeypatch.setattr(sass, "build", lambda requests: requests)
    monkeypatch.setattr(sass, "code_of", lambda request: code)
    monkeypatch.setattr(sass, "OTHERS", sass.OTHERS[:1])
    assert sass.main(["--arch", "90", "--order"]) == 0
    assert capsys.readouterr().out == "sm_90 ours fp16: words@1 store@2\n"


def test_the_gate_tells_loads_in_order_from_loads_behind_a_wait():
    """The kernel as it was before code2 went through shared memory, and as it is."""
    requests = [Request(75, force={"stage": stage}) for stage in (False, True)]
    before, now = map(sass.code_of, build(requests))
    assert any("8 of 8 words are loaded behind a wait" in reason for reason in before.missed)
    assert before.latencies == 2 and (now.latencies, now.late_words, now.missed) == (1, 0, [])


def test_no_cuobjdump(monkeypatch, capsys):
    monkeypatch.setattr(machine_code.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine_code.shutil, "which", lambda name, path=None: None)
    machine_code.tool.cache_clear()
    try:
        with pytest.raises(machine_code.ToolMissing, match="install triton"):
            machine_code.tool()
        assert sass.main([]) == 2 and "install triton" in capsys.readouterr().err
    finally:
        machine_code.tool.cache_clear()


def missed(opcodes, order=None, nested=False, dtype="float16", small=False, registers=32, shared=0):
    """What a kernel for a T4 of these opcodes, 8 elements a thread, misses."""
    path = tuple(machine_code.Instruction(16 * i, "", opcode, "") for i, opcode in enumerate(opcodes))
    figures = machine_code.count(CARDS[75], path, registers, shared, 128, 8)
    kind = dict(arch=75, contender="kernel", label="ours", dtype=dtype, nested=nested, small=small)
    return sass.over_budget(sass.Code(**kind, **figures), order or Order((), (), 1, ()))


MET = ["STG.E.128.SYS"] + ["PRMT"] * 40


@pytest.mark.parametrize(
    "opcodes, facts, text",
    [
        (["STG.E.128.SYS"] + ["PRMT"] * 44, {}, "5.62 instructions per element, at most 5.5"),
        ([*MET, "STL"], {}, "1 spills"),
        ([*MET, "STG.E.64.SYS"], {}, "stores of 64/128 bits instead of 128"),
        (MET, {"registers": 72}, "occupancy 88%, at least 100%"),
        (MET, {"shared": 16384}, "occupancy 50%, at least 100%"),
    ],
)
def test_each_kind_of_miss_is_seen(opcodes, facts, text):
    assert missed(MET) == []
    (reason,) = missed(opcodes, **facts)
    assert text in reason


def test_the_order_of_loads_is_gated_in_nested_states_and_results_of_16_bits():
    order = Order((), (), 3, ("words",))
    faults = missed(MET, order, nested=True)
    assert any("3 dependent latencies" in fault for fault in faults)
    assert any("shared memory holds" in fault for fault in faults)
    wide = missed(MET, order, nested=True, dtype="float32")
    assert wide and not any("shared memory" in fault for fault in wide)
    assert missed(MET, order) == []


def test_a_small_tile_may_cost_more_an_element():
    heavy = ["STG.E.128.SYS"] + ["PRMT"] * 60
    assert missed(heavy) and not missed(heavy, small=True)


def test_a_kernel_that_does_not_compile_is_a_miss():
    code = sass.code_of(Built(Request(75), error="Traceback\n\nptxas: no such thing\n"))
    assert code.failed == "did not compile: ptxas: no such thing" and code.missed == [code.failed]
    assert "no such thing" in sass.report([code])


def test_absent_packages_get_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    failed = [code.failed for code in (*sass.unsloth(), *sass.bitsandbytes())]
    assert len(failed) == 2 and all("not installed" in text for text in failed)

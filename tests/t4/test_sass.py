"""Counting machine code, the sm_75 budget of the kernel (a gate), the other contenders, and the report."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

from helpers.t4 import cross_compile, forecast, machine_code, sass, cards

LISTING = """
\t\tFunction : kernel
\t.headerflags\t@"EF_CUDA_SM75"
        /*0000*/                   MOV R1, c[0x0][0x28] ;         /* 0x00 */
                                                                  /* 0x01 */
        /*0010*/              @!P6 LDG.E.U8.SYS R5, [R2] ;        /* 0x00 */
        /*0020*/                   LDG.E.128.SYS R4, [R2] ;       /* 0x00 */
        /*0030*/               @P0 EXIT ;                         /* 0x00 */
        /*0040*/                   STG.E.EF.128.SYS [R4], R8 ;    /* 0x00 */
        /*0050*/                   STG.E.64.SYS [R4+0x10], R8 ;   /* 0x00 */
        /*0060*/                   EXIT ;                         /* 0x00 */
        /*0070*/                   BRA 0x70;                      /* 0x00 */
        /*0080*/                   NOP;                           /* 0x00 */
"""


def instructions(*lines):
    """(opcode, operands[, predicate]) lines at 0x00, 0x10, ..."""
    return tuple(
        machine_code.Instruction(16 * position, *((*line, "")[2:3] or ("",)), *line[:2])
        for position, line in enumerate(lines)
    )


def counted(opcodes, shared=0, elements=8):
    path = instructions(*((opcode, "") for opcode in opcodes))
    pipes = dict(Counter(cards.pipe_of(opcode) for opcode in opcodes))
    return machine_code.Counted("kernel", path, elements, 128, 32, shared, "straight line", pipes)


class TestCounting:
    def test_a_listing(self):
        ((name, found),) = machine_code.parse(LISTING).items()
        assert name == "kernel" and len(found) == 9
        assert found[1].predicate == "!P6" and found[1].opcode == "LDG.E.U8.SYS"
        path, how = machine_code.executed(found)
        assert [i.stem for i in path] == ["MOV", "LDG", "LDG", "EXIT", "STG", "STG", "EXIT"]
        assert how == "straight line"

    def test_elements_come_from_the_stored_bytes(self):
        ((name, found),) = machine_code.parse(LISTING).items()
        result = machine_code.count(name, found, 16, 0, 128, itemsize=2)
        assert result.elements == 12  # 16 + 8 bytes of 2-byte elements
        assert result.per_element()["total"] == 7 / 12
        assert result.widths("LDG") == {8: 1, 128: 1} and result.widths("STG") == {128: 1, 64: 1}
        assert result.per_element()["l1 bytes"] == (1 + 16 + 16 + 8) / 12

    def test_a_loop_is_passed_once_and_its_jump_back_ends_the_walk(self):
        found = instructions(
            ("IADD3", ""), ("STG.E.SYS", ""), ("EXIT", "", "P0"), ("BRA", "0x0"), ("NOP", "")
        )
        path, how = machine_code.executed(found)
        assert [i.stem for i in path] == ["IADD3", "STG", "EXIT"] and how == "one pass of its loop"

    def test_a_conditional_jump_back_goes_on_behind_it(self):
        found = instructions(("IADD3", ""), ("BRA", "0x0", "P1"), ("STG.E.SYS", ""), ("EXIT", ""))
        path, how = machine_code.executed(found)
        assert [i.stem for i in path] == ["IADD3", "BRA", "STG", "EXIT"] and how == "one pass of its loop"

    def test_jumps_ahead(self):
        skipping = instructions(("BRA", "0x20"), ("MOV", ""), ("STG.E.SYS", ""), ("EXIT", ""))
        assert [i.stem for i in machine_code.executed(skipping)[0]] == ["BRA", "STG", "EXIT"]
        forked = instructions(("BRA", "0x20", "P0"), ("MOV", ""), ("STG.E.SYS", ""), ("EXIT", ""))
        path, how = machine_code.executed(forked)
        assert len(path) == 4 and "1 forks" in how

    def test_a_full_tile_takes_the_way_without_masks(self):
        found = instructions(
            ("BRA", "0x50", "P0"),
            ("ISETP", ""),
            ("ISETP", ""),
            ("STG.E.128", "", "P1"),
            ("EXIT", ""),
            ("STG.E.128", ""),
            ("EXIT", ""),
        )
        path, _ = machine_code.executed(found)
        assert [(i.stem, i.predicate) for i in path] == [("BRA", "P0"), ("STG", ""), ("EXIT", "")]

    def test_calls_are_refused(self):
        with pytest.raises(NotImplementedError, match="CALL.REL"):
            machine_code.executed(instructions(("CALL.REL.NOINC", "0x40"), ("EXIT", "")))

    def test_a_kernel_without_stores_is_refused(self):
        with pytest.raises(ValueError, match="no global store"):
            machine_code.count("kernel", instructions(("MOV", ""), ("EXIT", "")), 16, 0, 128, 2)

    def test_resources(self):
        text = " Function abc:\n  REG:64 STACK:0 SHARED:2656 LOCAL:8 CONSTANT[0]:392 TEXTURE:0\n"
        assert machine_code.resources(text) == {
            "abc": {"registers": 64, "stack": 0, "shared": 2656, "local": 8}
        }

    def test_no_cuobjdump(self, monkeypatch):
        monkeypatch.setattr(machine_code.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(machine_code.shutil, "which", lambda name: None)
        machine_code.tool.cache_clear()
        try:
            with pytest.raises(sass.ToolMissing, match="install triton"):
                machine_code.tool()
            assert sass.main([]) == 2
        finally:
            machine_code.tool.cache_clear()


class TestBudget:
    """over_budget must see each kind of miss."""

    def missed(self, opcodes, **facts):
        row = sass.Row("ours", "ours", "float16", True, counted(opcodes, **facts))
        return sass.over_budget(row, "float16")

    def test_met(self):
        assert self.missed(["STG.E.128.SYS"] + ["PRMT"] * 50) == []

    @pytest.mark.parametrize(
        "opcodes, facts, text",
        [
            (["STG.E.128.SYS"] + ["PRMT"] * 56, {}, "instructions per element"),
            (["STG.E.128.SYS"], {"shared": 16}, "shared memory"),
            (["STG.E.128.SYS", "STL"], {}, "spills"),
            (["STG.E.128.SYS", "STG.E.64.SYS"], {}, "instead of 128"),
        ],
    )
    def test_missed(self, opcodes, facts, text):
        (reason,) = self.missed(opcodes, **facts)
        assert text in reason


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """(exit status, printed text, JSON) of one real run of the command."""
    import contextlib
    import io

    machine_code.tool()
    path, text = tmp_path_factory.mktemp("sass") / "sass.json", io.StringIO()
    with contextlib.redirect_stdout(text):
        status = sass.main(["--json", str(path)])
    return status, text.getvalue(), json.loads(path.read_text())["data"]


def kernels(report, who):
    return [kernel for kernel in report[2]["kernels"] if kernel["who"] == who]


class TestReport:
    def test_fits_a_screen_and_succeeds(self, report):
        status, text, _ = report
        lines = text.splitlines()
        assert status == 0
        assert len(lines) <= 60 and max(map(len, lines)) <= sass.WIDTH

    @pytest.mark.parametrize("dtype, limit", [("float16", 7), ("bfloat16", 9)])
    @pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
    def test_budget_gate(self, report, dtype, limit, nested):
        (kernel,) = (k for k in kernels(report, "ours") if (k["dtype"], k["nested"]) == (dtype, nested))
        assert kernel["per_element"]["total"] <= limit
        assert kernel["shared_bytes"] == 0 and kernel["spills"] == 0
        assert set(kernel["store_bits"]) == {"128"}
        assert "unknown" not in kernel["per_element"]

    def test_all_of_ours_compile_without_spills(self, report):
        found = kernels(report, "ours")
        assert len(found) == 6 and all(kernel["reason"] == "" and kernel["spills"] == 0 for kernel in found)

    def test_bitsandbytes_is_disassembled(self, report):
        pytest.importorskip("bitsandbytes")
        found = {(k["label"], k["dtype"]): k for k in kernels(report, "bitsandbytes")}
        if ("bitsandbytes, weight", "float16") not in found:
            pytest.skip(f"bitsandbytes: {kernels(report, 'bitsandbytes')[0]['reason']}")
        weight = found["bitsandbytes, weight", "float16"]
        assert weight["per_element"]["total"] > 10 and weight["shared_bytes"] > 0
        assert weight["elements_a_thread"] == 16 and "loop" in weight["counted"]
        assert ("bitsandbytes, absmax decode", "float32") in found
        assert all("unknown" not in kernel["per_element"] for kernel in found.values())

    def test_predictions_cover_the_protocol(self, report):
        ours = [row for row in report[2]["predicted"] if row["contender"] == "kernel"]
        assert [(row["elements"], row["dtype"]) for row in ours] == [(n, d) for n, d, _ in cards.OFFICIAL]
        assert all(0 < row["low"] <= row["high"] for row in ours)

    def test_the_stored_file_is_shown_on_one_screen(self, report):
        lines = sass.brief(report[2])
        assert len(lines) < 32 and max(map(len, lines)) <= sass.WIDTH
        text = "\n".join(lines)
        assert lines[0].startswith("Predicted for a T4") and "Ratio to Unsloth classic" in text
        (fp16,) = (line for line in lines if line.startswith("ours, nested") and " fp16 " in line)
        assert fp16 in report[1] and "fp32" not in text and "ours, flat" not in text

    def test_what_was_not_measured_says_so(self, report, monkeypatch):
        rows = [
            sass.Row("ours", "ours, nested", dtype, True, counted(["STG.E.128"])) for dtype in sass.DTYPES
        ]
        text = sass.render(rows, rows, None, "results/x.json", 75)
        assert "error on the H200: not measured (needs results/x.json, section gpu)" in text
        assert "calls not measured" in text


def test_ptx_shows_assembly_and_hints_and_hints_can_be_switched_off():
    with_hints, without = sass.ptx("float16", 75), sass.ptx("float16", 75, hints=False)
    assert ".target sm_75" in with_hints and "shfl.sync.idx" in with_hints
    assert "evict_first" in with_hints and "st.global.cs" in with_hints
    assert "evict_first" not in without and "st.global.cs" not in without


def test_a_bf16_kernel_for_a_t4_has_no_bf16_instruction(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # must not reach the process that compiles
    request = {"source": "ours", "out_dtype": "bfloat16", "nested": True}
    t4, h200 = cross_compile.build([request | {"arch": arch} for arch in (75, 90)])
    assert t4.error == h200.error == ""
    assert ".target sm_75" in t4.ptx and "cvt.rn.bf16" not in t4.ptx
    assert ".target sm_90" in h200.ptx and "cvt.rn.bf16" in h200.ptx


def test_ours_in_chosen_kinds():
    (row,) = sass.ours(75, sass.KINDS[:1])
    assert (row.dtype, row.nested, row.reason) == ("float16", True, "")


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_process_that_can_compile_does_so_itself(monkeypatch, interpreted):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    answer = {"request": {}, "cubin": "", "error": "x"}
    monkeypatch.setattr(cross_compile, "_in_child", lambda requests, path: [answer | {"name": "child"}])
    monkeypatch.setattr(cross_compile, "_answers", lambda requests: [answer | {"name": "here"}])

    def where(source="ours", path=None):
        (built,) = cross_compile.build([{"source": source}], path)
        return built.name

    assert where() == ("child" if interpreted else "here")
    assert where("unsloth") == where(path="elsewhere") == "child"


def test_compiled_here_or_in_a_child_it_is_the_same_code():
    code = """if True:
        from helpers.t4 import cross_compile
        request = {"source": "ours", "arch": 75, "out_dtype": "float16", "nested": True}
        (here,) = cross_compile.build([request])
        (child,) = cross_compile._in_child([request], None)
        (wrong,) = cross_compile.build([request | {"force": {"no_such_setting": 1}}])
        assert not here.error and here.ptx == child["ptx"]
        assert "no_such_setting" in wrong.error
    """
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cross_compile.ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float64"):
        sass.compile_kernel("float64")


def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(sass.CompileError, match="no_such_setting"):
        sass.compile_kernel("float16", no_such_setting=1)


def test_absent_packages_get_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    assert [row.reason for row in (*sass.unsloth(75), *sass.bitsandbytes(75))] == ["not installed"] * 2


FAKE_UNSLOTH = """
import functools
import torch
import triton
import triton.language as tl
from unsloth_zoo.utils import Version

WARPS = 8 if Version(triton.__version__) >= Version("3.7.0") else 4

@triton.jit
def _nf4_dequant_kernel(w_ptr, out_ptr, n, HALF: tl.constexpr, ROWS: tl.constexpr):
    i = tl.program_id(0) * ROWS * HALF * 2 + tl.arange(0, ROWS * HALF * 2)
    tl.store(out_ptr + i, tl.load(w_ptr + i // 2, mask=i < n).to(out_ptr.dtype.element_ty), mask=i < n)

def _capability(index):
    raise AssertionError("asked the GPU")

def _launch(kernel, W, absmax, code2, absmax2, offset, code, blocksize, blocksize2, out, fp_fusion):
    assert _capability(torch.cuda.current_device()) == (7, 5) and code2 is not None
    kernel[(out.numel() // 256,)](W, out, out.numel(), HALF=32, ROWS=4, num_warps=WARPS)
"""


def test_unsloths_kernel_is_specialized_as_its_own_launcher_would(tmp_path, monkeypatch):
    folder = tmp_path / "unsloth" / "kernels"
    folder.mkdir(parents=True)
    (folder / "nf4.py").write_text(textwrap.dedent(FAKE_UNSLOTH))
    (folder.parent / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = sass.unsloth(75)
    assert all(row.reason == "" for row in rows), rows
    warps = {(row.who, row.dtype): row.counted.threads for row in rows if "small" not in row.who}
    assert warps["unsloth default", "float16"] == 128 and warps["unsloth T4 table", "float16"] == 256
    assert {row.counted.elements for row in rows} == {2.0, 1.0}  # 256 a block
    assert "unsloth" not in sys.modules


class TestForecast:
    def stored(self, microseconds):
        """A benchmark's data: ours at one size, and a ceiling that moves 4000 GB/s."""
        rows = {"kernel": {"p50": microseconds}, "floor_cuda": {"p50": 1.0, "gb_s": 4000.0}}
        cases = [
            {
                "shape": [1024, 4096],
                **{
                    what: {"kernel": {"p50": ours}, "unsloth_today": {"p50": 20.0}}
                    for what, ours in (("returned", 5.0), ("synchronized", 10.0))
                },
            }
        ]
        sizes = [{"numel": 2**24, "dtype": "float16", "rows": rows}]
        return {"gpu": {"sizes": sizes}, "host": {"cases": cases}}

    rows = [sass.Row("ours", "ours, nested", dtype, True, counted(["STG.E.128"])) for dtype in sass.DTYPES]

    def test_the_error_is_that_of_the_prediction(self):
        exact = cards.dram_bytes(2**24) / 4000 / 1e3
        (found,) = forecast.model_errors(self.rows, self.stored(2 * exact))
        assert found["predicted_us"] == pytest.approx(exact) and found["error"] == pytest.approx(-0.5)
        assert found["bound_by"] == "DRAM"

    def test_calls_are_scaled_by_the_measured_host_ratios(self):
        found = forecast.official(self.rows, self.stored(10.0))
        assert found["host_ratios"] == {"returned": 0.25, "synchronized": 0.5}
        ours = found["contenders"]["kernel"]
        assert ours["calls_s"] == pytest.approx((9000 * 60e-6 * 0.25, 9000 * 77e-6 * 0.5))
        assert ours["total_s"][0] == pytest.approx(ours["kernels_s"][0] + ours["calls_s"][0])

    def test_nothing_stored_predicts_no_calls_of_ours_and_no_ratio(self):
        found = forecast.official(self.rows, None)
        assert found["contenders"]["kernel"]["total_s"] is None and sass.ratios(found) == {}

    def official(self, **kernels):
        """What forecast.official finds when ours is bound to 2 or 3 s and costs 0.5 or 0.25 of a call."""
        labels = {"kernel": "ours", "a": "Unsloth today, Triton < 3.7", "b": "Unsloth today, Triton >= 3.7"}
        kernels = {"kernel": (2.0, 3.0)} | kernels
        contenders = {
            key: {"label": labels[key], "kernels_s": pair, "calls_s": (0.5, 0.75)}
            for key, pair in kernels.items()
        }
        return {"contenders": contenders, "host_ratios": {"returned": 0.25, "synchronized": 0.5}}

    def test_both_contenders_of_a_ratio_meet_the_same_card(self):
        low, high = (cards.CALLS * us * 1e-6 for us in cards.PUBLISHED_CALL_US)
        found = sass.ratios(self.official(a=(2.0, 3.0), b=(4.0, 6.0)))
        least, middle, most = found["a"]
        assert least == pytest.approx((3 + low) / (3 + 0.5 * low))
        assert most == pytest.approx((2 + high) / (2 + 0.25 * high))
        assert middle == pytest.approx((2.5 + (low + high) / 2) / (2.5 + 0.375 * (low + high) / 2))
        assert least < middle < most < min(found["b"])

    def test_the_verdict_says_what_is_in_doubt(self):
        (doubt, reached) = (
            " ".join(sass._verdicts(self.official(a=pair))) for pair in ((2.0, 3.0), (4.0, 6.0))
        )
        assert "1.05 at the low end" in doubt and "1.10 and 1.15 in doubt" in doubt
        assert "1.15 throughout" in reached and "doubt" not in reached

    def test_contenders_of_the_same_times_are_shown_once(self):
        assert sass._shown(self.official(a=(2.0, 3.0), b=(2.0, 3.0))) == {
            "kernel": "ours",
            "a": "Unsloth today",
        }
        assert len(sass._shown(self.official(a=(2.0, 3.0), b=(2.5, 3.0)))) == 3

    def test_the_report_of_a_stored_run_fits(self):
        text = sass.render(self.rows, self.rows, self.stored(12.0), "results/x.json", 75)
        assert "Error, predicted / measured - 1" in text
        assert re.search(r"predicted +measured.*\nours +10\.6 +12\.0 +- +-", text)
        assert max(map(len, text.splitlines())) <= sass.WIDTH

"""The kernel's machine code on every card: budgets, hints, wide loads and stores."""

import os
import subprocess
import sys
import tempfile
from unittest import mock

import pytest

from helpers.cross import compile, predict, sass
from helpers.cross.compile import DTYPES, Code
from helpers.cross.sass import CARDS
from helpers.results import store


@pytest.fixture(scope="module")
def codes():
    """{str(code): code} of what the gate compiles."""
    wanted = [(75, "fp16"), (75, "fp32"), *((arch, "bf16") for arch in CARDS)]
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", NF4_FORCE="t4"):  # must change nothing
        return {str(code): code for code in compile.build(wanted)}


def test_every_card_is_within_budget_and_gets_its_own_settings(codes):
    assert [fault for code in codes.values() for fault in sass.faults(code)] == []
    native = {code.arch: "cvt.rn.bf16" in code.ptx for code in codes.values()}
    assert native == {arch: arch >= 80 for arch in CARDS}


def listing(*lines):
    """Text as cuobjdump prints it, of lines such as "@P0 LDG.E R0, [R2]"."""
    return "\n".join(f"        /*00a0*/    {line} ;    /* 0x00 */" for line in lines)


def test_a_thread_executes_what_comes_before_the_first_exit_without_a_predicate():
    path = sass.executed(
        listing("@!P6 LDG.E.U8 R5, [R2]", "@P0 EXIT", "STG.E.128 [R4], R8", "EXIT", "BRA 0x50")
    )
    assert path == ["LDG.E.U8", "EXIT", "STG.E.128", "EXIT"]
    with pytest.raises(NotImplementedError, match="CALL.REL"):
        sass.executed(listing("CALL.REL.NOINC 0x40", "EXIT"))


@pytest.mark.parametrize("variant", ["sm_75 fp16", "sm_75 bf16", "sm_90 bf16"])
def test_words_are_loaded_and_results_stored_128_bits_wide_with_hints(codes, variant):
    path = sass.executed(codes[variant].sass)
    hinted = [opcode for opcode in path if ".EF" in opcode]
    wide = [opcode.split(".")[0] for opcode in hinted if ".128" in opcode]
    elements = codes[variant].elements  # of a thread: 32 to a load of 128 bits, 8 to a store
    assert (wide.count("LDG"), wide.count("STG")) == (elements // 32, elements // 8)
    assert any(".U8" in opcode for opcode in hinted)  # absmax


def test_the_assembly_of_a_t4_has_no_newer_instruction(codes):
    ptx = codes["sm_75 fp16"].ptx
    assert "cvt.rn.f16.f32" in ptx and "f16x2" not in ptx and "fma.rn" not in ptx


@pytest.mark.long
@pytest.mark.parametrize("version", "3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0 newest".split())
def test_every_triton_compiles_within_budget(version, monkeypatch):
    requirement = "triton" if version == "newest" else f"triton=={version}"
    wanted = [(arch, dtype) for arch in (75, 80, 90) for dtype in DTYPES]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, requirement]
        subprocess.run(pip, check=True)
        monkeypatch.setenv("PYTHONPATH", folder)
        found = compile.build(wanted)
    for code in found:
        ptx = code.ptx
        assert version in (code.triton, "newest") and sass.faults(code) == []
        assert "fma.rn" not in ptx and "st.global.cs" in ptx
        if code.arch == 75:
            assert "evict_first" in ptx and ".bf16" not in ptx


# --- the command ---


def test_the_command_prints_stores_and_fails_over_budget(codes, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    monkeypatch.setattr(predict, "write", lambda: None)
    monkeypatch.setattr(sass, "build", lambda wanted: [codes["sm_75 fp16"]])
    assert sass.main(["--arch", "75", "--store"]) == 0
    used = codes["sm_75 fp16"].registers
    assert f" instructions, {used} registers" in capsys.readouterr().out
    rows = store.rows("cross-compiled")
    assert store.one(rows, "machine_code", "Tesla T4 (sm_75)", "fp16", "registers").median == used
    monkeypatch.setitem(CARDS, 75, sass.Card("Tesla T4", used - 1, 11.5, 15.5, 14.5))
    assert sass.main(["--arch", "75"]) == 1


MET = ["PRMT R0, R1"] * 40 + ["STG.E.128 [R2], R8", "EXIT"]  # for 8 elements: 5.25 instructions each


@pytest.mark.parametrize(
    "lines, used, faults",
    [
        (MET, 64, []),
        (["MOV R0, R1"] * 31 + MET, 64, ["sm_75 fp16: 9.12 instructions per element, at most 9"]),
        (MET, 81, ["sm_75 fp16: 81 registers per thread, at most 80"]),
        (["STL [R1], R0"] + MET, 64, ["sm_75 fp16: 1 spills to local memory"]),
        (["STG.E.64 [R2], R8"] + MET, 64, ["sm_75 fp16: STG.E.64: expected stores of 128 bits"]),
    ],
)
def test_each_fault_is_named(lines, used, faults):
    assert sass.faults(Code(75, "fp16", listing(*lines), registers=used, elements=8)) == faults

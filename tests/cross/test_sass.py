"""The kernel's machine code on every card: no spill, wide loads and stores, packed conversions, hints."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from helpers.cross import machine_code, sass
from helpers.cross.machine_code import Code
from helpers.cross.sass import CARDS


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """{str(code): code} of what the gate compiles."""
    wanted = [(75, "fp16", False), (90, "fp16", False), *((arch, "bf16", False) for arch in CARDS)]
    wanted += [(75, "fp32", True), (90, "bf16", True)]
    ptxas = tmp_path_factory.mktemp("another") / "ptxas"
    ptxas.write_text("#!/bin/sh\necho release 13.0, V13.0.88\n")  # it compiles nothing
    ptxas.chmod(0o755)
    changes_nothing = dict(TRITON_INTERPRET="1", TRITON_PTXAS_PATH=str(ptxas), NF4_FORCE="t4")
    with mock.patch.dict(os.environ, changes_nothing):
        return {str(code): code for code in machine_code.build(wanted)}


def test_no_card_has_a_fault(codes):
    for code in codes.values():
        assert sass.faults(code) == []


def test_conversions_are_packed_where_the_card_has_them(codes):
    for code in codes.values():
        packed = f"cvt.rn.{code.dtype.replace('fp', 'f')}x2.f32"
        if code.arch >= 80 and code.dtype != "fp32":  # two results an instruction, none alone
            assert code.ptx.count(packed) == code.elements // 2, code
            assert packed.replace("x2", "") not in code.ptx, code
    assert "cvt.rn.f16.f32" in codes["sm_75 fp16"].ptx and "f16x2" not in codes["sm_75 fp16"].ptx
    assert ".bf16" not in codes["sm_75 bf16"].ptx  # rounded in integers


def test_nothing_is_fused_and_hints_are_there(codes):
    for code in codes.values():
        assert "fma.rn" not in code.ptx, code
        assert "st.global.cs" in code.ptx and "evict_first" in code.ptx, code


@pytest.mark.long
@pytest.mark.parametrize("version", "3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0 newest".split())
def test_every_triton_compiles_it_well(version, tmp_path, monkeypatch):
    requirement = "triton" if version == "newest" else f"triton=={version}"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, requirement]
    subprocess.run(pip, check=True)
    monkeypatch.syspath_prepend(tmp_path)  # of the process that compiles, too
    codes = machine_code.build([one for one in sass.WANTED if one[0] in (75, 80, 90)])
    assert all(version in (code.triton, "newest") for code in codes)
    assert not any(sass.faults(code) for code in codes)
    test_nothing_is_fused_and_hints_are_there({str(code): code for code in codes})


# --- what is said of a listing ---


def listing(*lines):
    """Text as cuobjdump prints it, of lines such as "@P0 LDG.E R0, [R2]"."""
    return "\n".join(f"        /*00a0*/    {line} ;    /* 0x00 */" for line in lines)


GOOD = ["LDG.E.U8 R5, [R2]", "LDG.E.128 R8, [R2]", "STG.E.128 [R4], R8", "EXIT"]  # 32 elements
BAD = {
    "2 spills to local memory": ["STL.128 [R1], R0", "LDL R0, [R1]", *GOOD],
    "1 narrow stores": ["STG.E.64 [R2], R8", *GOOD],
    "0 loads of 128 bits, expected 1": ["LDG.E R2, [R4]", *GOOD[2:]],
}


def test_each_fault_is_named():
    good = Code(75, "fp16", False, listing(*GOOD), registers=96, elements=32)
    assert sass.faults(good) == []
    assert "97 registers per thread, expected at most 96" in sass.faults(good._replace(registers=97))[0]
    for problem, lines in BAD.items():
        [found] = sass.faults(good._replace(sass=listing(*lines)))
        assert problem in found

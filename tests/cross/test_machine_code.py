"""The kernels' machine code for every card: no spills, wide loads and stores, packed conversions, hints."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from helpers.cross import machine_code
from helpers.cross.machine_code import CARDS, Code


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """{str(code): code}: what the gate compiles."""
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
        assert machine_code.faults(code) == []


def test_conversions_are_packed_where_the_card_has_them(codes):
    for code in codes.values():
        packed = f"cvt.rn.{code.dtype.replace('fp', 'f')}x2.f32"
        if code.arch >= 80 and code.dtype != "fp32":  # two results per instruction, never one
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
    monkeypatch.syspath_prepend(tmp_path)  # for the process that compiles, too
    codes = machine_code.build([one for one in machine_code.WANTED if one[0] in (75, 80, 90)])
    assert all(version in (code.triton, "newest") for code in codes)
    assert not any(machine_code.faults(code) for code in codes)
    test_nothing_is_fused_and_hints_are_there({str(code): code for code in codes})


GOOD = """
@%p1 ld.global.L1::evict_first.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
ld.global.b8 %rs1, [%rd2];
st.global.cs.v4.b32 [%rd3], {%r1, %r2, %r3, %r4};
"""
BAD = {  # for 32 elements
    "8 bytes of local memory per thread": dict(local=8),
    "1 narrow stores": dict(ptx=GOOD + "st.global.cs.v2.b32 [%rd3], {%r1, %r2};"),
    "0 loads of 128 bits, expected 1": dict(ptx=GOOD.replace("first.v4", "first.v2")),
    "97 registers per thread, expected at most 96": dict(registers=97),
}


@pytest.mark.parametrize("problem", BAD)
def test_each_fault_is_named(problem):
    good = Code(75, "fp16", False, registers=96, local=0, elements=32, ptx=GOOD)
    assert machine_code.faults(good) == []
    [found] = machine_code.faults(good._replace(**BAD[problem]))
    assert problem in found

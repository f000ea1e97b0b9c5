"""The gate: budgets and order of loads of the kernel on every card; and that the gate sees each fault."""

import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

import pytest

from helpers import machine
from helpers.t4 import compile, sass
from helpers.t4.compile import Built, Variant
from helpers.t4.sass import CARDS, Code, Instruction

# The machine code that was simulated: commit d0d6f41. If you change the device code on purpose, the simulated
# times no longer describe the kernel: say so in docs, then replace these hashes.
SIMULATED = {
    version: {"sm_75 fp16": "2c09c3d28aba", "sm_75 bf16": "549242aebdea"} for version in ("3.6.0", "3.9.0")
}
T4 = [("fp16",), ("bf16",), ("fp32",), ("bf16", False), ("fp16", True, True), ("bf16", True, True)]
T4 += [("bf16", True, False, {"stage": False, "hints": False})]


@pytest.fixture(scope="module")
def codes():
    """{str(variant): Code} of what the gate compiles."""
    variants = [Variant(75, *kind) for kind in T4]
    variants += [Variant(arch, "bf16") for arch in CARDS if arch != 75]
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", NF4_FORCE="t4"):  # must change nothing
        return {code.name: code for code in map(Code, compile.build(variants))}


def test_gate(codes):
    """Instructions, spills, width of stores, occupancy, shared memory, order of loads on every card."""
    found = {name: code.faults() for name, code in codes.items() if not code.variant.settings}
    assert len(found) == 6 + len(CARDS) - 1 and not any(found.values()), found


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("small", ["", " small"])
def test_on_a_t4_every_load_is_issued_before_the_first_wait(codes, dtype, small):
    code, words = codes[f"sm_75 {dtype}{small}"], 2 if small else 8
    before, _, _ = " ".join(code.events).partition("<wait")
    assert len(re.findall(r"words@\d+", before)) == words and not any(load.late for load in code.loads)
    hints = [i.stem for i in code.path if "EF" in i.opcode.split(".")]
    assert (hints.count("LDG"), hints.count("STG")) == (words + 1, words)


def test_the_machine_code_is_the_one_that_was_simulated(codes):
    version = codes["sm_75 fp16"].built.triton
    if version not in SIMULATED:
        pytest.skip(f"no reference for Triton {version}: python -m helpers t4 --arch 75 --against d0d6f41")
    assert {name: codes[name].hash for name in SIMULATED[version]} == SIMULATED[version]


def test_changed_settings_change_the_machine_code(codes, kernel):
    """Without code2 in shared memory words wait, which the gate refuses; hints can be switched off."""
    before = codes["sm_75 bf16 stage=False hints=False"]
    assert any("loads are issued after a wait" in fault for fault in before.faults())
    assert "EF" not in " ".join(i.opcode for i in before.path) and "evict_first" not in before.built.ptx
    native = {code.variant.arch: "cvt.rn.bf16" in code.built.ptx for code in codes.values()}
    assert native == {arch: arch >= 80 for arch in CARDS}
    with kernel.force(card="t4"):
        assert [compile.settings(arch).int_bf16 for arch in (75, 80, 120)] == [True, False, False]


@pytest.mark.long
@pytest.mark.parametrize(
    "version", "3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0 newest".split()
)
def test_every_triton_compiles_within_budget(version, monkeypatch):
    requirement = "triton" if version == "newest" else f"triton=={version}"
    variants = [Variant(arch, dtype) for arch in (75, 80, 90) for dtype in compile.DTYPES]
    variants += [Variant(75, dtype, nested=False) for dtype in compile.DTYPES]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, requirement]
        subprocess.run(pip, check=True)
        monkeypatch.setenv("PYTHONPATH", folder)
        codes = list(map(Code, compile.build(variants)))
    for code in codes:
        used, ptx, faults = code.built.triton, code.built.ptx, code.faults()
        if used.startswith("3.3."):  # its gather does not go through shared memory: code2 is loaded late
            faults = [fault for fault in faults if "issued after a wait" not in fault]
        assert not faults and (version == "newest" or used == version), code.name
        assert "fma.rn" not in ptx and "shfl.sync.idx.b32" in ptx and "st.global.cs" in ptx
        assert code.variant.arch > 75 or "evict_first" in ptx and ".bf16" not in ptx
        assert SIMULATED.get(used, {}).get(code.name, code.hash) == code.hash


def test_the_command_prints_stores_and_fails_over_budget(codes, monkeypatch, tmp_path, capsys):
    from helpers.results import store
    from helpers.t4 import predict

    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    monkeypatch.setattr(predict, "write", lambda: None)
    monkeypatch.setattr(sass, "build", lambda variants: [codes["sm_75 fp16"].built])
    assert sass.main(["--arch", "75", "--store"]) == 0
    assert "4.83" in (text := capsys.readouterr().out) and "All within budget" in text
    rows = store.rows("cross-compiled")
    assert store.one(rows, "machine_code", "Tesla T4 (sm_75)", "fp16", "registers").median == 64
    assert sass.main(["--arch", "75", "--order"]) == 0 and "absmax@" in capsys.readouterr().out
    monkeypatch.setattr(sass, "OCCUPANCY", {"fp16": 1.01})
    assert sass.main(["--arch", "75"]) == 1
    assert "sm_75 fp16: occupancy 100%, at least 101%" in capsys.readouterr().out


@pytest.mark.skipif(not (machine.ROOT / ".git").exists(), reason="needs the git repository")
@pytest.mark.parametrize("same", [True, False])
def test_machine_code_is_compared_with_that_of_a_commit(monkeypatch, capsys, same):
    def build(variants, source=""):
        sass = "/*0000*/ EXIT ; /* 0x2 */" if source and not same else "/*0000*/ EXIT ; /* 0x1 */"
        assert not source or "def _your_dequantize_nf4_kernel(" in source
        return [Built(variant, sass=sass) for variant in variants]

    monkeypatch.setattr(sass, "build", build)
    assert sass.main(["--arch", "75", "--against", "HEAD"]) == int(not same)
    assert capsys.readouterr().out.count("equal" if same else "DIFFERS") == 6


LISTING = """
\t.headerflags\t@"EF_CUDA_SM75"
        /*0000*/                   MOV R1, c[0x0][0x28] ;         /* 0x00 */
                                                                  /* 0x01 */
        /*0010*/              @!P6 LDG.E.U8.SYS R5, [R2] ;        /* 0x00 */
        /*0020*/               @P0 EXIT ;                         /* 0x00 */
        /*0030*/                   STG.E.EF.128.SYS [R4], R8 ;    /* 0x00 */
        /*0040*/                   EXIT ;                         /* 0x00 */
        /*0050*/                   BRA 0x50;                      /* 0x00 */
"""


def written(text):
    """Instructions of lines such as "@P0 LDG.E.SYS R0, [R2]", at 0x00, 0x10, ..."""
    lines = [re.fullmatch(r"(?:@(\S+) )?(\S+) ?(.*)", line.strip()) for line in text.strip().splitlines()]
    return [Instruction(16 * i, m[1] or "", m[2], m[3]) for i, m in enumerate(lines)]


def test_a_listing_is_read():
    code = sass.parse(LISTING)
    assert len(code) == 6 and code[1] == (0x10, "!P6", "LDG.E.U8.SYS", "R5, [R2]")
    path = [(i.stem, i.bits) for i in sass.executed(code)]
    assert path == [("MOV", 32), ("LDG", 8), ("EXIT", 32), ("STG", 128), ("EXIT", 32)]


@pytest.mark.parametrize(
    "text, issued",
    [
        ("IADD3\nSTG.E\n@P0 EXIT\nBRA 0x0\nNOP", "IADD3 STG EXIT"),  # a loop is passed once
        ("IADD3\n@P1 BRA 0x0\nSTG.E\nEXIT", "IADD3 BRA STG EXIT"),
        ("BRA 0x20\nMOV\nSTG.E\nEXIT", "BRA STG EXIT"),
        ("@P0 BRA 0x20\nMOV\nSTG.E\nEXIT", "BRA MOV STG EXIT"),  # of two ways the longer
        ("@P0 BRA 0x40\nISETP\n@P1 STG.E.128\nEXIT\nSTG.E.128\nEXIT", "BRA STG EXIT"),  # without masks
    ],
)
def test_the_way_of_a_thread_of_a_full_tile(text, issued):
    assert [i.stem for i in sass.executed(written(text))] == issued.split()


def test_calls_are_refused():
    with pytest.raises(NotImplementedError, match="CALL.REL"):
        sass.executed(written("CALL.REL.NOINC 0x40\nEXIT"))


@pytest.mark.parametrize(
    "arch, threads, registers, share",
    [
        (75, 128, 64, 1.0),
        (75, 128, 65, 0.875),  # 72 registers per thread are allocated: 28 warps
        (75, 32, 16, 0.5),  # an SM holds at most 16 blocks
        (86, 128, 48, 10 / 12),
    ],
)
def test_occupancy(arch, threads, registers, share):
    assert CARDS[arch].occupancy(threads, registers) == pytest.approx(share)


def faults(opcodes, dtype="fp16", nested=False, small=False, registers=32, shared=0):
    """The faults of code for a T4 of these opcodes, 8 elements per thread."""
    text = "\n".join(f"/*{16 * i:04x}*/ {opcode} ;" for i, opcode in enumerate(opcodes))
    return Code(Built(Variant(75, dtype, nested, small), "", text, registers, shared, 128, 8)).faults()


MET = ["STG.E.128.SYS"] + ["PRMT"] * 40


@pytest.mark.parametrize(
    "opcodes, facts, text",
    [
        (["STG.E.128.SYS"] + ["PRMT"] * 44, {}, "5.62 instructions per element, at most 5.5"),
        ([*MET, "STL", "LDL"], {}, "2 spills to local memory"),
        ([*MET, "STG.E.64.SYS"], {}, "stores of [64, 128] bits, expected 128"),
        (MET, {"registers": 72}, "occupancy 88%, at least 100%"),
        (MET, {"shared": 2048}, "2048 bytes of shared memory, at most 1024"),
        (MET, {"nested": True}, "no load of a word found"),
    ],
)
def test_each_fault_is_seen(opcodes, facts, text):
    assert faults(MET) == [] and faults(opcodes, **facts) == [text]


def test_limits_depend_on_tile_dtype_and_state():
    heavy, late = [*MET, *["PRMT"] * 20], [*LATE.strip().splitlines(), "STG.E.128.SYS [R2], R8"]
    assert faults(heavy) and not faults(heavy, small=True)
    assert faults(MET, shared=2048) and not faults(MET, "fp32", shared=6144)
    assert faults(late, nested=True) == ["2 of 3 loads are issued after a wait"] and not faults(late)


# sm_75: parameters from 0x160 on, 8 bytes each: words, out, absmax, table, code2, absmax2, offset.
LATE = """
    ULDC.64 UR4, c[0x0][0x170]
    @!P0 LDG.E.EF.U8.SYS R0, [R6.64+UR4]
    LOP3.LUT R0, R0, 0xff, RZ, 0xc0, !PT
    LEA R4, P2, R0, c[0x0][0x180], 0x2
    LEA.HI.X R5, R0, c[0x0][0x184], RZ, 0x2, P2
    LDG.E.SYS R18, [R4]
    IADD3 R4, P0, P1, R3, c[0x0][0x160], R8
    LDG.E.EF.SYS R15, [R4]
    FMUL.FTZ R11, R18, R13
    PRMT R8, R15, 0x5410, R11
    STG.E.EF.128.SYS [R2], R8
    EXIT
"""
STAGED = """
    ULDC.64 UR4, c[0x0][0x170]
    IMAD.WIDE.U32 R2, R15, R2, c[0x0][0x180]
    @!P0 LDG.E.EF.U8.SYS R14, [R6.64+UR4]
    LDG.E.SYS R20, [R2]
    LEA R2, P0, R11, c[0x0][0x160], 0xc
    LDG.E.EF.SYS R13, [R2]
    LDG.E.EF.SYS R16, [R2+0x800]
    LEA R6, R14, RZ, 0x2
    STS [R15.X4], R20
    BAR.SYNC 0x0
    LDS.U R6, [R6]
    PRMT R8, R13, 0x5410, R6
    STG.E.EF.128.SYS [R4], R8
    PRMT R8, R16, 0x5410, R6
    STG.E.EF.128.SYS [R4+0x800], R8
    EXIT
"""
NEWER = """
    LDCU.64 UR4, c[0x0][0x390]
    LDC.64 R14, c[0x0][0x380]
    IADD3 R4, P0, PT, R7, UR4, RZ
    @!P0 LDG.E.U8 R7, desc[UR6][R4.64]
    LDG.E R9, desc[UR6][R14.64+0x200]
    PRMT R8, R9, 0x5410, R7
    STG.E.EF.128 desc[UR6][R24.64], R8
    EXIT
"""


@pytest.mark.parametrize(
    "text, old, new, arch, loads",
    [
        (LATE, "", "", 75, "absmax code2! words!"),
        # a store waits for every register of its vector
        (LATE, "R15, [R4]\n    FMUL.FTZ R11, R18, R13\n    PRMT R8, R15, 0x5410, R11", "R10, [R4]", 75,
         "absmax code2! words!"),
        (STAGED, "", "", 75, "absmax code2 words words"),
        (NEWER, "", "", 120, "absmax words"),
        # what overwrites a register that is being loaded waits
        (STAGED, "LDG.E.SYS R20", "IMAD.MOV.U32 R14, RZ\n LDG.E.SYS R20", 75, "absmax code2! words! words!"),
        (STAGED, "c[0x0][0x160]", "R9", 75, "absmax code2 ? ?"),
        # a predicated write may leave what was there
        (LATE, "LDG.E.EF.SYS R15", "@P3 IMAD.MOV.U32 R4, RZ, RZ, R9\n LDG.E.EF.SYS R15", 75,
         "absmax code2! words!"),
    ],
)  # fmt: skip
def test_the_order_of_loads(text, old, new, arch, loads):
    """What each load reads; "!": it is issued after a wait."""
    assert old in text
    found, _ = sass.read_order(written(text.replace(old, new) if old else text), arch)
    assert " ".join(f"{load.what}{'!' * load.late}" for load in found) == loads

"""The gate: budgets and order of loads of the kernel on every card; and that the gate sees each fault."""

import fcntl
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from helpers.t4 import compile, sass
from helpers.t4.compile import Built, Variant
from helpers.t4.sass import CARDS, Code, Instruction, Order

# The machine code that was simulated: commit d0d6f41. If you change the device code on purpose, the simulated
# times no longer describe the kernel: say so in docs, then replace these hashes.
SIMULATED = {
    version: {"sm_75 fp16": "2c09c3d28aba", "sm_75 bf16": "549242aebdea"} for version in ("3.6.0", "3.9.0")
}
T4 = [("fp16",), ("bf16",), ("fp32",), ("bf16", False), ("fp16", True, True), ("bf16", True, True)]
T4 += [("bf16", True, False, changed) for changed in ({"stage": False, "hints": False}, {"no_such": 1})]


@pytest.fixture(scope="session")
def codes(tmp_path_factory):
    """{str(variant): Code} of what the gate compiles: once for all test processes."""
    variants = [Variant(75, *kind) for kind in T4]
    variants += [Variant(arch, "bf16") for arch in CARDS if arch != 75]
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # of all workers
    with open(folder / "machine_code.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "machine_code.pickle"
        if not path.exists():
            with mock.patch.dict(os.environ, TRITON_INTERPRET="1", NF4_FORCE="t4"):  # must change nothing
                path.write_bytes(pickle.dumps(compile.build(variants)))
    return {code.name: code for code in map(Code, pickle.loads(path.read_bytes()))}


@pytest.mark.parametrize("arch", CARDS)
def test_gate(codes, arch):
    """Instructions, spills, width of stores, occupancy, order of loads, shared memory."""
    mine = [code for code in codes.values() if code.variant.arch == arch and not code.variant.settings]
    mine = {code.name: code.faults() for code in mine}
    assert mine and not any(mine.values()), mine


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("small", ["", " small"])
def test_on_a_t4_every_load_is_issued_before_the_first_wait(codes, dtype, small):
    code, words = codes[f"sm_75 {dtype}{small}"], 2 if small else 8
    before, _, _ = " ".join(code.order.events).partition("<wait")
    assert len(re.findall(r"words@\d+", before)) == words, code.order.events
    assert (code.late_words, code.order.latencies, code.order.shared) == (0, 1, ["code2"])
    assert (code.hinted("LDG"), code.hinted("STG")) == (words + 1, words)


def test_the_machine_code_is_the_one_that_was_simulated(codes):
    version = codes["sm_75 fp16"].built.triton
    if version not in SIMULATED:
        pytest.skip(f"no reference for Triton {version}: python -m helpers t4 --arch 75 --against d0d6f41")
    assert {name: codes[name].hash for name in SIMULATED[version]} == SIMULATED[version]


def test_changed_settings_change_the_machine_code(codes, kernel):
    """Without code2 in shared memory words wait, which the gate refuses; hints can be switched off."""
    before, wrong = codes["sm_75 bf16 stage=False hints=False"], codes["sm_75 bf16 no_such=1"]
    assert any("words are loaded behind a wait" in fault for fault in before.faults())
    assert (before.hinted("LDG"), before.hinted("STG")) == (0, 0) and "evict_first" not in before.built.ptx
    native = {code.variant.arch: "cvt.rn.bf16" in code.built.ptx for code in codes.values()}
    assert native == {arch: arch >= 80 for arch in CARDS}
    (fault,) = wrong.faults()
    assert fault.startswith("did not compile:") and "no_such" in fault
    with kernel.force(card="t4"):
        assert [compile.settings(arch).int_bf16 for arch in (75, 80, 120)] == [True, False, False]


def install(version: str) -> Path:
    """Return a folder below the system's temporary folder with this Triton, installed if necessary."""
    name = f"{version}-python{sys.version_info[0]}.{sys.version_info[1]}"
    folder = Path(tempfile.gettempdir(), "nf4-triton-versions", name)
    if version == "newest" or not (folder / "complete").exists():
        requirement = "triton" if version == "newest" else f"triton=={version}"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps", "--target", folder]
        subprocess.run([*pip, requirement], check=True)
        (folder / "complete").touch()
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "version", "3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0 newest".split()
)
def test_every_triton_compiles_within_budget(version, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(install(version)))
    variants = [Variant(arch, dtype) for arch in (75, 80, 90) for dtype in compile.DTYPES]
    variants += [Variant(75, dtype, nested=False) for dtype in compile.DTYPES]
    for code in map(Code, compile.build(variants)):
        used, ptx, faults = code.built.triton, code.built.ptx, code.faults()
        if used.startswith("3.3."):  # its gather does not go through shared memory: code2 is loaded late
            faults = [fault for fault in faults if "loaded behind a wait" not in fault]
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
    assert "4.828" in (text := capsys.readouterr().out) and "All within budget" in text
    rows = store.rows("cross-compiled")
    assert store.one(rows, "machine_code", "sm_75 fp16", "ours", "registers").median == 64
    assert sass.main(["--arch", "75", "--order"]) == 0 and "absmax@" in capsys.readouterr().out
    monkeypatch.setattr(sass, "OCCUPANCY", {"fp16": 1.01})
    assert sass.main(["--arch", "75"]) == 1
    assert "sm_75 fp16: occupancy 100%, at least 101%" in capsys.readouterr().out


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
    "arch, threads, registers, shared, share",
    [
        (75, 128, 64, 0, 1.0),
        (75, 128, 65, 0, 0.875),  # 72 registers per thread are allocated: 28 warps
        (75, 32, 16, 0, 0.5),  # an SM holds at most 16 blocks
        (75, 128, 32, 32 * 1024, 0.25),
        (90, 128, 32, 57 * 1024, 0.1875),  # 4 blocks without the driver's share
        (86, 128, 48, 0, 10 / 12),
    ],
)
def test_occupancy(arch, threads, registers, shared, share):
    assert CARDS[arch].occupancy(threads, registers, shared) == pytest.approx(share)


def faults(opcodes, dtype="fp16", nested=False, small=False, order=None, registers=32, shared=0):
    """The faults of code for a T4 of these opcodes, 8 elements per thread."""
    text = "\n".join(f"/*{16 * i:04x}*/ {opcode} ;" for i, opcode in enumerate(opcodes))
    code = Code(Built(Variant(75, dtype, nested, small), "", text, registers, shared, 128, 8))
    if order:
        code.order, code.words = order, order.loads
        code.late_words = sum(load.behind > 0 for load in order.loads)
    return code.faults()


MET = ["STG.E.128.SYS"] + ["PRMT"] * 40


@pytest.mark.parametrize(
    "opcodes, facts, text",
    [
        (["STG.E.128.SYS"] + ["PRMT"] * 44, {}, "5.62 instructions per element, at most 5.5"),
        ([*MET, "STL", "LDL"], {}, "2 spills to local memory"),
        ([*MET, "STG.E.64.SYS"], {}, "stores of [64, 128] bits, expected 128"),
        (MET, {"registers": 72}, "occupancy 88%, at least 100%"),
        (MET, {"shared": 16384}, "occupancy 50%, at least 100%"),
        (MET, {"nested": True}, "no load of a word found"),
    ],
)
def test_each_fault_is_seen(opcodes, facts, text):
    assert faults(MET) == [] and faults(opcodes, **facts) == [text]


def test_limits_depend_on_tile_dtype_and_state():
    heavy, bad = [*MET, *["PRMT"] * 20], Order([sass.Load(0, "words", 0)], [], 3, ["words"])
    assert faults(heavy) and not faults(heavy, small=True)
    assert faults(MET, order=bad) == []  # flat: reported only
    latencies, strangers = faults(MET, order=bad, nested=True)
    assert (
        "3 dependent latencies" in latencies and strangers == "words in shared memory, expected code2 alone"
    )
    assert faults(MET, "fp32", nested=True, order=bad) == [latencies]


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
CHAIN = "LEA R22, R18, c[0x0][0x178], 0x2\n LDG.E.SYS R11, [R22]"
SHUFFLED = "SHFL.IDX PT, R21, R13, RZ, 0x101f\n STS.128 [R15.X4], R20"


@pytest.mark.parametrize(
    "text, old, new, arch, loads, latencies, shared",
    [
        (LATE, "", "", 75, "absmax:0 code2:1 words:1", 2, ""),
        # a store waits for every register of its vector
        (LATE, "R15, [R4]\n    FMUL.FTZ R11, R18, R13\n    PRMT R8, R15, 0x5410, R11", "R10, [R4]", 75,
         "absmax:0 code2:1 words:1", 2, ""),
        (STAGED, "", "", 75, "absmax:0 code2:0 words:0 words:0", 1, "code2"),
        (NEWER, "", "", 120, "absmax:0 words:0", 1, ""),
        (LATE, "FMUL.FTZ R11, R18, R13", CHAIN, 75, "absmax:0 code2:1 words:1 table:2", 3, ""),
        # what overwrites a register that is being loaded waits
        (STAGED, "LDG.E.SYS R20", "IMAD.MOV.U32 R14, RZ\n LDG.E.SYS R20", 75,
         "absmax:0 code2:1 words:1 words:1", 2, "code2"),
        (STAGED, "], R20", "], R13", 75, "absmax:0 code2:0 words:0 words:0", 1, "words"),
        (STAGED, "], R20", "], R14", 75, "absmax:0 code2:0 words:0 words:0", 1, "absmax"),
        (STAGED, "STS [R15.X4], R20", SHUFFLED, 75, "absmax:0 code2:0 words:0 words:0", 1, "code2 words"),
        (STAGED, "c[0x0][0x160]", "R9", 75, "absmax:0 code2:0 ?:0 ?:0", 1, "code2"),
        # a predicated write may leave what was there
        (LATE, "LDG.E.EF.SYS R15", "@P3 IMAD.MOV.U32 R4, RZ, RZ, R9\n LDG.E.EF.SYS R15", 75,
         "absmax:0 code2:1 words:1", 2, ""),
    ],
)  # fmt: skip
def test_the_order_of_loads(text, old, new, arch, loads, latencies, shared):
    """Of each load: what it reads, and how many latencies pass before it."""
    assert old in text
    order = sass.read_order(written(text.replace(old, new) if old else text), arch)
    assert " ".join(f"{load.what}:{load.behind}" for load in order.loads) == loads
    assert (order.latencies, " ".join(order.shared)) == (latencies, shared)

"""The kernel's machine code on every card: budgets, order of loads, one element per thread."""

import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

import pytest

from helpers import machine
from helpers.cross import compile, predict, sass
from helpers.cross.compile import Built, Variant
from helpers.cross.sass import CARDS, Code
from helpers.results import store

# The machine code that was simulated: commit d0d6f41. If you change the device code on purpose, the simulated
# times no longer describe the kernel: say so in docs, then replace these hashes.
SIMULATED = {
    version: {"sm_75 fp16": "2c09c3d28aba", "sm_75 bf16": "549242aebdea"} for version in ("3.6.0", "3.9.0")
}


@pytest.fixture(scope="module")
def codes():
    """{str(variant): Code} of what the gate compiles."""
    variants = [Variant(75, "fp16"), Variant(75, "fp32"), Variant(75, "bf16", nested=False)]
    variants += [Variant(arch, "bf16") for arch in CARDS]
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", NF4_FORCE="t4"):  # must change nothing
        return {str(built.variant): Code(built) for built in compile.build(variants)}


def test_every_card_is_within_budget_and_gets_its_own_settings(codes):
    assert [fault for code in codes.values() for fault in code.faults()] == []
    native = {code.variant.arch: "cvt.rn.bf16" in code.built.ptx for code in codes.values()}
    assert native == {arch: arch >= 80 for arch in CARDS}


def listing(*lines):
    """Text as cuobjdump prints it, of lines such as "@P0 LDG.E R0, [R2]"."""
    return "\n".join(f"        /*00a0*/    {line} ;    /* 0x00 */" for line in lines)


def test_a_thread_executes_what_comes_before_the_first_exit_without_a_predicate():
    path = sass.executed(
        listing("@!P6 LDG.E.U8 R5, [R2]", "@P0 EXIT", "STG.E.128 [R4], R8", "EXIT", "BRA 0x50")
    )
    assert [now.stem for now in path] == ["LDG", "EXIT", "STG", "EXIT"]
    with pytest.raises(NotImplementedError, match="CALL.REL"):
        sass.executed(listing("CALL.REL.NOINC 0x40", "EXIT"))


def registers(operands, count):
    """The registers that operands name: two of "R2.64", else `count` from each on."""
    names = set()
    for first, pair in re.findall(r"\bR(\d+)(\.64)?", operands):
        names |= {int(first) + i for i in range(2 if pair else count)}
    return names


def late_loads(path):
    """Count the loads after the first instruction that reads or overwrites the result of a load."""
    loading, waited, late = set(), False, 0
    for now in path:
        moved = now.operands.split(",")[0 if now.stem == "LDG" else -1]  # of a load or store
        vector = registers(moved, 4 if ".128" in now.opcode else 1)
        if (registers(now.operands, 1) | vector) & loading:
            waited = True
        if now.stem == "LDG":
            late += waited
            loading |= vector
    return late


@pytest.mark.parametrize("variant", ["sm_75 fp16", "sm_75 bf16", "sm_90 bf16"])
def test_every_load_is_issued_before_the_first_wait(codes, variant):
    path = codes[variant].path
    loads = [now for now in path if now.stem == "LDG"]
    assert len(loads) >= 8 + 5  # words, absmax, absmax2, offset, table, code2
    assert late_loads(path) == 0


def test_hints_on_a_t4_are_on_the_words_absmax_and_the_stores(codes):
    hinted = [now.stem for now in codes["sm_75 fp16"].path if ".EF" in now.opcode]
    assert (hinted.count("LDG"), hinted.count("STG")) == (8 + 1, 8)


@pytest.mark.parametrize("variant", ["sm_75 fp16", "sm_75 bf16", "sm_75 fp32", "sm_90 bf16"])
def test_each_thread_holds_one_element_of_what_the_assembly_takes(codes, variant):
    """A shuffle's lane is thread % 32 only if thread t holds element t. Read from the compiled layout."""
    check_layout(codes[variant].built.ttgir)


def check_layout(ttgir):
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    lines = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line]
    names = set(re.findall(r"tensor<128x\w+, (#\w+)>", "".join(lines)))
    assert len(lines) == 8 + 1 and names  # eight words and the scale; flat states have none
    for name in names:
        for one in ("sizePerThread = [1]", "threadsPerWarp = [32]", "warpsPerCTA = [4]"):
            assert one in layouts[name], layouts[name]


def test_the_machine_code_is_the_one_that_was_simulated(codes):
    version = codes["sm_75 fp16"].built.triton
    if version not in SIMULATED:
        pytest.skip(f"no reference for Triton {version}: python -m helpers cross --arch 75 --against d0d6f41")
    assert {name: codes[name].hash for name in SIMULATED[version]} == SIMULATED[version]


@pytest.mark.long
@pytest.mark.parametrize(
    "version", "3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0 newest".split()
)
def test_every_triton_compiles_within_budget(version, monkeypatch):
    requirement = "triton" if version == "newest" else f"triton=={version}"
    variants = [Variant(arch, dtype) for arch in (75, 80, 90) for dtype in compile.DTYPES]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, requirement]
        subprocess.run(pip, check=True)
        monkeypatch.setenv("PYTHONPATH", folder)
        found = compile.build(variants + sass.FLAT)
    for code in map(Code, found):
        used, ptx, name = code.built.triton, code.built.ptx, str(code.variant)
        assert version in (used, "newest") and code.faults() == []
        assert "fma.rn" not in ptx and "shfl.sync.idx.b32" in ptx and "st.global.cs" in ptx
        assert SIMULATED.get(used, {}).get(name, code.hash) == code.hash
        if code.variant.arch == 75:
            assert "evict_first" in ptx and ".bf16" not in ptx
        if code.variant.nested:
            check_layout(code.built.ttgir)
            # Before 3.4 the gather did not go through shared memory: code2 is loaded late.
            assert used.startswith("3.3.") or late_loads(code.path) == 0, name


# --- the command ---


def test_the_command_prints_stores_and_fails_over_budget(codes, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    monkeypatch.setattr(predict, "write", lambda: None)
    monkeypatch.setattr(sass, "build", lambda variants: [codes["sm_75 fp16"].built])
    assert sass.main(["--arch", "75", "--store"]) == 0
    assert " 4.83 instructions, 64 registers" in capsys.readouterr().out
    rows = store.rows("cross-compiled")
    assert store.one(rows, "machine_code", "Tesla T4 (sm_75)", "fp16", "registers").median == 64
    monkeypatch.setitem(CARDS, 75, sass.Card("Tesla T4", 63, 5.5, 6.5, 7.0))
    assert sass.main(["--arch", "75"]) == 1


@pytest.mark.skipif(not (machine.ROOT / ".git").exists(), reason="needs the git repository")
@pytest.mark.parametrize("theirs, equal", [("EXIT", 6), ("NOP", 0)])
def test_machine_code_is_compared_with_that_of_a_commit(monkeypatch, capsys, theirs, equal):
    def build(variants, path=None):
        assert path is None or "def _your_dequantize_nf4_kernel(" in path.read_text()
        return [Built(variant, sass=theirs if path else "EXIT") for variant in variants]

    monkeypatch.setattr(sass, "build", build)
    assert sass.main(["--arch", "75", "--against", "HEAD"]) == (0 if equal else 1)
    assert f"{equal} of 6 equal" in capsys.readouterr().out


MET = ["PRMT R0, R1"] * 40 + ["STG.E.128 [R2], R8", "EXIT"]  # for 8 elements: 5.25 instructions each


@pytest.mark.parametrize(
    "lines, used, faults",
    [
        (MET, 64, []),
        (["MOV R0, R1"] * 3 + MET, 64, ["sm_75 fp16: 5.62 instructions per element, at most 5.5"]),
        (MET, 65, ["sm_75 fp16: 65 registers per thread, at most 64"]),
        (["STL [R1], R0"] + MET, 64, ["sm_75 fp16: 1 spills to local memory"]),
        (["STG.E.64 [R2], R8"] + MET, 64, ["sm_75 fp16: STG.E.64: expected stores of 128 bits"]),
    ],
)
def test_each_fault_is_named(lines, used, faults):
    built = Built(Variant(75, "fp16"), listing(*lines), registers=used, elements=8)
    assert Code(built).faults() == faults

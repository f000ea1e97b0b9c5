"""Machine code: counted, and its order of loads, what waits for them, and what goes through shared memory."""

import pytest

from helpers.t4 import load_order, machine_code
from helpers.t4.cards import CARDS

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


def written(text):
    """Instructions of lines such as "@P0 LDG.E.SYS R0, [R2]"."""
    lines = []
    for line in text.strip().splitlines():
        predicate, _, rest = (
            line.strip().rpartition("@")[2].partition(" ") if "@" in line else ("", "", line.strip())
        )
        opcode, _, operands = rest.partition(" ")
        lines.append((opcode, operands, predicate))
    return instructions(*lines)


class TestCounting:
    def test_a_listing(self):
        ((name, listed),) = machine_code.parse(LISTING).items()
        assert name == "kernel" and len(listed) == 9
        assert listed[1].predicate == "!P6" and listed[1].opcode == "LDG.E.U8.SYS"
        path = machine_code.executed(listed)
        assert [i.stem for i in path] == ["MOV", "LDG", "LDG", "EXIT", "STG", "STG", "EXIT"]
        figures = machine_code.count(CARDS[75], path, 16, 0, 128, 12)
        assert figures["instructions"] == 7 / 12 and figures["load_store"] == 4 / 12
        assert figures["store_bits"] == {128: 1, 64: 1}
        assert figures["hinted"] == {"loads": 0, "stores": 1} and figures["occupancy"] == 1.0

    def test_a_loop_is_passed_once_and_its_jump_back_ends_the_walk(self):
        code = instructions(("IADD3", ""), ("STG.E.SYS", ""), ("EXIT", "", "P0"), ("BRA", "0x0"), ("NOP", ""))
        assert [i.stem for i in machine_code.executed(code)] == ["IADD3", "STG", "EXIT"]

    def test_a_conditional_jump_back_goes_on_behind_it(self):
        code = instructions(("IADD3", ""), ("BRA", "0x0", "P1"), ("STG.E.SYS", ""), ("EXIT", ""))
        assert [i.stem for i in machine_code.executed(code)] == ["IADD3", "BRA", "STG", "EXIT"]

    def test_jumps_ahead(self):
        skipping = instructions(("BRA", "0x20"), ("MOV", ""), ("STG.E.SYS", ""), ("EXIT", ""))
        assert [i.stem for i in machine_code.executed(skipping)] == ["BRA", "STG", "EXIT"]
        forked = instructions(("BRA", "0x20", "P0"), ("MOV", ""), ("STG.E.SYS", ""), ("EXIT", ""))
        assert len(machine_code.executed(forked)) == 4

    def test_a_full_tile_takes_the_way_without_masks(self):
        code = instructions(
            ("BRA", "0x50", "P0"),
            ("ISETP", ""),
            ("ISETP", ""),
            ("STG.E.128", "", "P1"),
            ("EXIT", ""),
            ("STG.E.128", ""),
            ("EXIT", ""),
        )
        path = [(i.stem, i.predicate) for i in machine_code.executed(code)]
        assert path == [("BRA", "P0"), ("STG", ""), ("EXIT", "")]

    def test_calls_are_refused(self):
        with pytest.raises(NotImplementedError, match="CALL.REL"):
            machine_code.executed(instructions(("CALL.REL.NOINC", "0x40"), ("EXIT", "")))

    def test_spills_are_seen(self):
        code = instructions(("STL", "[R1], R2"), ("STG.E.128", ""), ("LDL", "R2, [R1]"), ("EXIT", ""))
        assert machine_code.count(CARDS[75], code, 16, 0, 128, 8)["spills"] == 2

    def test_resources(self):
        text = " Function abc:\n  REG:64 STACK:0 SHARED:2656 LOCAL:8 CONSTANT[0]:392 TEXTURE:0\n"
        assert machine_code.resources(text) == {"abc": (64, 2656)}


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


class TestOrderOfLoads:
    def test_a_word_behind_the_wait_for_absmax_is_refused(self):
        order = load_order.read(written(LATE), 75)
        assert [(load.what, load.behind) for load in order.loads] == [
            ("absmax", 0),
            ("code2", 1),
            ("words", 1),
        ]
        assert str(order) == "absmax@1 <wait absmax@1> code2@5 words@7 <wait code2@5> <wait words@7> store@10"
        assert order.latencies == 2 and order.faults() == ["1 of 1 words are loaded behind a wait"]

    def test_all_loads_before_the_first_wait_pass(self):
        order = load_order.read(written(STAGED), 75)
        assert [load.what for load in order.loads] == ["absmax", "code2", "words", "words"]
        assert order.late_words == 0 and order.latencies == 1 and order.shared == ("code2",)
        assert order.faults() == []

    def test_a_chain_of_three_before_the_store_is_refused(self):
        code = LATE.replace(
            "FMUL.FTZ R11, R18, R13", "LEA R22, R18, c[0x0][0x178], 0x2\n    LDG.E.SYS R11, [R22]"
        )
        order = load_order.read(written(code), 75)
        assert [load.what for load in order.loads][-1] == "table" and order.latencies == 3
        assert "3 dependent latencies before the first store, at most 2" in order.faults()

    def test_what_overwrites_the_result_of_a_load_waits_for_it(self):
        code = STAGED.replace("LDG.E.SYS R20, [R2]", "IMAD.MOV.U32 R14, RZ, RZ, RZ\n    LDG.E.SYS R20, [R2]")
        order = load_order.read(written(code), 75)
        assert order.late_words == 2 and order.faults() == ["2 of 2 words are loaded behind a wait"]

    def test_a_store_waits_for_every_register_of_its_vector(self):
        code = LATE.replace("SYS R15, [R4]", "SYS R10, [R4]").replace("    PRMT R8, R15, 0x5410, R11\n", "")
        assert str(load_order.read(written(code), 75)).endswith("<wait words@7> store@9")

    @pytest.mark.parametrize("stored, holds", [("R13", "words"), ("R14", "absmax")])
    def test_words_and_results_may_not_pass_through_shared_memory(self, stored, holds):
        order = load_order.read(written(STAGED.replace("STS [R15.X4], R20", f"STS [R15.X4], {stored}")), 75)
        (fault,) = order.faults()
        assert f"derives from {holds}" in fault and order.faults(direct=False) == []

    def test_a_computed_value_in_shared_memory_is_traced_to_its_loads(self):
        computed = "SHFL.IDX PT, R21, R13, RZ, 0x101f\n    STS.128 [R15.X4], R20"
        order = load_order.read(written(STAGED.replace("STS [R15.X4], R20", computed)), 75)
        assert order.shared == ("code2", "words") and order.faults()

    def test_a_load_of_an_unknown_argument_is_a_fault(self):
        order = load_order.read(written(STAGED.replace("c[0x0][0x160]", "R9")), 75)
        assert "no load of a word was seen" in order.faults()
        assert any("unknown argument: ?@5, ?@6" in fault for fault in order.faults())

    def test_code_for_newer_cards_names_addresses_and_parameters_otherwise(self):
        code = """
            LDCU.64 UR4, c[0x0][0x390]
            LDC.64 R14, c[0x0][0x380]
            IADD3 R4, P0, PT, R7, UR4, RZ
            @!P0 LDG.E.U8 R7, desc[UR6][R4.64]
            LDG.E R9, desc[UR6][R14.64+0x200]
            PRMT R8, R9, 0x5410, R7
            STG.E.EF.128 desc[UR6][R24.64], R8
            EXIT
        """
        order = load_order.read(written(code), 120)
        assert [load.what for load in order.loads] == ["absmax", "words"] and not order.faults()

    def test_a_predicated_write_keeps_what_was_there(self):
        code = LATE.replace(
            "LDG.E.EF.SYS R15, [R4]", "@P3 IMAD.MOV.U32 R4, RZ, RZ, R9\n    LDG.E.EF.SYS R15, [R4]"
        )
        assert load_order.read(written(code), 75).loads[-1].what == "words"


@pytest.mark.parametrize(
    "arch, threads, registers, shared, share",
    [
        (75, 128, 64, 0, 1.0),
        (75, 128, 65, 0, 0.875),  # 72 registers a thread are allotted: 28 warps
        (75, 64, 16, 0, 1.0),  # 16 blocks of 64
        (75, 32, 16, 0, 0.5),  # 16 blocks are the most an SM holds
        (75, 128, 32, 32 * 1024, 0.25),
        (90, 128, 32, 0, 1.0),
        (90, 128, 32, 57 * 1024, 0.1875),  # 4 blocks, were there not what the driver keeps
        (86, 128, 48, 0, 10 / 12),
    ],
)
def test_occupancy(arch, threads, registers, shared, share):
    assert CARDS[arch].occupancy(threads, registers, shared) == pytest.approx(share)

from helpers.results import tables
from helpers.results.old_store import Benchmark


def test_the_protocol_shows_ratios_to_ours_and_every_repeat(data):
    head, *rows = tables.protocol(data)
    assert head[:4] == ["official protocol", "seconds", "time / ours", "repeats"]
    assert rows == [
        ["this kernel", "0.250", "1", "0.250, 0.250", "every bit equal"],
        ["Unsloth today", "0.400", "1.60", "0.390, 0.410, 0.400", tables.REFERENCE],
        ["Unsloth classic", "0.500", "2.00", "0.500", "every bit equal"],
        ["PEFT", "0.750", "3.00", "0.750", "within tolerance"],
    ]
    del data.protocol.entries["kernel"]
    assert tables.protocol(data) == []


def test_the_other_tables_show_the_files_figures(data):
    assert tables.gemm(data)[1:] == [["6144 x 1024x4096 bf16", "500.00 (1.10x)", "454.50 (1.00x)"]]
    assert tables.ablation(data) == [
        ["one decision changed, us (over as chosen)", "4M fp16", "4M bf16"],
        ["as chosen", "3.60 (1.00x)", "3.60 (1.00x)"],
        ["4 warps", "-", "3.90 (1.08x)"],
    ]
    head, first, second, *_ = tables.compiled(data)
    assert head[1:] == ["this kernel", "Unsloth today", "bitsandbytes"]
    assert first == ["64 tokens, forward", "800 -> 800", "1345 -> 960", "1948 -> 1760"]
    assert second[0] == "64 tokens, forward and backward"
    assert tables.compiled(data)[-1][1:] == ["8 -> 7", "- -> -", "- -> -"]
    assert tables.call_cost(data)[1:] == [["this kernel", "212", "9", "31"]]


def test_what_was_not_measured_has_no_table():
    nothing = Benchmark(quick=False)
    assert all(make(nothing) == [] for make in tables.TABLES) and tables.summary(nothing) == ""


def test_text_aligns_columns_and_markdown_separates_them(data):
    table = [["what", "a", "b"], ["longer name", "1", "22"], ["x", "333", ""]]
    assert tables.text(table) == "what         a    b\nlonger name  1    22\nx            333"
    assert (
        tables.markdown(table)
        == "| what | a | b |\n| --- | --- | --- |\n| longer name | 1 | 22 |\n| x | 333 |  |"
    )
    assert "](" not in tables.markdown([["call"], ["kernel[grid](...)"]]), "no table has links"
    summary = tables.summary(data)
    assert all(cell in summary for make in tables.TABLES for line in make(data) for cell in line)

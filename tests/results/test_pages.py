"""Blocks of README, docs and notebook: what they hold, and whether the pages are up to date."""

import re

import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store
from helpers.results.store import Row

PAGES = [store.ROOT / "README.md", *sorted((store.ROOT / "docs").glob("*.md")), pages.NOTEBOOK]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]
IMAGES = dict.fromkeys([*plots.PICTURES, "idea"], b"png")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_is_up_to_date(path, stored):
    now = re.sub(r"base64,[\w+/=]*", "base64,cG5n", path.read_text(encoding="utf-8"))
    assert pages.filled(path, stored, IMAGES) == now, "run `python -m helpers draw`"


def test_the_claim_shows_every_card_that_has_rows(stored):
    measured = dict.fromkeys(["nvidia-h200", "nvidia-h100-80gb-hbm3"], stored[plots.CARD])
    measured["tesla-t4"] = [Row("gpu_time", "4194304 bf16", "ours", "us", [40])]  # no score yet
    order = r"NVIDIA H200 .*\n.*NVIDIA H100 .*\n.*Tesla T4, predicted . \d+ or \d+ \(\d+ to \d+\) "
    assert re.search(order, pages.claim(measured | {pages.SIMULATED: stored[pages.SIMULATED]}))


def test_blocks_are_filled(stored, tmp_path):
    page = tmp_path / "page.md"
    after = '<!-- figure idea -->\n<img src="base64,old" width="9">\n<!-- /figure idea -->\n'
    page.write_text(f"Before.\n<!-- claim -->\nold\n<!-- /claim -->\n<!-- new -->\n<!-- /new -->\n{after}")
    text = pages.filled(page, stored, IMAGES)
    assert text.startswith("Before.\n<!-- claim -->\n| card ") and "old" not in text
    assert text.endswith("<!-- new -->\nNot measured yet.\n<!-- /new -->\n" + after.replace("old", "cG5n"))


@pytest.mark.parametrize(
    "values, text",
    [
        ([1.012, 1.029, 1.04], "1.02x (1.01x to 1.04x)"),
        ([1.003, 1.02, 1.03], "within noise (1.00x to 1.03x)"),
        ([0.96, 0.97, 0.999], "0.97x (0.96x to 0.99x)"),
        ([1.0, 1.11], "1.00x to 1.11x"),  # the ends of a prediction
    ],
)
def test_a_ratio_whose_range_touches_1_is_within_noise(values, text):
    assert pages.cell(Row("training", "PEFT", "speedup", "x", values)) == text


def test_a_step_is_shown_without_the_kernel_and_with_it():
    rows = []
    for variant, *values in (("without", 49.6, 17.5, 7849, 412), ("with", 43.1, 12.2, 6959, 398)):
        for unit, value in zip(pages.STEP_UNITS, values, strict=True):
            times = [value, value, value + 9] if unit == "wall ms" else [value]
            rows.append(Row("step_gpu_time", "PEFT nested, 128 tokens", variant, unit, times))
    [*_, line] = pages.table(rows, "step_gpu_time").splitlines()
    assert [text.strip() for text in line.strip("|").split("|")] == [
        "PEFT nested, 128 tokens",
        "49.6, 43.1 (-13%)",
        "17.5, 12.2",
        "7,849, 6,959",
        "412 (412 to 421), 398 (398 to 407)",
    ]


@pytest.mark.parametrize("path", [*PAGES[:-1], store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)

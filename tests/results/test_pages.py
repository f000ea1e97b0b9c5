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

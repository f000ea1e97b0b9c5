"""Blocks of README, docs and notebook: what they hold, and whether the pages are up to date."""

import re

import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store
from helpers.results.store import CARDS, Row
from nf4_triton.core.supported import VERSION

PAGES = [store.ROOT / "README.md", *sorted((store.ROOT / "docs").glob("*.md")), pages.NOTEBOOK]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_is_up_to_date(path, stored):
    now = path.read_text(encoding="utf-8")
    assert pages.filled(path, stored) == now, "run `python -m helpers draw`"


def test_what_stands_for_a_picture_names_the_card_that_it_shows():
    texts = str([re.findall(r"!\[(.*?)\]", path.read_text(encoding="utf-8")) for path in PAGES])
    card = CARDS[plots.CARD]
    assert set(re.findall(r"NVIDIA \w+", texts)) == {card.name}
    assert set(re.findall(r"\S+ TB/s", texts)) == {f"{card.bandwidth} TB/s"}


def test_the_claim_shows_this_version_and_a_measured_t4_replaces_the_predicted_one(folder):
    claimed = [Row("claim", "score (of 14)", "ours", "points", [14])]
    for name, version in (("NVIDIA H100 80GB HBM3", VERSION), ("NVIDIA H200", "1.0"), ("Tesla T4", VERSION)):
        assert "| Tesla T4, predicted | 12 (10 to 14) " in pages.claim()
        store.write("notebook", claimed, environment=dict(card=name, forced=None, version=version))
    shown = [line.split("|")[1].strip() for line in pages.claim().splitlines()[2:]]
    assert shown == ["NVIDIA H100", "Tesla T4"]


def test_a_step_is_shown_without_the_kernel_and_with_it():
    rows = []
    units = {"GPU ms": (49.6, 43.1), "launches": (7849, 6959), "wall ms": (412, 398)}
    for unit, values in units.items():
        for variant, value in zip(("without", "with"), values, strict=True):
            times = [value, value, value + 9] if unit == "wall ms" else [value]
            rows.append(Row("step_gpu_time", "PEFT nested, 128 tokens", variant, unit, times))
    head, _, line = pages.table(rows, "step_gpu_time").splitlines()
    cells = ("49.6, 43.1 (-13%)", "7,849, 6,959", "412 (412 to 421), 398 (398 to 407)")
    assert re.split(r" *\| *", line)[1:-1] == ["PEFT nested, 128 tokens", *cells]
    assert re.split(r" *\| *", head)[1:-1] == ["without, with", *units]


@pytest.mark.parametrize("path", [*PAGES[:-1], store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)

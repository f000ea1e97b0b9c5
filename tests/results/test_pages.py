"""Blocks of README, docs and notebook: what they hold, and whether the pages are up to date."""

import re

import pytest

from helpers import __main__ as commands
from helpers.results import pages, store
from helpers.results.store import Row

PAGES = [store.ROOT / "README.md", *sorted((store.ROOT / "docs").glob("*.md")), pages.NOTEBOOK]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]


def test_pages_are_up_to_date():
    drawn = pages.draw()
    assert all(drawn[path] == path.read_text(encoding="utf-8") for path in PAGES), "python -m helpers draw"


def test_the_claim_shows_this_version_and_a_measured_t4_replaces_the_predicted_one(folder):
    assert "\n| Tesla T4 with Triton 3.6, predicted | 12 (10 to 14) " in pages.claim()
    for card, version in (("NVIDIA H200", "1.0"), ("Tesla T4", store.VERSION)):
        row = Row("claim", "score (of 14)", "ours", "points", [14])
        store.write("notebook", [row], environment={"card": card, "version": version})
    [_, _, line] = pages.claim().splitlines()
    assert line.startswith("| Tesla T4 ")


def test_a_step_is_shown_without_the_kernel_and_with_it():
    names = {"without": [49.61, 49.62], "with": [398.4, 407]}
    rows = [Row("step_gpu_time", "PEFT", name, "ms", values) for name, values in names.items()]
    assert re.search(
        r"\| ms, without +\| ms, with .*\| 49.6 +\| 398 to 407 ", pages.table(rows, "step_gpu_time"), re.S
    )


@pytest.mark.parametrize("path", [*PAGES[:-1], store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)

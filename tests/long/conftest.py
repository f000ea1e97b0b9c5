"""Counts of long tests become rows of this machine's results."""

import collections

import pytest

from helpers.results.store import Row, write


@pytest.fixture
def count(record_property):
    """count(section, {(case, contender): number}, parts=1, card=None): add to the rows of a section.

    It replaces the stored section once `parts` tests of this run have added to it.
    """

    def add(section, numbers, parts=1, card=None):
        rows = [[*key, number] for key, number in numbers.items()]
        record_property("count", [section, parts, card, rows])

    return add


def pytest_terminal_summary(terminalreporter):
    stats = terminalreporter.stats
    found = collections.defaultdict(list)
    for report in [*stats.get("passed", ()), *stats.get("failed", ())]:
        for name, value in report.user_properties:
            if name == "count":
                section, parts, card, rows = value
                found[section, parts, card].append(rows)
    for (section, parts, card), tests in found.items():
        if len(tests) < parts:
            terminalreporter.write_line(f"{section}: {len(tests)} of {parts} tests, nothing stored")
            continue
        sums = collections.Counter()
        for case, who, number in sum(tests, []):
            sums[case, who] += number
        rows = [Row(section, *key, "count", (total,)) for key, total in sums.items()]
        terminalreporter.write_line(f"{section}: {dict(sums)} in {write(section, rows, card)}")

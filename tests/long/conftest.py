"""Counts of long tests become rows of this machine's results."""

import collections

import pytest

from helpers.results.store import Row, write


@pytest.fixture
def store():
    """store(section, {(case, contender): count}, note=""): replace a section of this machine's results."""

    def counts(section, found, note=""):
        rows = [Row(section, case, who, "count", (value,)) for (case, who), value in found.items()]
        print(f"{found} in {write(section, rows, note=note)}")

    return counts


def pytest_terminal_summary(terminalreporter):
    """Store how many seeded bugs were caught, if all of the CPU's or of the GPU's ran."""
    seen = collections.Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if seeded := dict(report.user_properties).get("seeded"):
                seen[(outcome, *seeded)] += 1
    for kind, total in {key[1:] for key in seen}:
        caught = seen["passed", kind, total]
        if caught + seen["failed", kind, total] == total:
            counts = {"seeded": total, "caught": caught}
            rows = [Row("seeded_bugs", kind, who, "count", (value,)) for who, value in counts.items()]
            terminalreporter.write_line(str(write("seeded_bugs", rows, "cpu" if kind == "cpu" else None)))

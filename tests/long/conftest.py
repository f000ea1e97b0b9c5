"""Counts of long tests become rows of this machine's results."""

import pytest


@pytest.fixture
def store():
    """store(section, {(case, contender): count}, note=""): replace a section of this machine's results."""
    from helpers.results.store import Row, write

    def counts(section, found, note=""):
        rows = [Row(section, case, who, "count", (value,)) for (case, who), value in found.items()]
        print(f"{found} in {write(section, rows, note=note)}")

    return counts
